"""How long each recovery of an engine took, by stage, and since when it serves. Written beside changes of phase."""

from __future__ import annotations

from datetime import datetime, timedelta

from rolloutfleet.api.common import EnginePhase, RecoverySpec
from rolloutfleet.api.server_group import EngineStatus, Recovery
from rolloutfleet.plan.engines import EngineView, Weights, complete
from rolloutfleet.plan.observed import parse_time


def begun(
    recoveries: tuple[Recovery, ...], epoch: int, reason: str, now: datetime, *, keep: int
) -> tuple[Recovery, ...]:
    """With the recovery that begins now."""
    return (*recoveries, Recovery(epoch=epoch, reason=reason, detected=_stamp(now)))[-keep:]


def proved_itself(record: EngineStatus, recovery: RecoverySpec, now: datetime) -> bool:
    """It has served for so long that its failures count no more."""
    since = parse_time(record.serving_since)
    return since is not None and now - since >= timedelta(seconds=recovery.backoff.reset_after_seconds)


def chronicled(view: EngineView, recovery: RecoverySpec, now: datetime) -> EngineStatus:
    """The record with the stages that its engine has reached, and since when it serves."""
    record = view.record
    if record.phase is EnginePhase.SERVING:
        record = record if record.serving_since else record.model_copy(update={"serving_since": _stamp(now)})
    elif record.phase is not EnginePhase.HELD and record.serving_since:
        # What ends its service may turn out to be its next failure.
        forgiven = {"failures_in_row": 0} if proved_itself(record, recovery, now) else {}
        record = record.model_copy(update={"serving_since": "", **forgiven})
    if not record.recoveries or record.recoveries[-1].epoch != record.epoch or record.recoveries[-1].routable:
        return record
    last = record.recoveries[-1]
    reached = {
        "replaced": complete(view.pods),
        "loaded": view.answering,
        "caught_up": view.answering and view.weights is Weights.CURRENT,
        "routable": record.phase is EnginePhase.SERVING,
    }
    news = {stage: _stamp(now) for stage, yes in reached.items() if yes and not getattr(last, stage)}
    if not news:
        return record
    return record.model_copy(update={"recoveries": (*record.recoveries[:-1], last.model_copy(update=news))})


def _stamp(now: datetime) -> str:
    return now.isoformat(timespec="milliseconds")
