"""The life of one engine: which life is wanted, where it stands, what is the next step.

Identity is (ServerGroup UID, index, epoch). An epoch is given out once, from the group's counter, and is written to
status before a pod of that name exists; so a crash between any two steps repeats the same step, and a verdict about
a pod can never be taken for one about its successor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from rolloutfleet.api.common import EnginePhase, Role
from rolloutfleet.api.names import engine_name
from rolloutfleet.api.server_group import EngineStatus
from rolloutfleet.api.weight_labels import belongs_elsewhere
from rolloutfleet.plan.observed import EnginePod, EngineProbe, Fleet, WorkerKind
from rolloutfleet.plan.training import Training


class Weights(StrEnum):
    """What is known about an engine's weights."""

    CURRENT = "Current"
    BEHIND = "Behind"
    UNPROVED = "Unproved"
    """The label may fit, but no checksum was read since the weights may last have changed."""


class Pairing(StrEnum):
    """Whether a prefill or decode engine is known to work with engines of the other role."""

    PROVED = "Proved"
    """A request went through it and a peer, and no peer has gone since. Regular engines need no peer."""
    UNPROVED = "Unproved"
    WAITING = "Waiting"
    """Peers exist, and none is up to try it with."""
    ALONE = "Alone"


@dataclass(frozen=True)
class EngineView:
    """One engine of a group as a plan sees it."""

    group: str
    """Name of the ServerGroup."""
    role: Role
    record: EngineStatus
    pods: tuple[EnginePod, ...]
    """Those of this life that exist, by rank; rank 0 answers for all."""
    probe: EngineProbe
    weights: Weights
    expected: str
    """Checksum of the fleet's weights in this engine's layout; empty while nobody has measured it."""
    listed: bool
    """Some router lists its URL."""
    acknowledged: bool
    """Every router that takes traffic lists its URL as healthy."""
    outdated: bool = False
    """Made from an older revision of the group's spec."""
    pairing: Pairing = Pairing.PROVED
    initial_path: str = ""
    """Where it has the model, which is weight version 0."""
    misfit: tuple[str, str] = ("", "")
    """(reason, message) why it cannot be used as it was started."""
    lacks_encoder: bool = False
    """It leaves images to encoders and knows none that is up."""
    aside: bool = False
    """Must not serve beside engines of another revision that do."""
    offload: bool = False
    """The trainer may release its memory."""
    leaving: bool = False
    """On its way out: replaced by a new revision, or scaled away."""

    @property
    def pod(self) -> EnginePod | None:
        return self.pods[0] if self.pods and self.pods[0].rank == 0 else None

    @property
    def answering(self) -> bool:
        return self.pod is not None and all(pod.alive for pod in self.pods) and self.probe.answering

    @property
    def fits(self) -> bool:
        return self.misfit == ("", "")

    @property
    def worker(self) -> WorkerKind:
        """As what routers are to list it."""
        facts = self.probe.facts
        if facts is None:
            return WorkerKind()
        return WorkerKind(type=facts.role.lower(), bootstrap_port=facts.bootstrap_port)

    @property
    def serves(self) -> bool:
        """Requests reach it, and it has the right weights."""
        proved = self.weights is Weights.CURRENT and self.pairing is Pairing.PROVED
        return self.answering and self.acknowledged and proved and self.fits and not (self.aside or self.lacks_encoder)

    def recorded(self, **fields: object) -> EngineView:
        """With these fields in its record; itself where they are so already, as they mostly are."""
        if all(getattr(self.record, name) == value for name, value in fields.items()):
            return self
        return replace(self, record=self.record.model_copy(update=fields))


NO_PROBE = EngineProbe(answering=False)


def pods_by_life(pods: Iterable[EnginePod]) -> dict[tuple[int, int], tuple[EnginePod, ...]]:
    """The pods of each life, by (index, epoch) and in there by rank."""
    lives: dict[tuple[int, int], list[EnginePod]] = {}
    for pod in pods:
        lives.setdefault((pod.index, pod.epoch), []).append(pod)
    return {life: tuple(sorted(made, key=lambda pod: pod.rank)) for life, made in lives.items()}


def complete(pods: tuple[EnginePod, ...]) -> bool:
    """Every rank has its pod."""
    return bool(pods) and len(pods) == pods[0].nodes


def started_at(pods: tuple[EnginePod, ...]) -> datetime | None:
    """When the last of its containers started; None while one has not."""
    starts = [pod.running_since for pod in pods]
    known = [start for start in starts if start is not None]
    return max(known) if complete(pods) and len(known) == len(starts) else None


def weights_of(pod: EnginePod, probe: EngineProbe, expected: str, training: Training) -> Weights:
    """Label and checksum against the committed ones. The agent's verdict counts as a checksum; a label never does.

    The verdict names a pod, and so one process; an external engine may be another one by now. A checksum that was read
    after the verdict counts more: somebody has loaded other weights since.
    """
    if probe.facts is not None and probe.facts.role == "Encoder":
        return Weights.CURRENT  # it has the vision tower alone, which no update changes
    if belongs_elsewhere(probe.label, training.fleet):
        return Weights.BEHIND  # whoever has its address by now: no verdict is about that one
    belied = bool(expected) and bool(probe.checksum) and probe.read_under == training.key and probe.checksum != expected
    if pod.identity in training.committed_pods and not pod.external and not belied:
        return Weights.CURRENT
    if not probe.checksum or probe.read_under != training.key:
        return Weights.UNPROVED
    if not training.claimed_by(probe.label):
        return Weights.BEHIND
    if not expected:
        # Nobody has measured this version in this layout: the first engine that loaded it whole defines it.
        trusted = pod.identity not in training.distrusted_pods or probe.loaded_under == training.key
        return Weights.CURRENT if trusted else Weights.BEHIND
    return Weights.CURRENT if probe.checksum == expected else Weights.BEHIND


