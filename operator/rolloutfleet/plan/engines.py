"""The life of one engine: which life is wanted, where it stands, what is the next step.

Identity is (ServerGroup UID, index, epoch). An epoch is given out once, from the group's counter, and is written to
status before a pod of that name exists; so a crash between any two steps repeats the same step, and a verdict about
a pod can never be taken for one about its successor.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from rolloutfleet.api.common import EnginePhase, RecoverySpec
from rolloutfleet.api.names import engine_pod_name
from rolloutfleet.api.server_group import EngineStatus, Failure
from rolloutfleet.plan.observed import EnginePod, EngineProbe, Fleet, parse_time
from rolloutfleet.plan.training import Training


class Weights(StrEnum):
    """What is known about an engine's weights."""

    CURRENT = "Current"
    BEHIND = "Behind"
    UNPROVED = "Unproved"
    """The label may fit, but no checksum was read since the weights may last have changed."""


@dataclass(frozen=True)
class EngineView:
    """One engine of a group as a plan sees it."""

    group: str
    """Name of the ServerGroup."""
    record: EngineStatus
    pod: EnginePod | None
    probe: EngineProbe
    weights: Weights
    expected: str
    """Checksum of the fleet's weights in this engine's layout; empty while nobody has measured it."""
    listed: bool
    """Some router lists its URL."""
    acknowledged: bool
    """Every router that takes traffic lists its URL as healthy."""
    leaving: bool = False
    """On its way out: replaced by a new revision, or scaled away."""

    @property
    def answering(self) -> bool:
        return self.pod is not None and self.pod.alive and self.probe.answering


NO_PROBE = EngineProbe(answering=False)


def current_pod(record: EngineStatus, pods: tuple[EnginePod, ...]) -> EnginePod | None:
    """The rank 0 pod of the life that the record names."""
    for pod in pods:
        if pod.index == record.index and pod.epoch == record.epoch and pod.rank == 0:
            return pod
    return None


def ended(
    record: EngineStatus, pod: EnginePod | None, recovery: RecoverySpec, now: datetime, answering: bool
) -> Failure | None:
    """Why this life of the engine is over, or None while it goes on."""
    if pod is None:
        if record.pod_uid:
            return Failure(reason="PodDeleted", message="the pod is gone", pod=record.pod)
        return None  # not created yet
    if record.pod_uid and pod.uid != record.pod_uid:
        return Failure(reason="PodDeleted", message="another pod took its name", pod=pod.name)
    if pod.trouble is not None and pod.trouble.ended:
        return Failure(reason=pod.trouble.reason, message=pod.trouble.message, pod=pod.name)
    if pod.deleting:
        return Failure(reason="PodDeleted", message="the pod was deleted", pod=pod.name)
    if pod.running_since is not None and not answering:
        deadline = timedelta(seconds=recovery.startup_deadline_seconds)
        if record.phase in (EnginePhase.STARTING, EnginePhase.PENDING) and now - pod.running_since > deadline:
            text = f"not answering {recovery.startup_deadline_seconds} s after its container started"
            return Failure(reason="StartupDeadlineExceeded", message=text, pod=pod.name)
    return None


HARMLESS_ENDS = frozenset(
    {"PodDeleted", "MemoryUnknown", "Evicted", "Preempting", "TerminationByKubelet", "NodeShutdown"}
)
"""Ends that say nothing against the engine: the next life begins at once and no backoff grows."""


def next_life(
    record: EngineStatus, failure: Failure, epoch: int, recovery: RecoverySpec, now: datetime
) -> EngineStatus:
    """The record of the life after one that ended."""
    stamp = now.isoformat(timespec="seconds")
    blameless = failure.reason in HARMLESS_ENDS
    failures = record.failures_in_row if blameless else record.failures_in_row + 1
    pause = timedelta() if blameless else backoff(failures, recovery)
    return EngineStatus(
        index=record.index,
        epoch=epoch,
        revision=record.revision,
        phase=EnginePhase.PENDING if blameless else EnginePhase.FAILED,
        restarts=record.restarts + 1,
        failures_in_row=failures,
        retry_at="" if blameless else (now + pause).isoformat(timespec="seconds"),
        last_failure=failure.model_copy(update={"time": stamp}),
    )


def backoff(failures: int, recovery: RecoverySpec) -> timedelta:
    """initialSeconds, doubled with each further failure in a row, at most maxSeconds."""
    seconds = recovery.backoff.initial_seconds * 2 ** min(max(failures - 1, 0), 30)
    return timedelta(seconds=min(seconds, recovery.backoff.max_seconds))


def waiting_for_retry(record: EngineStatus, now: datetime) -> bool:
    retry_at = parse_time(record.retry_at)
    return retry_at is not None and now < retry_at


def weights_of(pod: EnginePod, probe: EngineProbe, expected: str, training: Training) -> Weights:
    """Label and checksum against the committed ones. The agent's verdict counts as a checksum; a label never does."""
    if pod.name in training.committed_pods:
        return Weights.CURRENT
    if not probe.checksum or probe.read_under != training.key:
        return Weights.UNPROVED
    if probe.label != str(training.version):
        return Weights.BEHIND
    if not expected:
        # Nobody has measured this version in this layout: the first engine that loaded it whole defines it.
        trusted = pod.name not in training.distrusted_pods or probe.loaded_under == training.key
        return Weights.CURRENT if trusted else Weights.BEHIND
    return Weights.CURRENT if probe.checksum == expected else Weights.BEHIND


def phase_of(view: EngineView, fleet: Fleet, training: Training, now: datetime) -> tuple[EnginePhase, str, str]:
    """(phase, reason, message): where the engine stands and, unless it serves, why."""
    record, pod = view.record, view.pod
    if pod is None or pod.ended:
        if waiting_for_retry(record, now) and record.last_failure is not None:
            return EnginePhase.FAILED, record.last_failure.reason, record.last_failure.message
        refused = fleet.create_failures.get(engine_pod_name(view.group, record.index, record.epoch, 0))
        if refused is not None:
            return EnginePhase.PENDING, refused.reason, refused.message
        return EnginePhase.PENDING, "PodNotCreated", ""
    if pod.trouble is not None:
        return (
            (EnginePhase.STARTING if pod.scheduled else EnginePhase.PENDING),
            pod.trouble.reason,
            pod.trouble.message,
        )
    if not pod.scheduled:
        return EnginePhase.PENDING, "NotScheduled", ""
    if pod.name in training.memory_held:
        return EnginePhase.HELD, "MemoryReleased", "the trainer has released memory of this engine"
    if not view.probe.answering:
        if view.listed:
            return EnginePhase.STARTING, "NotAnswering", "no answer on /ping"
        return EnginePhase.STARTING, "Loading", "SGLang does not answer yet"
    if view.leaving:
        return EnginePhase.DRAINING, "Replaced", "a newer revision or a smaller scale takes its place"
    if training.held:
        return EnginePhase.HELD, "TrainerUpdates", "the trainer updates the fleet"
    if view.weights is Weights.BEHIND:
        problem = fleet.catch_up_failures.get(pod.uid)
        if problem:
            return EnginePhase.STALE, "CatchUpFailed", problem
        return EnginePhase.STALE, "WeightsBehind", f"loads version {training.version}"
    if view.weights is Weights.UNPROVED and (not view.acknowledged or pod.name in training.distrusted_pods):
        return EnginePhase.STALE, "WeightsUnproved", "its weights checksum is being read"
    if not view.acknowledged:
        return EnginePhase.STALE, "NotRegistered", "not every router lists it as healthy yet"
    return EnginePhase.SERVING, "", ""
