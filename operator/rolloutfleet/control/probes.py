"""Looks at engines and router tables at short intervals and tells the store; enqueues a fleet when a look differs.

Only flags are read (/ready, /ping, /model_info): nothing here generates a token or asks the scheduler, so a paused,
busy or offloaded engine answers as fast as an idle one. Between two looks the kubelet's readiness probe watches for us:
when its word changes, we look at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from rolloutfleet.api.common import EngineFacts
from rolloutfleet.control.store import FleetStore
from rolloutfleet.control.targets import FleetKey, Target
from rolloutfleet.engine import router
from rolloutfleet.engine.errors import EngineError
from rolloutfleet.engine.sglang import EncoderClient, EncoderTable, EngineClient, ModelInfo
from rolloutfleet.plan.observed import EngineProbe, Worker, WorkerKind, encoder_table_url

logger = logging.getLogger(__name__)

STARTING_SECONDS = 1.0
SETTLED_SECONDS = 3.0
LOAD_SECONDS = 15.0
"""How old the figures of requests may be: they decide only which engine is scaled away first."""
LOOKS_PER_SECOND = 50
"""Where there are more targets than can be looked at in these intervals, the intervals grow: a process that is busy
with looking is late for what has happened."""
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
        enqueue_soon: Callable[[FleetKey], None],
        engine: Callable[[str], EngineClient],
        router: Callable[[str], router.RouterClient],
        encoder: Callable[[str], EncoderClient],
        encoder_table: Callable[[str], EncoderTable],
        monotonic: Callable[[], float],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`enqueue_soon`: for news of which more may follow in the next moment."""
        self._store = store
        self._enqueue = enqueue
        self._enqueue_soon = enqueue_soon
        self._engine = engine
        self._router = router
        self._encoder = encoder
        self._encoder_table = encoder_table
        self._monotonic = monotonic
        self._jitter = jitter
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._running: set[str] = set()
        self._again: set[str] = set()
        """Targets to look at once more as soon as the look in progress has ended."""
        self._load_read: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._expected: dict[FleetKey, set[str]] = {}
        """Whom of a fleet to have looked at before anything is decided about it."""

    def expect_all(self) -> None:
        """Until each of those that are there now was looked at, its fleet is not known: as long as the time-outs of a
        look allow."""
        for target in self._store.targets:
            for key in target.fleets if not target.deleting else ():
                self._expected.setdefault(key, set()).add(target.uid)

    def knows(self, key: FleetKey) -> bool:
        return key not in self._expected

    def _strike_off(self, uid: str) -> None:
        """It was looked at, or is gone; the last one that was expected makes its fleet known."""
        for key in [key for key, uids in self._expected.items() if uid in uids]:
            self._expected[key].discard(uid)
            if not self._expected[key]:
                del self._expected[key]
                self._enqueue(key)

    def look_soon(self, uid: str) -> None:
        """Look at this target now: something was just asked of it, or it is new."""
        if uid in self._running:
            self._again.add(uid)
        else:
            self._schedule(uid, 0.0)

    async def run(self) -> None:
        """For ever; cancelled when the term ends."""
        self._store.targets.changed = self._changed
        for uid in {target.uid for target in self._store.targets}.union(*self._expected.values()):
            self._schedule(uid, 0.0)
        try:
            await asyncio.Event().wait()
        finally:
            for timer in self._timers.values():
                timer.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _changed(self, uid: str) -> None:
        if uid in self._store.targets:
            self.look_soon(uid)
            return
        timer = self._timers.pop(uid, None)
        if timer is not None:
            timer.cancel()
        self._load_read.pop(uid, None)
        self._strike_off(uid)

    def _schedule(self, uid: str, seconds: float) -> None:
        known = self._timers.pop(uid, None)
        if known is not None:
            known.cancel()
        self._timers[uid] = asyncio.get_running_loop().call_later(seconds, self._start, uid)

    def _start(self, uid: str) -> None:
        self._timers.pop(uid, None)
        target = self._store.targets.get(uid)
        if target is None:  # it went before this term looked for the first time
            self._changed(uid)
            return
        self._running.add(uid)
        task = asyncio.create_task(self._guarded(target), name=f"probe {uid}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _guarded(self, target: Target) -> None:
        look = self._look_at_engine
        if target.router:
            look = self._look_at_router
        elif target.encoder:
            look = self._look_at_encoder
        try:
            async with self._slots:
                pause = await look(target)
        except Exception:
            logger.exception("probe of %s failed", target.url)
            pause = SETTLED_SECONDS
        finally:
            self._running.discard(target.uid)
        self._strike_off(target.uid)
        if target.uid not in self._store.targets:
            self._again.discard(target.uid)
            return
        if target.uid in self._again:
            self._again.discard(target.uid)
            pause = 0.0
        elif pause >= STARTING_SECONDS:
            # Engines that were made together must not be looked at together for ever.
            pause = max(pause, len(self._store.targets) / LOOKS_PER_SECOND) * (0.75 + self._jitter() / 2)
        self._schedule(target.uid, pause)

    async def _look_at_engine(self, target: Target) -> float:
        """Seconds until the next look."""
        uid = target.uid
        before = self._store.probes.get(uid)
        engine = self._engine(target.url)
        answering, paused = await _flags(engine)
        info = await _model_info(engine) if answering else None
        if info is None:
            after = self._remember(target, before, lambda latest: _missed(latest, target))
        else:
            seen = partial(
                _answered,
                label=info.weight_version,
                paused=paused,
                model_path=info.model_path,
                facts=(before.facts if before is not None else None) or await _facts(engine),
                load=await self._load(uid, engine, before.load if before is not None else 0),
                encoders=await self._encoders(target),
            )
            after = self._remember(target, before, seen)
        return SETTLED_SECONDS if after.answering else STARTING_SECONDS

    async def _look_at_encoder(self, target: Target) -> float:
        before = self._store.probes.get(target.uid)
        if await _flag(self._encoder(target.url).healthy()):
            after = self._remember(target, before, partial(_answered, label="", facts=ENCODER_FACTS))
        else:
            after = self._remember(target, before, lambda latest: _missed(latest, target))
        return SETTLED_SECONDS if after.answering else STARTING_SECONDS

    async def _load(self, uid: str, engine: EngineClient, known: int) -> int:
        now = self._monotonic()
        if now - self._load_read.setdefault(uid, now) < LOAD_SECONDS:  # one that just came up has none
            return known
        self._load_read[uid] = now
        try:
            load = await engine.load()
        except EngineError:
            return 0
        return load.running + load.waiting

    async def _encoders(self, target: Target) -> frozenset[str] | None:
        if not target.language_only:
            return None
        try:
            return await self._encoder_table(encoder_table_url(target.url)).urls()
        except EngineError:
            return None

    def _remember(
        self, target: Target, before: EngineProbe | None, seen: Callable[[EngineProbe | None], EngineProbe]
    ) -> EngineProbe:
        """`seen`: what the look makes of what is known by now: others have written meanwhile, and a look at an engine
        that hangs takes seconds."""
        latest = self._store.probes.get(target.uid)
        after = seen(latest)
        if target.uid not in self._store.targets:
            return after  # it went while we looked
        if latest is not None and latest is not before and latest.closed:
            after = replace(after, closed=True)  # its end was heard while we looked
        self._store.probes[target.uid] = after
        if after != before:
            for key in target.fleets:
                self._enqueue_soon(key)
        return after

    async def _look_at_router(self, target: Target) -> float:
        uid = target.uid
        before = self._store.tables.get(uid)
        client = self._router(target.url)
        try:
            after = {worker.url: _listed(worker) for worker in await client.list_workers()}
        except EngineError:
            after = None
        if uid not in self._store.targets:
            return STARTING_SECONDS  # it went while we looked
        # First: what is neither listed nor being registered would be registered again.
        self._store.tables[uid] = after
        given_up = after is not None and await self._follow_registrations(uid, client, frozenset(after))
        if after != before or given_up:
            filling = uid in self._store.table_changes or uid in self._store.registering
            for key in target.fleets:
                (self._enqueue_soon if filling else self._enqueue)(key)
        if uid in self._store.registering or after is None or not all(worker.healthy for worker in after.values()):
            return STARTING_SECONDS
        return SETTLED_SECONDS

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


def _answered(known: EngineProbe | None, *, label: str, **seen: Any) -> EngineProbe:
    known = known or EngineProbe(answering=True)
    if label != known.label:  # somebody loaded weights: old proof is void
        known = replace(known, checksum="", read_under="", loaded_under="")
    return replace(known, answering=True, closed=False, misses=0, label=label, **seen)


def _missed(known: EngineProbe | None, target: Target) -> EngineProbe:
    """Whoever answers next at this address may be another process: only what is read from then on counts.

    Where a missed look takes an engine out of tables at once, it is given one more: of an external engine no pod tells
    that it has ended, and an encoder answers by encoding, which waits for others.
    """
    if known is None:
        return EngineProbe(answering=False)
    if (target.external or target.encoder) and known.answering and known.misses == 0:
        return replace(known, misses=1)
    return replace(known, answering=False, misses=0, facts=None, checksum="", read_under="", loaded_under="")


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


async def _flags(engine: EngineClient) -> tuple[bool, bool]:
    """(it answers, generation is paused). Whoever is ready answers pings as well."""
    try:
        if await engine.ready():
            return True, False
    except EngineError:
        return False, False
    pinged = await _flag(engine.ping())
    return pinged, pinged


async def _flag(call: Any) -> bool:
    try:
        return bool(await call)
    except EngineError:
        return False
