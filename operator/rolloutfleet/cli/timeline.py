"""`timeline NAME`: the recoveries of all engines, with the seconds that each stage took."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from rolloutfleet.api.names import engine_name
from rolloutfleet.api.server_group import Recovery
from rolloutfleet.cli.fleet import Engine, read_fleet
from rolloutfleet.cli.session import Session, Verbs, add_verb
from rolloutfleet.cli.text import table
from rolloutfleet.plan.observed import parse_time

STAGES = ("replaced", "loaded", "caughtUp", "routable")
"""In the order in which they are reached; as fields of Recovery are called on the wire."""


@dataclass(frozen=True)
class Line:
    """One recovery of one engine."""

    life: str
    """The one that took over."""
    reason: str
    """Why the one before it ended."""
    detected: datetime
    seconds: dict[str, float]
    """From the stage before it, of each stage that was reached."""
    total: float
    """Seconds from the detection until it was routable; of one that is under way, until now."""
    waits_for: str = ""
    """The stage that is not reached yet, while it is under way."""
    cut_short: str = ""
    """The stage that it never reached, since this life ended before."""


def lines(engines: Iterable[Engine], now: datetime) -> list[Line]:
    """The newest last."""
    found = [line_of(engine, recovery, now) for engine in engines for recovery in engine.record.recoveries]
    return sorted(found, key=lambda line: (line.detected, line.life))


def line_of(engine: Engine, recovery: Recovery, now: datetime) -> Line:
    detected = parse_time(recovery.detected) or now
    reached = {"replaced": recovery.replaced, "loaded": recovery.loaded}
    reached |= {"caughtUp": recovery.caught_up, "routable": recovery.routable}
    seconds: dict[str, float] = {}
    last = detected
    for stage in STAGES:
        moment = parse_time(reached[stage])
        if moment is not None:
            seconds[stage] = (moment - last).total_seconds()
            last = moment
    open_stage = "" if "routable" in seconds else next(s for s in STAGES if s not in seconds)
    under_way = bool(open_stage) and recovery.epoch == engine.record.epoch
    until = now if under_way else last
    return Line(
        life=engine_name(engine.group.name, engine.record.index, recovery.epoch),
        reason=recovery.reason,
        detected=detected,
        seconds=seconds,
        total=(until - detected).total_seconds(),
        waits_for=open_stage if under_way else "",
        cut_short="" if under_way else open_stage,
    )


def as_table(found: Iterable[Line], now: datetime) -> str:
    rows = []
    for line in found:
        cells = [f"{line.seconds[stage]:.1f}" if stage in line.seconds else "" for stage in STAGES]
        if line.waits_for:
            spent = (now - line.detected).total_seconds() - sum(line.seconds.values())
            cells[STAGES.index(line.waits_for)] = f"waits {spent:.1f}"
        if line.cut_short:
            cells[STAGES.index(line.cut_short)] = "ended"
        moment = line.detected.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        rows.append([moment, line.life, line.reason, *cells, f"{line.total:.1f}"])
    return table(["DETECTED", "ENGINE", "REASON", "REPLACED", "LOADED", "CAUGHT-UP", "ROUTABLE", "TOTAL"], rows)


def as_json(found: Iterable[Line]) -> str:
    return json.dumps(
        [
            {
                "engine": line.life,
                "reason": line.reason,
                "detected": line.detected.isoformat(),
                "seconds": {**line.seconds, "total": line.total},
                **({"waitsFor": line.waits_for} if line.waits_for else {}),
                **({"cutShort": line.cut_short} if line.cut_short else {}),
            }
            for line in found
        ],
        indent=2,
    )


def add_to(verbs: Verbs) -> None:
    parser = add_verb(verbs, "timeline", run, summary="list recoveries, the newest last, with seconds per stage")
    parser.add_argument("-o", "--output", choices=["json"], help="for programs")


async def run(session: Session, options: argparse.Namespace) -> int:
    fleet = await read_fleet(session, options.name)
    now = datetime.now(UTC)
    found = lines(fleet.engines, now)
    if options.output == "json":
        print(as_json(found))
    elif found:
        print(as_table(found, now))
    else:
        print(f"{fleet.server.name}: no engine has recovered from anything yet")
    return 0
