"""What a plan is made from: one fleet as last seen, in plain values.

Pods, objects and the Lease come from watches; probes and router tables from the operator's pollers. Nothing here is
remembered across a restart of the operator: everything can be seen again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from rolloutfleet.api.common import EngineFacts
from rolloutfleet.api.names import (
    ANNOTATION_NODES,
    ANNOTATION_PEERS,
    ANNOTATION_REVISION,
    ENCODER_TABLE_PORT,
    ENGINE_CONTAINER,
    ENGINE_PORT,
    GATE_ROUTABLE,
    LABEL_ENGINE_INDEX,
    LABEL_EPOCH,
    LABEL_GROUP_UID,
    LABEL_LANGUAGE_ONLY,
    LABEL_RANK,
    ROUTER_CONTAINER,
    ROUTER_PORT,
    WORKER_CONTAINER,
)
from rolloutfleet.api.rollout_server import RolloutServer
from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.plan.failures import Trouble, disruption, pod_trouble
from rolloutfleet.plan.gang import gang_of_pod


class NodeState(StrEnum):
    """What Kubernetes says of a pod's node."""

    READY = "Ready"
    NOT_READY = "NotReady"
    """Its kubelet has been silent for long enough (about 50 s by default), or says so itself."""
    GONE = "Gone"


@dataclass(frozen=True)
class EnginePod:
    """A pod of an engine."""

    name: str
    uid: str
    group_uid: str
    index: int
    epoch: int
    rank: int
    nodes: int
    """Pods of its engine."""
    revision: str
    language_only: bool
    """It leaves images to encoders, and keeps a table of them."""
    peers: frozenset[str]
    """Of a prefill or decode pod: revisions of the other role that it was made to work with."""
    url: str
    """Empty until the pod has an address."""
    scheduled: bool
    running_since: datetime | None
    """Start of the engine's container."""
    deleting: bool
    trouble: Trouble | None
    gate: bool | None
    """The Routable condition as it stands; None if never set."""
    deletion_due: datetime | None = None
    """Of a pod that is being deleted: when its grace period ends."""
    scheduled_at: datetime | None = None
    disruption: Trouble | None = None
    """Who ends it although it did nothing wrong."""
    node: str = ""
    """Name of its node; empty until it has one."""
    node_state: NodeState = NodeState.READY
    gang: str = ""
    """apiVersion of the PodGroup by which it is placed together with its engine's other pods; empty if in none."""
    worker: bool = False
    """A worker of ours is beside the engine and copies weights into the pod."""
    external: bool = False
    """Stands for an engine that somebody else runs: there is no pod."""

    @property
    def identity(self) -> str:
        """What one life of one engine has and no other ever: what agents' records name it by."""
        return f"{self.group_uid}/{self.index}/{self.epoch}" if self.external else self.uid

    @property
    def ended(self) -> bool:
        return self.trouble is not None and self.trouble.ended

    @property
    def alive(self) -> bool:
        return not (self.ended or self.deleting or self.disruption or self.node_state is NodeState.GONE)


@dataclass(frozen=True)
class EngineProbe:
    """What an engine said about itself."""

    answering: bool
    """GET /ping was 200."""
    paused: bool = False
    """GET /ready was 503 although /ping was 200: generation is paused."""
    label: str = ""
    """weight_version of /model_info: a label, not a proof."""
    model_path: str = ""
    """model_path of /model_info: where the weights were last loaded from."""
    misses: int = field(default=0, compare=False)
    """Looks in a row without an answer, while `answering` still says that there was one."""
    checksum: str = ""
    """per_engine_checksum of /weights_checker; empty when not read, or when the label changed since."""
    read_under: str = ""
    """Key of the training state in force when the checksum was read."""
    loaded_under: str = ""
    """Key of the training state in force when the operator itself loaded the weights, if it did."""
    facts: EngineFacts | None = None
    encoders: frozenset[str] | None = None
    """URLs in the engine's table of encoders, if it keeps one."""
    paired_with: frozenset[str] | None = None
    """Peer pods (UIDs) that were there when a request last went through this engine and one of them, without those that
    have left as planned; None if none ever did."""
    pair_failures: Mapping[str, int] = field(default_factory=dict)
    """Requests in a row that failed, by UID of the peer pod."""
    pair_error: str = ""
    closed: bool = False
    """Nobody listens at its port any more, although a connection of ours stood: its server has ended."""
    unhealthy: int = 0
    """Health checks in a row without an answer, while nobody held the engine."""
    deaf: int = 0
    """Times in a row that its scheduler did not say what its weights are, although its server answers."""
    recheck: bool = False
    """Its weights are due to be read again, although nothing says that they changed."""
    drained: str = ""
    """`drainUntil` of the drain in which its last request ended; void for any later drain."""
    load: int = field(default=0, compare=False)
    """Requests that run or wait, as last seen. Changes all the time and decides only who goes first."""

    def pair_proved(self, peers: frozenset[str]) -> EngineProbe:
        return replace(self, paired_with=peers, pair_failures={}, pair_error="")

    def peer_left(self, peer: str) -> EngineProbe:
        """A peer that had finished its requests went: nothing between the two was cut off."""
        return replace(self, paired_with=self.paired_with - {peer}) if self.paired_with is not None else self

    def pair_failed(self, peer: str, error: str) -> EngineProbe:
        failures = {**self.pair_failures, peer: self.pair_failures.get(peer, 0) + 1}
        return replace(self, pair_failures=failures, pair_error=error)


