"""The agent's HTTP API with observations that a test feeds, from a thread of its own: the test waits for pages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from aiohttp import web

from rolloutfleet.agent.observing.observations import Observations
from rolloutfleet.agent.server import Role, application
from rolloutfleet.api.samples import Sample


@dataclass
class ObservedRole:
    """What the page needs of a role."""

    observations: Observations = field(default_factory=Observations)
    server_name: str = "qwen"


class Agent:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._role = ObservedRole()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1/servers/actor/samples.html"

    def tell(self, happens: Callable[..., None], *arguments: Any) -> None:
        """`happens(observations, *arguments)`, as the collection loop tells: in the loop's thread."""

        async def tell() -> None:
            happens(self._role.observations, *arguments)

        self._do(tell())

    def ended(self, *samples: Sample) -> None:
        for sample in samples:
            self.tell(Observations.sample_ended, sample)

    def start(self) -> None:
        """Anew, on the port that it had, with nothing observed."""
        self._do(self._start())

    def stop(self) -> None:
        self._do(self._stop())

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self) -> None:
        self._role = ObservedRole()
        self._runner = web.AppRunner(
            application({"actor": cast(Role, self._role)}), access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        self._runner = None


@contextmanager
def serving() -> Iterator[Agent]:
    agent = Agent()
    thread = threading.Thread(target=agent._loop.run_forever)
    thread.start()
    try:
        agent.start()
        yield agent
    finally:
        agent.stop()
        agent._loop.call_soon_threadsafe(agent._loop.stop)
        thread.join(10)
        agent._loop.close()
