"""The engines of one ServerGroup: which lives are wanted, which pods to make and to delete, who is on its way out.

Two steps, since what an engine may do can depend on engines of other groups: `look_at` each group, then `plan_group`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

from rolloutfleet.api.common import EnginePhase
from rolloutfleet.api.names import engine_name
from rolloutfleet.api.server_group import EngineStatus, Failure, MeasuredWeights, ServerGroup, ServerGroupSpec
from rolloutfleet.api.weight_labels import belongs_elsewhere, fleet_id
from rolloutfleet.plan.actions import Action, CreatePod, CreatePodGroup, DeleteObject, DeletePod
from rolloutfleet.plan.changes import drain_until, drained, engines_wanted, free_indexes, surplus, to_replace
from rolloutfleet.plan.engine_pod import engine_pod
from rolloutfleet.plan.engines import (
    NO_PROBE,
    EngineView,
    Pairing,
    Weights,
    complete,
    phase_of,
    pods_by_life,
    weights_of,
)
from rolloutfleet.plan.epochs import Epochs
from rolloutfleet.plan.external import external_pod, external_records, misfit, model_path, wanted_urls
from rolloutfleet.plan.gang import gang_api, pod_group
from rolloutfleet.plan.history import chronicled
from rolloutfleet.plan.membership import acknowledged_everywhere, listed_anywhere
from rolloutfleet.plan.objects import Defaults, disaggregated
from rolloutfleet.plan.observed import EnginePod, EngineProbe, Fleet, external_uid
from rolloutfleet.plan.overlay import OverlayError
from rolloutfleet.plan.pairing import OTHER, peer_revisions, stuck
from rolloutfleet.plan.recovery import (
    awaits_its_word,
    end_of_life,
    next_life,
    rests,
    resumed,
    silence,
    to_force,
    told_how,
)
from rolloutfleet.plan.requests import Requests, requests_of
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
    measured: tuple[MeasuredWeights, ...]
    requests: Requests


@dataclass(frozen=True)
class GroupPlan:
    """What becomes of a group: its engines as they will stand in status, and its pods."""

    group: ServerGroup
    engines: tuple[EngineView, ...]
    last_epoch: int
    measured: tuple[MeasuredWeights, ...]
    pod_actions: tuple[Action, ...]
    pods: tuple[EnginePod, ...]
    """As they are, before `pod_actions`."""
    requests: Requests
    invalid: str = ""
    """Why no pod can be built from the spec."""


def look_at(group: ServerGroup, fleet: Fleet, training: Training, now: datetime) -> GroupView:
    revision = group_revision(group.spec)
    made = tuple(pod for pod in fleet.engine_pods if pod.group_uid == group.uid)
    epochs = Epochs(group, made)
    if group.spec.external is not None:
        records = external_records(group, fleet.probes, epochs, now)
        pods = tuple(external_pod(group, r, fleet.probes.get(external_uid(r.url), NO_PROBE)) for r in records)
    else:
        wanted = engines_wanted(group, revision, training)
        indexes = free_indexes(group.status.engines, wanted)
        new = [EngineStatus(index=index, epoch=epochs.next(), revision=revision) for index in indexes]
        records, pods = [*group.status.engines, *new], made
    measured = _measured(group, pods, fleet, revision, training)
    expecting = group.model_copy(update={"status": group.status.model_copy(update={"measured": measured})})
    records.sort(key=lambda record: record.index)
    lives = pods_by_life(pods)
    return GroupView(
        group=group,
        revision=revision,
        pods=pods,
        engines=tuple(
            _look(record, lives.get((record.index, record.epoch), ()), fleet, expecting, revision, training)
            for record in records
        ),
        epochs=epochs,
        measured=measured,
        requests=requests_of(group),
    )


def plan_group(
    seen: GroupView,
    peers: Sequence[EngineView],
    fleet: Fleet,
    training: Training,
    defaults: Defaults,
    now: datetime,
    *,
    mass_failure: str,
) -> GroupPlan:
    """`peers`: the engines of all groups, this one's among them; `mass_failure`: why nobody is replaced for silence."""
    group = seen.group
    invalid = _invalid(group, defaults)
    removed, replaced = _going(seen, training)
    engines: list[EngineView] = []
    for view in seen.engines:
        going = view.record.index in (removed if invalid else removed | replaced)
        view = _leaving(view, going, group, now)
        if view.record.index in removed and drained(view, now):
            continue  # its record goes, and with it its pods
        engines.append(_next(view, seen, peers, training, now, mass_failure))

    pod_actions = _pods(seen, engines, fleet, defaults, now, invalid) + _finished_gangs(seen, engines, fleet)
    engines = [_with_phase(view, group, fleet, training, now, invalid, mass_failure) for view in engines]
    return GroupPlan(
        group=group,
        engines=tuple(engines),
        last_epoch=seen.epochs.last,
        measured=seen.measured,
        pod_actions=tuple(pod_actions),
        pods=seen.pods,
        requests=seen.requests,
        invalid=invalid,
    )


