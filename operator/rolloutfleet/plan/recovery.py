"""How engines end and come back.

- A pod that ended, or that somebody ends, is believed at once: the next life begins.
- What only looks dead from outside (a node that is silent, a check that gets no answer) is judged by rules with a
  threshold, never while the trainer holds the fleet, and never when most engines look dead together.
- An end that says something against the engine counts. After the first in a row its next life begins at once, as a
  kubelet's container does: what fails once in a while should not wait. From the second on it waits, longer each time,
  and after `maxRestarts` for somebody to resume it. An end that says nothing against it costs nothing,
  unless lives end like that again and again before they serve: then the next one waits as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from rolloutfleet.api.common import EnginePhase, RecoverySpec
from rolloutfleet.api.server_group import EngineStatus, Failure, ServerGroup
from rolloutfleet.plan.engines import EngineView, complete, started_at
from rolloutfleet.plan.history import begun, proved_itself
from rolloutfleet.plan.observed import EnginePod, NodeState, parse_time
from rolloutfleet.plan.revision import digest

HARMLESS_ENDS = frozenset(
    {
        *("PodDeleted", "RestartRequested", "MemoryUnknown"),
        *("NodeNotReady", "NodeGone", "NodeLost", "NodeShutdown", "Terminated", "TerminationByKubelet"),
        *("Evicted", "EvictionByEvictionAPI", "Preempting", "PreemptionByScheduler"),
        *("DeletionByTaintManager", "DeletionByPodGC"),
    }
)
"""Ends that say nothing against the engine: none counts as a failure, and after a life that served the next one begins
at once."""

ENDED = "ServerEnded"
"""Seen from outside, before its kubelet has told how."""
KUBELETS_WORD = timedelta(seconds=10)
"""For how long the pod of such an engine is kept, so that status can tell."""

NODE_SILENCE = timedelta(seconds=10)
"""For how long an engine on a node that is not ready must have been silent itself: one missed look is not enough, and
a kubelet that is down alone takes no engine with it. One that never answered is silent since it has its node: news of
nodes and of pods come apart, so that we may hear of the scheduler's choice before we hear that its node is ready."""


DEAF = 2
"""Each time it has had sglang.CHECKSUM_SECONDS."""


def end_of_life(
    view: EngineView, recovery: RecoverySpec, now: datetime, *, held: bool, mass_failure: str
) -> Failure | None:
    """Why this life of an engine of ours is over, or None while it goes on. Any of its pods ends it: the ranks of a
    parallel engine cannot be replaced one by one.

    `held`: the trainer has the engines; `mass_failure`: see `mass_failure_of`.
    """
    found = _ended_by_itself(view)
    if found is None and not held and view.role != "Placeholder":
        found = _lost_node(view, now) or _deaf(view)
        if found is None and not mass_failure:
            found = _seems_dead(view, recovery, now)
    return found


def _ended_by_itself(view: EngineView) -> Failure | None:
    record, pods = view.record, view.pods
    for pod in pods:
        if pod.disruption is not None:
            return Failure(reason=pod.disruption.reason, message=pod.disruption.message, pod=pod.name)
        if pod.deleting:
            return Failure(reason="PodDeleted", message="the pod was deleted", pod=pod.name)
        if pod.node_state is NodeState.GONE:
            return Failure(reason="NodeGone", message=f"node {pod.node} is no more", pod=pod.name)
        if pod.trouble is not None and pod.trouble.ended:
            return Failure(reason=pod.trouble.reason, message=pod.trouble.message, pod=pod.name, log=pod.trouble.log)
    if view.probe.closed and record.started:
        return Failure(reason="ServerEnded", message="nobody listens at its port any more", pod=record.pod)
    if record.pod_uid:  # all of them were there
        if not complete(pods) or pods[0].rank != 0:
            return Failure(reason="PodDeleted", message="a pod of it is gone", pod=record.pod)
        if pods[0].uid != record.pod_uid:
            return Failure(reason="PodDeleted", message="another pod took its name", pod=pods[0].name)
    return None


def _lost_node(view: EngineView, now: datetime) -> Failure | None:
    """Kubernetes itself would wait for five minutes more, and then for ever for the pod to end."""
    lost = next((pod for pod in view.pods if pod.node_state is NodeState.NOT_READY), None)
    if lost is None or view.answering:
        return None
    silent = parse_time(view.record.silent_since) if view.record.started else lost.scheduled_at
    if silent is None or now - silent < NODE_SILENCE:
        return None
    return Failure(reason="NodeNotReady", message=f"node {lost.node} is not ready, nor does it answer", pod=lost.name)


