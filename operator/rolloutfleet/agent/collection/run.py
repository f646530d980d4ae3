"""One collection, opened: the store, the data set, the plug-ins, the loop, and what its trainer is handed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from rolloutfleet.agent.collection.batch import Batch, estimated, framed, share
from rolloutfleet.agent.collection.collector import Collector, heard
from rolloutfleet.agent.collection.judging import Judge
from rolloutfleet.agent.collection.observer import Observer
from rolloutfleet.agent.data.source import Prompts
from rolloutfleet.agent.errors import AgentError, conflict, invalid, unavailable
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.plugins.errors import PluginError
from rolloutfleet.agent.plugins.kinds import Kind
from rolloutfleet.agent.store.audit import progress
from rolloutfleet.agent.store.database import Database
from rolloutfleet.agent.store.errors import StoreBusy
from rolloutfleet.agent.store.handover import Choose, Handover, Offer
from rolloutfleet.agent.store.ledger import Left, PromptId
from rolloutfleet.agent.store.worker import LedgerWorker
from rolloutfleet.api.collection import Acknowledge, Collection, CollectionView, LeaseBatch
from rolloutfleet.plan.batching import largest_multiple

logger = logging.getLogger(__name__)

SKIPPED_SHOWN = 100
OFFERED = 4096
"""Finished groups that a buffer filter sees at once."""
BATCHES_KEPT = 2
"""In memory, for ranks that come a little later."""
PAUSES = (0.2, 1.0, 3.0)

Result = TypeVar("Result")


class CollectionRun:
    def __init__(
        self,
        collection: Collection,
        *,
        fleet: Fleet,
        database: Database,
        ledger: LedgerWorker,
        handover: Handover,
        judge: Judge,
        collector: Collector,
        observer: Observer,
        prompts: Prompts,
        ticket: str,
    ) -> None:
        self.collection = collection
        self._fleet = fleet
        self._database = database
        self._ledger = ledger
        self._handover = handover
        self._judge = judge
        self._collector = collector
        self._observer = observer
        self._prompts = prompts
        self.ticket = ticket
        self._batches: OrderedDict[int, Batch] = OrderedDict()
        self._leasing = asyncio.Lock()
        self._loop = asyncio.create_task(collector.run())

    async def close(self) -> None:
        """What runs is stopped and kept, and may be claimed by whoever comes next."""
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        try:
            await self._ledger.run(self._ledger.ledger.close)
        finally:
            await self._ledger.close()
            await self._judge.close()
            await asyncio.to_thread(self._database.close)
            self._prompts.close()

    async def view(self) -> CollectionView:
        """Raises StoreError."""
        found = await self._ledger.run(progress, self._database, self.collection.run)
        failure = self._collector.failure
        return CollectionView(
            run=self.collection.run,
            mode=self.collection.mode,
            state=self._collector.state,
            message=f"{failure.code}: {failure.message}" if failure else "",
            epoch=found.cursor.epoch,
            open=self._collector.open,
            finished=found.states.get("finished", 0),
            leased=found.states.get("leased", 0),
            trained=found.states.get("trained", 0),
            dropped=found.dropped,
            requests=self._collector.requests,
            data_rows_skipped=self._prompts.skipped[:SKIPPED_SHOWN],
        )

    async def batch(self, asked: LeaseBatch) -> bytes:
        """Raises AgentError (503 NotReady) where it is not there in time, StoreError."""
        self._require(asked.trainer)
        deadline = time.monotonic() + asked.wait_seconds
        async with self._leasing:
            batch = self._batches.get(asked.step) or await self._leased(asked.step, deadline)
        try:
            return await asyncio.to_thread(lambda: framed(*share(batch, asked)))
        except ValueError as error:
            raise invalid("CannotSplit", f"step {asked.step}: {error}") from error

    async def acknowledge(self, asked: Acknowledge) -> CollectionView:
        self._require(asked.trainer)
        await self._again(lambda: self._handover.acknowledge(asked.step))
        self._observer.step_trained(asked.step)
        return await self.view()

    def _require(self, trainer: str) -> None:
        if trainer != self.collection.trainer:
            text = f"trainer {trainer} has been followed by {self.collection.trainer} in run {self.collection.run}"
            raise conflict("Fenced", text)

    async def _leased(self, step: int, deadline: float) -> Batch:
        ids = await self._try(step)
        if ids is None:
            self._collector.want(step)
        while ids is None:
            news = self._collector.news
            if self._collector.failure is not None:
                failure = self._collector.failure
                raise AgentError(failure.code, failure.message, status=failure.status, details=failure.details)
            if self._enough():
                ids = await self._try(step)
                if ids is not None:
                    break
                await self._refuse_if_nothing_comes()
            if time.monotonic() >= deadline:
                raise unavailable("NotReady", await self._why_not(step))
            await heard(news, deadline - time.monotonic())
        await self._collector.leased()
        return await self._read(step)

    async def _refuse_if_nothing_comes(self) -> None:
        left = await self._left()
        if self._collector.exhausted and not left.comes:
            why = f"; {left.finished} finished groups are left that fit into no batch" if left.finished else ""
            raise conflict("Exhausted", f"run {self.collection.run} has no more prompts{why}")

    async def _left(self) -> Left:
        """Those of other agents of the run too."""
        return await self._ledger.run(self._ledger.ledger.left)

    def _enough(self) -> bool:
        return self._collector.finished >= self.collection.groups_per_step or self._collector.exhausted

    async def _why_not(self, step: int) -> str:
        view = await self.view()
        fleet = self._fleet.view(leading=False, holder="", fence=0)
        return (
            f"run {view.run}, step {step}: {view.finished} of {self.collection.groups_per_step} groups are finished, "
            f"{view.open} are in work, {fleet.routable} of {fleet.desired} engines routable"
            + (f"; {fleet.message}" if fleet.message else "")
        )

    async def _try(self, step: int) -> list[PromptId] | None:
        asked = self.collection
        oldest = 0 if asked.max_staleness is None else max(self._fleet.committed_version - asked.max_staleness, 0)
        choose, offered = await self._choice()

        def lease() -> list[PromptId] | None:
            return self._handover.lease(step, groups=offered, minimum=1, oldest_version=oldest, choose=choose)

        return await self._again(lease)

    async def _choice(self) -> tuple[Choose, int]:
        """Which of the finished groups make the batch, and how many are looked at for it."""
        asked = self.collection
        exhausted = self._collector.exhausted and not (await self._left()).comes
        if asked.buffer_filter is None:
            return lambda offers: _fitting(offers, asked, exhausted), asked.groups_per_step
        offers = await self._again(lambda: self._handover.offers(OFFERED))
        try:
            positions = await self._judge.call(Kind.BUFFER_FILTER, asked.buffer_filter, offers, asked.groups_per_step)
        except PluginError as error:
            raise AgentError("BufferFilterFailed", str(error), status=500) from error
        liked = {offers[position].id: rank for rank, position in enumerate(positions)}

        def choose(found: Sequence[Offer]) -> Sequence[Offer]:
            best = sorted((offer for offer in found if offer.id in liked), key=lambda offer: liked[offer.id])
            return _fitting(best[: asked.groups_per_step], asked, exhausted)

        return choose, OFFERED

    async def _read(self, step: int) -> Batch:
        groups = [group.samples for group in await self._again(lambda: self._handover.read(step))]
        asked = self.collection
        if asked.post_process is not None:
            try:
                values = await self._judge.call(Kind.POST_PROCESS, asked.post_process, groups)
            except PluginError as error:
                raise AgentError("PostProcessFailed", str(error), status=500) from error
        else:
            try:
                values = estimated(groups, asked.estimator, asked.reward_key)
            except ValueError as error:  # rewards of several parts, and none of them is the one
                raise invalid("BadRequest", f"step {step}: {error}") from error
        version = self._fleet.committed_version
        left = await self._left()
        last = not left.comes and not left.finished
        batch = Batch(step, version, groups, values, last, asked.reward_key)
        self._observer.step_leased(step, groups, version)
        self._batches[step] = batch
        while len(self._batches) > BATCHES_KEPT:
            self._batches.popitem(last=False)
        return batch

    async def _again(self, call: Callable[[], Result]) -> Result:
        """All these calls may be repeated; a store that is busy for long is the caller's to know."""
        for pause in PAUSES:
            try:
                return await self._ledger.run(call)
            except StoreBusy as busy:
                logger.warning("%s: %s", self.collection.run, busy)
                await asyncio.sleep(pause)
        return await self._ledger.run(call)


def _fitting(offers: Sequence[Offer], asked: Collection, exhausted: bool) -> list[Offer]:
    """Nothing while there are too few, unless no more will come; then those whose samples are a multiple."""
    if len(offers) < asked.groups_per_step and not exhausted:
        return []
    return [offers[number] for number in largest_multiple([offer.samples for offer in offers], asked.multiple)]
