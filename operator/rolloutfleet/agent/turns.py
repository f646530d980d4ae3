"""Order among a sender's buckets, which overlap: the agent is asked for the next one while one travels, so that its way
to the engines costs no time. In a broadcast nothing but the order says which bucket it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rolloutfleet.engine.errors import EngineError


class Turns:
    """Of one engine and one sender: it is told of bucket n when it has taken n - 1."""

    def __init__(self) -> None:
        self._taken: dict[int, asyncio.Future[bool]] = {}

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncIterator[None]:
        """Raises EngineError where the one before was not taken: this one would be taken for it."""
        before, mine = self._outcome(number - 1) if number else None, self._outcome(number)
        taken = False
        try:
            if before is not None and not await asyncio.shield(before):
                raise EngineError(f"it has not taken bucket {number - 1}")
            self._taken.pop(number - 1, None)
            yield
            taken = True
        finally:
            mine.set_result(taken)

    def _outcome(self, number: int) -> asyncio.Future[bool]:
        return self._taken.setdefault(number, asyncio.get_running_loop().create_future())