def _deaf(view: EngineView) -> Failure | None:
    """Its server answers and its scheduler does not: it stands in a broadcast of a trainer that has died, from which
    NCCL lets nobody go (measured). All engines of the fleet may, and no cause that they share heals them: so this is
    no matter of `mass_failure_of`."""
    if not view.probe.answering or view.probe.deaf < DEAF:
        return None
    text = f"answers, but its scheduler did not say what its weights are, {view.probe.deaf} times in a row"
    return Failure(reason="Hung", message=text, pod=view.pods[0].name)


def _seems_dead(view: EngineView, recovery: RecoverySpec, now: datetime) -> Failure | None:
    if view.record.started and fails_checks(view, recovery):
        asked = f"{view.probe.unhealthy} health checks in a row"
        if view.probe.answering:
            text = f"answers, but generated no token in {asked}"
            return Failure(reason="Hung", message=text, pod=view.pods[0].name)
        text = f"no answer since {view.record.silent_since}, nor to {asked}, although its container runs"
        return Failure(reason="NotAnswering", message=text, pod=view.pods[0].name)
    started = started_at(view.pods)
    if view.answering or view.record.started or started is None:
        return None
    seconds = recovery.startup_deadline_seconds
    if now - started > timedelta(seconds=seconds):
        text = f"not answering {seconds} s after its container started"
        return Failure(reason="StartupDeadlineExceeded", message=text, pod=view.pods[0].name)
    return None


def fails_checks(view: EngineView, recovery: RecoverySpec) -> bool:
    return bool(view.pods) and view.probe.unhealthy >= recovery.health_check.failure_threshold


def mass_failure_of(engines: Sequence[EngineView]) -> str:
    """Says so when more than half of the engines that run look dead at once, and more than one.

    One failed check makes a suspect: engines that fall together reach their thresholds one after the other. Network,
    storage, weights or this operator's own node are likelier then than so many engines, and replacing them all would
    lose what they hold and load the storage. Nodes that Kubernetes itself has given up are not counted.
    """
    running = [
        view
        for view in engines
        if view.record.started
        and complete(view.pods)
        and all(pod.alive and pod.node_state is NodeState.READY and not pod.external for pod in view.pods)
    ]
    suspects = [view for view in running if view.probe.unhealthy]
    if len(suspects) < 2 or 2 * len(suspects) <= len(running):
        return ""
    return (
        f"{len(suspects)} of {len(running)} engines fail their health checks together: a network, a storage or weights "
        "that all of them share is likelier than so many engines, so none is replaced for it; "
        "`kubectl rolloutfleet restart` replaces one all the same"
    )


def next_life(record: EngineStatus, failure: Failure, epoch: int, group: ServerGroup, now: datetime) -> EngineStatus:
    """The record of the life after one that ended."""
    recovery, roomy = group.spec.recovery, len(group.status.engines) <= ROOMY
    blameless = failure.reason in HARMLESS_ENDS
    before = 0 if proved_itself(record, recovery, now) else record.failures_in_row
    failures = before if blameless else before + 1
    given_up = recovery.max_restarts is not None and failures > recovery.max_restarts
    in_vain = _lives_that_never_served(record) if blameless else failures
    if given_up or failure.reason == "RestartRequested":
        in_vain = 0
    pause = backoff(in_vain, recovery, f"{group.uid}/{record.index}/{epoch}")
    kept = failure.model_copy(
        update={"time": now.isoformat(timespec="milliseconds"), "log": failure.log if roomy else ""}
    )
    return EngineStatus(
        index=record.index,
        epoch=epoch,
        revision=record.revision,
        phase=EnginePhase.FAILED if pause or given_up else EnginePhase.PENDING,
        restarts=record.restarts + (not given_up),
        failures_in_row=failures,
        retry_at=(now + pause).isoformat(timespec="milliseconds") if pause else "",
        last_failure=kept,
        recoveries=begun(record.recoveries, epoch, failure.reason, now, keep=5 if roomy else 2),
    )


def _lives_that_never_served(record: EngineStatus) -> int:
    """The last ones in a row, as far as status remembers. Whoever evicts each life as soon as it runs must not make us
    create pods as fast as they go (kueue#13830)."""
    served = [bool(recovery.routable) for recovery in reversed(record.recoveries)]
    return served.index(True) if True in served else len(served)


