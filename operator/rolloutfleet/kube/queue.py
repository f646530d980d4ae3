"""A work queue that coalesces: client-go's rules (util/workqueue) in asyncio.

A key that is added while it waits is one piece of work; added while it is worked on, it is worked on once more
afterwards; two workers never hold one key. A key that fails comes back after a backoff of its own.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from rolloutfleet.kube.errors import ApiError

logger = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)

FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 60.0


class WorkQueue(Generic[K]):
    def __init__(
        self, *, jitter: Callable[[], float] = random.random, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._jitter = jitter
        self._clock = clock
        self._waiting: dict[K, float] = {}
        """Dirty keys and since when, oldest first."""
        self._processing: set[K] = set()
        self._timers: dict[K, tuple[float, asyncio.TimerHandle]] = {}
        self._soon: dict[K, tuple[float, asyncio.TimerHandle]] = {}
        self._failures: dict[K, int] = {}
        self._wake = asyncio.Event()

    def add(self, key: K) -> None:
        self._waiting.setdefault(key, self._clock())
        self._wake.set()

    def add_after(self, key: K, seconds: float) -> None:
        """The earliest of several moments counts; `add` in between does not cancel it."""
        due = self._clock() + seconds
        known = self._timers.get(key)
        if known is not None:
            if known[0] <= due:
                return
            known[1].cancel()
        handle = asyncio.get_running_loop().call_later(seconds, self._elapsed, key)
        self._timers[key] = (due, handle)

    def add_soon(self, key: K, seconds: float) -> None:
        """For news of which more may follow: whatever takes the key until then has seen these as well. The earliest of
        several moments counts."""
        due = self._clock() + seconds
        known = self._soon.get(key)
        if key in self._waiting or (known is not None and known[0] <= due):
            return
        if known is not None:
            known[1].cancel()
        self._soon[key] = due, asyncio.get_running_loop().call_later(seconds, self._soon_is_now, key)

    def _soon_is_now(self, key: K) -> None:
        del self._soon[key]
        self.add(key)

    def _elapsed(self, key: K) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def depth(self) -> int:
        return len(self._waiting)

    def oldest_age(self) -> float:
        """Seconds that the oldest key has waited."""
        now = self._clock()
        return max((now - since for since in self._waiting.values()), default=0.0)

    async def run(self, *, workers: int, reconcile: Callable[[K], Awaitable[None]]) -> None:
        """For ever, until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(self._work(reconcile))
        finally:
            for _, handle in (*self._soon.values(), *self._timers.values()):
                handle.cancel()

    async def _work(self, reconcile: Callable[[K], Awaitable[None]]) -> None:
        while True:
            key = await self._take()
            try:
                await reconcile(key)
            except Exception as error:
                pause = self._backoff(key)
                # What the API server said explains itself, and our way there nothing.
                expected = isinstance(error, ApiError)
                logger.warning("%s: %s; again in %.1f s", key, error, pause, exc_info=not expected)
                self.add_after(key, pause)
            else:
                self._failures.pop(key, None)
            finally:
                self._processing.discard(key)
                if key in self._waiting:
                    self._wake.set()

    async def _take(self) -> K:
        while True:
            for key in self._waiting:
                if key not in self._processing:
                    del self._waiting[key]
                    self._processing.add(key)
                    soon = self._soon.pop(key, None)
                    if soon is not None:
                        soon[1].cancel()
                    return key
            self._wake.clear()
            await self._wake.wait()

    def _backoff(self, key: K) -> float:
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        pause = min(FIRST_RETRY_SECONDS * 2 ** min(failures, 20), LAST_RETRY_SECONDS)
        return float(pause * (0.5 + self._jitter() / 2))
