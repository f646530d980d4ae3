"""Work at once: the same for many engines, whoever of them hangs, or one thing beside another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from rolloutfleet.engine.errors import EngineError
from rolloutfleet.plan.update import Participant

STRAGGLER_FACTOR = 3.0

One = TypeVar("One")
Other = TypeVar("Other")


async def together(
    participants: Iterable[Participant],
    what: str,
    doing: Callable[[Participant], Coroutine[Any, Any, None]],
    *,
    falls_out: Callable[[Participant, str], None],
    slack: float,
    deadline: float = float("inf"),
) -> None:
    """When one is done, the others have `slack` seconds left, or three times as long as it took: so a hanging one does
    not keep all of them waiting, and a slow one is not taken for dead. `deadline`: by the monotonic clock, in any case.
    `what`: names the work for whoever reads why one fell out.

    What raises EngineError falls out, with its text; any other error is raised, and the rest is cancelled.
    """
    began = time.monotonic()
    tasks = {asyncio.ensure_future(doing(each)): each for each in participants}
    waiting, limit, first = set(tasks), deadline, True
    try:
        while waiting:
            left = None if limit == float("inf") else max(limit - time.monotonic(), 0.0)
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if isinstance(error, EngineError):
                    falls_out(tasks[task], str(error))
                elif error is not None:
                    raise error
                elif first:
                    first, took = False, time.monotonic() - began
                    limit = min(limit, began + took + max(slack, STRAGGLER_FACTOR * took))
            if not done:
                after = "" if first else ", long after another engine was"
                for task in waiting:
                    falls_out(tasks[task], f"{what} was not done after {time.monotonic() - began:.1f} s{after}")
                return
    finally:
        for task in tasks:
            task.cancel()


async def both(one: Coroutine[Any, Any, One], other: Coroutine[Any, Any, Other]) -> tuple[One, Other]:
    """What the first of them raises is raised, and the other is cancelled: nothing goes on behind our back."""
    tasks = asyncio.ensure_future(one), asyncio.ensure_future(other)
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
