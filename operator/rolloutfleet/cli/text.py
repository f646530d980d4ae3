"""Tables and times as kubectl prints them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rolloutfleet.plan.observed import parse_time


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; an empty cell is `-`."""
    lines = [list(header), *([cell or "-" for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def age(since: str, now: datetime) -> str:
    """As kubectl's AGE; empty when there is no time."""
    moment = parse_time(since)
    return "" if moment is None else duration((now - moment).total_seconds())


def duration(seconds: float) -> str:
    whole = max(int(seconds), 0)
    for size, unit, following, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            rest = whole % size // following
            few = whole < 10 * size  # the second unit says something only beside a small first one
            return f"{whole // size}{unit}" + (f"{rest}{smaller}" if rest and few else "")
    return f"{whole}s"
