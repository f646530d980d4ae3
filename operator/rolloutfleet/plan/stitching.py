"""Partial rollouts: a sample that was stopped goes on, and stays one sample.

A continuation is a sample too: its prompt is prompt and response of what it continues. So parts join in any order of
joining, and what an engine answers needs no conversion.
"""

from __future__ import annotations

from rolloutfleet.api.samples import PrefixCacheInfo, Sample, SampleStatus, SpecInfo, Timings, VersionSpan


def stitch(first: Sample, rest: Sample) -> Sample:
    """`first`, continued by `rest`: identity of the first, end and reward of the rest, tokens and counters of both.

    Raises ValueError where `rest` continues something else, or `first` had ended.
    """
    if first.finished or first.status is SampleStatus.FAILED:
        raise ValueError(f"status: the sample is {first.status.value}: it has ended and cannot go on")
    if rest.prompt_tokens != first.tokens:
        raise ValueError(
            f"prompt_tokens: the continuation starts from {len(rest.prompt_tokens)} other tokens than the "
            f"{len(first.prompt_tokens)} of the prompt and the {first.response_length} of the response so far"
        )
    return first.changed(
        response_tokens=first.response_tokens + rest.response_tokens,
        response=first.response + rest.response,
        rollout_log_probs=first.rollout_log_probs + rest.rollout_log_probs,
        loss_mask=first.loss_mask + rest.loss_mask,
        weight_versions=_joined(first.weight_versions, rest.weight_versions, first.response_length),
        reward=rest.reward,
        status=rest.status,
        error=rest.error,
        remove_sample=first.remove_sample or rest.remove_sample,
        metadata=first.metadata | rest.metadata,
        train_metadata=first.train_metadata | rest.train_metadata,
        engine=rest.engine or first.engine,
        attempts=first.attempts + rest.attempts,
        seconds=first.seconds + rest.seconds,
        timings=Timings(**_sums(first.timings, rest.timings)),
        spec_info=SpecInfo(**_sums(first.spec_info, rest.spec_info)),
        prefix_cache_info=PrefixCacheInfo(**_sums(first.prefix_cache_info, rest.prefix_cache_info)),
    )


def observe(sample: Sample, tokens: list[int], *, text: str = "") -> Sample:
    """What an environment or a tool says in the middle of a response: seen by the model, not trained."""
    return sample.changed(
        response_tokens=sample.response_tokens + tokens,
        response=sample.response + text,
        rollout_log_probs=sample.rollout_log_probs + [0.0] * len(tokens),
        loss_mask=sample.loss_mask + [0] * len(tokens),
    )


def mask_older_than(sample: Sample, version: int) -> Sample:
    """Tokens of weight versions before `version` stay in the context and are not trained."""
    mask = list(sample.loss_mask)
    for span in sample.weight_versions:
        if span.version < version:
            mask[span.start : span.end] = [0] * (span.end - span.start)
    return sample.changed(loss_mask=mask)


def restarted(sample: Sample) -> Sample:
    """Its prompt alone, to be generated anew; what it has cost stays."""
    return sample.changed(
        response_tokens=[],
        response="",
        rollout_log_probs=[],
        loss_mask=[],
        weight_versions=[],
        reward=None,
        status=SampleStatus.PENDING,
        error="",
        remove_sample=False,
    )


def oldest_version(sample: Sample) -> int | None:
    """Of the tokens that are trained; None where there are none."""
    if sample.remove_sample:
        return None
    mask = sample.loss_mask
    return min((span.version for span in sample.weight_versions if any(mask[span.start : span.end])), default=None)


def staleness(sample: Sample, version: int) -> int:
    """Versions between the oldest token that is trained and `version`, the one that the step trains."""
    oldest = oldest_version(sample)
    return 0 if oldest is None else max(version - oldest, 0)


def tokens_left(sample: Sample, max_new_tokens: int) -> int:
    """What a continuation may still generate; a tool's tokens count, as in slime."""
    return max(max_new_tokens - sample.response_length, 0)


def _joined(first: list[VersionSpan], rest: list[VersionSpan], offset: int) -> list[VersionSpan]:
    """Without empty spans, and one span where the version did not change."""
    moved = [VersionSpan(version=s.version, start=s.start + offset, end=s.end + offset) for s in rest]
    joined: list[VersionSpan] = []
    for span in [*first, *moved]:
        if span.start == span.end:
            continue
        if joined and joined[-1].version == span.version and joined[-1].end == span.start:
            span = VersionSpan(version=span.version, start=joined.pop().start, end=span.end)
        joined.append(span)
    return joined


def _sums(first: Timings | SpecInfo | PrefixCacheInfo, rest: Timings | SpecInfo | PrefixCacheInfo) -> dict[str, float]:
    return {name: value + getattr(rest, name) for name, value in first}