def phase_of(
    view: EngineView, fleet: Fleet, training: Training, *, resting: tuple[str, str], mass_failure: str
) -> tuple[EnginePhase, str, str]:
    """(phase, reason, message): where the engine stands and, unless it serves, why.

    `resting`: why its next life does not begin yet; `mass_failure`: why nobody is replaced for silence.
    """
    record, pod = view.record, view.pod
    if view.role == "Placeholder" and complete(view.pods) and started_at(view.pods) is not None:
        return EnginePhase.RESERVED, "", ""
    if pod is None or pod.ended or not complete(view.pods):
        if resting[0]:
            return EnginePhase.FAILED, *resting
        lives = engine_name(view.group, record.index, record.epoch)
        for name, refused in fleet.create_failures.items():
            if name == lives or name.startswith(f"{lives}-r"):  # its PodGroup or a pod of it
                return EnginePhase.PENDING, refused.reason, refused.message
        return EnginePhase.PENDING, "PodNotCreated", ""
    scheduled = all(pod.scheduled for pod in view.pods)
    for held_up in view.pods:
        if held_up.trouble is not None:
            phase = EnginePhase.STARTING if scheduled else EnginePhase.PENDING
            message = held_up.trouble.message if len(view.pods) == 1 else f"{held_up.name}: {held_up.trouble.message}"
            return phase, held_up.trouble.reason, message
    if not scheduled and pod.gang:
        placed = sum(pod.scheduled for pod in view.pods)
        text = f"{placed} of {len(view.pods)} pods are scheduled; the scheduler places all or none"
        return EnginePhase.PENDING, "GangPending", text
    if not scheduled:
        return EnginePhase.PENDING, "NotScheduled", ""
    if pod.identity in training.memory_held:
        return EnginePhase.HELD, "MemoryReleased", "the trainer has released memory of this engine"
    if not view.probe.answering:
        if pod.external:
            return EnginePhase.STARTING, "NotAnswering", f"no answer at {pod.url}; it is not ours to restart"
        if record.started and mass_failure:
            return EnginePhase.STARTING, "MassFailure", mass_failure
        if record.started:
            return (
                EnginePhase.STARTING,
                "NotAnswering",
                f"no answer since {record.silent_since}, although its container runs",
            )
        return EnginePhase.STARTING, "Loading", "SGLang does not answer yet"
    if view.leaving:
        return EnginePhase.DRAINING, "Draining", f"out of the routers; running requests have until {record.drain_until}"
    if training.holds(offload=view.offload) and view.role != "Encoder":
        doing = "updates the fleet" if training.updating else "has released memory of the fleet"
        return EnginePhase.HELD, "TrainerHolds", f"the trainer {doing}"
    reason, message = _unready(view, fleet, training)
    return (EnginePhase.STALE if reason else EnginePhase.SERVING), reason, message


def _unready(view: EngineView, fleet: Fleet, training: Training) -> tuple[str, str]:
    """(reason, message) why an engine that answers does not serve; empty when it does."""
    pod = view.pod
    uid, identity = (pod.uid, pod.identity) if pod is not None else ("", "")
    if not view.fits:
        return view.misfit
    if view.weights is Weights.BEHIND and not training.path:
        text = f"the trainer sent version {training.version} and named no checkpoint: it takes part in the next update"
        return "AwaitingUpdate", text
    if view.weights is Weights.BEHIND and training.delta and pod is not None and not pod.worker:
        text = f"version {training.version} is a delta, which engines without spec.weights.localCopy cannot load"
        return "NoLocalCopy", text
    if view.weights is Weights.BEHIND:
        problem = fleet.catch_up_failures.get(uid)
        if problem:
            return "CatchUpFailed", problem
        if training.claimed_by(view.probe.label) and view.expected and view.probe.checksum:
            sums = f"{view.probe.checksum[:12]} and not {view.expected[:12]}"
            return "WrongWeights", f"says that it has version {training.version}, but its checksum is {sums}: loads it"
        return "WeightsBehind", f"loads version {training.version}"
    if view.weights is Weights.UNPROVED and (not view.acknowledged or identity in training.distrusted_pods):
        return "WeightsUnproved", "its weights checksum is being read"
    if view.lacks_encoder:
        return "NoEncoder", "it leaves images to encoders, and none is up"
    if view.aside:
        return "OtherRevisionServes", "prefill and decode of two revisions never pair: it waits for a pair of its own"
    if view.pairing is Pairing.ALONE:
        return "NoPeer", "there is no engine of the other role"
    # One that was listed when this operator started was proved by its predecessor: it serves while it is tried again.
    known = view.probe.paired_with is not None or view.probe.pair_failures
    if view.pairing is Pairing.WAITING and (known or not view.acknowledged):
        return "NoPeer", "no engine of the other role is up with the right weights"
    if view.pairing is Pairing.UNPROVED and (known or not view.acknowledged):
        detail = f"; the last one failed: {view.probe.pair_error}" if view.probe.pair_error else ""
        return "PairUnproved", f"a request through it and a peer is tried{detail}"
    if not view.acknowledged and view.role == "Encoder":
        return "NotRegistered", "not every language engine lists it yet"
    if not view.acknowledged:
        return "NotRegistered", "not every router lists it as healthy yet"
    return "", ""
