"""What the operator has seen, by fleet. Watches, lists and pollers write it; a reconcile reads it as one `Fleet`.

Nothing here is truth: all of it can be seen again after a restart. A full list replaces what is held of a kind, which
heals deletions that a watch never told (kopf does not report what vanished while a watch was down).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from rolloutfleet.api.names import (
    COMPONENT_ENGINE,
    COMPONENT_ROUTER,
    LABEL_SERVER,
)
from rolloutfleet.api.rollout_server import RolloutServer
from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.control.nodes import Nodes
from rolloutfleet.control.reading import Reading
from rolloutfleet.control.targets import FleetKey, Targets, component_of, nobody
from rolloutfleet.plan.failures import Trouble
from rolloutfleet.plan.objects import CHILD_KINDS
from rolloutfleet.plan.observed import (
    EngineProbe,
    Fleet,
    LeaseView,
    Worker,
    engine_pod,
    node_of,
    on_its_node,
    pod_group,
    router_pod,
)
from rolloutfleet.plan.training import training_of

logger = logging.getLogger(__name__)

GONE_KEPT = timedelta(minutes=10)
"""Far longer than any list, event or answer is under way."""

STATUS_OF_OTHERS = frozenset({"ReplicaSet", "Service", "PodDisruptionBudget"})
"""Kinds whose status changes several times while pods start."""


@dataclass(frozen=True)
class Registration:
    """A router has been asked to add a worker."""

    worker_id: str
    until: datetime
    """When it is to be asked again, whatever it says."""

    def failed(self, now: datetime) -> Registration:
        return replace(self, until=min(self.until, now + FAILED_REGISTRATION_PAUSE))


FAILED_REGISTRATION_PAUSE = timedelta(seconds=3)


@dataclass
class _Seen:
    """All objects of one fleet, by kind and name."""

    objects: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)


class FleetStore:
    def __init__(self, *, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._fleets: dict[FleetKey, _Seen] = {}
        self._lease_renewals: dict[FleetKey, tuple[str, datetime]] = {}
        self._nodes = Nodes()
        self._read_server = Reading(RolloutServer.model_validate)
        self._read_group = Reading(_group)
        self._read_pod = Reading(engine_pod)
        self._gone: dict[str, datetime] = {}
        """Objects that are no more, by UID: lists, events and answers that were under way may still tell of them."""
        self.gang_apis: frozenset[str] = frozenset()
        """apiVersions of the PodGroups that the cluster knows."""
        self.targets = Targets()
        self.forget_what_was_done()

    def forget_what_was_done(self) -> None:
        """Keep what Kubernetes has told. All else is of one term as the leader: what it asked engines and routers, what
        it tried and what came of it."""
        self.probes: dict[str, EngineProbe] = {}
        self.tables: dict[str, dict[str, Worker] | None] = {}
        self.registering: dict[str, dict[str, Registration]] = {}
        """By UID of the router's pod and URL of the worker: what was asked for and is not listed yet."""
        self.table_changes: Counter[str] = Counter()
        """Requests under way that change a table, by UID of the pod that keeps it."""
        self.busy: dict[str, str] = {}
        self.create_failures: dict[FleetKey, dict[str, Trouble]] = {}
        self.catch_up_failures: dict[str, str] = {}
        self.applied_versions: dict[FleetKey, dict[str, str]] = {}
        self.targets.changed = nobody

    def now(self) -> datetime:
        return self._clock()

    # What watches and lists bring

    @staticmethod
    def key_of(kind: str, body: Mapping[str, Any]) -> FleetKey | None:
        metadata = body["metadata"]
        if kind == "RolloutServer":
            return FleetKey(metadata["namespace"], metadata["name"])
        server = (metadata.get("labels") or {}).get(LABEL_SERVER)
        return FleetKey(metadata["namespace"], server) if server else None

    def upsert(self, kind: str, body: Mapping[str, Any]) -> FleetKey | None:
        """Take a newer version of an object; the key of its fleet if anything changed that plans read."""
        key = self.key_of(kind, body)
        if key is None or body["metadata"]["uid"] in self._gone:
            return None
        objects = self._fleets.setdefault(key, _Seen()).objects.setdefault(kind, {})
        name = body["metadata"]["name"]
        held = objects.get(name)
        if not _is_newer(body, held):
            return None  # our own write was answered before the watch told about it
        kept = objects[name] = trimmed(kind, body)
        if kind == "Lease":
            return self._renewed(key, held, body)
        if kind == "Pod":
            self.targets.saw_pod(key, body, held)
        elif kind == "RolloutServer":
            self._targets_gone(self.targets.saw_server(key, body))
        return None if held is not None and self._planned_from(kind, held) == self._planned_from(kind, kept) else key

    def _planned_from(self, kind: str, kept: Mapping[str, Any]) -> Any:
        """What plans read of an object: a pod becomes Ready, a ReplicaSet counts replicas, and nothing follows."""
        if kind == "Pod":
            component = component_of(kept)
            if component == COMPONENT_ENGINE:
                return self._read_pod(kept)
            if component == COMPONENT_ROUTER:  # whatever its containers do, its table may be that of a new process
                return router_pod(kept, None), (kept.get("status") or {}).get("containerStatuses")
            return None
        return {**kept, "metadata": {**kept["metadata"], "resourceVersion": ""}}

    def is_news(self, kind: str, body: Mapping[str, Any]) -> bool:
        """Whether upsert would take it."""
        key = self.key_of(kind, body)
        if key is None or body["metadata"]["uid"] in self._gone:
            return False
        return _is_newer(body, self.object(key, kind, body["metadata"]["name"]))

    def remove(self, kind: str, body: Mapping[str, Any]) -> FleetKey | None:
        key = self.key_of(kind, body)
        self._gone[body["metadata"]["uid"]] = self._clock()
        if key is None or key not in self._fleets:
            return None
        objects = self._fleets[key].objects.get(kind, {})
        held = objects.get(body["metadata"]["name"])
        if held is None or held["metadata"].get("uid") != body["metadata"].get("uid"):
            return None
        self._forget(key, kind, held)
        return key

    def saw_node(self, node: Mapping[str, Any], *, deleted: bool) -> set[FleetKey]:
        """Take news of a node; the fleets that have pods on it, if it changed between ready, not ready and gone."""
        return self._fleets_on(self._nodes.saw(node, deleted=deleted))

    def replace_nodes(self, nodes: Iterable[Mapping[str, Any]], version: str) -> set[FleetKey]:
        """A full list of nodes, as of resourceVersion `version`."""
        pods = [pod for _, pod in self.pods(COMPONENT_ENGINE)]
        return self._fleets_on(self._nodes.replace(nodes, version, pods))

    def _fleets_on(self, names: set[str]) -> set[FleetKey]:
        return {key for key, pod in self.pods(COMPONENT_ENGINE) if node_of(pod) in names} if names else set()

    def replace(self, kind: str, items: Iterable[Mapping[str, Any]], version: str = "") -> set[FleetKey]:
        """A full list, as of resourceVersion `version`: what it lacks is gone, unless it was made after the list."""
        changed: set[FleetKey] = set()
        listed = {(item["metadata"]["namespace"], item["metadata"]["name"], item["metadata"]["uid"]) for item in items}
        for key in list(self._fleets):
            for name, held in list(self._fleets.get(key, _Seen()).objects.get(kind, {}).items()):
                newer = bool(version) and _version(held) > int(version)
                if (key.namespace, name, held["metadata"].get("uid")) not in listed and not newer:
                    self._forget(key, kind, held)
                    changed.add(key)
                    if version:
                        self._gone[held["metadata"]["uid"]] = self._clock()
        for item in items:
            upserted = self.upsert(kind, item)
            if upserted is not None:
                changed.add(upserted)
        oldest = self._clock() - GONE_KEPT
        self._gone = {uid: since for uid, since in self._gone.items() if since > oldest}
        return changed

    def _forget(self, key: FleetKey, kind: str, held: Mapping[str, Any]) -> None:
        del self._fleets[key].objects[kind][held["metadata"]["name"]]
        uid = held["metadata"].get("uid", "")
        for reading in (self._read_server, self._read_group, self._read_pod):
            reading.forget(uid)
        if kind == "Pod":
            self.targets.remove(uid)
            self.probes.pop(uid, None)
            self.tables.pop(uid, None)
            self.registering.pop(uid, None)
            self.catch_up_failures.pop(uid, None)
        if not any(self._fleets[key].objects.values()):
            self._fleets.pop(key, None)
            self._lease_renewals.pop(key, None)
            self.create_failures.pop(key, None)
            self.applied_versions.pop(key, None)
        if kind == "RolloutServer":
            self._targets_gone(self.targets.saw_server(key, None))

    def _targets_gone(self, uids: Iterable[str]) -> None:
        for uid in uids:
            self.probes.pop(uid, None)

    def _renewed(self, key: FleetKey, held: Mapping[str, Any] | None, body: Mapping[str, Any]) -> FleetKey | None:
        """Renewals come every few seconds and change nothing; a new holder does. Expiry runs by our own clock."""
        spec = body.get("spec") or {}
        old_spec = (held or {}).get("spec") or {}
        stamp = f"{spec.get('holderIdentity')}/{spec.get('leaseTransitions')}/{spec.get('renewTime')}"
        if self._lease_renewals.get(key, ("", None))[0] != stamp:
            self._lease_renewals[key] = (stamp, self._clock())
        same = all(spec.get(name) == old_spec.get(name) for name in ("holderIdentity", "leaseTransitions"))
        return None if same and held is not None else key

    # What reconciles and pollers read

    def fleet_keys(self) -> list[FleetKey]:
        return list(self._fleets)

    def server(self, key: FleetKey) -> dict[str, Any] | None:
        return self.object(key, "RolloutServer", key.name)

    def object(self, key: FleetKey, kind: str, name: str) -> dict[str, Any] | None:
        return self._objects(key, kind).get(name)

    def pods(self, component: str) -> list[tuple[FleetKey, dict[str, Any]]]:
        return [
            (key, pod)
            for key in self._fleets
            for pod in self._objects(key, "Pod").values()
            if component_of(pod) == component
        ]

    def statuses(self, key: FleetKey) -> dict[tuple[str, str], Mapping[str, Any]]:
        """What the statuses of a fleet say, by kind and name."""
        return {
            (kind, name): body.get("status") or {}
            for kind in ("RolloutServer", "ServerGroup")
            for name, body in self._objects(key, kind).items()
        }

    def groups(self) -> Iterator[tuple[FleetKey, Mapping[str, Any]]]:
        """Every ServerGroup, as it is in the API."""
        for key in self._fleets:
            for group in self._objects(key, "ServerGroup").values():
                yield key, group

    def own_engines(
        self,
    ) -> Iterator[tuple[FleetKey, Mapping[str, Any], list[tuple[Mapping[str, Any], EngineProbe]]]]:
        """By group: its spec, and those of its engines that were looked at, as status has them; external ones apart."""
        for key, group in self.groups():
            if not group["spec"].get("external"):
                records = (group.get("status") or {}).get("engines") or []
                probes = ((record, self.probes.get(record.get("podUid", ""))) for record in records)
                yield key, group["spec"], [(record, probe) for record, probe in probes if probe is not None]

    def fleet(self, key: FleetKey) -> Fleet | None:
        """The fleet as seen now; None if there is no RolloutServer of that name. Raises ValidationError."""
        body = self.server(key)
        if body is None:
            return None
        server = self._read_server(body)
        owned = {
            kind: [child for child in self._objects(key, kind).values() if owned_by(child, server.uid)]
            for kind in CHILD_KINDS
        }
        pods = list(self._objects(key, "Pod").values())
        group_uids = [child["metadata"]["uid"] for child in owned["ServerGroup"]]
        return Fleet(
            server=server,
            groups=tuple(
                sorted(
                    (self._read_group(child) for child in owned["ServerGroup"]),
                    key=lambda group: group.metadata["name"],
                )
            ),
            engine_pods=tuple(
                on_its_node(self._read_pod(pod), self._nodes.states)
                for pod in pods
                if component_of(pod) == COMPONENT_ENGINE
            ),
            router_pods=tuple(
                router_pod(
                    pod,
                    self.tables.get(pod["metadata"]["uid"]),
                    frozenset(self.registering.get(pod["metadata"]["uid"], ())),
                )
                for pod in pods
                if component_of(pod) == COMPONENT_ROUTER and not pod["metadata"].get("deletionTimestamp")
            ),
            probes=self.probes,
            busy=self.busy,
            create_failures=self.create_failures.get(key, {}),
            catch_up_failures=self.catch_up_failures,
            lease=self._lease(key, owned["Lease"]),
            children={f"{kind}/{child['metadata']['name']}": child for kind in CHILD_KINDS for child in owned[kind]},
            gang_apis=self.gang_apis,
            pod_groups={
                name: pod_group(body)
                for name, body in self._objects(key, "PodGroup").items()
                if any(owned_by(body, uid) for uid in group_uids)
            },
        )

    def training_key(self, key: FleetKey) -> str:
        """Of the fleet as seen now: see Training.key."""
        server = self._read_server(self._objects(key, "RolloutServer")[key.name])
        leases = [lease for lease in self._objects(key, "Lease").values() if owned_by(lease, server.uid)]
        return training_of(Fleet(server=server, lease=self._lease(key, leases)), self._clock()).key

    def _objects(self, key: FleetKey, kind: str) -> dict[str, dict[str, Any]]:
        seen = self._fleets.get(key)
        return seen.objects.get(kind, {}) if seen else {}

    def _lease(self, key: FleetKey, leases: list[dict[str, Any]]) -> LeaseView:
        spec = (leases[0].get("spec") or {}) if leases else {}
        renewed_at = self._lease_renewals.get(key, ("", None))[1]
        if not spec.get("holderIdentity") or renewed_at is None:
            return LeaseView()
        seconds = int(spec.get("leaseDurationSeconds") or 15)
        return LeaseView(
            holder=spec["holderIdentity"],
            fence=int(spec.get("leaseTransitions") or 0),
            expires_at=renewed_at + timedelta(seconds=seconds),
        )


