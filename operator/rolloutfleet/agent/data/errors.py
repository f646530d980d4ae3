from __future__ import annotations

from collections.abc import Sequence

SHOWN = 20


class DataError(ValueError):
    """A data set that cannot be used. `problems`: what is wrong, each with its file and line."""

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        self.problems = list(problems)
        more = len(self.problems) - SHOWN
        listed = "".join(f"\n  {problem}" for problem in self.problems[:SHOWN])
        super().__init__(message + listed + (f"\n  and {more} more" if more > 0 else ""))
