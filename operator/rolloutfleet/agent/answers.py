"""From SGLang's answer to a sample, and whose answer it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rolloutfleet.api.samples import PrefixCacheInfo, Sample, SampleStatus, SpecInfo, Timings, VersionSpan
from rolloutfleet.api.weight_labels import parse_label

STATUSES = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}
"""By SGLang's finish reason."""


class NotOurs(ValueError):
    """The answer is not signed with a version of this fleet's weights."""


class NotFinite(ValueError):
    """A token whose log probability is no number: SGLang answers null, and goes on with token 0."""

    def __init__(self, message: str, *, versions: frozenset[int]) -> None:
        super().__init__(message)
        self.versions = versions
        """That made the response."""


def sample_of(answer: dict[str, Any], asked: Sample, *, fleet: str, keep_meta: Sequence[str] = ()) -> Sample:
    """`asked` with what SGLang answered to its prompt. Fields of meta_info that `keep_meta` names go to train_metadata.

    Raises NotOurs, NotFinite, or another ValueError when that is no usable answer at all.
    """
    try:
        return _sample_of(answer, asked, fleet, keep_meta)
    except (TypeError, AttributeError, KeyError, IndexError) as error:
        raise ValueError(f"not an answer of SGLang: {type(error).__name__} {error}") from error


def _sample_of(answer: dict[str, Any], asked: Sample, fleet: str, keep_meta: Sequence[str]) -> Sample:
    meta = answer.get("meta_info") or {}
    entries = meta.get("output_token_logprobs") or []
    tokens = [int(entry[1]) for entry in entries]
    if not tokens and meta.get("completion_tokens"):
        raise ValueError(f"{meta['completion_tokens']} tokens without log probabilities")
    finish = meta.get("finish_reason") or {}
    kind = finish.get("type")
    status = STATUSES.get(str(kind))
    if status is None:
        raise ValueError(f"unknown finish reason {kind!r}")
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": len(tokens)}]
    versions = []
    for span in spans:
        label = parse_label(str(span.get("version")))
        if label is None or not fleet or label.fleet != fleet:
            said = span.get("version")
            raise NotOurs(f"not ours: answered by an engine whose weight version is {said!r}, not one of @{fleet}")
        versions.append(VersionSpan(version=label.version, start=int(span["start"]), end=int(span["end"])))
    log_probs = [math.nan if entry[0] is None else float(entry[0]) for entry in entries]
    first = next((number for number, value in enumerate(log_probs) if not math.isfinite(value)), None)
    if first is not None:
        made_by = frozenset(span.version for span in versions)
        raise NotFinite(
            f"token {first} of the response has a log probability that is no number: the weights of version "
            f"{max(made_by, default=0)} hold NaN or an infinity, or lead to one; update_weights(path, version=..., "
            "rollback=True) goes back",
            versions=made_by,
        )
    return asked.changed(
        response_tokens=tokens,
        response=answer.get("text") or "",
        rollout_log_probs=log_probs,
        loss_mask=None,
        weight_versions=versions,
        status=status,
        error=str(finish.get("message") or "") if status is SampleStatus.ABORTED else "",
        train_metadata=asked.train_metadata | {name: meta[name] for name in keep_meta if name in meta},
        timings=Timings(generation=meta.get("e2e_latency") or 0.0, queue=meta.get("queue_time") or 0.0),
        spec_info=SpecInfo(
            **{name: meta.get(name) or 0 for name in SpecInfo.model_fields if name != "completion_token_num"},
            completion_token_num=meta.get("completion_tokens") or 0,
        ),
        prefix_cache_info=PrefixCacheInfo(
            cached_tokens=meta.get("cached_tokens") or 0, total_prompt_tokens=meta.get("prompt_tokens") or 0
        ),
    )
