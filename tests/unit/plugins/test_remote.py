"""A judge behind HTTP is asked as slime asks, asked again while it is ill, and never waited for beyond the time-out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rolloutfleet.agent.plugins import remote
from rolloutfleet.agent.plugins.errors import PluginError, PluginRaised, PluginTimeout, WrongAnswer
from rolloutfleet.agent.plugins.remote import RemoteReward
from rolloutfleet.engine.http import Http
from unit.engine.stand_in import Answer, Asked, HangUp, StandIn
from unit.store.world import sample

SAMPLE = sample().changed(prompt="2 + 2", response="4", label="four", metadata={"level": 1})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(remote, "LAST_PAUSE_SECONDS", 0.01)


def judged(judge: StandIn, *, seconds: float = 10.0, times: int = 1, at_once: int = 64) -> list[Any]:
    async def scenario() -> list[Any]:
        async with Http(max_connections=8) as http, judge:
            reward = RemoteReward(judge.url + "/judge", http=http, timeout_seconds=seconds, at_once=at_once)
            return await asyncio.gather(*[reward(SAMPLE) for _ in range(times)], return_exceptions=True)

    return asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "reward"), [(1, 1.0), (0.25, 0.25), ({"correct": 1, "short": 0}, {"correct": 1.0, "short": 0.0})]
)
def test_it_is_asked_with_slimes_fields_and_its_answer_is_the_reward(answer: Any, reward: Any) -> None:
    judge = StandIn.always(200, answer)
    assert judged(judge) == [reward]
    (asked,) = judge.asked
    assert (asked.method, asked.path) == ("POST", "/judge")
    assert {name: asked.body[name] for name in ("prompt", "response", "label", "metadata")} == {
        "prompt": "2 + 2",
        "response": "4",
        "label": "four",
        "metadata": {"level": 1},
    }
    assert asked.body["response_tokens"] == SAMPLE.response_tokens


def test_it_is_asked_again_while_it_is_ill() -> None:
    left: list[Answer | type[HangUp]] = [(503, "warming up"), HangUp, (429, "slowly"), (200, 0.5)]

    async def answering(_: Asked) -> Answer:
        told = left.pop(0)
        if isinstance(told, type):
            raise told
        return told

    judge = StandIn(answering)
    assert judged(judge) == [0.5]
    assert len(judge.asked) == 4


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        ((422, "no such label"), PluginRaised, "/judge: 422 no such label"),
        ((200, "very good"), WrongAnswer, "/judge: a number is needed: NoneType None"),
        ((200, []), WrongAnswer, "a number is needed: list []"),
        ((503, "still ill"), PluginTimeout, "no reward in 0.3 s; 503 still ill"),
    ],
)
def test_what_it_cannot_judge_is_told(answer: Answer, error: type[PluginError], said: str) -> None:
    (found,) = judged(StandIn.always(*answer), seconds=0.3)
    assert isinstance(found, error)
    assert said in str(found)


def test_a_judge_that_hangs_is_not_waited_for() -> None:
    async def hang(_: Asked) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError

    (found,) = judged(StandIn(hang), seconds=0.2)
    assert isinstance(found, PluginTimeout)
    assert "no reward in 0.2 s; " in str(found)


def test_no_more_are_asked_at_once_than_it_bears() -> None:
    running = most = 0

    async def count(_: Asked) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return 200, 1.0

    assert judged(StandIn(count), times=12, at_once=3) == [1.0] * 12
    assert most == 3
