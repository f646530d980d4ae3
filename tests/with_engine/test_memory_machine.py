"""The state machine of memory over the real SGLang server; unit/agent/test_memory_machine.py has it over stand-ins."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings

from rolloutfleet.engine.http import Http
from unit.agent.machine import Fault, Machine, Step, steps
from with_engine.conftest import Server, place

STORY_SECONDS = 120.0
WALK_SECONDS = 60.0


def play(runner: asyncio.Runner, server: Server, http: Http, story: list[Step]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(STORY_SECONDS):
            await Machine([server], place("MODELS"), http).run(story)

    runner.run(bounded())


def test_a_round_of_training_with_every_call_asked_for_twice(
    runner: asyncio.Runner, http: Http, server: Server
) -> None:
    play(
        runner,
        server,
        http,
        [
            Step("generate"),
            Step("offload", twice=True),
            Step("operator"),
            Step("agent restarts"),
            Step("onload", tags=("weights",), twice=True),
            Step("update"),
            Step("onload", twice=True),
            Step("operator"),
        ],
    )


def test_calls_whose_answers_are_lost_cost_the_engine_and_nothing_else(
    runner: asyncio.Runner, http: Http, server: Server
) -> None:
    play(
        runner,
        server,
        http,
        [
            Step("offload", fault=Fault(0, "release_memory_occupation", "unheard")),
            Step("offload"),
            Step("onload"),
            Step("operator"),
            Step("offload"),
            Step("onload", fault=Fault(0, "resume_memory_occupation", "unheard")),
            Step("onload"),
        ],
    )


def test_a_server_that_starts_anew_in_an_offloaded_fleet_is_offloaded(
    runner: asyncio.Runner, http: Http, server: Server
) -> None:
    async def story() -> None:
        machine = Machine([server], place("MODELS"), http)
        await machine.run([Step("offload")])
        await machine.begin()
        await machine.perform(Step("offload"))
        server.end()
        await machine.perform(Step("engine restarts"))  # for once a start
        await machine.perform(Step("operator"))
        assert await server.memory_paused() == set()
        await machine.perform(Step("watch"))
        assert len(await server.memory_paused()) == 3
        await machine.check()

    runner.run(story())


def test_frozen_weights_come_back_from_host_memory_and_nobody_has_to_load_them(
    runner: asyncio.Runner, http: Http, tmp_path: Path
) -> None:
    kept = Server(tmp_path, place("MODELS"), http, "--enable-weights-cpu-backup")

    async def story() -> None:
        machine = Machine([kept], place("MODELS"), http, frozen=True)
        await machine.begin()
        for step in (Step("offload"), Step("operator"), Step("onload")):
            await machine.perform(step)
            await machine.check()
        assert await kept.client.ready(), "the agent itself has continued it"

    try:
        runner.run(story())
    finally:
        kept.end()


def test_no_scheduler_dies_of_our_calls_and_what_is_recorded_is_what_is(
    runner: asyncio.Runner, http: Http, server: Server
) -> None:
    end = time.monotonic() + WALK_SECONDS

    # Not shrunk: the stand-ins do that, and the story that failed is printed.
    @settings(
        max_examples=200, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None
    )
    @given(story=steps(1, least=6))
    def walk(story: list[Step]) -> None:
        if time.monotonic() < end:
            play(runner, server, http, story)

    walk()
