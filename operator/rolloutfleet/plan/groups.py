"""The engines of one ServerGroup: which lives are wanted, which pods to make and to delete, who is on its way out.

Two steps, since what an engine may do can depend on engines of other groups: `look_at` each group, then `plan_group`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from rolloutfleet.api.common import EnginePhase
from rolloutfleet.api.server_group import EngineStatus, Failure, ServerGroup
from rolloutfleet.plan.actions import Action, CreatePod, DeletePod
from rolloutfleet.plan.changes import drain_until, drained, engines_wanted, free_indexes, outdated_to_replace, surplus
from rolloutfleet.plan.engine_pod import engine_pod
from rolloutfleet.plan.engines import (
    NO_PROBE,
    EngineView,
    Pairing,
    Weights,
    complete,
    ended,
    next_life,
    phase_of,
    pods_of_life,
    waiting_for_retry,
    weights_of,
)
from rolloutfleet.plan.membership import acknowledged_everywhere, listed_anywhere
from rolloutfleet.plan.observed import EnginePod, Fleet
from rolloutfleet.plan.overlay import OverlayError
from rolloutfleet.plan.pairing import OTHER, peer_revisions, stuck
from rolloutfleet.plan.revision import group_revision
from rolloutfleet.plan.training import Training, expected_checksum


@dataclass(frozen=True)
class GroupView:
    """A group and its engines as they are now; engines that are missing have a record already."""

    group: ServerGroup
    revision: str
    pods: tuple[EnginePod, ...]
    engines: tuple[EngineView, ...]
    epochs: Epochs
    measured: Mapping[str, Any]
    """Fields of status that change because a checksum was measured."""


@dataclass(frozen=True)
class GroupPlan:
    """What becomes of a group: its engines as they will stand in status, and its pods."""

    group: ServerGroup
    engines: tuple[EngineView, ...]
    last_epoch: int
    measured: Mapping[str, Any]
    pod_actions: tuple[Action, ...]
    invalid: str = ""
    """Why no pod can be built from the spec."""


def look_at(group: ServerGroup, fleet: Fleet, training: Training) -> GroupView:
    revision = group_revision(group.spec)
    pods = tuple(pod for pod in fleet.engine_pods if pod.group_uid == group.uid)
    epochs = Epochs(group, pods)
    measured = _measured(group, pods, fleet, revision, training)
    expecting = group.model_copy(update={"status": group.status.model_copy(update=measured)})
    records = list(group.status.engines)
    records += [
        EngineStatus(index=index, epoch=epochs.next(), revision=revision)
        for index in free_indexes(records, engines_wanted(group, revision, training))
    ]
    records.sort(key=lambda record: record.index)
    return GroupView(
        group=group,
        revision=revision,
        pods=pods,
        engines=tuple(_look(record, pods, fleet, expecting, revision, training) for record in records),
        epochs=epochs,
        measured=measured,
    )


def plan_group(
    seen: GroupView, peers: Sequence[EngineView], fleet: Fleet, training: Training, now: datetime
) -> GroupPlan:
    """`peers`: the engines of all groups, this one's among them."""
    group = seen.group
    scaled_away = surplus(seen.engines, engines_wanted(group, seen.revision, training), training)
    staying = [view for view in seen.engines if view.record.index not in scaled_away]
    replaced = set() if training.held else outdated_to_replace(staying, group.spec.replicas, group.spec.rolling_update)
    engines: list[EngineView] = []
    for view in seen.engines:
        view = _leaving(view, view.record.index in scaled_away | replaced, group, now)
        if view.record.index in scaled_away and drained(view, now):
            continue  # its record goes, and with it its pods
        engines.append(_next(view, seen, peers, training, now))

    invalid, pod_actions = _pods(seen, engines, peer_revisions(group.spec.role, fleet.groups), now)
    engines = [_with_phase(view, fleet, training, now, invalid) for view in engines]
    return GroupPlan(
        group=group,
        engines=tuple(engines),
        last_epoch=seen.epochs.last,
        measured=seen.measured,
        pod_actions=tuple(pod_actions),
        invalid=invalid,
    )


