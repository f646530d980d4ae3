"""The whole plan of one fleet, top to bottom. Order matters: actions are performed one by one, as listed.

1. Routers forget engines that must not serve. 2. Groups and routers. 3. Statuses record new epochs. 4. Pods are deleted
and created. 5. Routers learn engines that may serve. 6. Gates, proofs and catch-ups. 7. The server's status, events.
8. Objects that no engine waits for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from rolloutfleet.api.names import INITIAL_WEIGHT_VERSION
from rolloutfleet.api.schema import Model, Resource
from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.api.weight_labels import parse_label
from rolloutfleet.plan.actions import (
    Action,
    Adopt,
    Apply,
    ApplyStatus,
    CatchUp,
    Continue,
    DeleteObject,
    DeletePod,
    Deregister,
    Requeue,
    SetGate,
    Verify,
)
from rolloutfleet.plan.changes import drain_step
from rolloutfleet.plan.disruption import disruption_budgets
from rolloutfleet.plan.encoders import table_changes, with_encoders
from rolloutfleet.plan.engines import EngineView, Weights, started_at
from rolloutfleet.plan.external import adoptable
from rolloutfleet.plan.groups import GroupPlan, GroupView, look_at, plan_group
from rolloutfleet.plan.membership import Membership, membership_of, table_actions, takes_traffic
from rolloutfleet.plan.objects import ROUTER_SET, Defaults, child_actions, disaggregated, wanted_children
from rolloutfleet.plan.observed import Fleet, NodeState, parse_time
from rolloutfleet.plan.pairing import pair_checks, with_pairing
from rolloutfleet.plan.recovery import NODE_SILENCE, force_moments, mass_failure_of, word_due
from rolloutfleet.plan.routers import without_early_retirements
from rolloutfleet.plan.status import group_events, group_status, routable, server_events, server_status
from rolloutfleet.plan.training import Training, training_of

PASSING_REASONS = frozenset({"WeightsUnproved", "NotRegistered"})
"""Steps of an engine that joins; they take a moment."""
GUARD_AFTER = timedelta(seconds=2)
"""Engines that start together have become ready by then, as their kubelets see it."""
DRAIN_LOOKS = timedelta(seconds=1)
"""How often an engine that finishes its requests is looked at."""


def plan_fleet(fleet: Fleet, *, defaults: Defaults, applied_versions: Mapping[str, str], now: datetime) -> list[Action]:
    if fleet.server.metadata.get("deletionTimestamp"):
        return []  # owner references take everything with it
    training = training_of(fleet, now)
    groups = [group for group in fleet.groups if not group.metadata.get("deletionTimestamp")]
    seen = [look_at(group, fleet, training, now) for group in groups]
    peers = with_pairing(with_encoders([view for group in seen for view in group.engines]))
    mass_failure = mass_failure_of(peers)
    plans = [
        plan_group(_paired(group, peers), peers, fleet, training, defaults, now, mass_failure=mass_failure)
        for group in seen
    ]
    engines = [view for plan in plans for view in plan.engines]
    membership = membership_of(engines, training)

    tables = table_actions(fleet.router_pods, membership, training)
    actions: list[Action] = [action for action in tables if isinstance(action, Deregister)]

    objects = wanted_children(fleet.server, defaults, pairs=disaggregated(fleet.server, fleet.groups))
    objects += disruption_budgets(fleet.server, _to_be_guarded(groups, fleet, engines, now), training)
    children = without_early_retirements(child_actions(fleet, objects, applied_versions), fleet, objects)
    actions += [action for action in children if not _can_wait(action)]
    groups_change = _groups_change(fleet, actions)

    statuses = [(plan, group_status(plan, training, now)) for plan in plans]
    for plan, status in statuses:
        if status != plan.group.status:
            # Epochs rise in it: what an operator that leads no more planned must not take one back.
            version = str(plan.group.metadata.get("resourceVersion", ""))
            actions.append(_apply_status("ServerGroup", plan.group, status, version=version))
        actions += plan.pod_actions
    actions += _orphans(fleet, plans)

    actions += [action for action in tables if not isinstance(action, Deregister)]
    actions += _router_gates(fleet, membership, engines)
    for view in engines:
        actions += _engine_gates(view, training)
        actions += _engine_work(view, fleet, training, now)
    actions += table_changes(engines)
    actions += pair_checks(engines, fleet.busy, training)

    generation = fleet.server.status.observed_generation if groups_change else fleet.server.generation
    # As the gates are after this plan: told in the next one, that a fleet is ready would wait for other objects.
    routers = sum(takes_traffic(router, membership, engines) for router in fleet.router_pods)
    overall = server_status(fleet, statuses, routers, training, now, generation=generation)
    if overall != fleet.server.status.model_copy(update={"training": None}):
        actions.append(_apply_status("RolloutServer", fleet.server, overall))
    for plan, status in statuses:
        actions += group_events(plan.group, status)
    actions += server_events(fleet.server, overall)
    if not groups_change:  # else engines would wait for these objects: the next plan, which has the groups, makes them
        actions += [action for action in children if _can_wait(action)]
    return actions + _wake_up(fleet, engines, plans, training, now)


def _can_wait(action: Action) -> bool:
    """Objects that no engine needs to start or to serve: the trainer's rights, what protects from evictions, and the
    router's Service, whose address takes the API server longer than anything else. Ranks find each other by theirs."""
    if not isinstance(action, Apply):
        return False
    kind, headless = action.manifest["kind"], action.manifest.get("spec", {}).get("clusterIP") == "None"
    return kind not in ("ServerGroup", ROUTER_SET) and not (kind == "Service" and headless)


