"""The rules of sample collection: how many prompts to work on, and what becomes of a sample and of a group."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rolloutfleet.api.samples import Sample, SampleStatus
from rolloutfleet.plan.stitching import mask_older_than, restarted


def groups_to_hold(*, target: int, finished: int, over_sampling: float = 1.0) -> int:
    """Prompts to have in work so that `target` groups will be finished. None once they are; until then as many more
    than needed as `over_sampling` says, since the slowest of them shall not be waited for."""
    return max(math.ceil(target * over_sampling) - finished, 0) if finished < target else 0


def to_continue(
    sample: Sample, *, version: int, partial: bool, max_staleness: int | None, stale: Literal["mask", "restart"]
) -> Sample:
    """What a sample that was stopped, or is kept of a group that was, goes on with, now that `version` is committed.

    What is not finished goes on from its prompt, with `partial` from its tokens. Where one of these is older than
    `max_staleness` versions, such tokens are masked, or the sample begins again.
    """
    if not partial and not sample.finished and sample.response_tokens:
        return restarted(sample)
    oldest = 0 if max_staleness is None else version - max_staleness
    if all(span.version >= oldest for span in sample.weight_versions):
        return sample
    return mask_older_than(sample, oldest) if stale == "mask" else restarted(sample)


def failed(sample: Sample, why: str) -> Sample:
    """It stays in its group with its error, and nothing of it is trained."""
    return sample.changed(status=SampleStatus.FAILED, error=why, reward=None, remove_sample=True)


def trajectories(samples: Sequence[Sample]) -> list[list[int]]:
    """Positions of the samples that are parts of one trajectory, for each of them, in order."""
    found: dict[tuple[str, int], list[int]] = {}
    for position, sample in enumerate(samples):
        key = ("sample", position) if sample.rollout_id is None else ("trajectory", sample.rollout_id)
        found.setdefault(key, []).append(position)
    return list(found.values())


@dataclass(frozen=True)
class Ended:
    """finished: a trainer may have it. dropped: nobody will train it. stopped: it goes on later."""

    outcome: Literal["finished", "dropped", "stopped"]
    cause: str = ""


def group_end(samples: Sequence[Sample]) -> Ended:
    """Before any filter is asked. Failed samples cost themselves only, unless nothing else is left."""
    if any(sample.status in (SampleStatus.PENDING, SampleStatus.ABORTED) for sample in samples):
        return Ended("stopped")
    if all(sample.status is SampleStatus.FAILED for sample in samples):
        return Ended("dropped", "failed")
    return Ended("finished")


def sampling_seed(seed: int, *, epoch: int, prompt: int, index: int) -> int:
    """One seed a sample, the same in each life of the run, and another one in each epoch."""
    digest = hashlib.sha256(f"{seed}/{epoch}/{prompt}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1
