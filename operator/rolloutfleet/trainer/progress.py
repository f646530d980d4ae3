"""A line of text about how far a run is, for terminals and logs."""

from __future__ import annotations

import shutil

_EIGHTHS = " ▏▎▍▌▋▊▉"


def progress_line(done: int, total: int, *, seconds: float, width: int | None = None, **figures: float | None) -> str:
    """`done` of `total` steps in `seconds`: share, bar, time so far and to come, seconds a step, and your figures.

    `width`: of the line, in characters; default: the terminal's. The bar takes what the rest leaves, and the line is
    never longer. Print it with end="\\r": it covers the line before it.
    """
    width = width or shutil.get_terminal_size().columns - 1
    left = max(total - done, 0) * seconds / done if done else None
    pace = f"{seconds / done:.2f}s/step" if done else "?s/step"
    shown = [f"{_clock(seconds)}<{_clock(left)}", pace]
    shown += [f"{name} {_short(value)}" for name, value in figures.items() if value is not None]
    share = min(max(done / total, 0.0), 1.0) if total > 0 else 0.0
    before, after = f"{share:4.0%} ", f" {done}/{total} [{', '.join(shown)}]"
    room = width - len(before) - len(after) - 2
    bar = f"|{_bar(share, room)}|" if room >= 4 else ""
    return f"{before}{bar}{after}"[:width].ljust(width)


def _bar(share: float, room: int) -> str:
    eighths = int(share * room * 8)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[part] if part else "")).ljust(room)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _short(value: float) -> str:
    """Three digits, as in 0.713, 12.3k, 4.5M."""
    value = float(f"{value:.3g}")  # first: 999999 is 1M and not 1000k
    size = abs(value)
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"
