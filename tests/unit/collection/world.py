"""The agent's collection between a trainer's calls, a store in a file, and a stand-in for router and engines."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from rolloutfleet.agent.collection.collections import Collections
from rolloutfleet.agent.collection.collector import heard
from rolloutfleet.agent.collection.run import CollectionRun
from rolloutfleet.agent.sampling import Sampler
from rolloutfleet.agent.server import Role, application
from rolloutfleet.api.collection import Acknowledge, Collection, LeaseBatch
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.trainer.collecting import StepBatch, _read
from unit.agent.world import LIMIT, World, answer, fleet_on_loopback, signed
from unit.engine.stand_in import Answer, Asked, StandIn

MARKER_SECONDS = 0.5
RID_LENGTH = 32
BEGAN = "2026-11-28T00:00:00Z"


class Engines:
    """Answers /generate as the router does for engines that sample `response(prompt, n)`; holds requests back while
    told to, and ends those that are aborted with the tokens that they have."""

    def __init__(self) -> None:
        self.version = 0
        self.held = False
        self.tokens_when_held = 1
        self.requests: list[dict[str, Any]] = []
        self.open: dict[str, asyncio.Event] = {}
        self.markers: dict[str, asyncio.Event] = {}
        """Requests whose id is a prefix of others."""
        self.most_open = 0
        self.answers: Callable[[dict[str, Any]], Awaitable[Answer]] | None = None
        self.router = StandIn(self.answer)

    async def answer(self, asked: Asked) -> Answer:
        body = asked.body
        self.requests.append(body)
        if self.answers is not None:
            return await self.answers(body)
        abort = self.open[body["rid"]] = asyncio.Event()
        self.most_open = max(self.most_open, len(self.open))
        try:
            if self.held:
                await abort.wait()
                return 200, self.said(body, self.tokens_when_held, "abort")
            return 200, self.said(body, body["sampling_params"]["max_new_tokens"], "length")
        finally:
            del self.open[body["rid"]]

    def said(self, body: dict[str, Any], count: int, kind: str) -> dict[str, Any]:
        """Deterministic: a token is one more than the one before it."""
        first = body["input_ids"][-1]
        tokens = [first + 1 + n for n in range(min(count, body["sampling_params"]["max_new_tokens"]))]
        return answer(tokens, version=signed(self.version), kind=kind)

    async def marked(self, body: dict[str, Any]) -> Answer:
        """A request that is there to be aborted, and ends soon if nobody does."""
        abort = self.markers[body["rid"]] = asyncio.Event()
        await heard(abort, MARKER_SECONDS)
        del self.markers[body["rid"]]
        return 200, answer([7], kind="abort" if abort.is_set() else "length")

    def abort(self, rid: str) -> None:
        """As SGLang: nothing for an id that is not known, else all that begin with it."""
        if rid not in self.open.keys() | self.markers.keys():
            return
        for known, event in [*self.open.items(), *self.markers.items()]:
            if known.startswith(rid):
                event.set()


class CollectionWorld:
    def __init__(self, world: World, engines: Engines, folder: Path) -> None:
        self.fleet_world = world
        self.engines = engines
        self.folder = folder
        self.trainer = "life-1"
        self.agents: list[Collections] = []
        self.new_agent()

    def new_agent(self) -> None:
        """One that knows nothing. The old one goes on, as one that was frozen and thawed."""
        world = self.fleet_world
        self.sampler = Sampler(
            fleet=world.fleet, router=lambda url: RouterClient(url, http=world.http), engine=world.client
        )
        self.collections = world.collections(self.sampler)
        self.agents.append(self.collections)

    def commit(self, version: int) -> None:
        self.fleet_world.change_training(weights={"phase": "Committed", "version": version})
        self.engines.version = version

    def data(self, rows: int, **fields: Any) -> Path:
        path = self.folder / f"data-{rows}.jsonl"
        lines = [json.dumps({"prompt": [100 * (row + 1)], "label": row, **fields}) for row in range(rows)]
        path.write_text("\n".join(lines) + "\n")
        return path

    def asked(self, rows: int = 8, **fields: Any) -> Collection:
        return Collection.model_validate(
            {
                "run": "run",
                "store": str(self.folder / "ledger.sqlite"),
                "trainer": self.trainer,
                "data": {"path": str(self.data(rows)), "shuffle": False},
                "epochs": 1,
                "n": 2,
                "groups_per_step": 2,
                "sampling_params": {"max_new_tokens": 3},
                "estimator": "raw",
                **fields,
            }
        )

    async def serve(self, stack: AsyncExitStack) -> str:
        """The agent's API on loopback; where it is. From now on plug-ins can come back through it."""
        world = self.fleet_world
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        self.collections = world.collections(self.sampler, f"{url}/v1/servers/actor")
        self.agents.append(self.collections)
        role = Role(
            fleet=world.fleet,
            leadership=world.leadership,
            updater=world.updater,
            sessions=world.sessions,
            memory=world.memory,
            sampler=self.sampler,
            collections=self.collections,
            observations=world.observations,
        )
        runner = web.AppRunner(application({"actor": role}), access_log=None, handler_cancellation=True)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return url

    async def begin(self, asked: Collection) -> CollectionRun:
        await self.collections.begin(asked)
        return self.collections.current

    async def batch(self, step: int, **fields: Any) -> StepBatch:
        request = LeaseBatch(trainer=self.trainer, step=step, **{"wait_seconds": 5.0, **fields})
        return _read(await self.collections.current.batch(request))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Bounded by the world's own time."""
        while not holds():
            await heard(self.collections.current._collector.news, 0.02)

    async def end_with_open_requests(self, count: int) -> None:
        """Collection ends while engines hold so many requests of the first batch; then they answer again."""
        waiting = asyncio.create_task(self.batch(1))
        await self.until(lambda: len(self.engines.open) == count)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await self.collections.end()
        self.engines.held = False

    async def until_nothing_runs(self) -> None:
        """A loop that has failed stops what it has begun: who is refused meanwhile does not wait for it."""
        await self.until(lambda: not self.collections.current._collector.open)

    async def until_finished(self, groups: int) -> None:
        await self.until(lambda: self.collections.current._collector.finished == groups)

    async def acknowledge(self, step: int) -> None:
        await self.collections.current.acknowledge(Acknowledge(trainer=self.trainer, step=step))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def collecting(tmp_path: Path, seconds: float = LIMIT) -> AsyncIterator[CollectionWorld]:
    engines = Engines()
    async with fleet_on_loopback(tmp_path, 1, seconds=seconds) as world, engines.router:
        body = world.cluster.seen("rolloutservers", "qwen")
        ready = {"type": "Ready", "status": "True", "reason": "Serving", "message": "", "lastTransitionTime": BEGAN}
        body["status"] |= {"router": {"url": engines.router.url}, "conditions": [ready]}
        world.cluster.put("rolloutservers", body)
        await world.fleet.refresh()
        obey = world.engines[0].stand_in._answering

        async def engine(asked: Asked) -> Answer:
            if asked.path == "/abort_request":
                engines.abort(asked.body["rid"])
                return 200, {}
            if asked.path.startswith("/v1/loads"):
                return 200, {"loads": [{"num_running_reqs": len(engines.open), "num_waiting_reqs": 0}]}
            if asked.path == "/generate" and len(asked.body["rid"]) < RID_LENGTH:
                return await engines.marked(asked.body)
            if asked.path == "/generate":
                return await engines.answer(asked)
            return await obey(asked)

        world.engines[0].stand_in._answering = engine
        made = CollectionWorld(world, engines, tmp_path)
        try:
            yield made
        finally:
            for agent in made.agents:
                await agent.end()


Story = Callable[[CollectionWorld], Awaitable[None]]


def collect(tmp_path: Path, story: Story, *, seconds: float = LIMIT) -> None:
    async def scenario() -> None:
        async with collecting(tmp_path, seconds) as world:
            await story(world)

    asyncio.run(scenario())
