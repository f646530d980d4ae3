"""The state machine of memory over stand-ins of SGLang; tests/with_engine has the same one over the real server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from rolloutfleet.engine.http import Http
from stand_ins.sglang import Died, Engine
from unit.agent.machine import Machine, Step, steps
from unit.agent.world import INITIAL_LABEL, write_checkpoint
from unit.engine.stand_in import Answer, Asked, HangUp, StandIn

ENGINES = 2


class StandInLife:
    def __init__(self, models: Path) -> None:
        self._models = models
        self.server = StandIn(self._answer)

    @property
    def url(self) -> str:
        return self.server.url

    async def begin_anew(self) -> None:
        flags = ["--model-path", str(self._models / "m0"), "--weight-version", INITIAL_LABEL, "--enable-memory-saver"]
        self._engine = Engine(flags)

    async def memory_paused(self) -> frozenset[str]:
        assert not self._engine.dead, "its scheduler has died"
        return self._engine.released

    async def _answer(self, asked: Asked) -> Answer:
        try:
            body = {"rid": "", **asked.body} if asked.path == "/generate" else asked.body
            return self._engine.answer(asked.method, asked.path, body)
        except Died:
            raise HangUp from None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for version in (0, 1):
        write_checkpoint(folder / f"m{version}", [2, 3])
    return folder


def run(models: Path, story: Sequence[Step]) -> None:
    async def play() -> None:
        async with AsyncExitStack() as stack:
            lives = [StandInLife(models) for _ in range(ENGINES)]
            for life in lives:
                await stack.enter_async_context(life.server)
            http = await stack.enter_async_context(Http(max_connections=16))
            async with asyncio.timeout(30):
                await Machine(lives, models, http).run(story)

    asyncio.run(play())


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(story=steps(ENGINES))
def test_no_scheduler_dies_of_our_calls_and_what_is_recorded_is_what_is(models: Path, story: list[Step]) -> None:
    run(models, story)
