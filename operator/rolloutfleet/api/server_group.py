"""ServerGroup: homogeneous engines of one role. Written by the operator from a RolloutServer's group.

Users read it, scale it (`kubectl scale sgrp`), and let an HPA own its replicas.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from rolloutfleet.api.common import (
    Colocation,
    Conditions,
    DrainSeconds,
    EngineFacts,
    EnginePhase,
    EngineSpec,
    ExternalSpec,
    ModelSpec,
    RecoverySpec,
    Role,
    RollingUpdate,
    WeightsSpec,
)
from rolloutfleet.api.schema import Column, Kind, Model, Opaque, Resource, Scale


class ServerGroupSpec(Model):
    """What the engines of this group are."""

    server: Annotated[str, Field(min_length=1, max_length=63)]
    """The RolloutServer that owns this group."""
    role: Role = "Regular"
    replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    """Engines wanted."""
    model: ModelSpec
    update_weights: bool = True
    engine: EngineSpec | None = None
    """Absent for role External alone."""
    external: ExternalSpec | None = None
    language_only: bool = False
    """Its engines leave images to the server's Encoder groups."""
    offload: bool = False
    colocation: Colocation | None = None
    template: Annotated[dict[str, Any], Opaque(fields=("metadata", "spec"))] | None = None
    recovery: RecoverySpec = RecoverySpec()
    rolling_update: RollingUpdate = RollingUpdate()
    drain_timeout_seconds: DrainSeconds = 300
    weights: WeightsSpec | None = None

    @property
    def copies_weights(self) -> bool:
        """Its engines load weights from copies in their pods."""
        copied = self.weights is not None and self.weights.local_copy is not None
        return copied and self.role in ("Regular", "Prefill", "Decode")

    @property
    def own_engine(self) -> EngineSpec:
        """What pods are made of; for every role but External."""
        if self.engine is None:
            raise ValueError(f"role {self.role} has no engine of its own")
        return self.engine


class MeasuredWeights(Model):
    """Checksum of one weight version in one layout, taken from the first engine that loaded it."""

    revision: Annotated[str, Field(max_length=64)]
    """Of the engines that share the layout."""
    version: Annotated[int, Field(ge=0)]
    checksum: Annotated[str, Field(max_length=128)]


class Failure(Model):
    """How a life of an engine ended, or why it cannot begin."""

    reason: Annotated[str, Field(max_length=64)]
    message: Annotated[str, Field(max_length=1024)] = ""
    pod: Annotated[str, Field(max_length=253)] = ""
    time: Annotated[str, Field(max_length=64)] = ""
    log: Annotated[str, Field(max_length=2048)] = ""
    """The end of what the engine wrote, as its kubelet kept it."""


class Recovery(Model):
    """The way of one engine from the end of one life to serving in the next. Times are RFC 3339; empty: not yet."""

    epoch: Annotated[int, Field(ge=1)]
    """The life that takes over."""
    reason: Annotated[str, Field(max_length=64)]
    detected: Annotated[str, Field(max_length=64)]
    """The operator learned of the end, and gave out the next life."""
    replaced: Annotated[str, Field(max_length=64)] = ""
    """All pods of the next life exist."""
    loaded: Annotated[str, Field(max_length=64)] = ""
    """It answers."""
    caught_up: Annotated[str, Field(max_length=64)] = ""
    """Its weights are proved to be the fleet's."""
    routable: Annotated[str, Field(max_length=64)] = ""
    """Every router lists it as healthy."""