def _group(body: Mapping[str, Any]) -> ServerGroup:
    try:
        return ServerGroup.model_validate(body)
    except ValidationError:
        # A status written by another version: it is computed anew, the spec is what counts.
        return ServerGroup.model_validate({**body, "status": {}})


def owned_by(child: Mapping[str, Any], uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in child["metadata"].get("ownerReferences") or [])


def _is_newer(body: Mapping[str, Any], held: Mapping[str, Any] | None) -> bool:
    """An object that was made anew under its name is newer as well."""
    return held is None or _version(body) > _version(held)


def _version(body: Mapping[str, Any]) -> int:
    return int(body["metadata"].get("resourceVersion") or 0)


def trimmed(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Without managedFields, which are often half of an object, without most of what a pod was made from, and without
    statuses that built-in controllers keep for themselves: none of it decides anything here, and there are thousands
    of pods."""
    kept = dict(body)
    kept["metadata"] = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
    if kind == "Pod":
        spec = body.get("spec") or {}
        sidecars = [{"name": container["name"]} for container in spec.get("initContainers") or []]
        kept["spec"] = {"nodeName": spec.get("nodeName"), "initContainers": sidecars}
    if kind in STATUS_OF_OTHERS:
        kept.pop("status", None)
    return kept


__all__ = ["FleetKey", "FleetStore", "Registration", "component_of", "owned_by", "trimmed"]
