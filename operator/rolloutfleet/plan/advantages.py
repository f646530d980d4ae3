"""Rewards become advantages: what each trajectory is better than the others by. Pure numbers, no tensors.

One definition of "all the same" serves filters and normalisation: a group whose standard deviation is at most
SAME_STD teaches nothing, its advantages are exactly 0. None stands for a trajectory without a reward (aborted, failed):
it gets 0 and counts nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rolloutfleet.api.collection import Estimator

SAME_STD = 1e-6
EPSILON = 1e-6
"""Added to a standard deviation that is divided by, as in slime."""

Rewards = Sequence[float | None]


NEEDS_GROUPS = frozenset(Estimator) - {Estimator.REINFORCE_PLUS_PLUS, Estimator.RAW}


def check(estimator: Estimator, samples_a_prompt: int) -> None:
    """Raises ValueError where every advantage would be 0."""
    if estimator in NEEDS_GROUPS and samples_a_prompt < 2:
        raise ValueError(
            f"{estimator.value} compares samples of one prompt: {samples_a_prompt} is too few, 2 are needed"
        )


def advantages(groups: Sequence[Rewards], estimator: Estimator) -> list[list[float]]:
    """By group and trajectory. A group in which one trajectory alone has a reward gets 0, but for RAW and REINFORCE++.
    Raises ValueError for a reward that is not finite."""
    for number, group in enumerate(groups):
        if not all(reward is None or math.isfinite(reward) for reward in group):
            raise ValueError(f"group {number}: a reward is not finite: {list(group)}")
    if estimator is Estimator.RAW:
        return [[reward or 0.0 for reward in group] for group in groups]
    if estimator is Estimator.REINFORCE_PLUS_PLUS:
        return _whitened(groups)
    if estimator is Estimator.REINFORCE_PLUS_PLUS_BASELINE:
        return _whitened([_unless_none(group, _each(group, _centred)) for group in groups])
    return [_each(group, _WITHIN[estimator]) for group in groups]


def same(rewards: Rewards) -> bool:
    """They teach a group-relative estimator nothing: what the zero-variance filter drops."""
    known = [reward for reward in rewards if reward is not None]
    return len(known) < 2 or _std(known, 1) <= SAME_STD


def _each(group: Rewards, normalise: Callable[[list[float]], list[float]]) -> list[float]:
    known = [reward for reward in group if reward is not None]
    values = iter([0.0] * len(known) if same(group) else normalise(known))
    return [0.0 if reward is None else next(values) for reward in group]


def _unless_none(group: Rewards, values: list[float]) -> Rewards:
    return [None if reward is None else value for reward, value in zip(group, values, strict=True)]


def _centred(rewards: list[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _scaled(rewards: list[float]) -> list[float]:
    std = _std(rewards, 1)
    return [centred / (std + EPSILON) for centred in _centred(rewards)]


def _left_one_out(rewards: list[float]) -> list[float]:
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def _whitened(groups: Sequence[Rewards]) -> list[list[float]]:
    known = [reward for group in groups for reward in group if reward is not None]
    std = _std(known, 0) if known else 0.0
    if std <= SAME_STD:
        return [[0.0] * len(group) for group in groups]
    mean = math.fsum(known) / len(known)
    return [[0.0 if reward is None else (reward - mean) / (std + EPSILON) for reward in group] for group in groups]


def _std(rewards: list[float], lost_degrees: int) -> float:
    return math.sqrt(math.fsum(centred**2 for centred in _centred(rewards)) / (len(rewards) - lost_degrees))


_WITHIN = {Estimator.GRPO: _scaled, Estimator.DR_GRPO: _centred, Estimator.RLOO: _left_one_out}
