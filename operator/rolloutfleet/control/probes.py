"""Looks at engines and router tables at short intervals and tells the store; enqueues a fleet when a look differs.

Only flags are read (/ping, /ready, /model_info): nothing here generates a token or asks the scheduler, so a paused,
busy or offloaded engine answers as fast as an idle one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rolloutfleet.api.common import EngineFacts
from rolloutfleet.control.store import FleetKey, FleetStore, Target
from rolloutfleet.engine import router
from rolloutfleet.engine.errors import EngineError
from rolloutfleet.engine.sglang import EncoderClient, EncoderTable, EngineClient, ModelInfo
from rolloutfleet.plan.observed import EngineProbe, Worker, WorkerKind, encoder_table_url, is_external

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.25
REST_SECONDS = 0.05
"""Between two looks around, however often somebody asks for one: it takes milliseconds with a thousand engines."""
STARTING_SECONDS = 1.0
SETTLED_SECONDS = 3.0
CONCURRENCY = 64
FOLLOWED_AT_ONCE = 8
"""Registrations whose fate is asked for in one look at a router; they are followed one after the other."""

ENCODER_FACTS = EngineFacts(role="Encoder", tensor_parallel=1, pipeline_parallel=1, memory_saver=False)
"""An encoder has no /server_info."""


class Prober:
    def __init__(
        self,
        *,
        store: FleetStore,
        enqueue: Callable[[FleetKey], None],
        engine: Callable[[str], EngineClient],
        router: Callable[[str], router.RouterClient],
        encoder: Callable[[str], EncoderClient],
        encoder_table: Callable[[str], EncoderTable],
        monotonic: Callable[[], float],
    ) -> None:
        self._store = store
        self._enqueue = enqueue
        self._engine = engine
        self._router = router
        self._encoder = encoder
        self._encoder_table = encoder_table
        self._monotonic = monotonic
        self._due: dict[str, float] = {}
        self._running: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._wake = asyncio.Event()
        self._expected: dict[FleetKey, set[str]] = {}
        """Whom of a fleet to have looked at before anything is decided about it."""

    def expect_all(self) -> None:
        """Until each of those that are there now was looked at, its fleet is not known: as long as the time-outs of a
        look allow."""
        for target in self._store.targets():
            for key in target.fleets if not target.deleting else ():
                self._expected.setdefault(key, set()).add(target.uid)

    def knows(self, key: FleetKey) -> bool:
        return key not in self._expected

    def _strike_off(self, key: FleetKey, uids: set[str]) -> None:
        """The last one that was expected makes the fleet known."""
        if key in self._expected:
            self._expected[key] -= uids
            if not self._expected[key]:
                del self._expected[key]
                self._enqueue(key)

    def look_soon(self, pod_uid: str) -> None:
        """Look at this pod at once: something was just asked of it."""
        self._due[pod_uid] = 0.0
        self._wake.set()

    async def run(self) -> None:
        """For ever; cancelled when the term ends."""
        try:
            await self._look_for_ever()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look_for_ever(self) -> None:
        while True:
            now = self._monotonic()
            targets = self._store.targets()
            for target in targets:
                if target.uid in self._running or self._due.get(target.uid, 0.0) > now:
                    continue
                self._running.add(target.uid)
                task = asyncio.create_task(self._guarded(target), name=f"probe {target.uid}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            current = {target.uid for target in targets}
            for key, uids in list(self._expected.items()):
                self._strike_off(key, uids - current)
            for uid in set(self._due) - current:
                del self._due[uid]
            for uid in [uid for uid in self._store.probes if is_external(uid) and uid not in current]:
                del self._store.probes[uid]
            await asyncio.sleep(REST_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_SECONDS - REST_SECONDS)
            self._wake.clear()

    async def _guarded(self, target: Target) -> None:
        look = self._look_at_engine
        if target.router:
            look = self._look_at_router
        elif target.encoder:
            look = self._look_at_encoder
        self._due.pop(target.uid, None)
        try:
            async with self._slots:
                settled = await look(target)
        except Exception:
            logger.exception("probe of %s failed", target.url)
            settled = True
        finally:
            self._running.discard(target.uid)
        for key in target.fleets:
            self._strike_off(key, {target.uid})
        interval = SETTLED_SECONDS if settled else STARTING_SECONDS
        # look_soon may have been called while we looked: keep the earlier moment.
        self._due.setdefault(target.uid, self._monotonic() + interval)

    async def _look_at_engine(self, target: Target) -> bool:
        uid = target.uid
        before = self._store.probes.get(uid)
        engine = self._engine(target.url)
        info: ModelInfo | None = None
        paused = False
        if await _flag(engine.ping()):
            paused = not await _flag(engine.ready())
            info = await _model_info(engine)
        if info is None:
            after = _missed(before, target)
        else:
            known = before or EngineProbe(answering=True)
            if info.weight_version != known.label:
                known = replace(
                    known, checksum="", read_under="", loaded_under=""
                )  # somebody loaded weights: old proof is void
            facts = known.facts or await _facts(engine)
            load = await _load(engine)
            encoders = await self._encoders(target)
            latest = self._store.probes.get(uid)
            if latest is not before and latest is not None:
                # A checksum was read, or a pair tried, while we looked.
                known = latest if latest.label == info.weight_version else known
            after = replace(
                known,
                answering=True,
                closed=False,
                misses=0,
                paused=paused,
                label=info.weight_version,
                model_path=info.model_path,
                facts=facts,
                load=load,
                encoders=encoders,
            )
        self._remember(target, before, after)
        return after.answering

    async def _look_at_encoder(self, target: Target) -> bool:
        before = self._store.probes.get(target.uid)
        if await _flag(self._encoder(target.url).healthy()):
            after = EngineProbe(answering=True, facts=ENCODER_FACTS)
        else:
            after = _missed(before, target)
        self._remember(target, before, after)
        return after.answering

    async def _encoders(self, target: Target) -> frozenset[str] | None:
        if not target.language_only:
            return None
        try:
            return await self._encoder_table(encoder_table_url(target.url)).urls()
        except EngineError:
            return None

    def _remember(self, target: Target, before: EngineProbe | None, after: EngineProbe) -> None:
        latest = self._store.probes.get(target.uid)
        if latest is not None and latest is not before and latest.closed:
            after = replace(after, closed=True)  # its end was heard while we looked
        self._store.probes[target.uid] = after
        if after != before:
            for key in target.fleets:
                self._enqueue(key)

    async def _look_at_router(self, target: Target) -> bool:
        uid = target.uid
        before = self._store.tables.get(uid)
        client = self._router(target.url)
        try:
            after = {worker.url: _listed(worker) for worker in await client.list_workers()}
        except EngineError:
            after = None
        # First: what is neither listed nor being registered would be registered again.
        self._store.tables[uid] = after
        given_up = after is not None and await self._follow_registrations(uid, client, frozenset(after))
        if after != before or given_up:
            for key in target.fleets:
                self._enqueue(key)
        return uid not in self._store.registering and after is not None and all(w.healthy for w in after.values())

    async def _follow_registrations(self, uid: str, client: router.RouterClient, listed: frozenset[str]) -> bool:
        """Forget those that are listed; whether one has come to nothing, so that it must be asked for again."""
        given_up = False
        waiting = self._store.registering.get(uid, {})
        for url in listed & waiting.keys():
            del waiting[url]
        with contextlib.suppress(EngineError):  # the next look follows them
            for url, registration in list(waiting.items())[:FOLLOWED_AT_ONCE]:
                failure = await client.registration_failure(registration.worker_id)
                failed = registration.failed(self._store.now())
                if failure and failed != registration and waiting.get(url) is registration:
                    logger.warning("%s did not register %s: %s", client.url, url, failure)
                    waiting[url] = failed
        for url, registration in list(waiting.items()):
            if registration.until <= self._store.now():
                del waiting[url]
                given_up = True
        if not waiting:
            self._store.registering.pop(uid, None)
        return given_up


def _missed(before: EngineProbe | None, target: Target) -> EngineProbe:
    """Whoever answers next at this address may be another process: only what is read from then on counts.

    Where a missed look takes an engine out of tables at once, it is given one more: of an external engine no pod tells
    that it has ended, and an encoder answers by encoding, which waits for others.
    """
    if before is None:
        return EngineProbe(answering=False)
    if (target.external or target.encoder) and before.answering and before.misses == 0:
        return replace(before, misses=1)
    return replace(before, answering=False, misses=0, facts=None, checksum="", read_under="", loaded_under="")


async def _model_info(engine: EngineClient) -> ModelInfo | None:
    try:
        return await engine.model_info()
    except EngineError:
        return None


def _listed(worker: router.Worker) -> Worker:
    kind = WorkerKind(type=worker.worker_type, bootstrap_port=worker.bootstrap_port)
    return Worker(healthy=worker.is_healthy, kind=kind, id=worker.id)


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