def _invalid(group: ServerGroup, defaults: Defaults) -> str:
    """Why no pod can be built from the spec; known before an engine is taken down for it."""
    return "" if group.spec.external is not None else _refusal(group.spec.model_dump_json(), defaults)


@lru_cache(maxsize=1024)
def _refusal(spec: str, defaults: Defaults) -> str:
    """Remembered, since to build a pod takes longer than the rest of a plan for an engine, and specs hardly change."""
    metadata = {"name": "any", "namespace": "any", "uid": "any"}
    group = ServerGroup(metadata=metadata, spec=ServerGroupSpec.model_validate_json(spec))
    try:
        engine_pod(group, index=0, epoch=0, defaults=defaults)
    except OverlayError as error:
        return str(error)
    return ""


def _going(seen: GroupView, training: Training) -> tuple[set[int], set[int]]:
    """(indexes that are not wanted any more, indexes to be made anew)."""
    group = seen.group
    if group.spec.external is not None:
        urls = wanted_urls(group)
        return {view.record.index for view in seen.engines if view.record.url not in urls}, set()
    removed = surplus(seen.engines, engines_wanted(group, seen.revision, training), training)
    if training.holds(offload=group.spec.offload):
        return removed, set()
    staying = [view for view in seen.engines if view.record.index not in removed]
    asked = {view.record.index for view in staying if seen.requests.restarts(view.record)}
    return removed, to_replace(staying, asked, group.spec.replicas, group.spec.rolling_update)


def _measured(
    group: ServerGroup, pods: tuple[EnginePod, ...], fleet: Fleet, revision: str, training: Training
) -> tuple[MeasuredWeights, ...]:
    """Checksums of the fleet's version where the agent gave none: that of a layout's first engine that loaded it."""
    found = {entry.revision: entry for entry in group.status.measured if entry.version == training.version}
    held = training.holds(offload=group.spec.offload or group.spec.external is not None)
    for pod in sorted(pods, key=lambda pod: (pod.index, pod.epoch)):
        if held or not (pod.external or pod.revision == revision) or not pod.revision:
            continue
        if pod.revision in found or expected_checksum(training, group, pod.revision):
            continue
        probe = fleet.probes.get(pod.uid, NO_PROBE)
        if pod.alive and probe.checksum and weights_of(pod, probe, "", training) is Weights.CURRENT:
            found[pod.revision] = MeasuredWeights(
                revision=pod.revision, version=training.version, checksum=probe.checksum
            )
    return tuple(sorted(found.values(), key=lambda entry: entry.revision))


def _look(
    record: EngineStatus,
    life: tuple[EnginePod, ...],
    fleet: Fleet,
    group: ServerGroup,
    revision: str,
    training: Training,
) -> EngineView:
    pod = life[0] if life and life[0].rank == 0 else None
    probe = fleet.probes.get(pod.uid, NO_PROBE) if pod else NO_PROBE
    external = group.spec.external is not None
    layout = pod.revision if external and pod is not None else record.revision
    expected = expected_checksum(training, group, layout)
    facts = probe.facts or record.facts
    return EngineView(
        group=group.name,
        role=facts.role if external and facts is not None else group.spec.role,
        record=record,
        pods=life,
        probe=probe,
        weights=weights_of(pod, probe, expected, training) if pod else Weights.UNPROVED,
        expected=expected,
        listed=bool(pod and pod.url) and listed_anywhere(pod.url if pod else "", fleet.router_pods),
        acknowledged=acknowledged_everywhere(pod.url if pod else "", fleet.router_pods),
        outdated=not external and record.revision != revision,
        offload=facts is not None and facts.memory_saver if external else group.spec.offload,
        initial_path=model_path(group, record.url),
        misfit=_misfit(group, record, probe, fleet),
    )


def _misfit(group: ServerGroup, record: EngineStatus, probe: EngineProbe, fleet: Fleet) -> tuple[str, str]:
    ours = fleet_id(fleet.server.uid)
    if belongs_elsewhere(probe.label, ours):
        return "OtherFleet", f"its weights are labelled {probe.label}: it belongs to another fleet, ours is @{ours}"
    if group.spec.external is not None:
        return misfit(group, record.url, probe, pairs=disaggregated(fleet.server, fleet.groups))
    if probe.facts is not None and probe.facts.role != group.spec.role:
        return "RoleMismatch", f"it was started as {probe.facts.role}, the group's role is {group.spec.role}"
    return "", ""


def _leaving(view: EngineView, leaving: bool, group: ServerGroup, now: datetime) -> EngineView:
    ours = group.spec.external is None
    until = drain_until(view, group.spec.drain_timeout_seconds, now) if leaving and view.answering and ours else ""
    view = view if view.leaving is leaving else replace(view, leaving=leaving)
    return view.recorded(drain_until=until)


