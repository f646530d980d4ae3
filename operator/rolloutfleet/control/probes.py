"""Looks at engines and router tables at short intervals and tells the store; enqueues a fleet when a look differs.

Only flags are read (/ping, /ready, /model_info): nothing here generates a token or asks the scheduler, so a paused,
busy or offloaded engine answers as fast as an idle one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rolloutfleet.api.common import EngineFacts
from rolloutfleet.api.names import COMPONENT_ENGINE, COMPONENT_ROUTER, ENGINE_PORT, ROUTER_PORT
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.engine import router
from rolloutfleet.engine.errors import EngineError
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.plan.observed import EngineProbe, Worker, WorkerKind, pod_url

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
STARTING_SECONDS = 1.0
SETTLED_SECONDS = 3.0
CONCURRENCY = 64


class Prober:
    def __init__(
        self,
        *,
        store: FleetStore,
        enqueue: Callable[[FleetKey], None],
        engine: Callable[[str], EngineClient],
        router: Callable[[str], router.RouterClient],
        monotonic: Callable[[], float],
    ) -> None:
        self._store = store
        self._enqueue = enqueue
        self._engine = engine
        self._router = router
        self._monotonic = monotonic
        self._due: dict[str, float] = {}
        self._running: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(CONCURRENCY)

    def look_soon(self, pod_uid: str) -> None:
        """Look at this pod at the next tick: something was just asked of it."""
        self._due[pod_uid] = 0.0

    async def run(self) -> None:
        """For ever; cancelled with the process."""
        while True:
            now = self._monotonic()
            alive: set[str] = set()
            for component, look in ((COMPONENT_ENGINE, self._look_at_engine), (COMPONENT_ROUTER, self._look_at_router)):
                for key, pod in self._store.pods(component):
                    uid = pod["metadata"]["uid"]
                    alive.add(uid)
                    if uid in self._running or self._due.get(uid, 0.0) > now or not _running(pod):
                        continue
                    self._running.add(uid)
                    task = asyncio.create_task(self._guarded(look, key, pod), name=f"probe {uid}")
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            for uid in set(self._due) - alive:
                del self._due[uid]
            await asyncio.sleep(TICK_SECONDS)

    async def _guarded(
        self, look: Callable[[FleetKey, dict[str, Any]], Any], key: FleetKey, pod: dict[str, Any]
    ) -> None:
        uid = pod["metadata"]["uid"]
        self._due.pop(uid, None)
        try:
            async with self._slots:
                settled = await look(key, pod)
        except Exception:
            logger.exception("probe of pod %s failed", pod["metadata"]["name"])
            settled = True
        finally:
            self._running.discard(uid)
        interval = SETTLED_SECONDS if settled else STARTING_SECONDS
        # look_soon may have been called while we looked: keep the earlier moment.
        self._due.setdefault(uid, self._monotonic() + interval)

    async def _look_at_engine(self, key: FleetKey, pod: dict[str, Any]) -> bool:
        uid = pod["metadata"]["uid"]
        before = self._store.probes.get(uid)
        engine = self._engine(pod_url(pod["status"]["podIP"], ENGINE_PORT))
        answering = await _flag(engine.ping())
        if answering:
            paused = not await _flag(engine.ready())
            try:
                label = (await engine.model_info()).weight_version
            except EngineError:
                answering, label = False, ""
        if not answering:
            # Whoever answers next at this address may be another process: only what is read from now on counts.
            after = replace(before, answering=False, facts=None) if before else EngineProbe(answering=False)
        else:
            known = before or EngineProbe(answering=True)
            if label != known.label:
                known = replace(
                    known, checksum="", read_under="", loaded_under=""
                )  # somebody loaded weights: old proof is void
            latest = self._store.probes.get(uid)
            if latest is not before and latest is not None:
                known = latest if latest.label == label else known  # a checksum was read while we looked
            facts = known.facts or await _facts(engine)
            load = await _load(engine)
            after = replace(known, answering=True, paused=paused, label=label, facts=facts, load=load)
        self._store.probes[uid] = after
        if after != before:
            self._enqueue(key)
        return after.answering

    async def _look_at_router(self, key: FleetKey, pod: dict[str, Any]) -> bool:
        uid = pod["metadata"]["uid"]
        before = self._store.tables.get(uid)
        registering = self._store.registering.get(uid, {})
        try:
            workers = await self._router(pod_url(pod["status"]["podIP"], ROUTER_PORT)).list_workers()
        except EngineError:
            after = None
        else:
            after = {worker.url: _listed(worker) for worker in workers}
            for url in after:
                registering.pop(url, None)
        self._store.tables[uid] = after
        if after != before:
            self._enqueue(key)
        return not registering and after is not None and all(worker.healthy for worker in after.values())


def _listed(worker: router.Worker) -> Worker:
    kind = WorkerKind(type=worker.worker_type, bootstrap_port=worker.bootstrap_port)
    return Worker(healthy=worker.is_healthy, kind=kind)


async def _facts(engine: EngineClient) -> EngineFacts | None:
    try:
        return await engine.server_info()
    except EngineError as error:
        logger.warning("%s", error)
        return None


async def _load(engine: EngineClient) -> int:
    try:
        load = await engine.load()
    except EngineError:
        return 0
    return load.running + load.waiting


async def _flag(call: Any) -> bool:
    try:
        return bool(await call)
    except EngineError:
        return False


def _running(pod: dict[str, Any]) -> bool:
    status = pod.get("status") or {}
    return bool(status.get("podIP")) and status.get("phase") == "Running"