ROOMY = 100
"""Engines of a group up to which each keeps a log and several recoveries: an object in etcd has about 1.5 MB."""


def told_how(record: EngineStatus, pods: Sequence[EnginePod]) -> EngineStatus:
    """The record with its kubelet's word on an end that we saw first."""
    last = record.last_failure
    if last is None or last.reason != ENDED:
        return record
    trouble = next((pod.trouble for pod in pods if pod.name == last.pod and pod.ended), None)
    if trouble is None:
        return record
    told = last.model_copy(update={"reason": trouble.reason, "message": trouble.message, "log": trouble.log})
    recoveries = tuple(
        recovery.model_copy(update={"reason": trouble.reason}) if recovery.reason == ENDED else recovery
        for recovery in record.recoveries
    )
    return record.model_copy(update={"last_failure": told, "recoveries": recoveries})


def awaits_its_word(pod: EnginePod, record: EngineStatus, now: datetime) -> bool:
    """This pod's kubelet is about to say how the engine's last life ended."""
    last, until = record.last_failure, word_due(record)
    if last is None or until is None or last.pod != pod.name or pod.node_state is not NodeState.READY:
        return False
    return now < until


def word_due(record: EngineStatus) -> datetime | None:
    """Until when a kubelet's word on the end of the engine's last life is waited for."""
    last = record.last_failure
    since = parse_time(last.time) if last is not None and last.reason == ENDED else None
    return since + KUBELETS_WORD if since is not None else None


def backoff(failures: int, recovery: RecoverySpec, life: str) -> timedelta:
    """None after the first failure in a row; then initialSeconds, doubled with each further one, at most maxSeconds; up
    to a quarter less, by the name of the life: the same for everybody who asks, and another for each engine."""
    if failures < 2:
        return timedelta()
    seconds = recovery.backoff.initial_seconds * 2 ** min(failures - 2, 30)
    share = int(digest(life)[:4], 16) / 0xFFFF
    return timedelta(seconds=min(seconds, recovery.backoff.max_seconds) * (1 - share / 4))


def rests(record: EngineStatus, recovery: RecoverySpec, now: datetime) -> tuple[str, str]:
    """(reason, message) why the next life of an engine that failed does not begin yet; empty when it may."""
    failure = record.last_failure
    if record.pod_uid or failure is None:
        return "", ""
    counts = failure.reason not in HARMLESS_ENDS
    if counts and recovery.max_restarts is not None and record.failures_in_row > recovery.max_restarts:
        return "RestartsExhausted", (
            f"failed {record.failures_in_row} times in a row, and recovery.maxRestarts is {recovery.max_restarts}; "
            f"last: {failure.reason}: {failure.message}; `kubectl rolloutfleet resume` starts it again"
        )
    retry_at = parse_time(record.retry_at)
    return (failure.reason, failure.message) if retry_at is not None and now < retry_at else ("", "")


def resumed(record: EngineStatus) -> EngineStatus:
    """The record of an engine that somebody wants to be started again at once."""
    if not record.failures_in_row and not record.retry_at:
        return record
    return record.model_copy(update={"failures_in_row": 0, "retry_at": ""})


def to_force(pods: Sequence[EnginePod], recovery: RecoverySpec, now: datetime) -> list[EnginePod]:
    """Pods that no kubelet will ever end, where the spec allows to remove them from the API without its word."""
    moments = ((pod, _forced_at(pod, recovery)) for pod in pods if pod.node_state is not NodeState.READY)
    return [pod for pod, moment in moments if moment is not None and now >= moment]


def force_moments(pods: Sequence[EnginePod], recovery: RecoverySpec) -> list[datetime]:
    moments = (_forced_at(pod, recovery) for pod in pods)
    return [moment for moment in moments if moment is not None]


def _forced_at(pod: EnginePod, recovery: RecoverySpec) -> datetime | None:
    if pod.deletion_due is None or recovery.force_delete_after_seconds is None:
        return None
    return pod.deletion_due + timedelta(seconds=recovery.force_delete_after_seconds)


def silence(view: EngineView, now: datetime) -> Mapping[str, object]:
    """What the record says of an engine's answers: `started` once there was one, and since when there is none."""
    if view.probe.answering:
        return {"started": True, "silent_since": ""}
    since = view.record.silent_since or (now.isoformat(timespec="seconds") if view.record.started else "")
    return {"silent_since": since}
