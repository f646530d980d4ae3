"""What every weight update does around the transfer of the weights, as a fenced transaction.

1. Record the intent. 2. Ask every engine who it is: one that does not answer falls out before anybody stands still.
3. Pause. 4. The transfer, by whoever uses this. 5. Read labels and checksums. 6. Commit version and checksums together.
7. Continue the survivors, always. Engines that fell out stay paused: the operator takes them out of the routers and
brings them up to date.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from rolloutfleet.agent.errors import AgentError, unavailable
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.participants import participants_in
from rolloutfleet.agent.together import both, together
from rolloutfleet.api.agent import PauseMode, UpdateOptions, UpdateResult
from rolloutfleet.api.common import EnginePhase
from rolloutfleet.api.rollout_server import EngineVerdict, LastUpdate, TrainingWeights, Transport, WeightsPhase
from rolloutfleet.api.weight_labels import weight_label
from rolloutfleet.engine import sglang
from rolloutfleet.engine.errors import EngineError, EngineRefused
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.plan.update import Aftermath, Outcome, Participant, outcome_of, resuming_order

logger = logging.getLogger(__name__)

RECOGNIZE_SECONDS = 3.0
PAUSE_SECONDS = 30.0
VERIFY_SECONDS = 30.0
CONTINUE_SECONDS = 20.0
CONTINUE_ATTEMPTS = 3
LOST_POLL_SECONDS = 0.5
CASUALTIES_TOLD = 3
STRAGGLER_SECONDS = 5.0

MODES: dict[PauseMode, sglang.PauseMode] = {"InPlace": "in_place", "Retract": "retract", "Abort": "abort"}

Step = Callable[[Participant, EngineClient, float], Coroutine[Any, Any, None]]
"""What is done with one engine, within so many seconds."""
Check = Callable[[], Coroutine[Any, Any, None]]


async def nothing_more() -> None:
    """A Check."""


class Transaction:
    """One update. Its methods are called in the order of their definition, `settle` in any case."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        leadership: Leadership,
        engine: Callable[[str], EngineClient],
        options: UpdateOptions,
        target: int,
        transport: Transport,
        path: str,
        began: float | None = None,
    ) -> None:
        """`began`: by the monotonic clock, if something was done before that counts."""
        self._fleet = fleet
        self._leadership = leadership
        self._engine = engine
        self._options = options
        self._transport = transport
        self._path = path
        self.target = target
        self.participants: list[Participant] = []
        self.errors: dict[str, str] = {}
        """Engines that have fallen out, by UID, and why."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._began = time.monotonic() if began is None else began
        self.deadline = self._began + options.timeout_seconds
        """Of all that comes before the checksums, by the monotonic clock."""
        self.began_to_load = self._began
        """Where the transfer is done by requests: when the first could begin."""
        self._asked: asyncio.Future[None] | None = None
        self._paused_at: float | None = None
        self._before = fleet.training
        memory = self._before.memory.engines if self._before.memory else ()
        self._offloaded = {entry.uid for entry in memory if entry.released}
        """Engines whose memory is released are paused already, and go on when the last tag is resident."""
        self._previous = self._before.weights or TrainingWeights(phase=WeightsPhase.COMMITTED, version=0)
        self._previous_checksums = fleet.committed_checksums()
        self._intent = self._previous

    @property
    def left(self) -> float:
        """Seconds until the deadline; never so few that a call could not even be sent."""
        return max(self.deadline - time.monotonic(), 0.1)

    @property
    def label(self) -> str:
        """What the target's weights are called."""
        return weight_label(self.target, self._fleet.id)

    def alive(self, among: Collection[Participant] | None = None) -> list[Participant]:
        """Those (of `among`) that have not fallen out."""
        chosen = self.participants if among is None else among
        return [participant for participant in chosen if participant.uid not in self.errors]

    async def begin(self) -> None:
        """Raises AgentError when there is nobody to update, or we do not lead; ApiError. Nothing was paused then."""
        self._leadership.require()
        self.participants = participants_in(self._fleet)
        if not self.participants:
            raise unavailable("NoEngines", f"RolloutServer {self._fleet.name} has no engine that could be updated now")
        ends = datetime.now(UTC) + timedelta(
            seconds=self._options.timeout_seconds + VERIFY_SECONDS + CONTINUE_ATTEMPTS * CONTINUE_SECONDS
        )
        self._intent = self._previous.model_copy(
            update={
                "phase": WeightsPhase.UPDATING,
                "transaction": self._previous.transaction + 1,
                "target_version": self.target,
                "target_path": self._path,
                "transport": self._transport,
                "deadline": ends.isoformat(timespec="seconds"),
                "engines": (),
            }
        )
        # Meanwhile, since it changes nothing.
        self._asked = asyncio.ensure_future(self._ask(self.participants))
        try:
            await self._leadership.write(self._before.model_copy(update={"weights": self._intent}))
        except BaseException:
            self._asked.cancel()
            raise

    async def recognize(self) -> None:
        """Those that were known before the intent."""
        assert self._asked is not None, "begun"
        await self._asked

    async def admit_late(self) -> list[Participant]:
        """Those that the operator has proved between our look and our intent. From then on it registers nobody, but
        what it has asked of a router before may still be under way."""
        known = {participant.uid for participant in self.participants}
        await self._fleet.refresh()
        late = [newcomer for newcomer in participants_in(self._fleet) if newcomer.uid not in known]
        self.participants += late
        await self._ask(late)
        return late

    async def _ask(self, who: Sequence[Participant]) -> None:
        """Who they are."""

        async def ask(_: Participant, engine: EngineClient, seconds: float) -> None:
            await engine.require_fleet(self._fleet.id, seconds=seconds)

        await self.everywhere("the question who it is", ask, within=RECOGNIZE_SECONDS, among=who)

    async def pause(self, among: Collection[Participant] | None = None) -> None:
        """What becomes of running samples is in PauseMode; only what they leave in the cache must go, or must not."""
        clock = time.monotonic()
        self._paused_at = self._paused_at or clock
        mode = self._options.pause_mode
        what = f"the pause ({mode})"

        async def pause(participant: Participant, engine: EngineClient, seconds: float) -> None:
            if participant.uid in self._offloaded:
                return
            await engine.pause(MODES[mode], seconds=seconds)
            if mode == "Retract":
                await _flushed_beside_waiting(engine, seconds)
            elif mode == "Abort":
                await engine.flush_cache(wait_seconds=int(seconds))

        await self.everywhere(what, pause, within=PAUSE_SECONDS, among=among)
        self.seconds["pause"] += time.monotonic() - clock

    async def everywhere(
        self, what: str, step: Step, *, within: float | None = None, among: Collection[Participant] | None = None
    ) -> None:
        """One step on all engines that have not fallen out (of `among`), at once; each error stays with its engine.

        Raises AgentError when we do not lead any more.
        """
        self._leadership.require()
        seconds = self.left if within is None else min(within, self.left)
        await self._together(self.alive(among), what, lambda each: step(each, self._engine(each.url), seconds))

    async def _together(
        self, chosen: Collection[Participant], what: str, doing: Callable[[Participant], Coroutine[Any, Any, None]]
    ) -> None:
        await together(
            chosen,
            what,
            lambda each: self._unless_lost(each, doing(each)),
            falls_out=self._falls_out,
            slack=STRAGGLER_SECONDS,
        )

    def _falls_out(self, participant: Participant, why: str) -> None:
        if participant.uid not in self.errors:
            self.errors[participant.uid] = why
            logger.warning("%s falls out of the update: %s", participant.pod, why)

    async def settle(
        self, *, sent_bytes: int = 0, abandoned: AgentError | None = None, last_check: Check = nothing_more
    ) -> UpdateResult:
        """`last_check`: done while engines compute their checksums; engines may fall out of it.

        Raises AgentError if no version was committed: `abandoned`, where given.
        """
        if self._paused_at is None and abandoned is not None:
            await self._forget()
            raise abandoned
        clock = time.monotonic()
        aftermath = await self._looks(last_check)
        outcome = outcome_of(
            aftermath,
            fleet=self._fleet.id,
            target=self.target,
            previous=self._previous.version,
            previous_checksums=self._previous_checksums,
        )
        self.seconds["verify"] = time.monotonic() - clock
        # Where this cannot be written, whether they lead or not is not known: the operator restores the fleet.
        await self._commit(outcome, sent_bytes)
        await self._continue([survivor for survivor in outcome.survivors if survivor.uid not in self._offloaded])
        if self._paused_at is not None:
            self.seconds["paused"] = time.monotonic() - self._paused_at
        await self._tell(outcome)
        self.seconds["total"] = time.monotonic() - self._began
        if not outcome.committed:
            fell_out = [_in_words(verdict, outcome.version) for verdict in outcome.verdicts]
            text = f"no engine took version {self.target}; version {outcome.version} stays"
            if abandoned is not None:
                abandoned.details = abandoned.details or fell_out
                raise abandoned
            raise AgentError("UpdateFailed", text, status=502, details=fell_out)
        return UpdateResult(
            version=outcome.version,
            committed=True,
            engines=list(outcome.verdicts),
            seconds={name: round(value, 4) for name, value in self.seconds.items()},
            bytes=sent_bytes,
        )

    # Who takes part

    async def _unless_lost(self, participant: Participant, doing: Coroutine[Any, Any, None]) -> None:
        """Raises EngineError when the engine's life has ended: a machine that has vanished answers nothing at all."""
        task = asyncio.ensure_future(doing)
        try:
            while not (await asyncio.wait({task}, timeout=LOST_POLL_SECONDS))[0]:
                if self._lost(participant):
                    raise EngineError(f"{participant.pod}: its pod has gone meanwhile")
            await task
        finally:
            task.cancel()

    def _lost(self, participant: Participant) -> bool:
        """The operator has said so: another life has begun, or this one has ended."""
        if self._fleet.server is None:
            return False  # nothing is known at the moment
        for _, engine in self._fleet.trained_engines():
            if engine.pod_uid == participant.uid:
                return engine.phase in (EnginePhase.FAILED, EnginePhase.PENDING)
        return True

    # How it ends

    async def _looks(self, last_check: Check) -> list[Aftermath]:
        seen: dict[str, Aftermath] = {}

        async def look(participant: Participant) -> None:
            seen[participant.uid] = await self._look(participant)

        await both(self._together(self.participants, "the checksum", look), last_check())
        found = [seen.get(one.uid, Aftermath(one, reachable=False)) for one in self.participants]
        return [replace(one, error=self.errors.get(one.participant.uid, one.error)) for one in found]

    async def _look(self, participant: Participant) -> Aftermath:
        engine = self._engine(participant.url)
        error = self.errors.get(participant.uid, "")
        if self._lost(participant):
            return Aftermath(participant, error=error or "its pod has gone meanwhile", reachable=False)
        # The others stand still: one that has fallen out is given no time to think.
        seconds = RECOGNIZE_SECONDS if error else VERIFY_SECONDS
        try:
            checksum, info = await asyncio.gather(engine.checksum(seconds=seconds), engine.model_info())
        except EngineRefused as refused:
            return Aftermath(participant, error=error or str(refused))
        except EngineError as unreachable:
            return Aftermath(participant, error=error or str(unreachable), reachable=False)
        return Aftermath(participant, error=error, label=info.weight_version, checksum=checksum)

    def _over(self, **changed: Any) -> TrainingWeights:
        """What the intent becomes when nothing is intended any more."""
        closed = {"phase": WeightsPhase.COMMITTED, "target_version": None, "target_path": "", "deadline": ""}
        return self._intent.model_copy(update=closed | changed)

    async def _forget(self) -> None:
        """Nothing was touched: what was proved about engines still holds."""
        kept = self._previous
        weights = self._over(transport=kept.transport, engines=kept.engines)
        await self._leadership.write(self._before.model_copy(update={"weights": weights}))

    async def _commit(self, outcome: Outcome, sent_bytes: int) -> None:
        done = outcome.committed
        kept = self._previous
        weights = self._over(
            version=outcome.version,
            path=self._path if done else kept.path,
            transport=self._transport if done else kept.transport,
            checksums=outcome.checksums if done else kept.checksums,
            engines=outcome.verdicts,
        )
        now = time.monotonic()
        seconds = {**self.seconds, "total": now - self._began}
        if self._paused_at is not None:
            seconds["paused"] = now - self._paused_at
        last = LastUpdate(
            version=self.target,
            transport=self._transport,
            committed=done,
            transaction=weights.transaction,
            finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds={name: round(value, 4) for name, value in seconds.items()},
            bytes=sent_bytes,
            engines=len(outcome.verdicts),
            fell_out=len(outcome.verdicts) - len(outcome.survivors),
        )
        await self._leadership.write(self._before.model_copy(update={"weights": weights, "last_update": last}))

    async def _tell(self, outcome: Outcome) -> None:
        """An event on the RolloutServer for what an SRE would not expect."""
        if not outcome.committed:
            causes = "; ".join(_in_words(verdict, outcome.version) for verdict in outcome.verdicts[:CASUALTIES_TOLD])
            text = f"version {self.target} was not committed, version {outcome.version} stays; {causes}"
            await self._fleet.warn_on_server("UpdateFailed", text)
            return
        casualties = [verdict for verdict in outcome.verdicts if verdict.outcome != "Committed"]
        if casualties:
            causes = "; ".join(_in_words(verdict, outcome.version) for verdict in casualties[:CASUALTIES_TOLD])
            text = f"{len(casualties)} of {len(outcome.verdicts)} engines fell out of the update to {self.target}"
            await self._fleet.warn_on_server("EnginesFellOut", f"{text}: {causes}")

    async def _continue(self, survivors: Sequence[Participant]) -> None:
        async def one(participant: Participant) -> None:
            for attempt in range(1, CONTINUE_ATTEMPTS + 1):
                try:
                    await self._engine(participant.url).continue_generation(seconds=CONTINUE_SECONDS)
                    return
                except EngineError as error:
                    # Nothing is lost: the operator resumes an engine that is paused and held by nobody.
                    logger.warning("%s not continued (attempt %d): %s", participant.pod, attempt, error)

        for wave in resuming_order(participant.role for participant in survivors):
            await asyncio.gather(*(one(participant) for participant in survivors if participant.role in wave))


def _in_words(verdict: EngineVerdict, version: int) -> str:
    """`version`: the one that the verdict is about."""
    outcome = f"has version {version} as before" if verdict.outcome == "Committed" else verdict.outcome
    return ": ".join(filter(None, (verdict.pod, outcome, verdict.message)))


async def _flushed_beside_waiting(engine: EngineClient, seconds: float) -> None:
    """Paused by retraction. SGLang 0.5.16 does not flush while requests wait, later ones do: there they are aborted,
    and their senders generate them again."""
    try:
        await engine.flush_cache()
    except EngineRefused:
        await engine.abort_all()
        await engine.flush_cache(wait_seconds=int(seconds))
