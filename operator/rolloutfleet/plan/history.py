"""How long each recovery of an engine took, by stage. Written once a stage, beside changes of phase."""

from __future__ import annotations

from datetime import datetime

from rolloutfleet.api.common import EnginePhase
from rolloutfleet.api.server_group import EngineStatus, Recovery
from rolloutfleet.plan.engines import EngineView, Weights, complete


def begun(
    recoveries: tuple[Recovery, ...], epoch: int, reason: str, now: datetime, *, keep: int
) -> tuple[Recovery, ...]:
    """With the recovery that begins now."""
    return (*recoveries, Recovery(epoch=epoch, reason=reason, detected=_stamp(now)))[-keep:]


def chronicled(view: EngineView, now: datetime) -> EngineStatus:
    """The record with the stages that its engine has reached, and since when it serves."""
    record = view.record
    since = record.serving_since
    if record.phase is EnginePhase.SERVING:
        since = since or _stamp(now)
    elif record.phase is not EnginePhase.HELD:
        since = ""
    if since != record.serving_since:
        record = record.model_copy(update={"serving_since": since})
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
