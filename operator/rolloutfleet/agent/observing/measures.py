"""Small measures over samples and rewards, each cheap enough to be taken of every sample."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

from rolloutfleet.api.samples import Sample
from rolloutfleet.api.samples_view import Bar
from rolloutfleet.plan.advantages import same

NGRAM = 4
TAIL_TOKENS = 512
"""A response that has run into a loop ends in it."""


def repetition(tokens: Sequence[int]) -> float:
    """Share of the n-grams of 4 tokens among the last 512 that came before there; 0 where there are fewer than 4.

    A loop of p tokens comes to (509 - p) / 509. 50 microseconds at most.
    """
    tail = tokens[-TAIL_TOKENS:]
    ngrams = len(tail) - NGRAM + 1
    if ngrams <= 0:
        return 0.0
    return 1 - len(set(zip(*(tail[offset:] for offset in range(NGRAM)), strict=False))) / ngrams


def reward_of(sample: Sample, key: str) -> float | None:
    """None also where the reward has parts and `key` names none of them: who watches must not stop a run."""
    if isinstance(sample.reward, dict):
        return sample.reward.get(key)
    return sample.reward


def rewards_of(samples: Sequence[Sample], key: str) -> list[float]:
    """Of those that have one."""
    return [reward for sample in samples if (reward := reward_of(sample, key)) is not None]


def all_equal(rewards: Sequence[float]) -> bool:
    """Of two or more: the group teaches nothing, by the definition of filters and advantages."""
    return len(rewards) > 1 and same(rewards)


def bars(values: Sequence[float], *, most: int = 20) -> list[Bar]:
    """A histogram: a bar for each value where there are few different ones, else `most` of equal width."""
    different = sorted(set(values))
    if len(different) <= most // 2:
        return [Bar(low=value, high=value, count=values.count(value)) for value in different]
    low, width = different[0], (different[-1] - different[0]) / most
    if width <= 0:  # too near to each other for floats
        return [Bar(low=low, high=different[-1], count=len(values))]
    counts = [0] * most
    for value in values:
        counts[min(int((value - low) / width), most - 1)] += 1
    edges = [*(low + width * number for number in range(most)), different[-1]]
    return [Bar(low=a, high=b, count=count) for (a, b), count in zip(pairwise(edges), counts, strict=True)]


class Histogram:
    """Counts by upper bounds, as Prometheus has them."""

    def __init__(self, *bounds: float) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, how many up to it)"""
        total = 0
        found = []
        for bound, count in zip([*map(str, map(float, self._bounds)), "+Inf"], self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found
