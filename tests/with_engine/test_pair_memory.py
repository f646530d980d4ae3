"""Memory of a prefill and a decode engine: the buffers between them must be known to each other again afterwards."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolloutfleet.agent.memory_record import TAGS
from rolloutfleet.api.agent import MemoryTag, UpdateWeights
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.pair import generate_through
from unit.agent.machine import Machine, Step
from with_engine.conftest import Server, place

MOONCAKE = ("--disaggregation-transfer-backend", "mooncake")


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture
def bootstrap_port() -> str:
    return free_port()


@pytest.fixture
def pair(tmp_path: Path, http: Http, bootstrap_port: str) -> Iterator[tuple[Server, Server]]:
    servers = []
    for mode in ("prefill", "decode"):
        folder = tmp_path / mode
        folder.mkdir()
        flags = ["--disaggregation-mode", mode, *MOONCAKE]
        if mode == "prefill":
            flags += ["--disaggregation-bootstrap-port", bootstrap_port]
        else:  # else it wants host memory beyond a reserve of 10 GiB
            flags += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        servers.append(Server(folder, place("MODELS"), http, *flags))
    yield servers[0], servers[1]
    for server in servers:
        server.end()


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
