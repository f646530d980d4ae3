"""Memory of a prefill and a decode engine: the buffers between them must be known to each other again afterwards."""

from __future__ import annotations

import asyncio

from rolloutfleet.agent.memory_record import TAGS
from rolloutfleet.api.agent import MemoryTag, UpdateWeights
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.pair import generate_through
from unit.agent.machine import Machine, Step
from with_engine.conftest import Server, place


def test_a_pair_generates_after_its_memory_was_away(
    runner: asyncio.Runner, http: Http, pair: tuple[Server, Server], bootstrap_port: str
) -> None:
    prefill, decode = pair

    async def generates() -> None:
        async with asyncio.timeout(60):
            await generate_through(
                prefill.client, decode.client, bootstrap_host="127.0.0.1", bootstrap_port=int(bootstrap_port)
            )

    async def story() -> None:
        await asyncio.gather(prefill.start(), decode.start())
        machine = Machine([decode, prefill], place("MODELS"), http, roles=("Decode", "Prefill"))
        await machine.begin()
        await generates()
        rounds: list[tuple[MemoryTag, ...]] = [("kv_cache",), TAGS, TAGS]
        for number, tags in enumerate(rounds):
            await machine.perform(Step("offload", tags=tags))
            await machine.check()
            assert await prefill.memory_paused() == await decode.memory_paused() == set(tags)
            if "weights" in tags:
                await machine.perform(Step("onload", tags=("weights",)))
                path = str(machine.models / f"m{number % 2}")  # never the committed one again: that is refused
                assert (await machine.updater.update(UpdateWeights(path=path))).committed
            await machine.perform(Step("onload"))
            await machine.check()
            await generates()

    runner.run(story())
