"""A few objects in memory, and clients of their API server: what the operator asks of Kubernetes, as far as it decides
anything. Nothing happens by itself: no controller runs, no pod starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from typing import Any

from rolloutfleet.kube import client as kube

Key = tuple[str, str]
"""Kind and name."""


class Cluster:
    def __init__(self) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self.calls: list[tuple[str, str, str, str]] = []
        """Client, verb, kind and name, in their order; leases are left out."""
        self.watchers: list[Callable[[str, str, dict[str, Any]], None]] = []
        """Told of every change at once: kind, type of event, object."""
        self._version = 100

    def put(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        metadata = body["metadata"]
        held = self.objects.get((kind, metadata["name"]))
        metadata["resourceVersion"] = str(self._version)
        metadata.setdefault("uid", held["metadata"]["uid"] if held else f"uid-{self._version}")
        self.objects[kind, metadata["name"]] = body
        self._tell(kind, "MODIFIED" if held else "ADDED", body)
        return deepcopy(body)

    def remove(self, kind: str, name: str, *, told: bool = True) -> None:
        body = self.objects.pop((kind, name))
        if told:
            self._tell(kind, "DELETED", body)

    def names(self, kind: str) -> list[str]:
        return sorted(name for held, name in self.objects if held == kind)

    def writes(self, client: str) -> list[tuple[str, str, str]]:
        return [call[1:] for call in self.calls if call[0] == client and call[1] not in ("get", "list")]

    def _tell(self, kind: str, event: str, body: dict[str, Any]) -> None:
        for watcher in self.watchers if kind != "Lease" else ():
            watcher(kind, event, deepcopy(body))


class Client(kube.KubeApi):
    """`before` is called with verb, kind and name before each call is performed; it may raise."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.trouble: kube.ApiError | None = None
        self.before: Callable[[str, str, str], None] = lambda *_: None

    async def close(self) -> None:
        pass

    async def _call(self, verb: str, kind: str, name: str) -> None:
        await asyncio.sleep(0)
        if self.trouble is not None:
            raise self.trouble
        self.before(verb, kind, name)
        if kind != "Lease":
            self.cluster.calls.append((self.name, verb, kind, name))

    async def serves(self, group: str, version: str, plural: str) -> bool:
        return False

    async def list(self, resource: kube.Resource, **_: Any) -> kube.Listed:
        await self._call("list", resource.kind, "")
        found = [deepcopy(body) for (kind, _), body in self.cluster.objects.items() if kind == resource.kind]
        return kube.Listed(found, str(self.cluster._version))

    async def watch(self, resource: kube.Resource, **_: Any) -> AsyncIterator[kube.WatchEvent]:
        """Tells nothing: `watchers` are told."""
        await asyncio.Event().wait()
        yield kube.WatchEvent("", {})

    async def get(
        self, resource: kube.Resource, name: str, *, namespace: str | None = None, cached: bool = False
    ) -> kube.Object:
        await self._call("get", resource.kind, name)
        return self._held(resource.kind, name)

    async def create(self, resource: kube.Resource, manifest: kube.Object) -> kube.Object:
        name = manifest["metadata"].get("name") or f"generated-{len(self.cluster.calls)}"
        await self._call("create", resource.kind, name)
        if (resource.kind, name) in self.cluster.objects:
            raise kube.AlreadyExists(name, status=409, reason="AlreadyExists")
        fresh = deepcopy(manifest)
        fresh["metadata"] |= {"name": name, "generation": 1}
        return self.cluster.put(resource.kind, fresh)

    async def update(self, resource: kube.Resource, manifest: kube.Object) -> kube.Object:
        name = manifest["metadata"]["name"]
        await self._call("update", resource.kind, name)
        self._require_version(self._held(resource.kind, name), manifest)
        return self.cluster.put(resource.kind, deepcopy(manifest))

    async def apply(self, resource: kube.Resource, manifest: kube.Object, **options: Any) -> kube.Object:
        name = manifest["metadata"]["name"]
        await self._call("apply", resource.kind, name)
        if (resource.kind, name) not in self.cluster.objects:
            if options.get("subresource"):
                raise kube.NotFound(name, status=404, reason="NotFound")
            fresh = deepcopy(manifest)
            fresh["metadata"]["generation"] = 1
            if resource.kind == "ServerGroup":
                fresh["spec"].setdefault("replicas", 1)
            return self.cluster.put(resource.kind, fresh)
        held = self._held(resource.kind, name)
        self._require_version(held, manifest)
        for part in ("spec", "status"):
            if part in manifest:
                held[part] = {**held.get(part, {}), **deepcopy(manifest[part])}
        if held == self.cluster.objects[resource.kind, name]:
            return held
        return self.cluster.put(resource.kind, held)

    async def patch(self, resource: kube.Resource, name: str, body: Any, **_: Any) -> kube.Object:
        """A JSON patch of `test` and `add` with plain paths."""
        await self._call("patch", resource.kind, name)
        held = self._held(resource.kind, name)
        for operation in body:
            *parents, last = operation["path"].strip("/").split("/")
            target: Any = held
            for parent in parents:
                target = target[int(parent) if isinstance(target, list) else parent]
            if operation["op"] == "add":
                target[last] = operation["value"]
            elif target[last] != operation["value"]:
                raise kube.Invalid("the server rejected our request due to an error in our request", status=422)
        return self.cluster.put(resource.kind, held)

    async def delete(self, resource: kube.Resource, name: str, **_: Any) -> None:
        await self._call("delete", resource.kind, name)
        if (resource.kind, name) not in self.cluster.objects:
            raise kube.NotFound(name, status=404, reason="NotFound")
        self.cluster.remove(resource.kind, name)

    def _held(self, kind: str, name: str) -> dict[str, Any]:
        if (kind, name) not in self.cluster.objects:
            raise kube.NotFound(name, status=404, reason="NotFound")
        return deepcopy(self.cluster.objects[kind, name])

    @staticmethod
    def _require_version(held: dict[str, Any], manifest: kube.Object) -> None:
        wanted = manifest["metadata"].get("resourceVersion")
        if wanted not in (None, held["metadata"]["resourceVersion"]):
            raise kube.Conflict("the object has been modified", status=409, reason="Conflict")