def _next(
    view: EngineView,
    seen: GroupView,
    peers: Sequence[EngineView],
    training: Training,
    now: datetime,
    mass_failure: str,
) -> EngineView:
    """The engine with the life that it should have: this one, or a new one."""
    if seen.group.spec.external is not None:
        return _external_next(view)
    record, recovery = told_how(view.record, seen.pods), seen.group.spec.recovery
    held = training.holds(offload=view.offload)
    failure = end_of_life(view, recovery, now, held=held, mass_failure=mass_failure) or stuck(view, peers)
    if view.pod is not None and view.pod.identity in training.ambiguous_pods:
        text = "a release or resume of this engine's memory broke off, and another call might kill it"
        failure = failure or Failure(reason="MemoryUnknown", message=text, pod=view.pod.name)
    free_to_go = not view.answering or (view.leaving and drained(view, now))
    if view.pods and seen.requests.restarts(record) and free_to_go:
        asked = Failure(reason="RestartRequested", message="somebody asked for it", pod=record.pod)
        failure = failure or asked
    if view.outdated and free_to_go:
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
        return _reborn(view, next_life(record, failure, seen.epochs.next(), seen.group, now))
    if seen.requests.resumes(record) and not view.pods:
        record = resumed(record)
    view = view if record is view.record else replace(view, record=record)
    if view.pod is None or not complete(view.pods):
        return view
    pod = view.pod
    return view.recorded(pod=pod.name, pod_uid=pod.uid, url=pod.url, retry_at="", **silence(view, now))


def _external_next(view: EngineView) -> EngineView:
    update: dict[str, Any] = {"pod": view.pod.name if view.pod is not None else ""}
    if view.answering and view.probe.facts is not None and view.pod is not None:
        update |= {"pod_uid": view.pod.identity, "revision": view.pod.revision, "facts": view.probe.facts}
    return replace(view, record=view.record.model_copy(update=update))


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
        lacks_encoder=False,
        leaving=False,
    )


def _pods(
    seen: GroupView,
    engines: list[EngineView],
    fleet: Fleet,
    defaults: Defaults,
    now: datetime,
    invalid: str,
) -> list[Action]:
    if seen.group.spec.external is not None:
        return []
    actions: list[Action] = []
    keep = {pod.uid for view in engines for pod in view.pods}
    recovery = seen.group.spec.recovery
    resting = {view.record.index for view in engines if rests(view.record, recovery, now)[0]}
    newest_ended = {
        index: max((pod.epoch for pod in seen.pods if pod.index == index and pod.ended), default=0) for index in resting
    }
    for pod in seen.pods:
        if pod.uid in keep or pod.deleting or any(awaits_its_word(pod, view.record, now) for view in engines):
            continue
        evidence = pod.ended and newest_ended.get(pod.index) == pod.epoch
        if not evidence:  # the last failed pod stays for diagnosis until its successor starts
            actions.append(DeletePod(name=pod.name, uid=pod.uid))
    actions += [DeletePod(name=pod.name, uid=pod.uid, force=True) for pod in to_force(seen.pods, recovery, now)]
    peers = peer_revisions(seen.group.spec.role, fleet.groups)
    for view in engines:
        if invalid or view.record.index in resting or view.outdated:
            continue
        index, epoch = view.record.index, view.record.epoch
        # A gang is of one kind: pods that are missing are made like those that exist, whatever the cluster has by now.
        gang = view.pods[0].gang if view.pods else gang_api(seen.group.spec, fleet.gang_apis)
        manifest = partial(engine_pod, seen.group, index=index, epoch=epoch, peers=peers, defaults=defaults, gang=gang)
        if gang in fleet.gang_apis and engine_name(seen.group.name, index, epoch) not in fleet.pod_groups:
            actions.append(CreatePodGroup(pod_group(manifest(), gang)))
            continue  # Volcano refuses pods whose PodGroup it does not find
        if view.record.pod_uid:
            continue
        missing = set(range(seen.group.spec.own_engine.nodes)) - {pod.rank for pod in view.pods}
        actions += [CreatePod(manifest(rank=rank)) for rank in sorted(missing)]
    return actions


def _finished_gangs(seen: GroupView, engines: Sequence[EngineView], fleet: Fleet) -> list[Action]:
    """PodGroups of lives that are over and of which no pod is left."""
    lives = {(view.record.index, view.record.epoch) for view in engines}
    lives |= {(pod.index, pod.epoch) for pod in seen.pods}
    return [
        DeleteObject(kind="PodGroup", name=gang.name, uid=gang.uid, api_version=gang.api_version)
        for gang in fleet.pod_groups.values()
        if gang.group_uid == seen.group.uid and (gang.index, gang.epoch) not in lives and not gang.deleting
    ]


def _with_phase(
    view: EngineView,
    group: ServerGroup,
    fleet: Fleet,
    training: Training,
    now: datetime,
    invalid: str,
    mass_failure: str,
) -> EngineView:
    resting = rests(view.record, group.spec.recovery, now)
    phase, reason, message = phase_of(view, fleet, training, resting=resting, mass_failure=mass_failure)
    if invalid and view.pod is None:
        phase, reason, message = EnginePhase.PENDING, "InvalidTemplate", invalid
    holds = view.weights is Weights.CURRENT and view.pod is not None and view.role != "Encoder"
    version = training.version if holds else None
    view = view.recorded(phase=phase, reason=reason, message=message, weight_version=version)
    record = chronicled(view, group.spec.recovery, now)
    return view if record is view.record else replace(view, record=record)
