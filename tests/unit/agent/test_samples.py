"""SGLang's answers become samples or are refused, and so are parameters that an engine would ignore or die of."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rolloutfleet.agent.sampling import sample_of
from rolloutfleet.api.agent import Generate, VersionSpan
from unit.agent.world import ABORT, FLEET, answer, signed

# Answers


@pytest.mark.parametrize(("kind", "status"), [("stop", "completed"), ("length", "truncated"), ("abort", "aborted")])
def test_the_finish_reason_gives_the_status(kind: str, status: str) -> None:
    sample = sample_of(answer([1, 2], kind=kind), fleet=FLEET, attempts=3, seconds=1.23456)
    assert (sample.status, sample.tokens, sample.log_probs) == (status, [1, 2], [-0.5, -1.0])
    assert (sample.attempts, sample.seconds, sample.error) == (3, 1.2346, "")


def test_why_a_sample_was_aborted_is_told() -> None:
    assert sample_of(ABORT, fleet=FLEET, attempts=1, seconds=0.0).error == "aborted by a pause"


def test_one_version_covers_the_whole_response() -> None:
    sample = sample_of(answer([1, 2, 3], version=signed(7)), fleet=FLEET, attempts=1, seconds=0.0)
    assert sample.weight_versions == [VersionSpan(version=7, start=0, end=3)]


def test_a_response_that_an_update_interrupted_tells_which_tokens_are_whose() -> None:
    spans = [{"version": signed(7), "start": 0, "end": 2}, {"version": signed(8), "start": 2, "end": 3}]
    sample = sample_of(answer([1, 2, 3], weight_versions=spans), fleet=FLEET, attempts=1, seconds=0.0)
    assert sample.weight_versions == [VersionSpan(version=7, start=0, end=2), VersionSpan(version=8, start=2, end=3)]


@pytest.mark.parametrize("version", ["default", None, "", "-1", "1.5"])
def test_an_engine_without_a_version_of_ours_is_not_believed(version: Any) -> None:
    with pytest.raises(ValueError, match="whose weight version is"):
        sample_of(answer([1], version=version), fleet=FLEET, attempts=1, seconds=0.0)


@pytest.mark.parametrize("body", [{}, {"meta_info": None}, {"meta_info": {"finish_reason": None}}])
def test_an_answer_without_a_finish_reason_is_no_sample(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="unknown finish reason None"):
        sample_of(body, fleet=FLEET, attempts=1, seconds=0.0)


def test_a_finish_reason_that_is_new_to_us_is_no_sample() -> None:
    with pytest.raises(ValueError, match="unknown finish reason 'tool'"):
        sample_of(answer([1], kind="tool"), fleet=FLEET, attempts=1, seconds=0.0)


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
