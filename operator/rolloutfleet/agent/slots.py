"""A bound on how many requests are open, and a word that stops those who wait for one."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque


class Stop:
    """Said once, to all samples of a collection: no more requests, and what waits, waits no longer."""

    def __init__(self) -> None:
        self.said = False
        self.prefix = uuid.uuid4().hex[:12]
        """Of the ids of all requests that it concerns, by which engines end them."""
        self._waiting: set[asyncio.Future[bool]] = set()

    def say(self) -> None:
        self.said = True
        for future in self._waiting:
            if not future.done():
                future.set_result(False)

    async def wait_for(self, future: asyncio.Future[bool], seconds: float | None = None) -> bool:
        """The future's result; False where it was not there in time, or this was said first."""
        if self.said:
            return False
        self._waiting.add(future)
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            return False
        finally:
            self._waiting.discard(future)

    async def pause(self, seconds: float) -> None:
        """`seconds`, or less."""
        await self.wait_for(asyncio.get_running_loop().create_future(), seconds)


class Slots:
    """First come, first served. `limit` may change at any time: what is open stays open."""

    def __init__(self) -> None:
        self.limit = 1
        self.open = 0
        self._queue: deque[asyncio.Future[bool]] = deque()

    async def take(self, stop: Stop, seconds: float | None = None) -> bool:
        """False where there was none in time, or `stop` was said."""
        if stop.said:
            return False
        if self.open < self.limit and not self._queue:
            self.open += 1
            return True
        given: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.append(given)
        taken = False
        try:
            taken = await stop.wait_for(given, seconds)
            return taken
        finally:
            if not taken and given.done() and not given.cancelled() and given.result():
                self.give_back()  # given to one who went away in the same moment

    def give_back(self) -> None:
        self.open -= 1
        self.admit()

    def admit(self) -> None:
        """Also to be called when `limit` has grown."""
        while self._queue and self.open < self.limit:
            given = self._queue.popleft()
            if not given.done():
                self.open += 1
                given.set_result(True)
