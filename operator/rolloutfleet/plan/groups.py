"""The engines of one ServerGroup: which lives are wanted, which pods to make and to delete, who is on its way out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from rolloutfleet.api.common import EnginePhase
from rolloutfleet.api.server_group import EngineStatus, Failure, ServerGroup
from rolloutfleet.plan.actions import Action, CreatePod, DeletePod
from rolloutfleet.plan.engine_pod import engine_pod
from rolloutfleet.plan.engines import (
    NO_PROBE,
    EngineView,
    Weights,
    current_pod,
    ended,
    next_life,
    phase_of,
    waiting_for_retry,
    weights_of,
)
from rolloutfleet.plan.membership import acknowledged_everywhere, listed_anywhere
from rolloutfleet.plan.observed import EnginePod, Fleet
from rolloutfleet.plan.overlay import OverlayError
from rolloutfleet.plan.revision import group_revision
from rolloutfleet.plan.training import Training, expected_checksum


@dataclass(frozen=True)
class GroupPlan:
    """What becomes of a group: its engines as they will stand in status, and its pods."""

    group: ServerGroup
    engines: tuple[EngineView, ...]
    last_epoch: int
    measured: Mapping[str, Any]
    """Fields of status that change because a checksum was measured."""
    pod_actions: tuple[Action, ...]
    invalid: str = ""
    """Why no pod can be built from the spec."""


def plan_group(group: ServerGroup, fleet: Fleet, training: Training, now: datetime) -> GroupPlan:
    revision = group_revision(group.spec)
    pods = tuple(pod for pod in fleet.engine_pods if pod.group_uid == group.uid)
    epochs = _Epochs(group, pods)
    measured = _measured(group, pods, fleet, revision, training)
    expecting = group.model_copy(update={"status": group.status.model_copy(update=measured)})
    records = {record.index: record for record in group.status.engines}
    for index in range(group.spec.replicas):
        if index not in records:
            records[index] = EngineStatus(index=index, epoch=epochs.next(), revision=revision)

    seen = [_look(record, pods, fleet, expecting, training) for _, record in sorted(records.items())]
    victim = _victim(group, seen, revision, training)
    engines: list[EngineView] = []
    for view in seen:
        surplus = view.record.index >= group.spec.replicas
        leaving = surplus or view.record.index == victim
        if surplus and not (view.answering and view.listed):
            continue  # its record goes, and with it its pods
        view = replace(view, leaving=leaving)
        engines.append(_next(view, group, revision, epochs, training, now))

    invalid, pod_actions = _pods(group, engines, pods, now)
    engines = [_with_phase(view, fleet, training, now, invalid) for view in engines]
    return GroupPlan(
        group=group,
        engines=tuple(engines),
        last_epoch=epochs.last,
        measured=measured,
        pod_actions=tuple(pod_actions),
        invalid=invalid,
    )


class _Epochs:
    """Gives out epochs: above everything that status or any pod has ever used."""

    def __init__(self, group: ServerGroup, pods: tuple[EnginePod, ...]) -> None:
        used = [record.epoch for record in group.status.engines] + [pod.epoch for pod in pods]
        self.last = max([group.status.last_epoch, *used])

    def next(self) -> int:
        self.last += 1
        return self.last


def _measured(
    group: ServerGroup, pods: tuple[EnginePod, ...], fleet: Fleet, revision: str, training: Training
) -> dict[str, Any]:
    """Checksum of the fleet's version where the agent gave none: that of the first engine that loaded it."""
    if expected_checksum(training, group, revision) or training.held:
        return {}
    for pod in sorted(pods, key=lambda pod: (pod.index, pod.epoch)):
        probe = fleet.probes.get(pod.uid, NO_PROBE)
        proved = bool(probe.checksum) and weights_of(pod, probe, "", training) is Weights.CURRENT
        if proved and pod.alive and pod.revision == revision:
            return {
                "measured_version": training.version,
                "measured_revision": revision,
                "measured_checksum": probe.checksum,
            }
    return {}


def _look(
    record: EngineStatus, pods: tuple[EnginePod, ...], fleet: Fleet, group: ServerGroup, training: Training
) -> EngineView:
    pod = current_pod(record, pods)
    probe = fleet.probes.get(pod.uid, NO_PROBE) if pod else NO_PROBE
    expected = expected_checksum(training, group, record.revision)
    return EngineView(
        group=group.name,
        record=record,
        pod=pod,
        probe=probe,
        weights=weights_of(pod, probe, expected, training) if pod else Weights.UNPROVED,
        expected=expected,
        listed=bool(pod and pod.url) and listed_anywhere(pod.url if pod else "", fleet.router_pods),
        acknowledged=acknowledged_everywhere(pod.url if pod else "", fleet.router_pods),
    )