@dataclass(frozen=True)
class WorkerKind:
    """As what a router knows an engine, in its own words."""

    type: str = "regular"
    """regular, prefill or decode."""
    bootstrap_port: int | None = None


@dataclass(frozen=True)
class Worker:
    """One entry of a router's table."""

    healthy: bool
    kind: WorkerKind = WorkerKind()
    id: str = ""
    """The router's own name for this entry; one that is added anew gets another."""


@dataclass(frozen=True)
class RouterPod:
    """A replica of the router and its worker table."""

    name: str
    uid: str
    url: str
    running: bool
    trouble: Trouble | None
    gate: bool | None
    workers: Mapping[str, Worker] | None
    """By URL, as listed by the router; None while the router does not answer."""
    registering: frozenset[str] = frozenset()
    """URLs that it has been asked to add, that are not listed yet and that it may still be working on."""
    made_by: str = ""
    """Name of the ReplicaSet that made it."""


@dataclass(frozen=True)
class PodGroup:
    """What tells a scheduler that the pods of one life of an engine are to be placed together."""

    name: str
    uid: str
    api_version: str
    group_uid: str
    index: int
    epoch: int
    deleting: bool


@dataclass(frozen=True)
class LeaseView:
    """The Lease of the fleet's trainer, judged by our own clock."""

    holder: str = ""
    fence: int = 0
    expires_at: datetime | None = None

    def alive(self, now: datetime) -> bool:
        return bool(self.holder) and self.expires_at is not None and now < self.expires_at


@dataclass(frozen=True)
class Fleet:
    """One RolloutServer and all that belongs to it."""

    server: RolloutServer
    groups: tuple[ServerGroup, ...] = ()
    engine_pods: tuple[EnginePod, ...] = ()
    router_pods: tuple[RouterPod, ...] = ()
    probes: Mapping[str, EngineProbe] = field(default_factory=dict)
    """By pod UID."""
    busy: Mapping[str, str] = field(default_factory=dict)
    """Work in progress on an engine (verify, catch-up, continue), by pod UID."""
    create_failures: Mapping[str, Trouble] = field(default_factory=dict)
    """Why the API server last refused a pod or its PodGroup, by name, or another object, by `Kind/name`."""
    catch_up_failures: Mapping[str, str] = field(default_factory=dict)
    """Why the last catch-up failed, by pod UID."""
    lease: LeaseView = LeaseView()
    children: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other owned objects by `Kind/name`: ReplicaSet, Service, Role, RoleBinding."""
    gang_apis: frozenset[str] = frozenset()
    """apiVersions of the PodGroups that the cluster knows."""
    pod_groups: Mapping[str, PodGroup] = field(default_factory=dict)
    """Ours, by name."""


def engine_pod(pod: Mapping[str, Any], nodes: Mapping[str, bool | None] | None = None) -> EnginePod:
    """`nodes`: readiness of every node of the cluster; None while that is not known."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    found = EnginePod(
        name=metadata["name"],
        uid=metadata["uid"],
        group_uid=labels.get(LABEL_GROUP_UID, ""),
        index=int(labels.get(LABEL_ENGINE_INDEX, -1)),
        epoch=int(labels.get(LABEL_EPOCH, 0)),
        rank=int(labels.get(LABEL_RANK, 0)),
        nodes=int(annotations.get(ANNOTATION_NODES, 1)),
        revision=annotations.get(ANNOTATION_REVISION, ""),
        language_only=labels.get(LABEL_LANGUAGE_ONLY) == "true",
        peers=frozenset(filter(None, annotations.get(ANNOTATION_PEERS, "").split(","))),
        url=pod_url(status.get("podIP") or "", ENGINE_PORT),
        scheduled=_condition(status, "PodScheduled") is True,
        scheduled_at=_scheduled_at(status),
        running_since=_running_since(status, ENGINE_CONTAINER),
        deleting=bool(metadata.get("deletionTimestamp")),
        deletion_due=parse_time(metadata.get("deletionTimestamp") or ""),
        disruption=disruption(pod),
        trouble=pod_trouble(pod),
        gate=_condition(status, GATE_ROUTABLE),
        node=node_of(pod),
        gang=gang_of_pod(metadata),
        worker=any(c["name"] == WORKER_CONTAINER for c in (pod.get("spec") or {}).get("initContainers") or []),
    )
    return on_its_node(found, nodes)


