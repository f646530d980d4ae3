"""`timeline`: seconds per stage, what a recovery waits for, and recoveries that a new failure cut short."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

from rolloutfleet.cli.timeline import Line, as_json, as_table, lines
from unit.cli.objects import engine, fleet, group, server

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat()


def recovery(epoch: int, reason: str = "EngineExited", **stages: float) -> dict[str, Any]:
    return {"epoch": epoch, "reason": reason, **{stage: at(seconds) for stage, seconds in stages.items()}}


def found(*engines: dict[str, Any], now: float = 100.0) -> list[Line]:
    return lines(fleet(server(), group(*engines)).engines, START + timedelta(seconds=now))


WHOLE = recovery(2, detected=0, replaced=0.5, loaded=30.5, caughtUp=32, routable=33)


def test_a_finished_recovery_has_the_seconds_of_each_stage_and_their_sum() -> None:
    (line,) = found(engine(0, 2, recoveries=[WHOLE]))
    assert line.life == "qwen-main-0-e2"
    assert line.seconds == {"replaced": 0.5, "loaded": 30.0, "caughtUp": 1.5, "routable": 1.0}
    assert (line.total, line.waits_for, line.cut_short) == (33.0, "", "")


def test_a_recovery_under_way_says_what_it_waits_for_and_how_long_it_takes_so_far() -> None:
    (line,) = found(engine(0, 2, "Starting", recoveries=[recovery(2, detected=40, replaced=41)]), now=50)
    assert (line.waits_for, line.total) == ("loaded", 10.0)
    assert "waits 9.0" in as_table([line], START + timedelta(seconds=50))


def test_one_that_was_only_detected_waits_for_its_pods() -> None:
    (line,) = found(engine(0, 2, "Failed", recoveries=[recovery(2, detected=40)]), now=50)
    assert (line.waits_for, line.seconds) == ("replaced", {})


def test_a_life_that_failed_before_it_served_is_cut_short_and_does_not_count_on() -> None:
    first = recovery(2, detected=0, replaced=1)
    (one, other) = found(engine(0, 3, recoveries=[first, recovery(3, detected=20)]), now=50)
    assert (one.life, one.cut_short, one.waits_for, one.total) == ("qwen-main-0-e2", "loaded", "", 1.0)
    assert (other.life, other.waits_for) == ("qwen-main-0-e3", "replaced")


def test_a_stage_that_nobody_saw_is_left_out_and_its_time_counts_for_the_next() -> None:
    (line,) = found(engine(0, 2, recoveries=[recovery(2, detected=0, replaced=1, loaded=10, routable=12)]))
    assert line.seconds == {"replaced": 1.0, "loaded": 9.0, "routable": 2.0}
    assert (line.waits_for, line.total) == ("", 12.0)


def test_recoveries_of_all_engines_are_in_the_order_of_their_detection() -> None:
    old, new = recovery(2, detected=5), recovery(7, detected=9)
    found_lines = found(engine(0, 7, recoveries=[old, new]), engine(1, 4, recoveries=[recovery(4, detected=7)]))
    assert [line.life for line in found_lines] == ["qwen-main-0-e2", "qwen-main-1-e4", "qwen-main-0-e7"]


def test_the_table_has_one_line_a_recovery() -> None:
    now = START + timedelta(seconds=100)
    header, line = as_table(found(engine(0, 2, recoveries=[WHOLE])), now).splitlines()
    assert header.split() == ["DETECTED", "ENGINE", "REASON", "REPLACED", "LOADED", "CAUGHT-UP", "ROUTABLE", "TOTAL"]
    assert " ".join(line.split()) == "2026-01-01 00:00:00Z qwen-main-0-e2 EngineExited 0.5 30.0 1.5 1.0 33.0"


def test_programs_get_seconds_and_the_stage_that_is_missing() -> None:
    (one,) = json.loads(as_json(found(engine(0, 2, recoveries=[recovery(2, detected=40, replaced=41)]), now=50)))
    assert one == {
        "engine": "qwen-main-0-e2",
        "reason": "EngineExited",
        "detected": at(40),
        "seconds": {"replaced": 1.0, "total": 10.0},
        "waitsFor": "loaded",
    }
