"""Users' code of the tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from rolloutfleet.agent.collection.engines import Engines
from rolloutfleet.agent.plugins.kinds import Verdict
from rolloutfleet.agent.store.handover import Offer
from rolloutfleet.api.samples import Sample
from rolloutfleet.plan.stitching import observe


def label(sample: Sample) -> float:
    assert isinstance(sample.label, int)
    return float(sample.label)


def index(sample: Sample) -> float:
    return float(sample.index)


def parts(_: Sample) -> dict[str, float]:
    return {"right": 1.0, "short": 0.5}


def judge_that_fails_for_the_second(sample: Sample) -> float:
    if sample.index == 1:
        raise RuntimeError("no verdict")
    return 1.0


def judge_that_hangs_for_the_second(sample: Sample) -> float:
    if sample.index == 1:
        time.sleep(600)
    return 1.0


def ranked(samples: Sequence[Sample]) -> list[float]:
    return [float(-sample.index) for sample in samples]


def only_odd(samples: Sequence[Sample]) -> Verdict:
    return Verdict(samples[0].group_index % 2 == 1, "even")


def nothing_is_good_enough(_: Sequence[Sample]) -> bool:
    return False


def noted(sample: Sample) -> Sample:
    return sample.changed(metadata={**sample.metadata, "noted": True})


def newest_first(offers: Sequence[Offer], _: int) -> list[int]:
    return list(reversed(range(len(offers))))


def shares(groups: Sequence[Sequence[Sample]]) -> list[list[float]]:
    return [[1 / len(group)] * len(group) for group in groups]


async def two_turns(sample: Sample, params: dict[str, Any], engines: Engines) -> Sample:
    """A turn of one token, a tool's answer of one token, another turn."""
    first = await engines.complete(sample, params | {"max_new_tokens": 1})
    if first.status == "aborted":
        return first
    return await engines.complete(observe(first, [7]), params | {"max_new_tokens": 3})


async def as_many_as_the_label(sample: Sample, params: dict[str, Any], engines: Engines) -> list[Sample]:
    """0 is an answer of the wrong kind."""
    made = await engines.complete(sample, params)
    assert isinstance(sample.label, int)
    return [made] * sample.label


async def never(_: Sample, __: dict[str, Any], ___: Engines) -> Sample:
    await asyncio.Event().wait()
    raise AssertionError


def notes_half_a_surrogate_pair(sample: Sample) -> Sample:
    return sample.changed(metadata={"note": "\ud83d"})


def writes_half_a_surrogate_pair(sample: Sample) -> Sample:
    return sample.changed(response="good \ud83d")


def drops_for_half_a_surrogate_pair(_: Sequence[Sample]) -> Verdict:
    return Verdict(False, "\ud83d is dull")


def complains_in_half_a_surrogate_pair(_: Sample) -> float:
    raise ValueError("\ud83d is no answer")


async def one_three_or_none(sample: Sample, params: dict[str, Any], engines: Engines) -> list[Sample]:
    made = await engines.complete(sample, params)
    return [made] if made.status == "aborted" else [made] * (1, 3, 0)[sample.index]


def by_position(samples: Sequence[Sample]) -> list[float]:
    return [float(position) for position, _ in enumerate(samples)]
