"""What users write: good, bad and hanging. Runs in the hosts of the tests."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from rolloutfleet.agent.plugins.kinds import Verdict
from rolloutfleet.api.samples import Sample

FOREVER = 1000.0


async def reward(sample: Sample) -> float:
    await asyncio.sleep(0)
    return float(len(sample.response_tokens))


def plain(sample: Sample) -> dict[str, float]:
    print("what a plug-in prints disturbs nobody")
    return {"length": len(sample.response_tokens), "thread": threading.current_thread() is not threading.main_thread()}


async def process(_: Sample) -> int:
    return os.getpid()


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _: Sample) -> int:
        self.calls += 1
        return self.calls


def group(samples: Sequence[Sample]) -> list[float]:
    return [float(sample.index) for sample in samples]


def keep_varied(samples: Sequence[Sample]) -> Verdict:
    varied = len({sample.reward_value() for sample in samples}) > 1
    return Verdict(varied, "" if varied else "zero_std")


def mark(sample: Sample) -> Sample:
    return sample.changed(metadata={"seen": True})


def advantages(groups: Sequence[Sequence[Sample]]) -> list[list[float]]:
    return [[0.5 for _ in group] for group in groups]


async def two_turns(sample: Sample, sampling_params: dict[str, Any], engines: Any) -> list[Sample]:
    return [sample.changed(rollout_id=0), sample.changed(index=sample.index + 1, rollout_id=0)]


async def raises(_: Sample) -> float:
    raise RuntimeError("the judge is ill")


async def its_own_timeout(_: Sample) -> float:
    raise TimeoutError("of something within")


async def hangs(_: Sample) -> float:
    await asyncio.sleep(FOREVER)
    return 0.0


async def will_not_be_cancelled(_: Sample) -> float:
    while True:
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            continue


def hangs_in_a_thread(_: Sample) -> float:
    time.sleep(FOREVER)
    return 0.0


async def blocks_the_loop(_: Sample) -> float:
    time.sleep(FOREVER)  # noqa: ASYNC251 - as users do
    return 0.0


def never_lets_go_of_the_interpreter(_: Sample) -> float:
    return float(bool(re.match(r"(a+)+$", "a" * 64 + "b")))


async def ends_the_process(_: Sample) -> float:
    os._exit(3)


async def exits(_: Sample) -> float:
    sys.exit(4)


async def text(_: Sample) -> str:
    return "very good"


async def nothing(_: Any, *__: Any) -> None:
    return None


async def not_a_number(_: Sample) -> float:
    return float("nan")


async def too_few(samples: Sequence[Sample]) -> list[float]:
    return [1.0]


async def another(sample: Sample) -> Sample:
    return sample.changed(index=99)


def two_arguments(sample: Sample, more: int) -> float:
    return 0.0


NO_FUNCTION = 7