class EngineStatus(Model):
    """One engine: identity (index, epoch), phase and the reason why it does not serve."""

    index: Annotated[int, Field(ge=0)]
    epoch: Annotated[int, Field(ge=1)]
    """The life that the operator wants now. Raised here before pods of that life are created."""
    revision: Annotated[str, Field(max_length=64)] = ""
    """Hash of the spec that this life was started from."""
    phase: EnginePhase = EnginePhase.PENDING
    reason: Annotated[str, Field(max_length=64)] = ""
    message: Annotated[str, Field(max_length=1024)] = ""
    url: Annotated[str, Field(max_length=512)] = ""
    """Where the engine's rank 0 answers; empty while it has no address."""
    pod: Annotated[str, Field(max_length=253)] = ""
    """Name of the rank 0 pod; of an external engine, the name that its pod would have."""
    pod_uid: Annotated[str, Field(max_length=64)] = ""
    """UID of that pod once all pods of this life were seen: when one is gone this life has ended, and no name of it is
    ever used again. Of an external engine that has answered, its name."""
    weight_version: Annotated[int, Field(ge=0)] | None = None
    """Known only after the engine's weights checksum agreed with the fleet's."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Lives that ended by a failure, ever."""
    failures_in_row: Annotated[int, Field(ge=0)] = 0
    """Failures since the engine last served for `recovery.backoff.resetAfterSeconds`; sets the backoff."""
    serving_since: Annotated[str, Field(max_length=64)] = ""
    """Since when it has served; empty while it does not, unless the trainer holds it."""
    retry_at: Annotated[str, Field(max_length=64)] = ""
    """When the next life may begin, while phase is Failed."""
    facts: EngineFacts | None = None
    """Of an external engine: what it says of itself."""
    silent_since: Annotated[str, Field(max_length=64)] = ""
    """When it stopped answering, although it runs."""
    started: bool = False
    """This life has answered: what counts from now on is silence, no longer the startup deadline."""
    drain_until: Annotated[str, Field(max_length=64)] = ""
    """While Draining: when requests that still run are aborted."""
    last_failure: Failure | None = None
    recoveries: Annotated[tuple[Recovery, ...], Field(max_length=5)] = ()
    """The last ones, oldest first; one alone in groups of more than a hundred engines: objects in etcd are bounded."""


class ServerGroupStatus(Model):
    """What is observed.

    Lists are atomic: they have one writer, and an API server that keeps an owner for each field of each engine spends
    half as much again on every write of six engines, and several times as much on one of a hundred.
    """

    observed_generation: int = 0
    replicas: int = 0
    """Engines that have a pod; the scale subresource reports it."""
    ready: int = 0
    """Engines that answer."""
    routable: int = 0
    """Engines with the right weights that every router replica lists as healthy."""
    selector: Annotated[str, Field(max_length=512)] = ""
    weight_version: Annotated[int, Field(ge=0)] | None = None
    """The fleet's weight version, if every routable engine has it."""
    last_epoch: Annotated[int, Field(ge=0)] = 0
    """Highest epoch given out in this group: no engine ever uses an epoch twice."""
    measured: Annotated[tuple[MeasuredWeights, ...], Field(max_length=32)] = ()
    """For version 0, and where no engine of a layout took part in the trainer's update."""
    conditions: Conditions = ()
    engines: Annotated[tuple[EngineStatus, ...], Field(max_length=1024)] = ()


class ServerGroup(Resource):
    """Homogeneous SGLang engines of one role."""

    kind_info: ClassVar[Kind] = Kind(
        name="ServerGroup",
        plural="servergroups",
        singular="servergroup",
        short_names=("sgrp",),
        scale=Scale(spec=".spec.replicas", status=".status.replicas", selector=".status.selector"),
        columns=(
            Column("Server", ".spec.server"),
            Column("Role", ".spec.role"),
            Column("Desired", ".spec.replicas", type="integer"),
            Column("Ready", ".status.ready", type="integer"),
            Column("Routable", ".status.routable", type="integer"),
            Column("Weights", ".status.weightVersion", type="integer"),
            Column("Reason", '.status.conditions[?(@.type=="Ready")].reason'),
            Column("Message", '.status.conditions[?(@.type=="Ready")].message', priority=1),
            Column("Age", ".metadata.creationTimestamp", type="date"),
        ),
    )

    spec: ServerGroupSpec
    status: ServerGroupStatus = ServerGroupStatus()

    @property
    def server_uid(self) -> str:
        """UID of the RolloutServer that it was made for."""
        owners = self.metadata.get("ownerReferences") or []
        return next((str(owner["uid"]) for owner in owners if owner.get("kind") == "RolloutServer"), "")
