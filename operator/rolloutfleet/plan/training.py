"""What the trainer's agent has committed or is about to change, as the operator may rely on it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from rolloutfleet.api.names import INITIAL_WEIGHT_VERSION
from rolloutfleet.api.rollout_server import TrainingStatus, WeightsPhase
from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.api.weight_labels import claims, fleet_id
from rolloutfleet.plan.observed import Fleet, parse_time


@dataclass(frozen=True)
class Training:
    """The fleet's weights, and whether the trainer holds the engines right now."""

    fleet: str
    """By what name labels of weights know it."""
    version: int
    path: str
    """Checkpoint of this version, from which engines are brought up to date; empty where the trainer sent it and named
    none."""
    delta: bool
    """What lies there are changes only: a worker makes a checkpoint of them."""
    held: bool
    """An update runs, or memory is released, and the trainer is alive: hands off the engines."""
    updating: bool
    """An update runs: the part of `held` that ends within its deadline."""
    offloading: bool
    """The trainer is alive and has released memory, or is about to: the part of `held` that groups with `offload`
    alone take part in."""
    held_until: datetime | None
    """When `held` ends by itself: the update's deadline or the end of the lease."""
    memory_held: frozenset[str]
    """Pods, by identity, whose memory the trainer has released, whether it still lives or not, and those that it is
    about to."""
    ambiguous_pods: frozenset[str]
    """Pods of which nobody can know what memory they hold, since a trainer died while it released or resumed it, or
    the call broke off: another call would kill them. They are replaced."""
    committed_pods: frozenset[str]
    """Pods that the agent verified at the committed version, by checksum."""
    distrusted_pods: frozenset[str]
    """Pods that the last update touched and could not verify."""
    checksums: dict[tuple[str, str], str]
    """Checksum of the committed version by (ServerGroup, revision), as the agent measured it; none for version 0."""
    key: str
    """Changes whenever anything may have changed an engine's weights, or which are the fleet's: what was read or
    planned under another key is void."""

    def holds(self, *, offload: bool) -> bool:
        """Hands off an engine of a group that has, or has not, set `offload`."""
        return self.updating or (self.offloading and offload)

    def claimed_by(self, label: str) -> bool:
        """An engine with this label says that it holds the committed weights."""
        return claims(label, self.version, self.fleet)


def training_of(fleet: Fleet, now: datetime) -> Training:
    status = fleet.server.status.training or TrainingStatus()
    weights, memory = status.weights, status.memory
    alive = fleet.lease.alive(now)
    deadline = parse_time(weights.deadline) if weights else None
    updating = weights is not None and weights.phase == WeightsPhase.UPDATING
    ours = fleet.lease.fence == status.fence
    # An update dies with its leader: the next one has another fencing number and holds nothing by it.
    update_held = updating and alive and ours and (deadline is None or now < deadline)
    led = alive and memory is not None and memory.fence == fleet.lease.fence
    entries = memory.engines if memory is not None else ()
    active = memory is not None and memory.phase != "Resident"
    offloading = active and alive
    ambiguous = {entry.uid for entry in entries if entry.state == "Unknown" or (entry.state == "Changing" and not led)}
    # One that is being drained, or is resident again and waits for the others, has released nothing: it is left to the
    # trainer only as long as that lives.
    memory_held = {entry.uid for entry in entries if entry.released or entry.state != "Known" or (active and led)}
    ends = [end for end in (fleet.lease.expires_at, deadline if updating else None) if end is not None]
    held = update_held or offloading
    verdicts = weights.engines if weights and not updating else ()
    version = weights.version if weights else INITIAL_WEIGHT_VERSION
    return Training(
        fleet=fleet_id(fleet.server.uid),
        version=version,
        path=weights.path if weights is not None and version > INITIAL_WEIGHT_VERSION else fleet.server.spec.model.path,
        delta=weights is not None and weights.transport == "delta" and not updating,
        held=held,
        updating=update_held,
        offloading=offloading,
        held_until=min(ends) if held and ends else None,
        memory_held=frozenset(memory_held),
        ambiguous_pods=frozenset(ambiguous),
        committed_pods=frozenset(verdict.uid for verdict in verdicts if verdict.outcome == "Committed"),
        distrusted_pods=frozenset(verdict.uid for verdict in verdicts if verdict.outcome != "Committed"),
        checksums={(entry.group, entry.revision): entry.checksum for entry in weights.checksums} if weights else {},
        key=f"{weights.transaction if weights else 0}/{version}/{'held' if update_held else 'free'}",
    )


def expected_checksum(training: Training, group: ServerGroup, revision: str) -> str:
    """Checksum that an engine of this group must have; empty while nobody has measured it."""
    known = training.checksums.get((group.name, revision), "")
    measured = {entry.revision: entry for entry in group.status.measured if entry.version == training.version}
    return known or (measured[revision].checksum if revision in measured else "")