def _to_be_guarded(
    groups: Sequence[ServerGroup], fleet: Fleet, engines: Sequence[EngineView], now: datetime
) -> list[ServerGroup]:
    """Groups with an engine that has served for a moment. Before that a budget protects nobody, since what is not ready
    may be evicted anyway, and its controller would write its status for each pod that is made and each that starts."""
    served = {view.group for view in engines if (since := _guard_due(view)) is not None and since <= now}
    return [group for group in groups if group.name in served or _guarded(group.name, fleet)]


def _guard_due(view: EngineView) -> datetime | None:
    """When its group is to have a budget on its account."""
    since = parse_time(view.record.serving_since)
    return None if since is None else since + GUARD_AFTER


def _guarded(group: str, fleet: Fleet) -> bool:
    return f"PodDisruptionBudget/{group}" in fleet.children


def _groups_change(fleet: Fleet, actions: Sequence[Action]) -> bool:
    """What this plan says of groups that it is about to change must not pass for an answer to the new spec."""
    deleted = any(isinstance(action, DeleteObject) and action.kind == "ServerGroup" for action in actions)
    applied = [action.manifest for action in actions if isinstance(action, Apply)]
    groups = [manifest["metadata"]["name"] for manifest in applied if manifest["kind"] == "ServerGroup"]
    return deleted or any(f"ServerGroup/{name}" not in fleet.create_failures for name in groups)


def _paired(seen: GroupView, peers: Sequence[EngineView]) -> GroupView:
    return replace(seen, engines=tuple(view for view in peers if view.group == seen.group.name))


def _apply_status(kind: str, owner: Resource, status: Model, *, version: str = "") -> ApplyStatus:
    return ApplyStatus(kind=kind, name=owner.name, uid=owner.uid, status=status.dump(), version=version)


def _orphans(fleet: Fleet, plans: Sequence[GroupPlan]) -> list[Action]:
    """Pods whose ServerGroup is gone, or was made anew under the same name."""
    owners = {plan.group.uid for plan in plans}
    return [
        DeletePod(name=pod.name, uid=pod.uid)
        for pod in fleet.engine_pods
        if pod.group_uid not in owners and not pod.deleting
    ]


def _router_gates(fleet: Fleet, membership: Membership, engines: Sequence[EngineView]) -> list[Action]:
    actions: list[Action] = []
    for router in fleet.router_pods:
        if not router.running:
            continue
        complete = takes_traffic(router, membership, engines)
        if bool(router.gate) is complete or (router.gate and router.workers is None):
            continue  # one missed poll is no reason to take a replica out of its Service
        actions.append(
            SetGate(
                pod=router.name,
                uid=router.uid,
                routable=complete,
                reason="TableComplete" if complete else "TableIncomplete",
                message=f"{len(router.workers or {})} of {len(membership.wanted)} engines listed",
            )
        )
    return actions


