"""A sample whose parts do not fit together is never made."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from rolloutfleet.api.samples import Sample, SampleStatus, VersionSpan

MADE: dict[str, Any] = {
    "prompt_tokens": [1, 2],
    "response_tokens": [3, 4, 5],
    "rollout_log_probs": [-0.1, -0.2, -0.3],
    "weight_versions": [{"version": 7, "start": 0, "end": 3}],
    "status": "completed",
}


def test_tokens_are_prompt_and_response_as_in_slime() -> None:
    sample = Sample.model_validate(MADE)
    assert (sample.tokens, sample.response_length, sample.loss_mask) == ([1, 2, 3, 4, 5], 3, [1, 1, 1])


def test_a_sample_goes_through_json_unchanged() -> None:
    sample = Sample.model_validate({**MADE, "reward": {"correct": 1, "short": 0.5}, "label": {"answer": [1, None]}})
    assert Sample.model_validate_json(sample.model_dump_json()) == sample


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rollout_log_probs": [-0.1]}, "rollout_log_probs: 1 for 3 response tokens"),
        ({"loss_mask": [1, 1]}, "loss_mask: 2 for 3 response tokens"),
        ({"loss_mask": [1, 2, 0]}, "loss_mask: only 0 and 1"),
        ({"rollout_log_probs": [-0.1, math.nan, 0]}, "rollout_log_probs: one is not finite"),
        ({"weight_versions": [{"version": 7, "start": 0, "end": 4}]}, "weight_versions: 0 to 4 after 0, of 3 tokens"),
        ({"weight_versions": [{"version": 7, "start": 2, "end": 1}]}, "weight_versions: 2 to 1"),
        ({"weight_versions": [{"version": 7, "start": 0, "end": 2}]}, "tokens 2 to 3 are trained and nobody sampled"),
        ({"weight_versions": []}, "tokens 0 to 3 are trained and nobody sampled them"),
        ({"reward": math.inf}, "reward: inf is not finite"),
        ({"reward": {"correct": math.nan}}, "is not finite"),
        ({"reward": 1.0, "status": "aborted"}, "reward: the sample is aborted; only a finished one is judged"),
        ({"reward": 0.0, "status": "failed"}, "reward: the sample is failed"),
        ({"status": "stopped"}, "status"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        Sample.model_validate(MADE | fields)
    assert said in str(refusal.value)


def test_overlapping_spans_are_refused() -> None:
    spans = [{"version": 7, "start": 0, "end": 2}, {"version": 8, "start": 1, "end": 3}]
    with pytest.raises(ValidationError, match="1 to 3 after 2"):
        Sample.model_validate({**MADE, "weight_versions": spans})


def test_tokens_that_are_not_trained_need_no_version() -> None:
    sample = Sample.model_validate(
        {
            **MADE,
            "loss_mask": [1, 0, 1],
            "weight_versions": [VersionSpan(version=1, start=0, end=1), VersionSpan(version=2, start=2, end=3)],
        }
    )
    assert sample.effective_response_length == 2
    assert sample.changed(remove_sample=True).effective_response_length == 0


def test_a_change_is_checked_and_an_unknown_field_is_refused() -> None:
    sample = Sample.model_validate(MADE)
    assert sample.changed(reward=1).reward == 1.0
    with pytest.raises(ValidationError, match="only a finished one"):
        sample.changed(reward=1, status=SampleStatus.ABORTED)
    with pytest.raises(ValueError, match="log_probs: a sample has no such field"):
        sample.changed(log_probs=[])


def test_one_number_of_a_reward_is_found_by_its_key() -> None:
    sample = Sample.model_validate(MADE)
    assert sample.reward_value("correct") is None
    assert sample.changed(reward=0.5).reward_value() == 0.5
    parts = sample.changed(reward={"correct": 1.0, "short": 0.25})
    assert parts.reward_value("short") == 0.25
    with pytest.raises(ValueError, match="reward_key: ''; the reward has correct, short"):
        parts.reward_value()
