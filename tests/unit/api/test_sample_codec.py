"""What goes into the store comes out of it, bit for bit, or is called damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutfleet.api.sample_codec import DamagedSample, decode, encode
from rolloutfleet.api.samples import Sample, SampleStatus, VersionSpan
from unit.store.world import sample

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=9))
    floats = st.floats(width=draw(st.sampled_from([32, 64])), allow_nan=False, allow_infinity=False)
    count = len(tokens)
    return Sample(
        group_index=draw(st.integers(0, 9)),
        prompt_tokens=draw(st.lists(st.integers(0, 2**31 - 1), max_size=9)),
        response_tokens=tokens,
        rollout_log_probs=draw(st.lists(floats, min_size=count, max_size=count)),
        loss_mask=draw(st.lists(st.sampled_from([0, 1]), min_size=count, max_size=count)),
        weight_versions=[VersionSpan(version=3, start=0, end=count)],
        status=SampleStatus.TRUNCATED,
        reward=draw(st.none() | st.floats(allow_nan=False, allow_infinity=False)),
        label=draw(JSON),
        metadata=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        response=draw(TEXT),
    )


@given(samples())
def test_a_sample_comes_back_as_it_was(made: Sample) -> None:
    assert decode(encode(made)) == made


@given(samples(), st.data())
def test_a_changed_byte_is_noticed(made: Sample, data: st.DataObject) -> None:
    payload = bytearray(encode(made))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DamagedSample):
        decode(bytes(payload))


def test_log_probs_as_engines_give_them_take_four_bytes_and_a_full_mask_none() -> None:
    small, large = sample(tokens=1000).changed(rollout_log_probs=[-0.5] * 1000), sample(tokens=2000)
    double = large.changed(rollout_log_probs=[-0.1] * 2000)
    assert len(encode(small)) < 8 * 1000 + 400
    assert len(encode(double)) > 12 * 2000
    assert decode(encode(double)) == double


UNICODE = Path(__file__).parents[1] / "data/unicode.jsonl"
ROWS = [line for line in UNICODE.read_text("ascii").splitlines() if "lone-" not in line]


@pytest.mark.parametrize("line", ROWS)
def test_texts_that_break_others_come_back(line: str) -> None:
    row = json.loads(line)
    made = sample().changed(prompt=row["prompt"], label=row["label"], metadata={row["id"]: row["id"]})
    assert decode(encode(made)) == made
