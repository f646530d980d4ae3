"""The operator process: watches, lists and leadership, with kopf as the process shell. What acts is a Term.

kopf delivers what others write (RolloutServers, nodes), answers liveness and handles signals. It reconciles nothing and
writes nothing: its handlers only feed the store and enqueue the fleet's key. What we make is followed by watches.py.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import kopf

from rolloutfleet.api.names import COMPONENT_ROUTER, COMPONENT_TRAINER, LABEL_COMPONENT, LABEL_MANAGED_BY, MANAGED_BY
from rolloutfleet.control.leadership import Leadership
from rolloutfleet.control.metrics import Metrics
from rolloutfleet.control.progress import PROGRESS_SECONDS
from rolloutfleet.control.states import Sources, States
from rolloutfleet.control.store import FleetKey, FleetStore, component_of, trimmed
from rolloutfleet.control.term import Term, awaited
from rolloutfleet.control.trainers import TrainerPods
from rolloutfleet.control.watch_health import WatchHealth
from rolloutfleet.control.watches import Watch
from rolloutfleet.engine.http import Http, Send
from rolloutfleet.kube import client as kube
from rolloutfleet.plan.failures import disruption, pod_trouble
from rolloutfleet.plan.objects import Defaults

logger = logging.getLogger(__name__)

RESYNC_SECONDS = 60.0
STALE_SECONDS = 5 * RESYNC_SECONDS
"""Liveness fails when no full list has succeeded, a watch owed an event, or a fleet waited, for this long."""
OURS = f"{LABEL_MANAGED_BY}={MANAGED_BY}"


@dataclass(frozen=True)
class Watched:
    resource: kube.Resource
    selector: str | None


OF_OTHERS = (Watched(kube.ROLLOUT_SERVER, None), Watched(kube.NODE, None))
"""Followed by kopf."""
MADE_BY_US = (
    Watched(kube.SERVER_GROUP, OURS),
    Watched(kube.POD, LABEL_COMPONENT),
    Watched(kube.REPLICA_SET, OURS),
    Watched(kube.SERVICE, OURS),
    Watched(kube.ROLE, OURS),
    Watched(kube.ROLE_BINDING, OURS),
    Watched(kube.LEASE, OURS),
    Watched(kube.DISRUPTION_BUDGET, OURS),
)
WATCHED = OF_OTHERS + MADE_BY_US


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
        leadership: Leadership | None = None,
        metrics: Metrics | None = None,
        services: tuple[Callable[[], Awaitable[None]], ...] = (),
        send: Send | None = None,
        resync_seconds: float = RESYNC_SECONDS,
        progress_seconds: float = PROGRESS_SECONDS,
    ) -> None:
        """`services` run in every replica, whether it leads or not. `send` replaces the way to engines and routers."""
        self._api = api
        self._namespace = namespace
        self._defaults = defaults
        self._leadership = leadership or Leadership()
        self._services = services
        self._resync_seconds = resync_seconds
        self._progress_seconds = progress_seconds
        self._metrics = metrics or Metrics()
        self._http = Http(max_connections=256, observe=self._metrics.asked, before=self._before_engine_call, send=send)
        self.store = FleetStore(clock=now)
        self.term: Term | None = None
        """While this replica leads."""
        States(
            self._metrics,
            Sources(
                store=self.store,
                queue=lambda: self.term.queue if self.term is not None else None,
                leading=lambda: self.term is not None,
                clock=now,
            ),
        )
        self._trainers = TrainerPods(api=api, store=self.store)
        self._tasks: list[asyncio.Task[None]] = []
        self._listed_at = time.monotonic()
        self._watches = {watched.resource.kind: WatchHealth() for watched in WATCHED}

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._leadership.run(self._lead), name="leadership"),
            *(
                asyncio.create_task(self._watch(made).run(), name=f"watch of {made.resource.plural}")
                for made in MADE_BY_US
            ),
            asyncio.create_task(self._resync_for_ever(), name="resync"),
            *(asyncio.create_task(awaited(service), name="service") for service in self._services),
        ]

    def _watch(self, made: Watched) -> Watch:
        kind = made.resource.kind
        return Watch(
            api=self._api,
            resource=made.resource,
            namespace=self._namespace,
            selector=made.selector,
            keep=partial(trimmed, kind),
            listed=self._pods_listed if made.resource is kube.POD else partial(self._took, kind),
            saw=partial(self.saw, kind),
        )

    async def stop(self) -> None:
        """When this returns nothing acts any more, and the next leader may have begun."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()
        await self._api.close()

    def begin_term(self) -> Term:
        self.term = Term(
            api=self._api,
            http=self._http,
            store=self.store,
            defaults=self._defaults,
            clock=now,
            metrics=self._metrics,
            require=self._leadership.require,
            progress_seconds=self._progress_seconds,
        )
        return self.term

    async def _lead(self) -> None:
        try:
            await self.begin_term().run(resync=self._resync, beside=self._trainers.run)
        finally:
            self.term = None

    def _before_engine_call(self, method: str) -> None:
        """Work on engines goes on for minutes: what changes one is sent by the leader only, each time."""
        if method != "GET":
            self._leadership.require()

    def healthy(self) -> dict[str, float]:
        """Figures for the liveness answer, of a standby too; raises when a loop is dead or starved."""
        moment = time.monotonic()
        listed = moment - self._listed_at
        waiting = self.term.queue.oldest_age() if self.term is not None else 0.0
        for task in self._tasks:
            if task.done():
                raise RuntimeError(f"task {task.get_name()} has ended")
        if max(listed, waiting) > STALE_SECONDS:
            raise RuntimeError(f"no full list for {listed:.0f} s, oldest fleet waits {waiting:.0f} s")
        for kind, watch in self._watches.items():
            silent = watch.silent_seconds(moment)
            if silent > STALE_SECONDS:
                raise RuntimeError(f"the watch of {kind} has not told for {silent:.0f} s what lists find")
        return {
            "leads": float(self.term is not None),
            "seconds_since_list": round(listed, 1),
            "oldest_wait_seconds": round(waiting, 1),
        }

    def saw(self, kind: str, kind_of_event: str | None, body: dict[str, Any]) -> None:
        """A watch event, or an object of kopf's first list (`kind_of_event` None)."""
        self._metrics.heard(kind)
        self._watches[kind].told()
        if kind == "Pod" and component_of(body) == COMPONENT_TRAINER:
            self._trainers.saw(body, deleted=kind_of_event == "DELETED")
            return
        if kind == "Node":
            for fleet in self.store.saw_node(body, deleted=kind_of_event == "DELETED"):
                self._enqueue(fleet)
            return
        before = self._known_server(body) if kind == "RolloutServer" else None
        key = self.store.remove(kind, body) if kind_of_event == "DELETED" else self.store.upsert(kind, body)
        if key is None:
            return
        if kind == "RolloutServer" and self.term is not None:
            self._metrics.server_seen(before, body)
        if kind == "Pod" and kind_of_event != "DELETED" and not ends(body):
            if self.term is not None:
                (self.term.soon if troubled(body) else self.term.step)(key)
        else:
            self._enqueue(key)
            if kind == "Pod" and component_of(body) == COMPONENT_ROUTER and self.term is not None:
                self.term.prober.look_soon(body["metadata"]["uid"])  # its process may be new, and its table empty

    def _known_server(self, body: dict[str, Any]) -> dict[str, Any] | None:
        key = self.store.key_of("RolloutServer", body)
        return self.store.object(key, "RolloutServer", body["metadata"]["name"]) if key is not None else None

    def _enqueue(self, key: FleetKey) -> None:
        """A standby only remembers: its first act as the leader is to look at every fleet."""
        if self.term is not None:
            self.term.queue.add(key)

    def _took(self, kind: str, listed: kube.Listed) -> None:
        """A full list of a kind."""
        self._metrics.heard(kind)
        if kind == "Node":
            changed = self.store.replace_nodes(listed.items, listed.resource_version)
        else:
            changed = self.store.replace(kind, listed.items, listed.resource_version)
        for key in changed:
            self._enqueue(key)

    def _pods_listed(self, listed: kube.Listed) -> None:
        self._trainers.listed(pod for pod in listed.items if component_of(pod) == COMPONENT_TRAINER)
        self._took(kube.POD.kind, listed)

    async def _resync(self) -> None:
        """Lists replace what is held: the only way to learn of a deletion that no watch told."""
        for watched in WATCHED:
            kind = watched.resource.kind
            namespace = self._namespace if watched.resource.namespaced else None
            listed = await self._api.list(
                watched.resource, namespace=namespace, label_selector=watched.selector, keep=partial(trimmed, kind)
            )
            if any(self.store.is_news(kind, item) for item in listed.items):
                self._watches[kind].was_late(time.monotonic())
            self._took(kind, listed)
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
            self._enqueue(key)

    async def _resync_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._resync_seconds)
            try:
                await self._resync()
            except kube.ApiError as error:
                logger.warning("full list failed: %s", error)
            if self.term is not None:
                for key in self.store.fleet_keys():  # spread: none must wait behind all of them
                    self.term.queue.add_after(key, self._resync_seconds * random.random())  # noqa: S311