def _victim(group: ServerGroup, views: list[EngineView], revision: str, training: Training) -> int | None:
    """The one serving engine of an old revision that goes next: only while all the others serve."""
    if training.held:
        return None
    wanted = [view for view in views if view.record.index < group.spec.replicas]
    outdated = [view for view in wanted if view.record.revision != revision and _serves(view)]
    draining = [view for view in wanted if view.record.revision != revision and view.answering]
    if not draining:
        return None
    victim = min(draining, key=lambda view: view.record.index)
    others = [view for view in wanted if view is not victim]
    if outdated and not all(_serves(view) for view in others):
        return None
    return victim.record.index


def _serves(view: EngineView) -> bool:
    return view.answering and view.acknowledged and view.weights is Weights.CURRENT


def _next(
    view: EngineView, group: ServerGroup, revision: str, epochs: _Epochs, training: Training, now: datetime
) -> EngineView:
    """The engine with the life that it should have: this one, or a new one."""
    record = view.record
    failure = ended(record, view.pod, group.spec.recovery, now, view.probe.answering)
    if view.pod is not None and view.pod.name in training.ambiguous_pods:
        text = "the trainer died while it released or resumed this engine's memory"
        failure = failure or Failure(reason="MemoryUnknown", message=text, pod=view.pod.name)
    replaced = record.revision != revision and (
        not view.answering or (view.leaving and not view.listed and record.index < group.spec.replicas)
    )
    if replaced:
        # A changed spec may cure whatever failed: no backoff, and nothing counts as a failure.
        fresh = EngineStatus(
            index=record.index,
            epoch=epochs.next(),
            revision=revision,
            restarts=record.restarts,
            last_failure=record.last_failure,
        )
        return _reborn(view, fresh)
    if failure is not None:
        return _reborn(view, next_life(record, failure, epochs.next(), group.spec.recovery, now))
    if view.pod is not None:
        serving = _serves(view)
        record = record.model_copy(
            update={
                "pod": view.pod.name,
                "pod_uid": view.pod.uid,
                "url": view.pod.url,
                "retry_at": "",
                "failures_in_row": 0 if serving else record.failures_in_row,
            }
        )
    return replace(view, record=record)


def _reborn(view: EngineView, record: EngineStatus) -> EngineView:
    return replace(
        view,
        record=record,
        pod=None,
        probe=NO_PROBE,
        weights=Weights.UNPROVED,
        listed=False,
        acknowledged=False,
        leaving=False,
    )


def _pods(
    group: ServerGroup, engines: list[EngineView], pods: tuple[EnginePod, ...], now: datetime
) -> tuple[str, list[Action]]:
    actions: list[Action] = []
    keep = {view.pod.uid for view in engines if view.pod is not None}
    resting = {view.record.index for view in engines if waiting_for_retry(view.record, now)}
    newest_ended = {
        index: max((pod.epoch for pod in pods if pod.index == index and pod.ended), default=0) for index in resting
    }
    for pod in pods:
        if pod.uid in keep or pod.deleting:
            continue
        evidence = pod.ended and newest_ended.get(pod.index) == pod.epoch
        if not evidence:  # the last failed pod stays for diagnosis until its successor starts
            actions.append(DeletePod(name=pod.name, uid=pod.uid))
    for view in engines:
        if view.pod is None and view.record.index not in resting:
            try:
                actions.append(CreatePod(engine_pod(group, index=view.record.index, epoch=view.record.epoch)))
            except OverlayError as error:
                return str(error), actions
    return "", actions


def _with_phase(view: EngineView, fleet: Fleet, training: Training, now: datetime, invalid: str) -> EngineView:
    phase, reason, message = phase_of(view, fleet, training, now)
    if invalid and view.pod is None:
        phase, reason, message = EnginePhase.PENDING, "InvalidTemplate", invalid
    version = training.version if view.weights is Weights.CURRENT and view.pod is not None else None
    record = view.record.model_copy(
        update={"phase": phase, "reason": reason, "message": message, "weight_version": version}
    )
    return replace(view, record=record)
