"""The operator process: wires watches, lists, probes, queue and executor together, with kopf as the process shell.

kopf delivers watch events (but those of pods: watches.py), answers liveness and handles signals. It reconciles nothing
and writes nothing: its handlers only feed the store and enqueue the fleet's key.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import kopf

from rolloutfleet.api.names import COMPONENT_TRAINER, LABEL_COMPONENT, LABEL_MANAGED_BY, MANAGED_BY
from rolloutfleet.control.engine_work import EngineWork
from rolloutfleet.control.executor import Executor
from rolloutfleet.control.health import HealthChecker
from rolloutfleet.control.metrics import Metrics
from rolloutfleet.control.object_writer import ObjectWriter
from rolloutfleet.control.probes import Prober
from rolloutfleet.control.reconcile import Reconciler
from rolloutfleet.control.states import Sources, States
from rolloutfleet.control.store import FleetKey, FleetStore, component_of
from rolloutfleet.control.tables import Tables
from rolloutfleet.control.trainers import TrainerPods
from rolloutfleet.control.watches import Watch
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.engine.sglang import EncoderClient, EncoderTable, EngineClient
from rolloutfleet.kube import client as kube
from rolloutfleet.kube.queue import WorkQueue
from rolloutfleet.plan.objects import Defaults

logger = logging.getLogger(__name__)

WORKERS = 8
RESYNC_SECONDS = 60.0
BURST_SECONDS = 0.01
STALE_SECONDS = 5 * RESYNC_SECONDS
"""Liveness fails when no full list has succeeded, or a fleet has waited, for this long."""
OURS = f"{LABEL_MANAGED_BY}={MANAGED_BY}"


@dataclass(frozen=True)
class Watched:
    resource: kube.Resource
    selector: str | None


PODS = Watched(kube.POD, LABEL_COMPONENT)
WATCHED = (
    Watched(kube.ROLLOUT_SERVER, None),
    Watched(kube.SERVER_GROUP, OURS),
    Watched(kube.DEPLOYMENT, OURS),
    Watched(kube.SERVICE, OURS),
    Watched(kube.ROLE, OURS),
    Watched(kube.ROLE_BINDING, OURS),
    Watched(kube.LEASE, OURS),
    Watched(kube.DISRUPTION_BUDGET, OURS),
    Watched(kube.NODE, None),
)


def now() -> datetime:
    return datetime.now(UTC)


class Operator:
    """One running operator: `start` and `stop` are kopf's startup and cleanup."""

    def __init__(
        self,
        *,
        api: kube.KubeApi,
        defaults: Defaults,
        namespace: str | None,
        metrics: Metrics | None = None,
        services: tuple[Callable[[kube.KubeApi], Awaitable[None]], ...] = (),
    ) -> None:
        self._api = api
        self._namespace = namespace
        self._services = services
        self._metrics = metrics or Metrics()
        self._http = Http(max_connections=256, observe=self._metrics.asked)
        self.store = FleetStore(clock=now)
        self.queue: WorkQueue[FleetKey] = WorkQueue()
        States(self._metrics, Sources(store=self.store, queue=lambda: self.queue, leading=lambda: True, clock=now))
        prober = Prober(
            store=self.store,
            enqueue=self._soon,
            engine=self._engine,
            router=self._router,
            encoder=lambda url: EncoderClient(url, http=self._http),
            encoder_table=self._encoder_table,
            monotonic=time.monotonic,
        )
        self._health = HealthChecker(
            store=self.store,
            enqueue=self.queue.add,
            engine=self._engine,
            encoder=lambda url: EncoderClient(url, http=self._http),
            monotonic=time.monotonic,
            chance=random.random,
        )
        self._engines = EngineWork(api=api, store=self.store, prober=prober, engine=self._engine, enqueue=self._soon)
        self._executor = Executor(
            objects=ObjectWriter(
                api=api,
                store=self.store,
                enqueue=self.queue.add,
                enqueue_after=self.queue.add_after,
                clock=now,
                metrics=self._metrics,
            ),
            tables=Tables(
                api=api,
                store=self.store,
                prober=prober,
                router=self._router,
                encoder_table=self._encoder_table,
                enqueue_after=self.queue.add_after,
                clock=now,
            ),
            engines=self._engines,
        )
        self._reconciler = Reconciler(
            store=self.store, executor=self._executor, queue=self.queue, defaults=defaults, clock=now
        )
        self._prober = prober
        self._pods = Watch(
            api=api,
            resource=PODS.resource,
            namespace=namespace,
            selector=PODS.selector,
            listed=self._pods_listed,
            saw=lambda kind_of_event, body: self.saw(PODS.resource.kind, kind_of_event, body),
        )
        self._trainers = TrainerPods(api=api, store=self.store)
        self._tasks: list[asyncio.Task[None]] = []
        self._listed_at = time.monotonic()

    def _engine(self, url: str) -> EngineClient:
        return EngineClient(url, http=self._http)

    def _router(self, url: str) -> RouterClient:
        return RouterClient(url, http=self._http)

    def _encoder_table(self, url: str) -> EncoderTable:
        return EncoderTable(url, http=self._http)

    async def start(self) -> None:
        await self._resync()
        await self._pods.list()
        reconcile = self._metrics.timed(self._reconciler)
        self._tasks = [
            asyncio.create_task(self._pods.run(), name="watch of pods"),
            asyncio.create_task(self._prober.run(), name="prober"),
            asyncio.create_task(self._health.run(), name="health"),
            asyncio.create_task(self.queue.run(workers=WORKERS, reconcile=reconcile), name="queue"),
            asyncio.create_task(self._resync_for_ever(), name="resync"),
            asyncio.create_task(self._trainers.run(), name="trainers"),
            *(asyncio.create_task(_service(service, self._api), name="service") for service in self._services),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engines.close()
        await self._http.close()
        await self._api.close()

    def healthy(self) -> dict[str, float]:
        """Figures for the liveness answer; raises when a loop is dead or starved."""
        listed = time.monotonic() - self._listed_at
        waiting = self.queue.oldest_age()
        for task in self._tasks:
            if task.done():
                raise RuntimeError(f"task {task.get_name()} has ended")
        silent = self._pods.silent_seconds()
        if max(listed, waiting, silent) > STALE_SECONDS:
            raise RuntimeError(
                f"no full list for {listed:.0f} s, no word of pods for {silent:.0f} s, "
                f"oldest fleet waits {waiting:.0f} s"
            )
        return {
            "seconds_since_list": round(listed, 1),
            "seconds_since_pod_event": round(silent, 1),
            "oldest_wait_seconds": round(waiting, 1),
        }

    def saw(self, kind: str, kind_of_event: str | None, body: dict[str, Any]) -> None:
        """A watch event, or an object of kopf's first list (`kind_of_event` None)."""
        self._metrics.heard(kind)
        if kind == "Pod" and component_of(body) == COMPONENT_TRAINER:
            self._trainers.saw(body, deleted=kind_of_event == "DELETED")
            return
        if kind == "Node":
            for fleet in self.store.saw_node(body, deleted=kind_of_event == "DELETED"):
                self.queue.add(fleet)
            return
        key = self.store.remove(kind, body) if kind_of_event == "DELETED" else self.store.upsert(kind, body)
        if key is None:
            return
        if kind == "Pod" and kind_of_event != "DELETED" and not ends(body):
            self._soon(key)
        else:
            self.queue.add(key)

    def _soon(self, key: FleetKey) -> None:
        """For what comes in bursts: the pods of a fleet start together, and their engines answer together."""
        self.queue.add_after(key, BURST_SECONDS)

    def _replaced(self, kind: str, items: Iterable[kube.Object]) -> None:
        """A full list of a kind."""
        self._metrics.heard(kind)
        for key in self.store.replace_nodes(items) if kind == "Node" else self.store.replace(kind, items):
            self.queue.add(key)

    def _pods_listed(self, pods: list[kube.Object]) -> None:
        self._trainers.listed([pod for pod in pods if component_of(pod) == COMPONENT_TRAINER])
        self._replaced(PODS.resource.kind, [pod for pod in pods if component_of(pod) != COMPONENT_TRAINER])

    async def _resync(self) -> None:
        """Lists replace what is held: the only way to learn of a deletion that kopf's watch did not tell."""
        for watched in WATCHED:
            namespace = self._namespace if watched.resource.namespaced else None
            listed = await self._api.list(watched.resource, namespace=namespace, label_selector=watched.selector)
            self._replaced(watched.resource.kind, listed.items)
        self._listed_at = time.monotonic()
        await self._look_for_gangs()

    async def _look_for_gangs(self) -> None:
        """Which PodGroups the cluster knows, and those of ours. They come and go with a scheduler that is not required,
        so nothing watches them; and where this fails, what was known counts on."""
        apis: set[str] = set()
        found: list[kube.Object] = []
        try:
            for resource in kube.POD_GROUPS:
                if await self._api.serves(resource.group, resource.version, resource.plural):
                    listed = await self._api.list(resource, namespace=self._namespace, label_selector=OURS)
                    apis.add(resource.api_version)
                    found += listed.items
        except kube.ApiError as error:
            logger.warning("PodGroups not looked at: %s", error)
            return
        if apis != self.store.gang_apis:
            logger.info("gang scheduling with %s", ", ".join(sorted(apis)) or "nothing")
        self.store.gang_apis = frozenset(apis)
        for key in self.store.replace("PodGroup", found):
            self.queue.add(key)

    async def _resync_for_ever(self) -> None:
        while True:
            await asyncio.sleep(RESYNC_SECONDS)
            try:
                await self._resync()
            except kube.ApiError as error:
                logger.warning("full list failed: %s", error)
            for key in self.store.fleet_keys():
                self.queue.add(key)


def ends(pod: Mapping[str, Any]) -> bool:
    """It goes, or has ended: its replacement waits for nothing."""
    return "deletionTimestamp" in pod["metadata"] or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


async def _service(service: Callable[[kube.KubeApi], Awaitable[None]], api: kube.KubeApi) -> None:
    await service(api)


def registry_for(operator: Operator) -> kopf.OperatorRegistry:
    """kopf's handlers: thin, explicit, without state of their own."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    @kopf.on.startup(registry=registry)
    async def startup(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings)
        await operator.start()

    @kopf.on.cleanup(registry=registry)
    async def cleanup(**_: Any) -> None:
        await operator.stop()

    @kopf.on.probe(id="operator", registry=registry)
    def probe(**_: Any) -> dict[str, float]:
        return operator.healthy()

    for watched in WATCHED:
        _watch(registry, operator, watched.resource)
    return registry


def _watch(registry: kopf.OperatorRegistry, operator: Operator, resource: kube.Resource) -> None:
    @kopf.on.event(resource.group, resource.version, resource.plural, registry=registry)
    async def on_event(type: str | None, body: kopf.Body, **_: Any) -> None:
        operator.saw(resource.kind, type, dict(body))


def configure(settings: kopf.OperatorSettings) -> None:
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    for watched in WATCHED:
        if watched.selector is not None:
            settings.watching.label_selectors[watched.resource.plural] = watched.selector
    settings.watching.chunk_size = 500
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.networking.connect_timeout = 10
    settings.networking.request_timeout = 60
    settings.execution.max_workers = 2
