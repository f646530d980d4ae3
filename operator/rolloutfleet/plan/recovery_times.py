"""What a written status tells of recoveries that the one before it did not: ends, and how long each stage took."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from rolloutfleet.api.server_group import Recovery, ServerGroupStatus
from rolloutfleet.plan.observed import parse_time

Stage = Literal["replaced", "loaded", "caught_up", "routable"]
STAGES: tuple[Stage, ...] = get_args(Stage)


class Reached(NamedTuple):
    stage: Stage
    reason: str
    """Of the end that the recovery is from."""
    seconds: float
    """From the moment when the operator learned of that end."""


def reached(old: ServerGroupStatus, new: ServerGroupStatus) -> list[Reached]:
    """Stages of recoveries that `new` has and `old` has not. A status written twice tells nothing the second time."""
    before = _recoveries(old)
    found = []
    for life, recovery in _recoveries(new).items():
        known = before.get(life)
        detected = parse_time(recovery.detected)
        for stage in STAGES:
            at = parse_time(getattr(recovery, stage))
            if detected is not None and at is not None and not (known is not None and getattr(known, stage)):
                # Written by two operators, one after the other: their clocks may differ.
                seconds = max((at - detected).total_seconds(), 0.0)
                found.append(Reached(stage, recovery.reason, seconds))
    return found


def ends(old: ServerGroupStatus, new: ServerGroupStatus) -> list[str]:
    """Reasons of the ends after which a recovery has begun in `new` that `old` does not know."""
    before = _recoveries(old)
    return [recovery.reason for life, recovery in _recoveries(new).items() if life not in before]


def _recoveries(status: ServerGroupStatus) -> dict[tuple[int, int], Recovery]:
    """By index and epoch, which together are never used twice."""
    return {(engine.index, recovery.epoch): recovery for engine in status.engines for recovery in engine.recoveries}
