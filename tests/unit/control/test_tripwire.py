"""The silent connections: real sockets on this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from rolloutfleet.control import tripwire
from rolloutfleet.control.probes import Prober
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.control.tripwire import Tripwire
from rolloutfleet.engine.errors import EngineError
from rolloutfleet.engine.sglang import EngineClient, ModelInfo
from rolloutfleet.plan.observed import EngineProbe

KEY = FleetKey("rl", "qwen")
UID = "uid-0"


class Listener:
    """An engine's port. It reads and never answers."""

    def __init__(self) -> None:
        self.open: list[asyncio.StreamWriter] = []
        self.received = b""
        self.server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.append(writer)
        self.received += await reader.read()

    def hang_up(self) -> None:
        for writer in self.open:
            writer.transport.abort()
        self.open.clear()

    async def die(self) -> None:
        assert self.server is not None
        self.server.close()
        self.hang_up()
        await asyncio.sleep(0)


class Fixture:
    def __init__(self, listener: Listener) -> None:
        self.store = FleetStore(clock=lambda: datetime(2026, 1, 1, tzinfo=UTC))
        self.enqueued: list[FleetKey] = []
        self.looked_at: list[str] = []
        self.wires = Tripwire(store=self.store, enqueue=self.enqueued.append, look_soon=self.looked_at.append)
        self.listener = listener
        self._version = 0
        self.engine_is(started=True)
        self.store.probes[UID] = EngineProbe(answering=True)

    def engine_is(self, **record: Any) -> None:
        self._version += 1
        metadata = {
            "name": "qwen-main",
            "namespace": "rl",
            "uid": "g",
            "resourceVersion": str(self._version),
            "labels": {"rolloutfleet.dev/server": "qwen"},
        }
        engine = {"podUid": UID, "url": f"http://127.0.0.1:{self.listener.port}", **record}
        self.store.upsert("ServerGroup", {"metadata": metadata, "spec": {}, "status": {"engines": [engine]}})

    @property
    def closed(self) -> bool:
        return self.store.probes[UID].closed


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


def with_fixture(test: Callable[[Fixture], Awaitable[None]]) -> None:
    async def run() -> None:
        listener = Listener()
        await listener.start()
        fixture = Fixture(listener)
        try:
            await test(fixture)
        finally:
            for task in fixture.wires.held.values():
                task.cancel()
            await asyncio.gather(*fixture.wires.held.values(), return_exceptions=True)
            await listener.die()

    asyncio.run(run())


def test_the_end_of_a_server_is_told_at_once_and_nothing_is_ever_sent_to_it() -> None:
    async def test(fixture: Fixture) -> None:
        fixture.wires.tick()
        await until(lambda: fixture.listener.open)
        assert not fixture.closed
        await fixture.listener.die()
        await until(lambda: fixture.closed)
        assert fixture.enqueued == [KEY]
        assert fixture.looked_at == [UID]
        assert fixture.listener.received == b""
        fixture.wires.tick()
        assert not fixture.wires.held, "it is not asked for again"

    with_fixture(test)


def test_a_process_that_dies_piece_by_piece_is_heard_as_well() -> None:
    """The kernel closes what it had open one after the other: its connections may go before the port does."""

    async def test(fixture: Fixture) -> None:
        fixture.wires.tick()
        await until(lambda: fixture.listener.open)
        fixture.listener.hang_up()
        await until(lambda: fixture.listener.open)  # the look whether it still listens
        assert not fixture.closed
        await fixture.listener.die()
        await until(lambda: fixture.closed)

    with_fixture(test)


def test_a_connection_that_a_dying_process_resets_before_it_stands_is_no_reason_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect = asyncio.open_connection

    async def test(fixture: Fixture) -> None:
        async def reset_once(*address: Any) -> Any:
            monkeypatch.setattr(asyncio, "open_connection", connect)
            await fixture.listener.die()
            raise ConnectionResetError

        fixture.wires.tick()
        await until(lambda: fixture.listener.open)
        monkeypatch.setattr(asyncio, "open_connection", reset_once)
        fixture.listener.hang_up()
        await until(lambda: fixture.closed)

    with_fixture(test)


def test_a_connection_that_ends_while_the_server_lives_proves_nothing_and_is_made_again() -> None:
    async def test(fixture: Fixture) -> None:
        tripwire.AGAIN_SECONDS, kept = 0.0, tripwire.AGAIN_SECONDS
        try:
            fixture.wires.tick()
            for _ in range(2 * tripwire.AT_ONCE):
                await until(lambda: fixture.listener.open)
                fixture.listener.hang_up()
        finally:
            tripwire.AGAIN_SECONDS = kept
        assert not fixture.closed
        assert not fixture.enqueued

    with_fixture(test)


@pytest.mark.parametrize("last_words", [True, False])
def test_an_end_that_is_heard_during_a_look_is_not_forgotten_for_what_the_look_saw(last_words: bool) -> None:
    async def run() -> None:
        listener = Listener()
        fixture = Fixture(listener)
        looked = asyncio.Event()

        class Dying:
            async def ready(self) -> bool:
                probe = fixture.store.probes[UID]
                if not probe.closed:
                    fixture.store.probes[UID] = replace(probe, closed=True)
                    return last_words
                looked.set()
                return False

            async def ping(self) -> bool:
                return False

            async def model_info(self) -> ModelInfo:
                return ModelInfo(model_path="/models/m0", weight_version="0@abcdef01")

            async def server_info(self) -> Any:
                raise EngineError("died")

            async def load(self) -> Any:
                raise EngineError("died")

        def nobody(url: str) -> Any:
            raise AssertionError(url)

        metadata = {
            "name": "pod",
            "namespace": "rl",
            "uid": UID,
            "resourceVersion": "1",
            "labels": {"rolloutfleet.dev/server": "qwen", "rolloutfleet.dev/component": "engine"},
        }
        fixture.store.upsert(
            "Pod", {"metadata": metadata, "status": {"phase": "Running", "podIP": "10.0.0.1"}, "spec": {}}
        )
        prober = Prober(
            store=fixture.store,
            enqueue=fixture.enqueued.append,
            enqueue_soon=fixture.enqueued.append,
            engine=lambda url: cast(EngineClient, Dying()),
            router=nobody,
            encoder=nobody,
            encoder_table=nobody,
            monotonic=time.monotonic,
        )
        running = asyncio.create_task(prober.run())
        try:
            await until(lambda: fixture.enqueued)
            assert fixture.closed
            prober.look_soon(UID)
            async with asyncio.timeout(5):
                await looked.wait()
            assert fixture.closed
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def test_only_engines_that_have_answered_are_watched_and_those_that_go_are_let_go() -> None:
    async def test(fixture: Fixture) -> None:
        fixture.engine_is(started=False)
        fixture.wires.tick()
        assert not fixture.wires.held
        fixture.engine_is(started=True)
        fixture.wires.tick()
        await until(lambda: fixture.listener.open)
        fixture.engine_is(podUid="", started=False)
        fixture.wires.tick()
        assert not fixture.wires.held
        await fixture.listener.die()
        assert not fixture.closed

    with_fixture(test)
