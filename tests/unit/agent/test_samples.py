"""SGLang's answers become samples or are refused, and so are parameters that an engine would ignore or die of."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rolloutfleet.agent.answers import NotFinite, sample_of
from rolloutfleet.api.agent import Generate
from rolloutfleet.api.samples import PrefixCacheInfo, Sample, SpecInfo, Timings, VersionSpan
from unit.agent.world import ABORT, FLEET, answer, signed

ASKED = Sample(prompt_tokens=[5, 6])

# Answers


@pytest.mark.parametrize(("kind", "status"), [("stop", "completed"), ("length", "truncated"), ("abort", "aborted")])
def test_the_finish_reason_gives_the_status(kind: str, status: str) -> None:
    sample = sample_of(answer([1, 2], kind=kind), ASKED.changed(attempts=3, seconds=1.2346), fleet=FLEET)
    assert (sample.status, sample.response_tokens, sample.rollout_log_probs) == (status, [1, 2], [-0.5, -1.0])
    assert (sample.attempts, sample.seconds, sample.error) == (3, 1.2346, "")


def test_why_a_sample_was_aborted_is_told() -> None:
    assert sample_of(ABORT, ASKED, fleet=FLEET).error == "aborted by a pause"


def test_one_version_covers_the_whole_response() -> None:
    sample = sample_of(answer([1, 2, 3], version=signed(7)), ASKED, fleet=FLEET)
    assert sample.weight_versions == [VersionSpan(version=7, start=0, end=3)]


def test_a_response_that_an_update_interrupted_tells_which_tokens_are_whose() -> None:
    spans = [{"version": signed(7), "start": 0, "end": 2}, {"version": signed(8), "start": 2, "end": 3}]
    sample = sample_of(answer([1, 2, 3], weight_versions=spans), ASKED, fleet=FLEET)
    assert sample.weight_versions == [VersionSpan(version=7, start=0, end=2), VersionSpan(version=8, start=2, end=3)]


@pytest.mark.parametrize("version", ["default", None, "", "-1", "1.5"])
def test_an_engine_without_a_version_of_ours_is_not_believed(version: Any) -> None:
    with pytest.raises(ValueError, match="whose weight version is"):
        sample_of(answer([1], version=version), ASKED, fleet=FLEET)


@pytest.mark.parametrize("value", [None, float("nan"), float("-inf")])
def test_a_log_probability_that_is_no_number_is_said_of_the_weights(value: float | None) -> None:
    """SGLang 0.5.23 with a NaN or an infinity in one tensor: null for each token, and token 0."""
    told = answer([0, 0], version=signed(7))
    told["meta_info"]["output_token_logprobs"] = [[value, 0, None]] * 2
    with pytest.raises(NotFinite, match=r"token 0 of the response .* the weights of version 7 hold NaN"):
        sample_of(told, ASKED, fleet=FLEET)


@pytest.mark.parametrize("body", [{}, {"meta_info": None}, {"meta_info": {"finish_reason": None}}])
def test_an_answer_without_a_finish_reason_is_no_sample(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="unknown finish reason None"):
        sample_of(body, ASKED, fleet=FLEET)


def test_a_finish_reason_that_is_new_to_us_is_no_sample() -> None:
    with pytest.raises(ValueError, match="unknown finish reason 'tool'"):
        sample_of(answer([1], kind="tool"), ASKED, fleet=FLEET)


def test_what_engines_count_is_kept() -> None:
    told = answer([1, 2, 3])
    told["text"] = "abc"
    told["meta_info"] |= {"cached_tokens": 4, "prompt_tokens": 6, "completion_tokens": 3, "e2e_latency": 1.5}
    told["meta_info"] |= {"spec_accept_token_num": 2, "spec_draft_token_num": 5, "spec_verify_ct": 1}
    sample = sample_of(told, ASKED, fleet=FLEET)
    assert (sample.prompt_tokens, sample.response, sample.loss_mask) == ([5, 6], "abc", [1, 1, 1])
    assert sample.prefix_cache_info == PrefixCacheInfo(cached_tokens=4, total_prompt_tokens=6)
    assert sample.timings == Timings(generation=1.5)
    assert sample.spec_info == SpecInfo(
        spec_accept_token_num=2, spec_draft_token_num=5, spec_verify_ct=1, completion_token_num=3
    )


# Parameters


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"n": 4}, "sampling_params.n: belongs to the request"),
        ({"n": 0}, "sampling_params.n"),
        ({"stop": [""]}, "an empty stop string would stop at once"),
        ({"stop": ""}, "an empty stop string would stop at once"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": -239}, "max_new_tokens"),
        ({"temperature": "NaN"}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"max_tokens": 8}, "unknown; max_new_tokens is meant"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens: 9 is greater than max_new_tokens 8"),
        ({"logit_bias": {"999999": 5}}, "the router drops it"),
        ({"custom_params": {"x": 1}}, "the router drops it"),
        ({"temprature": 1.0}, "temprature"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_parameters_that_an_engine_would_ignore_or_die_of_are_refused_by_name(
    params: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError) as refusal:
        Generate.model_validate({"prompts": [[1]], "sampling_params": params})
    assert said in str(refusal.value)


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []], [[-1]], [["a"]]])
def test_prompts_without_tokens_are_refused(prompts: list[Any]) -> None:
    with pytest.raises(ValidationError):
        Generate.model_validate({"prompts": prompts})