def ends(pod: Mapping[str, Any]) -> bool:
    """It goes, or has ended: its replacement waits for nothing."""
    return "deletionTimestamp" in pod["metadata"] or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def troubled(pod: Mapping[str, Any]) -> bool:
    """Something keeps it from running, or somebody is about to end it."""
    return disruption(pod) is not None or pod_trouble(pod) is not None


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

    # Permanent: kopf would keep the kubelet waiting for a second attempt after a minute.
    @kopf.on.probe(id="operator", errors=kopf.ErrorsMode.PERMANENT, registry=registry)
    def probe(**_: Any) -> dict[str, float]:
        return operator.healthy()

    for watched in OF_OTHERS:
        _follow(registry, operator, watched.resource)
    return registry


def _follow(registry: kopf.OperatorRegistry, operator: Operator, resource: kube.Resource) -> None:
    @kopf.on.event(resource.group, resource.version, resource.plural, registry=registry)
    async def on_event(type: str | None, body: kopf.Body, **_: Any) -> None:
        operator.saw(resource.kind, type, dict(body))


def configure(settings: kopf.OperatorSettings) -> None:
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.watching.chunk_size = 500
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.networking.connect_timeout = 10
    settings.networking.request_timeout = 60
    # kopf would leave watches off for up to 21 s after the API server is back.
    settings.networking.error_backoffs = (1, 1, 2, 3, 5, 5, 5, 5, 5, 5, 5, 5)
    settings.execution.max_workers = 2
