"""Which engines go: too many of them, or made from an older revision. Never more than asked, never without notice.

An engine that goes leaves the routers first, finishes its requests (or has them aborted when its time is up), and is
deleted then. Kubernetes' names mean what they mean for a Deployment.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from rolloutfleet.api.common import RollingUpdate
from rolloutfleet.api.server_group import EngineStatus, ServerGroup
from rolloutfleet.plan.actions import Drain
from rolloutfleet.plan.engines import EngineView
from rolloutfleet.plan.observed import parse_time
from rolloutfleet.plan.training import Training

ABORT_GRACE = timedelta(seconds=30)
"""For an engine that does not even answer the abort; then it goes as it is."""


def engines_wanted(group: ServerGroup, revision: str, training: Training) -> int:
    """Replicas, and the surge while some engine is outdated."""
    outdated = sum(record.revision != revision for record in group.status.engines)
    surge = 0 if training.holds(offload=group.spec.offload) else min(group.spec.rolling_update.max_surge, outdated)
    return group.spec.replicas + surge


def free_indexes(records: Sequence[EngineStatus], wanted: int) -> list[int]:
    """The lowest indexes that no engine has, for those that are missing."""
    taken = {record.index for record in records}
    free = (index for index in range(wanted + len(taken)) if index not in taken)
    return [next(free) for _ in range(max(wanted - len(records), 0))]


def surplus(views: Sequence[EngineView], wanted: int, training: Training) -> set[int]:
    """Indexes to scale away: those that do not answer first, then those that do not serve, then the least loaded.

    One that has begun to drain goes on draining. While an update runs only engines go that take no part in it.
    """
    candidates = [view for view in views if not (training.updating and view.answering)]
    order = sorted(
        candidates,
        key=lambda view: (
            view.answering,
            view.serves,
            not view.record.drain_until,
            not view.outdated,
            view.probe.load,
            -view.record.index,
        ),
    )
    return {view.record.index for view in order[: max(len(views) - wanted, 0)]}


def to_replace(views: Sequence[EngineView], asked: set[int], replicas: int, rolling: RollingUpdate) -> set[int]:
    """Indexes of engines to replace now, of those that stay: of an older revision, or because somebody asked.

    New engines that do not serve yet use up what may be unavailable: so a bad revision stops after the first ones.
    """
    due = {view.record.index for view in views if view.outdated} | asked
    aside = {view.record.index for view in views if view.outdated and view.aside}
    outdated = [view for view in views if view.record.index in due and view.answering and not view.aside]
    new_missing = sum(view.record.index not in due and not view.serves for view in views)
    budget = rolling.max_unavailable + max(len(views) - replicas, 0) - new_missing
    spare = sum(view.serves for view in views) - (replicas - rolling.max_unavailable)
    chosen: set[int] = set()
    for view in sorted(outdated, key=lambda view: (not view.record.drain_until, view.serves, view.record.index)):
        if len(chosen) >= budget or (view.serves and spare <= 0):
            break
        spare -= view.serves
        chosen.add(view.record.index)
    return chosen | aside


def drained(view: EngineView, now: datetime) -> bool:
    """Nothing is lost when it goes now."""
    until = parse_time(view.record.drain_until)
    if not view.answering:
        return True
    if view.pod is not None and (view.pod.external or view.role == "Encoder"):
        return not view.listed  # the one goes on running; the other has requests of milliseconds
    if until is None or view.listed:
        return False
    return view.probe.drained == view.record.drain_until or now >= until + ABORT_GRACE


def drain_until(view: EngineView, timeout_seconds: int, now: datetime) -> str:
    return view.record.drain_until or (now + timedelta(seconds=timeout_seconds)).isoformat(timespec="milliseconds")


def drain_step(view: EngineView, now: datetime) -> list[Drain]:
    """The next look at an engine that is draining and that no router lists any more."""
    until = parse_time(view.record.drain_until)
    if (
        view.pod is None
        or view.role == "Encoder"
        or until is None
        or not view.leaving
        or view.listed
        or not view.answering
    ):
        return []
    if view.probe.drained == view.record.drain_until:
        return []
    return [Drain(pod_uid=view.pod.uid, url=view.pod.url, until=view.record.drain_until, abort=now >= until)]