def on_its_node(pod: EnginePod, nodes: Mapping[str, bool | None] | None) -> EnginePod:
    """The pod with what is known of its node now."""
    state = _node_state(pod.node, nodes)
    return pod if pod.node_state is state else replace(pod, node_state=state)


def node_of(pod: Mapping[str, Any]) -> str:
    return str((pod.get("spec") or {}).get("nodeName") or "")


def node_ready(node: Mapping[str, Any]) -> bool:
    return _condition(node.get("status") or {}, "Ready") is True


def _node_state(name: str, nodes: Mapping[str, bool | None] | None) -> NodeState:
    """`nodes`: whether each is ready, None of one that is gone; nobody has told yet of one that is not there."""
    if nodes is None or name not in nodes:
        return NodeState.READY
    if nodes[name] is None:
        return NodeState.GONE
    return NodeState.READY if nodes[name] else NodeState.NOT_READY


def pod_group(body: Mapping[str, Any]) -> PodGroup:
    metadata = body["metadata"]
    labels = metadata.get("labels") or {}
    return PodGroup(
        name=metadata["name"],
        uid=metadata["uid"],
        api_version=body["apiVersion"],
        group_uid=labels.get(LABEL_GROUP_UID, ""),
        index=int(labels.get(LABEL_ENGINE_INDEX, -1)),
        epoch=int(labels.get(LABEL_EPOCH, 0)),
        deleting=bool(metadata.get("deletionTimestamp")),
    )


def router_pod(
    pod: Mapping[str, Any], workers: Mapping[str, Worker] | None, registering: frozenset[str] = frozenset()
) -> RouterPod:
    metadata, status = pod["metadata"], pod.get("status") or {}
    return RouterPod(
        name=metadata["name"],
        uid=metadata["uid"],
        url=pod_url(status.get("podIP") or "", ROUTER_PORT),
        running=_running_since(status, ROUTER_CONTAINER) is not None and not metadata.get("deletionTimestamp"),
        trouble=pod_trouble(pod),
        gate=_condition(status, GATE_ROUTABLE),
        workers=workers,
        registering=registering,
        made_by=next((o["name"] for o in metadata.get("ownerReferences") or [] if o.get("controller")), ""),
    )


def pod_url(address: str, port: int) -> str:
    """The one spelling of an address everywhere: IPv6 in brackets, no trailing slash. Empty without an address."""
    if not address:
        return ""
    host = f"[{address.lower()}]" if ":" in address else address
    return f"http://{host}:{port}"


def canonical_url(url: str) -> str:
    """The same spelling for a URL that a user wrote."""
    return url.rstrip("/").lower()


_EXTERNAL = "external:"


def external_uid(url: str) -> str:
    """Key of an external engine where pods have their UID."""
    return f"{_EXTERNAL}{url}"


def is_external(uid: str) -> bool:
    return uid.startswith(_EXTERNAL)


def encoder_table_url(engine_url: str) -> str:
    """Where a language engine keeps its table of encoders."""
    return f"{engine_url.rpartition(':')[0]}:{ENCODER_TABLE_PORT}"


def parse_time(text: str) -> datetime | None:
    return datetime.fromisoformat(text.replace("Z", "+00:00")) if text else None


def containers_ready(status: Mapping[str, Any]) -> bool | None:
    """What the kubelet's own readiness probes say, whatever our gate says."""
    return _condition(status, "ContainersReady")


def _condition(status: Mapping[str, Any], kind: str) -> bool | None:
    for condition in status.get("conditions") or []:
        if condition.get("type") == kind:
            return bool(condition.get("status") == "True")
    return None


def _scheduled_at(status: Mapping[str, Any]) -> datetime | None:
    found = (c for c in status.get("conditions") or [] if c["type"] == "PodScheduled" and c["status"] == "True")
    return next((parse_time(condition.get("lastTransitionTime") or "") for condition in found), None)


def _running_since(status: Mapping[str, Any], container: str) -> datetime | None:
    for entry in status.get("containerStatuses") or []:
        running = (entry.get("state") or {}).get("running")
        if entry["name"] == container and running:
            return parse_time(running.get("startedAt") or "")
    return None
