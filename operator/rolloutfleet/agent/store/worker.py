"""The ledger for asyncio: one thread, since a sync of the disk takes milliseconds, and one transaction for all that is
told while the one before is under way, since it takes them however much there is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from rolloutfleet.agent.store.errors import Refused
from rolloutfleet.agent.store.ledger import GroupUpdate, Ledger

AT_ONCE = 256
"""Updates a transaction: what a crash makes to be done again, and what others wait for."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
_Told = tuple[GroupUpdate, "asyncio.Future[bool]"]


class LedgerWorker:
    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._told: deque[_Told] = deque()
        self._saving: asyncio.Task[None] | None = None

    async def save(self, update: GroupUpdate) -> bool:
        """True when it is committed, False where its claim no longer holds. What is told first is committed first. A
        caller that is cancelled meanwhile may have been heard. Raises StoreError."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._told.append((update, done))
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_all())
        return await done

    async def run(
        self, call: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """Another call of the ledger or of a hand-over, in its turn."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*arguments, **named))

    async def close(self) -> None:
        """After what was told is committed."""
        while self._saving is not None and not self._saving.done():
            await self._saving
        self._thread.shutdown()

    async def _save_all(self) -> None:
        while self._told:
            batch = [self._told.popleft() for _ in range(min(AT_ONCE, len(self._told)))]
            try:
                await self._save(batch)
            except Refused:
                for one in batch:  # one of them makes no sense: the others shall not pay for it
                    try:
                        await self._save([one])
                    except Exception as error:
                        _fail([one], error)
            except Exception as error:
                _fail(batch, error)

    async def _save(self, batch: list[_Told]) -> None:
        lost = {*await self.run(self.ledger.save, [update for update, _ in batch])}
        for update, done in batch:
            if not done.done():
                done.set_result(update.claim not in lost)


def _fail(batch: list[_Told], error: Exception) -> None:
    for _, done in batch:
        if not done.done():
            done.set_exception(error)
