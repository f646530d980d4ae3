"""What `kubectl get` says: does it serve, with which weights, if not why. Computed anew from what is observed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Literal

from rolloutfleet.api.common import Condition, EnginePhase
from rolloutfleet.api.names import LABEL_GROUP, engine_name, router_url
from rolloutfleet.api.rollout_server import (
    EngineCounts,
    GroupSummary,
    RolloutServer,
    RolloutServerStatus,
    RouterStatus,
    WeightsStatus,
)
from rolloutfleet.api.server_group import EngineStatus, Failure, ServerGroup, ServerGroupStatus
from rolloutfleet.api.weight_labels import parse_label
from rolloutfleet.plan.actions import Action, Emit
from rolloutfleet.plan.engines import EngineView, Weights
from rolloutfleet.plan.groups import GroupPlan
from rolloutfleet.plan.objects import places
from rolloutfleet.plan.observed import Fleet
from rolloutfleet.plan.recovery import ENDED
from rolloutfleet.plan.training import Training

SERVING = "Serving"
NAMED = 8
"""Engines that one event names."""
WAITING_REASONS = frozenset(
    {
        "PodNotCreated",
        "NotScheduled",
        "GangPending",
        "Loading",
        "WeightsUnproved",
        "NotRegistered",
        "WeightsBehind",
        "NoPeer",
        "PairUnproved",
        "OtherRevisionServes",
        "NoEncoder",
    }
)
"""Reasons of engines on their normal way; any other reason is news."""


def routable(view: EngineView, training: Training) -> bool:
    """The gate: right weights and acknowledged by the routers. An engine that the trainer holds keeps its place."""
    if view.pod is None or not view.pod.alive or view.leaving:
        return False
    if view.record.phase is EnginePhase.SERVING:
        return True
    return view.record.phase is EnginePhase.HELD and view.acknowledged and view.pod.gate is True


def group_status(plan: GroupPlan, training: Training, now: datetime) -> ServerGroupStatus:
    group, engines = plan.group, plan.engines
    desired = group.spec.replicas
    serving = sum(routable(view, training) for view in engines)
    reserved = sum(view.record.phase is EnginePhase.RESERVED for view in engines)
    problem = worst(engines)
    if not plan.invalid and group.spec.role == "Placeholder" and reserved >= desired:
        ready = _condition("Ready", "True", "Reserved", f"{reserved}/{desired} placeholders hold their GPUs")
    elif plan.invalid:
        ready = _condition("Ready", "True" if serving >= desired else "False", "InvalidTemplate", plan.invalid)
    elif serving >= desired:
        ready = _condition("Ready", "True", SERVING, f"{serving}/{desired} engines routable")
    else:
        ready = _condition("Ready", "False", *_explain(group.name, problem, serving, desired))
    conditions = [ready]
    if plan.requests.unreadable:
        conditions.append(_condition("RequestRefused", "True", "UnreadableRequest", plan.requests.unreadable))
    computed = {
        "observed_generation": group.generation,
        "replicas": sum(view.pod is not None for view in engines),
        "ready": sum(view.answering for view in engines) + reserved,
        "routable": serving,
        "selector": f"{LABEL_GROUP}={group.name}",
        "weight_version": training.version if serving and group.spec.role != "Encoder" else None,
        "last_epoch": plan.last_epoch,
        "measured": plan.measured,
        "conditions": _stamp(conditions, group.status.conditions, group.generation, now),
        "engines": tuple(view.record for view in engines),
    }
    return group.status.model_copy(update=computed)


def server_status(
    fleet: Fleet,
    plans: Sequence[tuple[GroupPlan, ServerGroupStatus]],
    routers: int,
    training: Training,
    now: datetime,
    *,
    generation: int,
) -> RolloutServerStatus:
    """All of the status but `training`, which is the agent's. `routers`: those that take traffic. `generation`: the one
    that the groups are of."""
    server = fleet.server
    everything = plans
    plans = [(plan, status) for plan, status in plans if plan.group.spec.role != "Placeholder"]
    engines = [view for plan, _ in plans for view in plan.engines]
    desired = sum(plan.group.spec.replicas for plan, _ in plans)
    serving = sum(status.routable for _, status in plans)
    counts = EngineCounts(
        desired=desired,
        ready=sum(status.ready for _, status in plans),
        routable=serving,
        stale=sum(view.record.phase is EnginePhase.STALE for view in engines),
        failed=sum(view.record.phase is EnginePhase.FAILED for view in engines),
    )
    conditions = [
        _ready(fleet, plans, routers, desired, serving),
        _progressing(engines, routers, server),
        _degraded(engines),
        _weights_current(engines, training),
    ]
    return RolloutServerStatus(
        observed_generation=generation,
        conditions=_stamp(conditions, server.status.conditions, generation, now),
        router=RouterStatus(
            url=router_url(server.name, server.namespace), replicas=len(fleet.router_pods), ready=routers
        ),
        groups=tuple(
            GroupSummary(
                name=plan.group.name,
                replicas=plan.group.spec.replicas,
                ready=status.ready,
                routable=status.routable,
            )
            for plan, status in everything
        ),
        engines=counts,
        weights=WeightsStatus(
            version=training.version,
            path=training.path,
            skew=max((_behind(view, training) for plan, _ in everything for view in plan.engines), default=0),
        ),
    )


def _behind(view: EngineView, training: Training) -> int:
    """Versions; one at least where the weights are known to be others than the label says."""
    label = parse_label(view.probe.label)
    if not view.answering or view.leaving or view.weights is Weights.CURRENT:
        return 0
    if label is None or label.fleet not in ("", training.fleet):
        return 0
    return max(training.version - label.version, 1 if view.weights is Weights.BEHIND else 0)


def _ready(
    fleet: Fleet,
    plans: Sequence[tuple[GroupPlan, ServerGroupStatus]],
    routers: int,
    desired: int,
    serving: int,
) -> Condition:
    """True while requests are answered with the right weights, even if some engines are missing."""
    engines = [(plan.group.name, view) for plan, _ in plans for view in plan.engines]
    silent = _silent(plans)
    if not fleet.groups and not fleet.create_failures:
        return _condition("Ready", "False", "Reconciling", "server groups are being created")
    wanted = places(fleet.server) if fleet.create_failures else set()
    taken = next((trouble for place, trouble in sorted(fleet.create_failures.items()) if place in wanted), None)
    if taken is not None:
        return _condition("Ready", "True" if serving and routers else "False", taken.reason, taken.message)
    invalid = next((plan.invalid for plan, _ in plans if plan.invalid), "")
    if invalid:
        return _condition("Ready", "True" if serving and routers else "False", "InvalidTemplate", invalid)
    if routers == 0:
        troubles = [router for router in fleet.router_pods if router.trouble is not None]
        if troubles and troubles[0].trouble is not None:
            trouble = troubles[0].trouble
            return _condition("Ready", "False", trouble.reason, f"router pod {troubles[0].name}: {trouble.message}")
        if not silent:
            return _condition("Ready", "False", "RouterNotReady", "no router replica has a complete worker table yet")
    if desired == 0:
        return _condition("Ready", "False", "ScaledToZero", "every group has 0 replicas")
    sickest = worst(view for _, view in engines)
    missing = next(((name, view) for name, view in engines if view is sickest), None)
    if serving >= desired:
        return _condition("Ready", "True", SERVING, f"{serving}/{desired} engines routable")
    if silent:
        problem = worst(silent[0].engines)
        return _condition("Ready", "False", *_explain(silent[0].group.name, problem, serving, desired))
    reason, message = _explain(missing[0] if missing else "", missing[1] if missing else None, serving, desired)
    return _condition("Ready", "True", reason, message)


def _silent(plans: Sequence[tuple[GroupPlan, ServerGroupStatus]]) -> list[GroupPlan]:
    """Groups of roles of which no engine serves: without one, no request is answered."""
    serving = {plan.group.spec.role for plan, status in plans if status.routable}
    return [plan for plan, _ in plans if plan.group.spec.replicas > 0 and plan.group.spec.role not in serving]


def _progressing(engines: Sequence[EngineView], routers: int, server: RolloutServer) -> Condition:
    moving = [view for view in engines if view.record.phase not in (EnginePhase.SERVING, EnginePhase.HELD)]
    if moving:
        return _condition("Progressing", "True", "EnginesStarting", f"{len(moving)} engines are not serving yet")
    outdated = sum(view.outdated for view in engines)
    if outdated:
        text = f"{outdated} of {len(engines)} engines are of an older revision"
        return _condition("Progressing", "True", "ChangeUnderWay", text)
    if routers < server.spec.router.replicas:
        return _condition(
            "Progressing", "True", "RouterStarting", f"{routers}/{server.spec.router.replicas} routers ready"
        )
    return _condition("Progressing", "False", "Stable", "")


def _degraded(engines: Sequence[EngineView]) -> Condition:
    sick = [view for view in engines if _is_news(view.record)]
    if sick:
        view = sick[0]
        name = engine_name(view.group, view.record.index, view.record.epoch)
        return _condition("Degraded", "True", view.record.reason, f"{name}: {view.record.message}")
    return _condition("Degraded", "False", "AsExpected", "")


def _weights_current(engines: Sequence[EngineView], training: Training) -> Condition:
    up = [view for view in engines if view.answering]
    if not up:
        return _condition("WeightsCurrent", "Unknown", "NoEngineUp", "no engine answers")
    up = [view for view in up if not training.holds(offload=view.offload)]
    if not up:
        return _condition("WeightsCurrent", "Unknown", "TrainerHolds", "the trainer holds the engines")
    late = [view for view in up if view.weights is not Weights.CURRENT]
    if late:
        name = engine_name(late[0].group, late[0].record.index, late[0].record.epoch)
        return _condition(
            "WeightsCurrent",
            "False",
            f"Weights{late[0].weights.value}",
            f"{len(late)} of {len(up)} engines are not proved to hold version {training.version}; first: {name}",
        )
    return _condition("WeightsCurrent", "True", "Verified", f"{len(up)} engines hold version {training.version}")


_SEVERITY = {
    EnginePhase.FAILED: 0,
    EnginePhase.PENDING: 1,
    EnginePhase.STARTING: 2,
    EnginePhase.STALE: 3,
    EnginePhase.DRAINING: 4,
    EnginePhase.HELD: 5,
    EnginePhase.SERVING: 6,
    EnginePhase.RESERVED: 6,
}


def worst(engines: Iterable[EngineView]) -> EngineView | None:
    """The engine whose reason explains best why the group does not serve in full."""
    ill = [view for view in engines if view.record.phase not in (EnginePhase.SERVING, EnginePhase.RESERVED)]
    return min(ill, key=lambda view: worst_first(view.record), default=None)


def worst_first(record: EngineStatus) -> tuple[bool, int, int]:
    """Sort key of the engines of a group: trouble before what heals by itself, and what serves last."""
    return not _is_news(record), _SEVERITY[record.phase], record.index


def _explain(group: str, view: EngineView | None, serving: int, desired: int) -> tuple[str, str]:
    share = f"{serving}/{desired} engines routable"
    if view is None:
        return "Reconciling", share
    name = engine_name(group, view.record.index, view.record.epoch)
    return view.record.reason or "Reconciling", f"{share}; {name}: {view.record.message or view.record.reason}"


def _is_news(record: EngineStatus) -> bool:
    quiet = record.phase in (
        EnginePhase.SERVING,
        EnginePhase.HELD,
        EnginePhase.DRAINING,
        EnginePhase.RESERVED,
    )
    return not quiet and bool(record.reason) and record.reason not in WAITING_REASONS


def _condition(kind: str, status: Literal["True", "False", "Unknown"], reason: str, message: str) -> Condition:
    return Condition(type=kind, status=status, reason=reason, message=message)


def _stamp(
    wanted: Iterable[Condition], before: Iterable[Condition], generation: int, now: datetime
) -> tuple[Condition, ...]:
    """lastTransitionTime moves only when status flips."""
    known = {condition.type: condition for condition in before}
    stamped = []
    for condition in wanted:
        old = known.get(condition.type)
        since = old.last_transition_time if old is not None and old.status == condition.status else ""
        stamped.append(
            condition.model_copy(
                update={
                    "observed_generation": generation,
                    "last_transition_time": since or now.isoformat(timespec="seconds"),
                }
            )
        )
    return tuple(stamped)


def group_events(group: ServerGroup, status: ServerGroupStatus) -> list[Action]:
    """Events on transitions: what status says now and did not say before."""
    before = {record.index: record for record in group.status.engines}
    events: list[Action] = []
    serving: list[str] = []

    def emit(warning: bool, reason: str, message: str) -> None:
        events.append(
            Emit(kind="ServerGroup", name=group.name, uid=group.uid, warning=warning, reason=reason, message=message)
        )

    for record in status.engines:
        old = before.get(record.index)
        name = engine_name(group.name, record.index, record.epoch)
        failure = record.last_failure
        if failure is not None and (old is None or record.restarts > old.restarts):
            emit(True, failure.reason, f"pod {failure.pod}: {failure.message}; {name} takes its place")
        elif failure is not None and old is not None and _told_since(old, failure):
            emit(True, failure.reason, f"pod {failure.pod}: {failure.message}")
        elif _is_news(record) and (old is None or (old.reason, old.phase) != (record.reason, record.phase)):
            emit(True, record.reason, f"engine {name}: {record.message}")
        if record.phase is EnginePhase.SERVING and (
            old is None or old.phase not in (EnginePhase.SERVING, EnginePhase.HELD)
        ):
            serving.append(name)
    if len(serving) > NAMED:
        serving[NAMED:] = [f"{len(serving) - NAMED} more"]
    if serving:
        who = f"engine {serving[0]} serves" if len(serving) == 1 else f"engines {', '.join(serving)} serve"
        emit(False, "EngineServing", f"{who} weight version {status.weight_version}")
    return events


def _told_since(old: EngineStatus, failure: Failure) -> bool:
    """Its kubelet has said how the engine ended whose end was told already."""
    return old.last_failure is not None and old.last_failure.reason == ENDED != failure.reason


def server_events(server: RolloutServer, status: RolloutServerStatus) -> list[Action]:
    before = {condition.type: condition for condition in server.status.conditions}
    events: list[Action] = []
    for condition in status.conditions:
        old = before.get(condition.type)
        if condition.type != "Ready" or (old is not None and old.status == condition.status):
            continue
        if old is None and condition.status != "True":
            continue
        events.append(
            Emit(
                kind="RolloutServer",
                name=server.name,
                uid=server.uid,
                warning=condition.status != "True",
                reason="Ready" if condition.status == "True" else condition.reason,
                message=condition.message,
            )
        )
    return events
