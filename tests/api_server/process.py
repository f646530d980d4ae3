"""One process of the operator: born with an empty memory, ended without a chance to clean up, started anew."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from api_server.hub import Hub
from api_server.wire import Network, Wires
from rolloutfleet.control.operator import WATCHED, Operator
from rolloutfleet.plan.objects import Defaults

DEFAULTS = Defaults(router_image="router:1", placeholder_image="pause:1", agent_image="agent:1")

KILL_SECONDS = 0.2
KILLS = 50

Tasks = set[asyncio.Task[Any]]
_TASKS: contextvars.ContextVar[Tasks | None] = contextvars.ContextVar("tasks of a process", default=None)


def count_tasks_of_processes(loop: asyncio.AbstractEventLoop) -> None:
    """Remember with each task of this loop of which process it is; call it before the first one starts."""

    def create(
        loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any] | Generator[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **options)
        context = options.get("context")
        mine = context.get(_TASKS) if context is not None else _TASKS.get()
        if mine is not None:
            mine.add(task)
            task.add_done_callback(mine.discard)
        return task

    loop.set_task_factory(create)


class Process:
    def __init__(self, *, network: Network, hub: Hub, namespace: str, wires: Wires, resync: float) -> None:
        self._hub = hub
        self._namespace = namespace
        self.wires = wires
        self.operator = Operator(
            api=network.api(wires),
            defaults=DEFAULTS,
            namespace=namespace,
            send=network.to_engines(wires),
            resync_seconds=resync,
            progress_seconds=0.0,  # each status is a call to die at
        )
        self.feed: Callable[[str, str | None, dict[str, Any]], None] = self.operator.saw
        self._tasks: Tasks = set()
        self._main: asyncio.Task[None] | None = None

    @property
    def looked(self) -> bool:
        """It knows what it can know."""
        store, term = self.operator.store, self.operator.term
        return term is not None and bool(store.fleet_keys()) and all(map(term.prober.knows, store.fleet_keys()))

    def start(self) -> None:
        context = contextvars.copy_context()
        context.run(_TASKS.set, self._tasks)
        self._main = asyncio.create_task(self._run(), context=context)

    async def _run(self) -> None:
        with self._hub.subscribed(self._namespace, lambda *event: self.feed(*event)):
            await self.operator.start()
            # kopf lists what it watches after that.
            for resource in (watched.resource for watched in WATCHED):
                for body in self._hub.objects(resource.kind, self._namespace if resource.namespaced else ""):
                    self.feed(resource.kind, None, body)
            while True:
                self.operator.healthy()
                await asyncio.sleep(0.5)

    async def ended(self) -> None:
        """Until it dies by its wires or by itself."""
        assert self._main is not None
        death = asyncio.ensure_future(self.wires.dead.wait())
        await asyncio.wait([death, self._main], return_when=asyncio.FIRST_COMPLETED)
        death.cancel()

    async def kill(self) -> None:
        """Nothing of it runs any more, and nothing more of it leaves this machine."""
        self.wires.dead.set()
        for _ in range(KILLS):
            if not self._tasks:
                return
            for task in list(self._tasks):
                task.cancel()  # again and again: what cleans up waits for calls that are never answered
            await asyncio.wait(list(self._tasks), timeout=KILL_SECONDS)
        raise AssertionError(f"cannot be ended: {[task.get_stack() for task in self._tasks]}")
