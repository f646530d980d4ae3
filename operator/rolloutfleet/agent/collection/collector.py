"""The loop that keeps engines busy with the prompts of one run: claim, sample, judge, keep; stop when enough is there.

Everything that must outlive this process is in the ledger; what is here can be lost at any moment.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from rolloutfleet.agent.collection.group import GroupResult, Making, finish_group
from rolloutfleet.agent.collection.prompts import Work, WorkSource
from rolloutfleet.agent.data.errors import DataError
from rolloutfleet.agent.errors import AgentError, conflict, invalid
from rolloutfleet.agent.sampling import Asking
from rolloutfleet.agent.slots import Stop
from rolloutfleet.agent.store.errors import StoreBusy, StoreError, as_refusal
from rolloutfleet.agent.store.ledger import Claim, GroupUpdate
from rolloutfleet.agent.store.worker import LedgerWorker
from rolloutfleet.api.collection import Collection
from rolloutfleet.api.samples import Sample
from rolloutfleet.plan.collecting import groups_to_hold

logger = logging.getLogger(__name__)

KEEP_SECONDS = 2.0
"""How long a finished sample may wait for the others of its group before it is kept alone."""
LOOK_SECONDS = 5.0
"""Between two looks at the ledger when nothing happens here: other agents may have done something. Also how often an
agent that shares a run says that it lives."""
BUSY_PAUSE_SECONDS = 1.0
STOP_SECONDS = 60.0
"""For engines and plug-ins to end what was stopped; what has not by then begins again."""
DROPS_PER_GROUP = 64
UNEXPECTED = 500


class Collector:
    def __init__(
        self,
        collection: Collection,
        *,
        ledger: LedgerWorker,
        source: WorkSource,
        making: Making,
        resume: Callable[[Sample], Sample],
    ) -> None:
        """`resume`: what a sample that is claimed again goes on with."""
        self._collection = collection
        self._ledger = ledger
        self._source = source
        self._making = making
        self._resume = resume
        self._groups: dict[Claim, asyncio.Task[None]] = {}
        self._kept_later: dict[Claim, list[Sample]] = {}
        self._stop = making.asking.stop
        self._work = asyncio.Event()
        self.news = asyncio.Event()
        """Set when something has happened; another one takes its place. Take it before the look, wait for it after."""
        self._drops: Counter[str] = Counter()
        self.wanted: int | None = None
        """The step that a trainer waits for."""
        self.finished = 0
        """Groups that wait for a step, as of the last look."""
        self.exhausted = False
        self.failure: AgentError | None = None

    # What the hand-over asks

    @property
    def state(self) -> Literal["Collecting", "Waiting", "Exhausted", "Failed"]:
        if self.failure is not None:
            return "Failed"
        if self._groups:
            return "Collecting"
        return "Exhausted" if self.exhausted else "Waiting"

    @property
    def open(self) -> int:
        return len(self._groups)

    @property
    def requests(self) -> int:
        """Open at this moment, those of evaluations too."""
        return self._making.sampler.open_requests

    def want(self, step: int) -> None:
        """A trainer waits for the batch of this step. What had failed is tried again."""
        if self.wanted != step or self.failure is not None:
            self.wanted, self.failure = step, None
            self._ring()

    async def leased(self) -> None:
        """The step has its batch: returns when engines have stopped working for it, where they do not go on."""
        self.wanted = None
        self._drops.clear()
        self._ring()
        while True:
            news = self.news
            if self._collection.mode == "asynchronous" or not self._groups or self.failure is not None:
                return
            await heard(news, LOOK_SECONDS)

    def _ring(self) -> None:
        """There may be something to do."""
        self._work.set()
        self._work = asyncio.Event()
        self._tell()

    def _tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    # The loop

    async def run(self) -> None:
        """Until it is cancelled; then everything that runs has been stopped and kept."""
        keeping = asyncio.create_task(self._keep_samples())
        try:
            while True:
                work = self._work
                try:
                    await self._look()
                except StoreBusy as busy:
                    logger.warning("%s: %s", self._collection.run, busy)
                    await asyncio.sleep(BUSY_PAUSE_SECONDS)
                except Exception as error:
                    # Whatever it is: a loop that has ended unseen would collect nothing for ever.
                    self._fail(error)
                await heard(work, LOOK_SECONDS)
        finally:
            keeping.cancel()
            await self._stop_all()

    async def _look(self) -> None:
        before, self.finished = self.finished, await self._ledger.run(self._ledger.ledger.finished)
        if before != self.finished:
            self._tell()
        self._making.observer.queue(open=len(self._groups), finished=self.finished, running=self.requests)
        hold = self._to_hold()
        if self.failure is not None or (hold == 0 and self._collection.mode == "synchronous"):
            await self._stop_all()
        elif hold > len(self._groups):
            await self._begin(hold)
        elif self._collection.shared:
            await self._ledger.run(self._ledger.ledger.keep_alive)

    def _to_hold(self) -> int:
        asked = self._collection
        if asked.mode == "asynchronous":
            target = asked.groups_per_step * asked.ahead
        else:
            target = asked.groups_per_step if self.wanted is not None else 0
        return groups_to_hold(target=target, finished=self.finished, over_sampling=asked.over_sampling)

    async def _begin(self, hold: int) -> None:
        claims = await self._ledger.run(self._ledger.ledger.claim, hold, known=set(self._groups))
        was, self.exhausted = self.exhausted, not claims and not self._groups
        if self.exhausted and not was:
            self._tell()
        if not claims:
            return
        kept = await self._ledger.run(self._ledger.ledger.partials, [claim.id for claim in claims])
        for work in await self._source.work(claims, kept):
            self._groups[work.claim] = asyncio.create_task(self._group(work))

    async def _group(self, work: Work) -> None:
        try:
            if work.dropped:
                await self._save(GroupUpdate(work.claim, outcome="dropped", reason=work.dropped), [])
                return
            continued = [self._resume(sample) for sample in work.samples]
            making = replace(self._making, asking=self.asking())
            result = await finish_group(continued, work.prompt, making, partial(self._keep_later, work.claim))
            await self._save(_update(work.claim, result), result.samples)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._fail(error)
        finally:
            self._kept_later.pop(work.claim, None)
            self._groups.pop(work.claim, None)
            self._ring()

    def asking(self) -> Asking:
        """How samples are asked for now: until the next stop."""
        return replace(self._making.asking, stop=self._stop)

    async def _save(self, update: GroupUpdate, samples: list[Sample]) -> None:
        self._kept_later.pop(update.claim, None)
        while True:  # bounded by the collector: it is cancelled, or the store fails for good
            try:
                held = await self._ledger.save(update)
                break
            except StoreBusy as busy:
                logger.warning("%s: %s", self._collection.run, busy)
                await asyncio.sleep(BUSY_PAUSE_SECONDS)
        if not held:
            return
        if update.outcome == "finished":
            self._making.observer.group_finished(samples)
        elif update.outcome == "dropped":
            self._making.observer.group_dropped(samples, update.reason)
            self._drops[update.reason] += 1
            self._check_drops()

    def _check_drops(self) -> None:
        asked = self._collection
        bound = asked.max_drops_per_step or DROPS_PER_GROUP * asked.groups_per_step
        if self._drops.total() >= bound and self.failure is None:
            counts = ", ".join(f"{reason} {count}" for reason, count in self._drops.most_common())
            text = (
                f"run {asked.run}: {bound} groups were dropped for one step ({counts}): max_drops_per_step is reached"
            )
            self._drops.clear()
            self._fail(conflict("TooManyDropped", text))

    def _keep_later(self, claim: Claim, sample: Sample) -> None:
        self._kept_later.setdefault(claim, []).append(sample)

    async def _keep_samples(self) -> None:
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            waiting, self._kept_later = self._kept_later, {}
            updates = [GroupUpdate(claim, samples) for claim, samples in waiting.items()]
            told = await asyncio.gather(*map(self._ledger.save, updates), return_exceptions=True)
            for problem in {str(error) for error in told if isinstance(error, Exception)}:
                logger.warning("%s: samples are not kept before their groups end: %s", self._collection.run, problem)

    async def _stop_all(self) -> None:
        """Running requests end with the tokens that they have, and are kept; what was stopped goes on when it is
        claimed again."""
        if not self._groups:
            return
        self._stop.say()
        ended = asyncio.gather(*self._groups.values(), return_exceptions=True)
        aborting = asyncio.create_task(self._making.sampler.abort(self._stop, ended))
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.shield(ended)
        except TimeoutError:
            text = "%s: %d groups have not stopped in %g s: they begin again"
            logger.warning(text, self._collection.run, len(self._groups), STOP_SECONDS)
            for task in list(self._groups.values()):
                task.cancel()
            await asyncio.wait([ended])
        finally:
            aborting.cancel()
        self._stop = Stop()
        self._ring()

    def _fail(self, error: Exception) -> None:
        """The loop stops everything, until a trainer asks again."""
        told = _told(error)
        logger.error("%s: %s", self._collection.run, told, exc_info=told.status == UNEXPECTED and error)
        self.failure = self.failure or told
        self._ring()


async def heard(news: asyncio.Event, seconds: float) -> None:
    """Until it is set, or `seconds` have passed."""
    try:
        async with asyncio.timeout(seconds):
            await news.wait()
    except TimeoutError:
        pass


def _update(claim: Claim, result: GroupResult) -> GroupUpdate:
    match result.ended.outcome:
        case "finished":
            return GroupUpdate(claim, result.samples, "finished")
        case "dropped":
            return GroupUpdate(claim, outcome="dropped", reason=result.ended.cause)
        case "stopped":
            return GroupUpdate(claim, result.samples, "released")


def _told(error: Exception) -> AgentError:
    while isinstance(error, ExceptionGroup):  # of samples of one group, which failed for one reason
        error = error.exceptions[0]
    if isinstance(error, AgentError):
        return error
    if isinstance(error, StoreError):
        return as_refusal(error)
    if isinstance(error, DataError):
        return invalid("BadData", str(error), error.problems)
    return AgentError("CollectionFailed", f"{type(error).__name__}: {error}", status=UNEXPECTED)
