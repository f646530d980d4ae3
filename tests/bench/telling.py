"""What benchmarks of this folder have in common: their command line, and what they say while they run."""

from __future__ import annotations

import sys
import time

_began = time.monotonic()


def say(text: str) -> None:
    """On stderr, with the seconds since the start: stdout is for the one JSON object."""
    print(f"[{time.monotonic() - _began:5.0f}s] {text}", file=sys.stderr, flush=True)


def words(text: str) -> list[str]:
    """Type of an argument: a,b,c."""
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]
