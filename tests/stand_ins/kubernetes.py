"""Stands in for the Kubernetes API where an agent runs without a cluster. Needs no pytest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from rolloutfleet.api.rollout_server import TrainingStatus
from rolloutfleet.kube.client import EVENT, Resource
from rolloutfleet.kube.errors import Conflict, Invalid, NotFound

Object = dict[str, Any]


class Cluster:
    """Stands in for the Kubernetes API: the verbs that the agent uses, with conditional writes."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.events: list[Object] = []
        self.written: list[TrainingStatus] = []
        """What the agent applied to status.training, in order."""
        self.before_apply: list[Callable[[], None]] = []
        """What others do between the agent's look and its write; each once."""

    def put(self, plural: str, body: Object) -> None:
        name = body["metadata"]["name"]
        known = self.objects.get((plural, name))
        version = int(known["metadata"]["resourceVersion"]) + 1 if known else 1
        self.objects[plural, name] = {**body, "metadata": {**body["metadata"], "resourceVersion": str(version)}}

    def seen(self, plural: str, name: str) -> Object:
        return deepcopy(self.objects[plural, name])

    async def get(self, resource: Resource, name: str, *, namespace: str | None = None, cached: bool = False) -> Object:
        assert namespace == "rl"
        await asyncio.sleep(0)  # others come in between, as they do over a network
        if (resource.plural, name) not in self.objects:
            raise NotFound(f"{resource.plural} {name} not found", status=404)
        return self.seen(resource.plural, name)

    async def create(self, resource: Resource, manifest: Object) -> Object:
        assert resource is EVENT, "the agent may create events only"
        self.events.append(manifest)
        return manifest

    async def update(self, resource: Resource, manifest: Object) -> Object:
        metadata = manifest["metadata"]
        there = self.objects[resource.plural, metadata["name"]]
        if metadata["resourceVersion"] != there["metadata"]["resourceVersion"]:
            raise Conflict("changed meanwhile", status=409)
        self.put(resource.plural, manifest)
        return self.seen(resource.plural, manifest["metadata"]["name"])

    async def apply(
        self,
        resource: Resource,
        manifest: Object,
        *,
        field_manager: str,
        force: bool = True,
        subresource: str | None = None,
    ) -> Object:
        assert (resource.plural, subresource, field_manager) == ("rolloutservers", "status", "rolloutfleet-agent")
        await asyncio.sleep(0)
        if self.before_apply:
            self.before_apply.pop(0)()
        self._check_status(resource, manifest)
        name = manifest["metadata"]["name"]
        body = self.seen(resource.plural, name)
        body["status"] = {**body.get("status", {}), **deepcopy(manifest["status"])}
        self.put(resource.plural, body)
        self.written.append(TrainingStatus.model_validate(manifest["status"]["training"]))
        return self.seen(resource.plural, name)

    def _check_status(self, resource: Resource, manifest: Object) -> None:
        """By the rule of TrainingStatus."""
        there = self.objects[resource.plural, manifest["metadata"]["name"]]
        written = there.get("status", {}).get("training") or {}
        training = manifest["status"]["training"]
        if (training["fence"], training["sequence"]) < (written.get("fence", 0), written.get("sequence", 0)):
            raise Invalid("status.training: Invalid value: fence, sequence: later ones have written", status=422)
