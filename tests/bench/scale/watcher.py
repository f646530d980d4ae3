"""Fleets and pods as a watch tells of them, with the moment at which it did (this process's monotonic clock)."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from bench.scale.control_plane import NAMESPACE
from rolloutfleet.api.names import COMPONENT_ENGINE, LABEL_COMPONENT, LABEL_SERVER
from rolloutfleet.kube import client as kube

POLL_SECONDS = 0.02


class Watcher:
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

    def start(self) -> list[asyncio.Task[None]]:
        return [
            asyncio.create_task(self._watch(kube.ROLLOUT_SERVER, self._saw_fleet), name="watch of fleets"),
            asyncio.create_task(self._watch(kube.POD, self._saw_pod), name="watch of pods"),
        ]

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
        name, status = body["metadata"]["name"], body.get("status") or {}
        if kind == "DELETED":
            self.known.discard(name)
            self.whole.pop(name, None)
            return
        self.known.add(name)
        engines = status.get("engines") or {}
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or [])
        wanted = sum(group["replicas"] for group in body["spec"]["groups"])
        if ready and engines.get("routable") == engines.get("desired") == wanted:
            self.whole.setdefault(name, moment)
        else:
            self.whole.pop(name, None)

    def _saw_pod(self, moment: float, kind: str, body: kube.Object) -> None:
        self._pods_too(kind, body)
        metadata = body["metadata"]
        labels, uid = metadata.get("labels") or {}, metadata["uid"]
        fleet = labels.get(LABEL_SERVER, "")
        if kind == "DELETED":
            self.pods[fleet].pop(uid, None)
            return
        if uid not in self.pods[fleet] and labels.get(LABEL_COMPONENT) == COMPONENT_ENGINE:
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
            "engine": labels.get(LABEL_COMPONENT) == COMPONENT_ENGINE,
            "going": "deletionTimestamp" in metadata,
            "ready": any(
                condition["type"] == "Ready" and condition["status"] == "True"
                for condition in (body.get("status") or {}).get("conditions") or []
            ),
        }

    def all_ready(self) -> bool:
        """By the kubelet's rule, gates and all."""
        return all(pod["ready"] for pods in self.pods.values() for pod in pods.values() if not pod["going"])

    def empty(self) -> bool:
        return not self.known and not any(self.pods.values())


async def until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    try:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise SystemExit(f"not within {seconds:.0f} s: {what}") from None
