"""What a plan may ask for. Each action is one step of I/O, safe to repeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolloutfleet.plan.observed import WorkerKind


@dataclass(frozen=True)
class Apply:
    """Server-side apply of an object that the operator owns."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class ApplyStatus:
    """Server-side apply of our part of a status."""

    kind: str
    name: str
    uid: str
    status: Mapping[str, Any]
    version: str = ""
    """resourceVersion that the object must still have; empty: any."""


@dataclass(frozen=True)
class CreatePod:
    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class CreatePodGroup:
    """Before the pods that carry its name: they are made once it is seen."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class DeletePod:
    name: str
    uid: str
    force: bool = False
    """From the API at once, without the word of its kubelet, which is lost."""


@dataclass(frozen=True)
class DeleteObject:
    """An owned object that is not wanted any more."""

    kind: str
    name: str
    uid: str
    api_version: str = ""
    """Of a kind that more than one API group has: PodGroup."""


@dataclass(frozen=True)
class SetGate:
    """The Routable condition of a pod."""

    pod: str
    uid: str
    routable: bool
    reason: str
    message: str


@dataclass(frozen=True)
class Register:
    """Add an engine to one router replica. Refused when the trainer has begun an update since we looked."""

    router: str
    router_uid: str
    router_url: str
    url: str
    kind: WorkerKind
    training_key: str


@dataclass(frozen=True)
class Deregister:
    """Take out the entry that the table had when we looked, and no later one of the same URL."""

    router: str
    router_uid: str
    router_url: str
    url: str
    worker_id: str


@dataclass(frozen=True)
class Verify:
    """Read an engine's label and weights checksum."""

    pod_uid: str
    url: str
    training_key: str


@dataclass(frozen=True)
class Adopt:
    """Label an engine with the version that its weights are, and the fleet: nothing is loaded."""

    pod_uid: str
    url: str
    version: int
    fleet: str
    training_key: str


@dataclass(frozen=True)
class CatchUp:
    """Load a committed checkpoint into an engine that no router lists, and let it continue."""

    pod_uid: str
    url: str
    path: str
    version: int
    fleet: str
    expected: str
    """Checksum that it must have afterwards; empty while nobody has measured it."""
    training_key: str
    copied: bool = False
    """By the worker beside the engine, into its pod, before it is loaded from there."""


@dataclass(frozen=True)
class Continue:
    """Resume generation on an engine that nobody holds and whose weights are right."""

    pod_uid: str
    url: str
    training_key: str


@dataclass(frozen=True)
class PairCheck:
    """Send one request through a prefill and a decode engine, as a router would."""

    prefill_uid: str
    prefill_url: str
    bootstrap_host: str
    bootstrap_port: int | None
    decode_uid: str
    decode_url: str
    prefill_peers: frozenset[str]
    """Pods that the prefill engine is known to work with if the request succeeds: those there are now."""
    decode_peers: frozenset[str]
    training_key: str


@dataclass(frozen=True)
class Drain:
    """Look whether an engine that no router lists has finished its requests; after the time is up, abort them."""

    pod_uid: str
    url: str
    until: str
    """The drain that this look belongs to: its `drainUntil`."""
    abort: bool


@dataclass(frozen=True)
class RegisterEncoder:
    """Tell a language engine of an encoder."""

    pod_uid: str
    """Of the language engine."""
    table: str
    """URL of its table."""
    url: str


@dataclass(frozen=True)
class UnregisterEncoder:
    pod_uid: str
    table: str
    url: str


@dataclass(frozen=True)
class Emit:
    """A Kubernetes event, on a transition."""

    kind: str
    name: str
    uid: str
    warning: bool
    reason: str
    message: str


@dataclass(frozen=True)
class Requeue:
    """Look again after so many seconds, although nothing may have changed: a deadline passes by itself."""

    seconds: float


Action = (
    Apply
    | ApplyStatus
    | CreatePod
    | CreatePodGroup
    | DeletePod
    | DeleteObject
    | SetGate
    | Register
    | Deregister
    | Verify
    | Adopt
    | CatchUp
    | Continue
    | PairCheck
    | Drain
    | RegisterEncoder
    | UnregisterEncoder
    | Emit
    | Requeue
)
