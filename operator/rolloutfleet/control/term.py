"""One term as the leader: all that acts, and all that it remembers.

A new term begins with nothing of an earlier one but what watches have told: meanwhile another replica may have led,
and engines and routers may have been changed by it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from datetime import datetime

from rolloutfleet.control.engine_work import EngineWork
from rolloutfleet.control.executor import Executor
from rolloutfleet.control.health import HealthChecker
from rolloutfleet.control.metrics import Metrics
from rolloutfleet.control.object_writer import ObjectWriter
from rolloutfleet.control.probes import Prober
from rolloutfleet.control.reconcile import Reconciler
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.control.tables import Tables
from rolloutfleet.control.trainer_lease import TrainerLease
from rolloutfleet.control.tripwire import Tripwire
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.engine.sglang import EncoderClient, EncoderTable, EngineClient
from rolloutfleet.engine.worker import WorkerClient, worker_url
from rolloutfleet.kube import client as kube
from rolloutfleet.kube.queue import WorkQueue
from rolloutfleet.plan.objects import Defaults

logger = logging.getLogger(__name__)

WORKERS = 8
BURST_SECONDS = 0.03
STEP_SECONDS = 0.25
"""For what only status tells of: until then some other news of the fleet has mostly let plan."""
LIST_AGAIN_SECONDS = 0.5


class Term:
    def __init__(
        self,
        *,
        api: kube.KubeApi,
        http: Http,
        store: FleetStore,
        defaults: Defaults,
        clock: Callable[[], datetime],
        metrics: Metrics,
        require: Callable[[], None],
        progress_seconds: float,
    ) -> None:
        """`require` raises Stop when it is not certain that this replica leads."""
        self._store = store
        self._metrics = metrics
        self.queue: WorkQueue[FleetKey] = WorkQueue()

        def engine(url: str) -> EngineClient:
            return EngineClient(url, http=http)

        def router(url: str) -> RouterClient:
            return RouterClient(url, http=http)

        def encoder_table(url: str) -> EncoderTable:
            return EncoderTable(url, http=http)

        store.forget_what_was_done()
        self.prober = Prober(
            store=store,
            enqueue=self.queue.add,
            enqueue_soon=self.soon,
            engine=engine,
            router=router,
            encoder=lambda url: EncoderClient(url, http=http),
            encoder_table=encoder_table,
            monotonic=time.monotonic,
        )
        self._health = HealthChecker(
            store=store,
            enqueue=self.queue.add,
            engine=engine,
            encoder=lambda url: EncoderClient(url, http=http),
            monotonic=time.monotonic,
            chance=random.random,
        )
        self._tripwire = Tripwire(store=store, enqueue=self.queue.add, look_soon=self.prober.look_soon)
        self._engines = EngineWork(
            api=api,
            store=store,
            prober=self.prober,
            engine=engine,
            worker=lambda url: WorkerClient(worker_url(url), http=http),
            enqueue=self.queue.add,
            enqueue_soon=self.soon,
        )
        self._tables = Tables(
            api=api,
            store=store,
            prober=self.prober,
            router=router,
            encoder_table=encoder_table,
            enqueue=self.queue.add,
            enqueue_after=self.queue.add_after,
        )
        self.executor = Executor(
            objects=ObjectWriter(
                api=api,
                store=store,
                enqueue=self.queue.add,
                enqueue_after=self.queue.add_after,
                clock=clock,
                metrics=metrics,
            ),
            tables=self._tables,
            engines=self._engines,
            require=require,
        )
        self.reconcile = Reconciler(
            store=store,
            executor=self.executor,
            queue=self.queue,
            defaults=defaults,
            clock=clock,
            looked_at=self.prober.knows,
            lease=TrainerLease(api=api, store=store),
            progress_seconds=progress_seconds,
        )

    def soon(self, key: FleetKey) -> None:
        """For what comes in bursts: the pods of a fleet start together, and their engines answer together."""
        self.queue.add_soon(key, BURST_SECONDS)

    def step(self, key: FleetKey) -> None:
        """For pods that do what they should: they are given a node, they run, and what is next begins with a look."""
        self.queue.add_soon(key, STEP_SECONDS)

    async def run(self, *, resync: Callable[[], Awaitable[None]], beside: Callable[[], Awaitable[None]]) -> None:
        """For ever; cancelled when the term ends. `beside`: what else only a leader does."""
        try:
            await _listed(resync)
            self.prober.expect_all()
            for key in self._store.fleet_keys():
                self.queue.add(key)
            reconcile = self._metrics.timed(self.reconcile)
            async with asyncio.TaskGroup() as group:
                group.create_task(self.prober.run(), name="prober")
                group.create_task(self._health.run(), name="health")
                group.create_task(self._tripwire.run(), name="tripwire")
                group.create_task(self.queue.run(workers=WORKERS, reconcile=reconcile), name="queue")
                group.create_task(awaited(beside), name="beside")
        finally:
            await self._tables.close()
            await self._engines.close()


async def _listed(resync: Callable[[], Awaitable[None]]) -> None:
    """All that the last leader wrote is in these lists, which no watch promises: watches of two kinds run apart, and a
    status that names a pod may be told before the pod. Read as if the pod were gone, that would cost its engine."""
    while True:
        try:
            await resync()
            return
        except kube.ApiError as error:
            logger.warning("full list failed: %s", error)
            await asyncio.sleep(LIST_AGAIN_SECONDS)


async def awaited(work: Callable[[], Awaitable[None]]) -> None:
    """As a coroutine, which a task wants."""
    await work()
