"""Advantages against values worked out by hand, and finite whatever the rewards are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutfleet.api.collection import Estimator
from rolloutfleet.plan.advantages import EPSILON, NEEDS_GROUPS, advantages, check, same

REWARD = st.none() | st.floats(-1e6, 1e6)
GROUPS = st.lists(st.lists(REWARD, max_size=6), max_size=4)


def one(rewards: list[float | None], estimator: Estimator) -> list[float]:
    return advantages([rewards], estimator)[0]


def test_grpo_by_hand() -> None:
    # mean 2, deviations -1 0 1, standard deviation sqrt(2 / 2) = 1
    assert one([1, 2, 3], Estimator.GRPO) == pytest.approx([-1 / (1 + EPSILON), 0, 1 / (1 + EPSILON)])
    # mean 1/4, sum of squares 3 * 1/16 + 9/16 = 3/4, standard deviation sqrt(3/4 / 3) = 1/2
    assert one([1, 0, 0, 0], Estimator.GRPO) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_the_others_by_hand() -> None:
    assert one([1, 0, 0, 0], Estimator.DR_GRPO) == [0.75, -0.25, -0.25, -0.25]
    assert one([1, 0, 0, 0, 0, 0, 0, 0], Estimator.RLOO) == pytest.approx([1] + [-1 / 7] * 7)
    assert one([1, 3], Estimator.RLOO) == [-2, 2]
    assert advantages([[1], [None, 3]], Estimator.RAW) == [[1], [0, 3]]
    # mean 2, variance (4 + 0 + 0 + 4) / 4 = 2
    found = advantages([[0, 2], [2, 4]], Estimator.REINFORCE_PLUS_PLUS)
    root = math.sqrt(2)
    assert [*found[0], *found[1]] == pytest.approx([-2 / root, 0, 0, 2 / root], rel=1e-5)
    # centred -1 1 | -2 2: mean 0, variance (1 + 1 + 4 + 4) / 4 = 2.5
    found = advantages([[0, 2], [2, 6]], Estimator.REINFORCE_PLUS_PLUS_BASELINE)
    root = math.sqrt(2.5)
    assert [*found[0], *found[1]] == pytest.approx([-1 / root, 1 / root, -2 / root, 2 / root], rel=1e-5)


@pytest.mark.parametrize(
    "rewards", [[0.3] * 8, [0.1 + 0.2, 0.3], [1.0, 1.0 + 1e-9], [0.0, 0.0], [7.0], [None, 7.0], []]
)
def test_rewards_that_are_the_same_teach_nothing_instead_of_being_blown_up(rewards: list[float | None]) -> None:
    assert same(rewards)
    for estimator in NEEDS_GROUPS:
        assert one(rewards, estimator) == [0.0] * len(rewards)


def test_what_the_filter_keeps_has_advantages() -> None:
    assert not same([0.0, 1e-5])
    assert one([0.0, 1e-5], Estimator.GRPO)[1] > 0.5


@given(GROUPS, st.sampled_from(Estimator))
def test_advantages_are_finite_and_a_trajectory_without_a_reward_has_none_and_changes_none(
    groups: list[list[float | None]], estimator: Estimator
) -> None:
    found = advantages(groups, estimator)
    assert [len(group) for group in found] == [len(group) for group in groups]
    assert all(math.isfinite(value) for group in found for value in group)
    known = [[reward for reward in group if reward is not None] for group in groups]
    alone = advantages(known, estimator)
    for rewards, values, expected in zip(groups, found, alone, strict=True):
        assert [value for reward, value in zip(rewards, values, strict=True) if reward is None] == [
            0.0 for reward in rewards if reward is None
        ]
        assert [value for reward, value in zip(rewards, values, strict=True) if reward is not None] == expected


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8), st.sampled_from(sorted(NEEDS_GROUPS)))
def test_a_group_has_no_advantage_over_itself(rewards: list[float], estimator: Estimator) -> None:
    assert math.fsum(one(list(rewards), estimator)) == pytest.approx(0, abs=1e-6)


def test_samples_that_are_alone_are_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="grpo compares samples of one prompt: 1 is too few"):
        check(Estimator.GRPO, 1)
    check(Estimator.GRPO, 2)
    check(Estimator.REINFORCE_PLUS_PLUS, 1)


def test_a_reward_that_is_not_finite_is_refused_with_its_group() -> None:
    with pytest.raises(ValueError, match="group 1: a reward is not finite"):
        advantages([[1.0], [math.nan]], Estimator.GRPO)
