"""A sample that was stopped and went on is the sample that was never stopped; only its masks may differ, if asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutfleet.api.samples import PrefixCacheInfo, Sample, SampleStatus, SpecInfo, Timings, VersionSpan
from rolloutfleet.plan.stitching import (
    mask_older_than,
    observe,
    oldest_version,
    restarted,
    staleness,
    stitch,
    tokens_left,
)

TOKENS = st.lists(st.integers(0, 511), max_size=12)


@st.composite
def whole_samples(draw: st.DrawFn) -> Sample:
    """Finished, by versions that do not go back, with an environment's tokens in it."""
    sample = Sample(prompt_tokens=draw(TOKENS), group_index=3, index=1, label="x")
    version = 1
    for _ in range(draw(st.integers(1, 5))):
        version += draw(st.integers(0, 2))
        sample = stitch(sample, part(sample, draw(TOKENS), version))
        if draw(st.booleans()):
            sample = observe(sample, draw(TOKENS))
    return sample.changed(status=SampleStatus.COMPLETED, reward=1.0)


def part(after: Sample, tokens: list[int], version: int, status: SampleStatus = SampleStatus.ABORTED) -> Sample:
    return Sample(
        prompt_tokens=after.tokens,
        response_tokens=tokens,
        rollout_log_probs=[-0.5 * version] * len(tokens),
        loss_mask=None,
        weight_versions=[VersionSpan(version=version, start=0, end=len(tokens))],
        status=status,
        attempts=1,
        seconds=2.0,
        timings=Timings(generation=2, queue=1),
        spec_info=SpecInfo(spec_verify_ct=3, completion_token_num=len(tokens)),
        prefix_cache_info=PrefixCacheInfo(cached_tokens=1, total_prompt_tokens=len(after.tokens)),
    )


def cut(sample: Sample, start: int, end: int, *, ended: bool = False) -> Sample:
    """Response tokens [start, end) as a sample that continues what is before them."""
    spans = [
        VersionSpan(version=s.version, start=max(s.start, start) - start, end=min(s.end, end) - start)
        for s in sample.weight_versions
        if max(s.start, start) < min(s.end, end)
    ]
    return Sample(
        epoch=sample.epoch,
        group_index=sample.group_index,
        index=sample.index,
        label=sample.label,
        prompt_tokens=sample.prompt_tokens + sample.response_tokens[:start],
        response_tokens=sample.response_tokens[start:end],
        rollout_log_probs=sample.rollout_log_probs[start:end],
        loss_mask=sample.loss_mask[start:end],
        weight_versions=spans,
        status=sample.status if ended else SampleStatus.ABORTED,
        reward=sample.reward if ended else None,
    )


CONTENT = {"prompt_tokens", "response_tokens", "rollout_log_probs", "loss_mask", "weight_versions", "status", "reward",
           "group_index", "index", "label"}  # fmt: skip


def content(sample: Sample) -> dict[str, object]:
    return sample.model_dump(include=CONTENT)


@given(whole_samples(), st.data())
def test_parts_make_the_whole_wherever_it_was_cut_and_in_whatever_order_they_are_joined(
    whole: Sample, data: st.DataObject
) -> None:
    at = st.integers(0, whole.response_length)
    one, two = sorted((data.draw(at), data.draw(at)))
    first, middle = cut(whole, 0, one), cut(whole, one, two)
    last = cut(whole, two, whole.response_length, ended=True)
    assert content(stitch(stitch(first, middle), last)) == content(whole)
    assert content(stitch(first, stitch(middle, last))) == content(whole)


@given(whole_samples(), st.integers(0, 12))
def test_a_mask_by_version_takes_exactly_the_older_tokens_out_of_training(whole: Sample, version: int) -> None:
    masked = mask_older_than(whole, version)
    made_by: list[int | None] = [None] * whole.response_length
    for span in whole.weight_versions:
        made_by[span.start : span.end] = [span.version] * (span.end - span.start)
    assert masked.loss_mask == [int(v is not None and v >= version) for v in made_by]
    assert masked.changed(loss_mask=whole.loss_mask) == whole, "nothing else changed"
    oldest = oldest_version(masked)
    assert oldest is None or oldest >= version
    assert oldest == min((v for v in made_by if v is not None and v >= version), default=None)


@given(whole_samples())
def test_a_restart_keeps_the_prompt_and_the_identity_and_none_of_the_tokens(whole: Sample) -> None:
    anew = restarted(whole)
    assert (anew.tokens, anew.status, anew.reward) == (whole.prompt_tokens, SampleStatus.PENDING, None)
    assert (anew.group_index, anew.index, anew.attempts) == (3, 1, whole.attempts)


def test_counters_and_times_of_the_parts_add_up() -> None:
    empty = Sample(prompt_tokens=[1])
    first = stitch(empty, part(empty, [2, 3], 1))
    both = stitch(first, part(first, [4], 2, SampleStatus.TRUNCATED))
    assert both.rollout_log_probs == [-0.5, -0.5, -1.0]
    assert both.weight_versions == [VersionSpan(version=1, start=0, end=2), VersionSpan(version=2, start=2, end=3)]
    assert (both.attempts, both.seconds, both.timings) == (2, 4.0, Timings(generation=4, queue=2))
    assert both.spec_info == SpecInfo(spec_verify_ct=6, completion_token_num=3)
    assert both.prefix_cache_info == PrefixCacheInfo(cached_tokens=2, total_prompt_tokens=4)


def test_two_parts_by_one_version_are_one_span() -> None:
    empty = Sample(prompt_tokens=[1])
    first = stitch(empty, part(empty, [2], 4))
    assert stitch(first, part(first, [3], 4)).weight_versions == [VersionSpan(version=4, start=0, end=2)]


def test_what_continues_something_else_is_refused() -> None:
    started = part(Sample(prompt_tokens=[1]), [2], 1)
    with pytest.raises(ValueError, match="prompt_tokens: the continuation starts from 1 other tokens"):
        stitch(started, part(Sample(prompt_tokens=[1]), [3], 1))
    ended = started.changed(status=SampleStatus.COMPLETED)
    with pytest.raises(ValueError, match="the sample is completed: it has ended"):
        stitch(ended, part(ended, [3], 1))


def test_a_tools_tokens_are_seen_and_not_trained_and_count_against_the_length() -> None:
    sample = observe(part(Sample(prompt_tokens=[1]), [2, 3], 1), [9, 9, 9], text="42")
    assert (sample.loss_mask, sample.rollout_log_probs[2:], sample.response) == ([1, 1, 0, 0, 0], [0.0] * 3, "42")
    assert (tokens_left(sample, 8), tokens_left(sample, 4)) == (3, 0)


def test_staleness_counts_from_the_oldest_token_that_is_trained() -> None:
    empty = Sample(prompt_tokens=[1])
    first = stitch(empty, part(empty, [2], 3))
    both = stitch(first, part(first, [3], 5))
    assert (staleness(both, 6), staleness(mask_older_than(both, 4), 6), staleness(both, 2)) == (3, 1, 0)
    assert staleness(both.changed(remove_sample=True), 6) == 0
    assert staleness(empty, 6) == 0
