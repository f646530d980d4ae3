"""Writes to the Kubernetes API, one planned action at a time; what it refuses is kept for status."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from rolloutfleet.api.names import API_VERSION, GATE_ROUTABLE, OPERATOR_MANAGER, SCALE_MANAGER
from rolloutfleet.control.events import event_manifest
from rolloutfleet.control.freshness import Stop
from rolloutfleet.control.metrics import Metrics
from rolloutfleet.control.store import FleetKey, FleetStore, owned_by
from rolloutfleet.kube import client as kube
from rolloutfleet.plan.actions import ApplyStatus, DeleteObject, Emit, SetGate
from rolloutfleet.plan.failures import Trouble, refusal, shorten
from rolloutfleet.plan.objects import version_of

logger = logging.getLogger(__name__)

REFUSED_SECONDS = 10.0
"""After which what the API server refused is tried again."""
EXIT_SECONDS = 10
"""For a pod that we delete: its engine is drained or dead, and a rank that hangs must not keep the GPUs that its
successor waits for."""


class ObjectWriter:
    def __init__(
        self,
        *,
        api: kube.KubeApi,
        store: FleetStore,
        enqueue: Callable[[FleetKey], None],
        enqueue_after: Callable[[FleetKey, float], None],
        clock: Callable[[], datetime],
        metrics: Metrics,
    ) -> None:
        self._api = api
        self._metrics = metrics
        self._store = store
        self._enqueue = enqueue
        self._enqueue_after = enqueue_after
        self._clock = clock

    async def apply(self, key: FleetKey, manifest: Mapping[str, Any]) -> None:
        resource = kube.by_kind(manifest["kind"])
        if await self._name_taken(key, resource, manifest):
            return
        if manifest["kind"] == "ServerGroup" and "replicas" not in manifest["spec"]:
            await self._hand_over_scale(key, manifest["metadata"]["name"])
        applied = await self._api.apply(resource, dict(manifest), field_manager=OPERATOR_MANAGER, force=True)
        self._learned(key, manifest["kind"], applied)
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        self._store.applied_versions.setdefault(key, {})[name] = version_of(applied)

    def _learned(self, key: FleetKey, kind: str, written: Mapping[str, Any]) -> None:
        """Take what the API server answered to a write. The plan under way does not know it, and its watch event will
        be no news any more: without another look a status could go on saying what was before the write."""
        if self._store.upsert(kind, written) is not None:
            self._enqueue(key)

    async def _name_taken(self, key: FleetKey, resource: kube.Resource, manifest: Mapping[str, Any]) -> bool:
        """Whether an object of that name belongs to somebody else: an apply would take it from them.

        Two servers can derive one name: `a` with a group `b-c`, and `a-b` with a group `c`.
        """
        metadata = manifest["metadata"]
        place, owner = f"{manifest['kind']}/{metadata['name']}", metadata["ownerReferences"][0]["uid"]
        failures = self._store.create_failures.setdefault(key, {})
        found = self._store.object(key, manifest["kind"], metadata["name"])
        try:
            found = found or await self._api.get(resource, metadata["name"], namespace=key.namespace, cached=True)
        except kube.NotFound:
            found = None
        if found is None or owned_by(found, owner):
            failures.pop(place, None)
            return False
        trouble = Trouble("NameTaken", f"{place} exists and is not of this RolloutServer; rename one of them")
        self._refused(key, place, trouble)
        return True

    def _refused(self, key: FleetKey, place: str, trouble: Trouble) -> None:
        """Keep why an object could not be made, for status, and look again later."""
        failures = self._store.create_failures.setdefault(key, {})
        if failures.get(place) != trouble:
            failures[place] = trouble
            self._enqueue(key)
        self._enqueue_after(key, REFUSED_SECONDS)

    async def _hand_over_scale(self, key: FleetKey, name: str) -> None:
        """Keep the count of a group whose `replicas` was left out of the server's spec.

        A field that its only manager stops applying falls back to its default: a group of 8 engines would shrink to 1
        before any autoscaler has looked. So a manager of its own takes it first, unless another one has it already.
        """
        held = self._store.object(key, "ServerGroup", name)
        if held is None:
            return
        manifest = {
            "apiVersion": API_VERSION,
            "kind": "ServerGroup",
            "metadata": {"name": name, "namespace": key.namespace, "uid": held["metadata"]["uid"]},
            "spec": {"replicas": held["spec"]["replicas"]},
        }
        try:
            await self._api.apply(kube.SERVER_GROUP, manifest, field_manager=SCALE_MANAGER, force=False)
        except (kube.Conflict, kube.NotFound):
            return

    async def apply_status(self, key: FleetKey, action: ApplyStatus) -> None:
        resource = kube.by_kind(action.kind)
        metadata = {"name": action.name, "namespace": key.namespace, "uid": action.uid}
        if action.version:
            metadata["resourceVersion"] = action.version
        status = without_what_is_empty(action.status)
        manifest = {"apiVersion": API_VERSION, "kind": action.kind, "metadata": metadata, "status": status}
        before = self._store.object(key, action.kind, action.name) or {}
        try:
            held = await self._api.apply(
                resource, manifest, field_manager=OPERATOR_MANAGER, force=True, subresource="status"
            )
        except kube.NotFound as error:
            raise Stop from error
        except kube.Conflict as error:
            # The watch may lag, and the next plan must not be made from the version that was refused just now.
            try:
                held = await self._api.get(resource, action.name, namespace=key.namespace)
            except kube.NotFound:
                raise Stop from error
            self._store.upsert(action.kind, held)
            raise Stop from error
        if action.kind == "ServerGroup":
            self._metrics.status_written(key, action.name, before.get("status") or {}, action.status)
        self._learned(key, action.kind, held)

    async def create_pod(self, key: FleetKey, manifest: Mapping[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        failures = self._store.create_failures.setdefault(key, {})
        try:
            created = await self._api.create(kube.POD, dict(manifest))
        except kube.AlreadyExists:
            failures.pop(name, None)
            return
        except (kube.Forbidden, kube.Invalid) as error:
            if "is being terminated" in error.message:
                return  # the namespace goes, and everything in it
            # A quota, a missing PriorityClass or ServiceAccount, a template the API server cannot take.
            trouble = refusal(error.reason, error.message)
            self._refused(key, name, trouble)
            return
        failures.pop(name, None)
        self._learned(key, "Pod", created)

    async def create_pod_group(self, key: FleetKey, manifest: Mapping[str, Any]) -> None:
        """No watch tells about PodGroups: the store learns of this one here, and the next plan makes its pods."""
        name, owner = manifest["metadata"]["name"], manifest["metadata"]["ownerReferences"][0]["uid"]
        resource = kube.by_kind(manifest["kind"], manifest["apiVersion"])
        failures = self._store.create_failures.setdefault(key, {})
        try:
            try:
                held = await self._api.create(resource, dict(manifest))
            except kube.AlreadyExists:
                held = await self._api.get(resource, name, namespace=key.namespace)
        except kube.Unreachable:
            raise
        except kube.ApiError as error:
            if "is being terminated" in error.message:
                return  # the namespace goes, and everything in it
            # Not only Forbidden and Invalid: a scheduler's webhook that is down must not stop the rest of the plan.
            trouble = Trouble(f"PodGroup{error.reason or 'Refused'}", shorten(error.message))
        else:
            if owned_by(held, owner):
                failures.pop(name, None)
                self._store.upsert("PodGroup", held)
                self._enqueue(key)
                return
            trouble = Trouble("NameTaken", f"PodGroup/{name} exists and is not of this ServerGroup")
        self._refused(key, name, trouble)

    async def delete_pod_group(self, key: FleetKey, action: DeleteObject) -> None:
        await self.delete(kube.by_kind(action.kind, action.api_version), key.namespace, action.name, action.uid)
        held = self._store.object(key, action.kind, action.name)
        if held is not None and held["metadata"]["uid"] == action.uid:
            self._store.remove(action.kind, held)

    async def delete(
        self, resource: kube.Resource, namespace: str, name: str, uid: str, *, grace_seconds: int | None = None
    ) -> None:
        try:
            await self._api.delete(resource, name, namespace=namespace, uid=uid, grace_seconds=grace_seconds)
        except (kube.NotFound, kube.Conflict):
            return  # gone, or another object of that name

    async def set_gate(self, key: FleetKey, action: SetGate) -> None:
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": action.pod, "namespace": key.namespace, "uid": action.uid},
            "status": {
                "conditions": [
                    {
                        "type": GATE_ROUTABLE,
                        "status": "True" if action.routable else "False",
                        "reason": action.reason,
                        "message": shorten(action.message),
                        "lastTransitionTime": self._clock().strftime("%Y-%m-%dT%H:%M:%SZ"),
                    }
                ]
            },
        }
        try:
            applied = await self._api.apply(
                kube.POD, manifest, field_manager=OPERATOR_MANAGER, force=True, subresource="status"
            )
        except (kube.NotFound, kube.Conflict):
            return
        self._learned(key, "Pod", applied)

    async def emit(self, key: FleetKey, action: Emit) -> None:
        try:
            await self._api.create(kube.EVENT, event_manifest(key.namespace, action, self._clock()))
        except kube.ApiError as error:
            logger.warning("event %s for %s not written: %s", action.reason, action.name, error)


def without_what_is_empty(status: Mapping[str, Any]) -> dict[str, Any]:
    """Absent and empty say the same of an engine, and each field of each engine costs the API server CPU at every
    write: it is validated, merged, and noted as ours."""
    engines = status.get("engines")
    if not isinstance(engines, list):
        return dict(status)
    return {
        **status,
        "engines": [{name: value for name, value in engine.items() if value not in ("", [])} for engine in engines],
    }