def _engine_gates(view: EngineView, training: Training) -> list[Action]:
    """One answer for all pods of an engine."""
    wanted = routable(view, training)
    return [
        SetGate(
            pod=pod.name,
            uid=pod.uid,
            routable=wanted,
            reason="Serving" if wanted else (view.record.reason or "NotRegistered"),
            message=f"weight version {training.version}" if wanted else view.record.message,
        )
        for pod in view.pods
        if pod.alive
        and not pod.external
        and pod.gate is not wanted
        # A gate that was never set counts as False: it is set so only to say why, when that is news.
        and (wanted or pod.gate is not None or (view.answering and view.record.reason not in PASSING_REASONS))
    ]


def _engine_work(view: EngineView, fleet: Fleet, training: Training, now: datetime) -> list[Action]:
    """Prove, bring up to date, resume or drain one engine that nobody holds."""
    pod = view.pod
    if pod is None or not view.answering or pod.uid in fleet.busy:
        return []
    if view.leaving:
        return list(drain_step(view, now))
    if training.holds(offload=view.offload) or pod.identity in training.memory_held:
        return []
    if not view.fits:
        return []
    if (pod.external and adoptable(view.probe, training.version)) or _unsigned(view, training):
        return [
            Adopt(
                pod_uid=pod.uid,
                url=pod.url,
                version=training.version,
                fleet=training.fleet,
                training_key=training.key,
            )
        ]
    if view.weights is Weights.UNPROVED or (view.weights is Weights.CURRENT and view.probe.recheck):
        return [Verify(pod_uid=pod.uid, url=pod.url, training_key=training.key)]
    loadable = bool(training.path) and (pod.worker or not training.delta)
    if view.weights is Weights.BEHIND and not view.listed and loadable:
        initial = training.version == INITIAL_WEIGHT_VERSION
        return [
            CatchUp(
                pod_uid=pod.uid,
                url=pod.url,
                path=view.initial_path if initial else training.path,
                version=training.version,
                fleet=training.fleet,
                expected=view.expected,
                training_key=training.key,
                copied=pod.worker and not initial,
            )
        ]
    if view.weights is Weights.CURRENT and view.probe.paused:
        return [Continue(pod_uid=pod.uid, url=pod.url, training_key=training.key)]
    return []


def _unsigned(view: EngineView, training: Training) -> bool:
    """Its weights are the fleet's, and its label is the plain number of an operator that did not sign yet: agents do
    not know its answers as ours."""
    return view.weights is Weights.CURRENT and parse_label(view.probe.label) == (training.version, "")


def _wake_up(
    fleet: Fleet, engines: Sequence[EngineView], plans: Sequence[GroupPlan], training: Training, now: datetime
) -> list[Action]:
    """The next moment at which time alone changes the plan."""
    moments = [parse_time(view.record.retry_at) for view in engines if view.pod is None]
    silences = [parse_time(view.record.silent_since) for view in engines]
    silences += [pod.scheduled_at for view in engines for pod in view.pods if pod.node_state is NodeState.NOT_READY]
    moments += [word_due(view.record) for view in engines]
    moments += [_guard_due(view) for view in engines if not _guarded(view.group, fleet)]
    moments += [since + NODE_SILENCE for since in silences if since is not None]
    for plan in plans:
        moments += force_moments(plan.pods, plan.group.spec.recovery)
        deadline = timedelta(seconds=plan.group.spec.recovery.startup_deadline_seconds + 1)
        starts = [started_at(view.pods) for view in plan.engines if not view.answering]
        moments += [start + deadline for start in starts if start is not None]
    moments += [now + DRAIN_LOOKS for view in engines if view.leaving]
    moments.append(training.held_until)
    ahead = [(moment - now).total_seconds() for moment in moments if moment is not None]
    soonest = min((seconds for seconds in ahead if seconds > 0), default=None)
    return [] if soonest is None else [Requeue(seconds=soonest + 0.1)]