class Epochs:
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
    record: EngineStatus,
    pods: tuple[EnginePod, ...],
    fleet: Fleet,
    group: ServerGroup,
    revision: str,
    training: Training,
) -> EngineView:
    life = pods_of_life(record, pods)
    pod = life[0] if life and life[0].rank == 0 else None
    probe = fleet.probes.get(pod.uid, NO_PROBE) if pod else NO_PROBE
    expected = expected_checksum(training, group, record.revision)
    return EngineView(
        group=group.name,
        role=group.spec.role,
        record=record,
        pods=life,
        probe=probe,
        weights=weights_of(pod, probe, expected, training) if pod else Weights.UNPROVED,
        expected=expected,
        listed=bool(pod and pod.url) and listed_anywhere(pod.url if pod else "", fleet.router_pods),
        acknowledged=acknowledged_everywhere(pod.url if pod else "", fleet.router_pods),
        outdated=record.revision != revision,
    )


def _leaving(view: EngineView, leaving: bool, group: ServerGroup, now: datetime) -> EngineView:
    until = drain_until(view, group.spec.drain_timeout_seconds, now) if leaving and view.answering else ""
    return replace(view, leaving=leaving, record=view.record.model_copy(update={"drain_until": until}))


def _next(
    view: EngineView, seen: GroupView, peers: Sequence[EngineView], training: Training, now: datetime
) -> EngineView:
    """The engine with the life that it should have: this one, or a new one."""
    record, recovery = view.record, seen.group.spec.recovery
    failure = ended(record, view.pods, recovery, now, view.probe.answering) or stuck(view, peers)
    if view.pod is not None and view.pod.name in training.ambiguous_pods:
        text = "the trainer died while it released or resumed this engine's memory"
        failure = failure or Failure(reason="MemoryUnknown", message=text, pod=view.pod.name)
    if view.outdated and (not view.answering or (view.leaving and drained(view, now))):
        # A changed spec may cure whatever failed: no backoff, and nothing counts as a failure.
        fresh = EngineStatus(
            index=record.index,
            epoch=seen.epochs.next(),
            revision=seen.revision,
            restarts=record.restarts,
            last_failure=record.last_failure,
        )
        return _reborn(view, fresh)
    if failure is not None:
        return _reborn(view, next_life(record, failure, seen.epochs.next(), recovery, now))
    if view.pod is not None and complete(view.pods):
        record = record.model_copy(
            update={
                "pod": view.pod.name,
                "pod_uid": view.pod.uid,
                "url": view.pod.url,
                "retry_at": "",
                "failures_in_row": 0 if view.serves else record.failures_in_row,
            }
        )
    return replace(view, record=record)


def _reborn(view: EngineView, record: EngineStatus) -> EngineView:
    return replace(
        view,
        record=record,
        pods=(),
        probe=NO_PROBE,
        weights=Weights.UNPROVED,
        listed=False,
        acknowledged=False,
        outdated=False,
        pairing=Pairing.ALONE if view.role in OTHER else Pairing.PROVED,
        aside=False,
        leaving=False,
    )


def _pods(seen: GroupView, engines: list[EngineView], peers: frozenset[str], now: datetime) -> tuple[str, list[Action]]:
    actions: list[Action] = []
    keep = {pod.uid for view in engines for pod in view.pods}
    resting = {view.record.index for view in engines if waiting_for_retry(view.record, now)}
    newest_ended = {
        index: max((pod.epoch for pod in seen.pods if pod.index == index and pod.ended), default=0) for index in resting
    }
    for pod in seen.pods:
        if pod.uid in keep or pod.deleting:
            continue
        evidence = pod.ended and newest_ended.get(pod.index) == pod.epoch
        if not evidence:  # the last failed pod stays for diagnosis until its successor starts
            actions.append(DeletePod(name=pod.name, uid=pod.uid))
    for view in engines:
        if view.record.index in resting or view.record.pod_uid or view.outdated:
            continue
        for rank in sorted(set(range(seen.group.spec.engine.nodes)) - {pod.rank for pod in view.pods}):
            try:
                manifest = engine_pod(
                    seen.group, index=view.record.index, epoch=view.record.epoch, rank=rank, peers=peers
                )
            except OverlayError as error:
                return str(error), actions
            actions.append(CreatePod(manifest))
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
