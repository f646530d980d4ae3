"""Fleets and pods as a watch tells of them, with the moment at which it did (this process's monotonic clock)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from bench.scale.control_plane import NAMESPACE
from rolloutfleet.kube import client as kube
from rolloutfleet.kube.resources import Resource

POLL_SECONDS = 0.02


class Fleets(Protocol):
    """How an operator's fleets are known."""

    fleet: Resource
    """What a user posts for a fleet."""
    fleet_label: str
    """Of each pod: the name of its fleet."""

    def is_engine(self, labels: dict[str, str]) -> bool:
        """Of a pod with these labels."""

    def is_whole(self, fleet: kube.Object) -> bool:
        """By the fleet's own status."""


class Watcher:
    """Of one subject at a time."""

    def __init__(self, api: kube.KubeApi, *, pods_too: Callable[[str, kube.Object], None]) -> None:
        """`pods_too`: is told the type and object of each event of a pod as well."""
        self._api = api
        self._pods_too = pods_too
        self.whole: dict[str, float] = {}
        """Fleets whose own status says that every engine serves, and since when."""
        self.known: set[str] = set()
        """Fleets that exist."""
        self.pods: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        """By fleet and UID."""
        self.made: dict[str, list[tuple[float, str]]] = defaultdict(list)
        """By fleet: when a pod of an engine appeared, and its UID."""
        self.started_after: list[float] = []
        """Of each pod that ran: seconds since it was bound."""

    @contextlib.asynccontextmanager
    async def watching(self, fleets: Fleets) -> AsyncIterator[None]:
        """A watch that fails ends what is measured meanwhile: every number after it would be wrong."""
        self._fleets = fleets
        async with asyncio.TaskGroup() as group:
            watches = [
                group.create_task(self._watch(fleets.fleet, self._saw_fleet)),
                group.create_task(self._watch(kube.POD, self._saw_pod)),
            ]
            yield
            for watch in watches:
                watch.cancel()

    async def _watch(self, resource: kube.Resource, saw: Callable[[float, str, kube.Object], None]) -> None:
        version = "0"
        while True:
            try:
                async for event in self._api.watch(resource, resource_version=version, namespace=NAMESPACE):
                    version = event.object["metadata"]["resourceVersion"]
                    if event.type != "BOOKMARK":
                        saw(time.monotonic(), event.type, event.object)
            except (kube.Expired, kube.TooManyRequests, kube.Unreachable):
                version = "0"  # the watch cache of a new CRD is built anew for some seconds
                await asyncio.sleep(0.2)

    def _saw_fleet(self, moment: float, kind: str, body: kube.Object) -> None:
        name = body["metadata"]["name"]
        if kind == "DELETED":
            self.known.discard(name)
            self.whole.pop(name, None)
            return
        self.known.add(name)
        if self._fleets.is_whole(body):
            self.whole.setdefault(name, moment)
        else:
            self.whole.pop(name, None)

    def _saw_pod(self, moment: float, kind: str, body: kube.Object) -> None:
        self._pods_too(kind, body)
        metadata = body["metadata"]
        labels, uid = metadata.get("labels") or {}, metadata["uid"]
        fleet, engine = labels.get(self._fleets.fleet_label, ""), self._fleets.is_engine(labels)
        if kind == "DELETED":
            self.pods[fleet].pop(uid, None)
            return
        if uid not in self.pods[fleet] and engine:
            self.made[fleet].append((moment, uid))
        known = self.pods[fleet].get(uid, {})
        bound, running = "nodeName" in body["spec"], bool((body.get("status") or {}).get("podIP"))
        bound_at = known.get("bound_at") or (moment if bound else None)
        if running and bound_at is not None and not known.get("running"):
            self.started_after.append(moment - bound_at)
        self.pods[fleet][uid] = {
            "name": metadata["name"],
            "bound_at": bound_at,
            "running": running,
            "engine": engine,
            "going": "deletionTimestamp" in metadata,
            "ready": is_true(body, "Ready"),
        }

    def all_ready(self) -> bool:
        """By the kubelet's rule, gates and all."""
        return all(pod["ready"] for pods in self.pods.values() for pod in pods.values() if not pod["going"])

    def empty(self) -> bool:
        return not self.known and not any(self.pods.values())


def is_true(body: kube.Object, condition: str) -> bool:
    conditions = (body.get("status") or {}).get("conditions") or []
    return any(one["type"] == condition and one["status"] == "True" for one in conditions)


async def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise SystemExit(f"not within {seconds:.0f} s: {what}") from None
