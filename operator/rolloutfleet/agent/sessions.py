"""Weight updates in which the trainer sends tensors itself, driven by its requests (api/agent.py, BeginUpdate).

The trainer's processes may die at any of them. So the update is a task of its own, which ends by itself: when all
senders are done, when one has hung up, or when its time is over; and each end resumes the fleet.

A process group is of one engine and one sender, rank 0: whoever dies takes its own group along and no other. Groups
are kept between updates, as long as the engine lives and the sender still has its end.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rolloutfleet.agent.errors import AgentError, conflict, invalid
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.preflight import (
    checkpoint_folder,
    compare_checkpoint,
    compare_tensors,
    compare_whole,
    served_checkpoint,
    target_version,
)
from rolloutfleet.agent.transaction import Step, Transaction
from rolloutfleet.agent.turns import Turns
from rolloutfleet.agent.updates import refuse_beside_another
from rolloutfleet.api.agent import (
    BeginUpdate,
    JoinGroups,
    SendBucket,
    SenderDone,
    SendTensors,
    StepResult,
    TensorMeta,
    UpdateEngine,
    UpdateResult,
    UpdateSession,
)
from rolloutfleet.engine.checkpoint import Checkpoint, missing
from rolloutfleet.engine.errors import EngineError
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.plan.update import Participant

logger = logging.getLogger(__name__)

HOLD_SECONDS = 15.0
"""A sender that has begun and does not hold its line (GET .../updates/{id}) by then is taken for dead."""
JOIN_SECONDS = 60.0


class Sessions:
    """The update of one fleet that the trainer drives, one at a time."""

    def __init__(
        self, *, fleet: Fleet, leadership: Leadership, engine: Callable[[str], EngineClient], address: str
    ) -> None:
        self._fleet = fleet
        self._leadership = leadership
        self._engine = engine
        self._address = address
        self._groups: dict[tuple[str, int], str] = {}
        """Process groups that are whole, by engine's UID and sender."""
        self._current: Session | None = None

    async def begin(self, request: BeginUpdate) -> UpdateSession:
        """Raises AgentError: nothing was paused."""
        session = self._current
        if session is None or session.id != request.id or session.ended:
            refuse_beside_another(self._fleet, self._leadership)
            session = Session(
                request,
                fleet=self._fleet,
                leadership=self._leadership,
                engine=self._engine,
                address=self._address,
                groups=self._groups,
            )
            self._current = session
            session.task = asyncio.ensure_future(self._leadership.alone(session.run()))
            session.task.add_done_callback(_told_by_the_session)
        return await session.join(request)

    def of(self, update: str) -> Session:
        """Raises AgentError when there is no such update, or not any more."""
        if self._current is None or self._current.id != update:
            raise AgentError("UnknownUpdate", f"update {update}: not one that runs here", status=404)
        return self._current

    async def abandon(self, reason: str) -> None:
        """At shutdown: a fleet must not be left paused."""
        if self._current is not None and self._current.task is not None:
            self._current.abandon(conflict("Abandoned", reason))
            await asyncio.wait({self._current.task})


class Session:
    """One update."""

    def __init__(
        self,
        request: BeginUpdate,
        *,
        fleet: Fleet,
        leadership: Leadership,
        engine: Callable[[str], EngineClient],
        address: str,
        groups: dict[tuple[str, int], str],
    ) -> None:
        self.id = request.id
        self.task: asyncio.Task[None] | None = None
        self._request = request
        self._fleet = fleet
        self._leadership = leadership
        self._engine = engine
        self._address = address
        self._groups = groups
        self._transaction: Transaction | None = None
        self._reference: Checkpoint | None = None
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[None] = loop.create_future()
        self._all_joined: asyncio.Future[None] = loop.create_future()
        self._over: asyncio.Future[None] = loop.create_future()
        """Nothing more is sent: all senders are done, or the update is abandoned for the exception in here."""
        self._result: asyncio.Future[UpdateResult] = loop.create_future()
        self._standing_still: asyncio.Task[None] | None = None
        self._steps: set[asyncio.Task[None]] = set()
        self._names: dict[tuple[str, int], str] = {}
        """Process groups of this update by engine's UID and sender."""
        self._joined: dict[int, float] = {}
        """Senders that have begun, and when."""
        self._announced: dict[int, list[str]] = {}
        """Names of tensors by sender that has said what it will send."""
        self._held: set[int] = set()
        self._numbers: defaultdict[int, set[int]] = defaultdict(set)
        """Of buckets by sender."""
        self._turns: defaultdict[tuple[str, int], Turns] = defaultdict(Turns)
        """By engine's UID and sender."""
        self._sent: dict[str, set[str]] = {}
        """Names of tensors by engine's UID."""
        self._done: dict[int, int] = {}
        """Bytes by sender that is done."""

    @property
    def ended(self) -> bool:
        return self._over.done()

    # The task that it is

    async def run(self) -> None:
        try:
            await self._fleet.refresh()
            transaction = self._transaction = self._prepared()
            await transaction.begin()
        except BaseException as error:
            self._fail(error)
            raise
        abandoned: AgentError | None = None
        try:
            try:
                await transaction.recognize()
                self._begun.set_result(None)
                await self._until_over()
            except AgentError as error:
                abandoned = error
            finally:
                await self._closed()
                result = await transaction.settle(sent_bytes=self._sent_bytes(), abandoned=abandoned)
        except BaseException as error:
            self._fail(error)
            raise
        self._result.set_result(result)

    def _prepared(self) -> Transaction:
        """Raises AgentError for what must not begin."""
        request = self._request
        target = target_version(self._fleet, request)
        if request.source:
            compare_checkpoint(self._fleet, checkpoint_folder(self._fleet, request.source))
        self._reference = served_checkpoint(self._fleet)
        if self._reference is None:
            logger.warning("no checkpoint of %s is mounted here: tensors are not compared", self._fleet.name)
        for group, engine in self._fleet.trained_engines():
            shape = engine.facts or group.spec.engine
            if shape is not None and shape.pipeline_parallel > 1:
                raise conflict(
                    "UnsupportedLayout",
                    f"{group.name} has {shape.pipeline_parallel} pipeline stages, and SGLang takes tensors from a "
                    "trainer into one only; update it from disk",
                )
            if request.transport == "tensor" and group.spec.engine is not None and group.spec.engine.nodes > 1:
                raise conflict(
                    "UnsupportedLayout",
                    f"an engine of {group.name} spans {group.spec.engine.nodes} pods, which share no memory with one "
                    "trainer; use the distributed transport or disk",
                )
        return Transaction(
            fleet=self._fleet,
            leadership=self._leadership,
            engine=self._engine,
            options=request,
            target=target,
            transport=request.transport,
            path=request.source,
        )

    async def _until_over(self) -> None:
        """Raises AgentError when the update is abandoned."""
        while not self._over.done():
            await asyncio.wait({self._over}, timeout=1.0)
            now = time.monotonic()
            silent = [s for s, since in self._joined.items() if s not in self._held and now - since > HOLD_SECONDS]
            if silent:
                self.abandon(conflict("SenderLost", f"sender {silent[0]} began and does not hold its line"))
            elif now > self._running().deadline:
                text = f"not all had been sent within {self._request.timeout_seconds:g} s"
                self.abandon(AgentError("UpdateTimedOut", text, status=504))
        self._over.result()

    async def _closed(self) -> None:
        """Steps that still run are waited for no longer; engines are told that nothing more comes."""
        for step in list(self._steps):
            step.cancel()
        transaction = self._running()
        if self._standing_still is None:
            return
        # A pause that is under way would come after our continue.
        await asyncio.wait({self._standing_still})
        if self._complete:
            self._drop_incomplete(transaction)

        async def end(_: Participant, engine: EngineClient, seconds: float) -> None:
            ending = engine.end_weight_update(seconds=seconds)
            if self._complete:  # the label is no work of the scheduler's
                await asyncio.gather(ending, engine.label_weights(transaction.label))
            else:
                await ending

        transaction.seconds["load"] = time.monotonic() - transaction.began_to_load
        await transaction.everywhere(end)

    def _drop_incomplete(self, transaction: Transaction) -> None:
        """An engine to which nobody has sent some tensor keeps the old one."""
        everything = set().union(*self._sent.values())
        for participant in transaction.alive():
            had = self._sent.get(participant.uid, set())
            lacks = missing(self._reference, had) if self._reference is not None else sorted(everything - had)
            if lacks:
                transaction.errors[participant.uid] = f"{len(lacks)} tensors were not sent to it: {lacks[0]}"

    def _sent_bytes(self) -> int:
        """To each engine: of the distributed transport from all senders, of the tensor transport from its own."""
        sent = self._done.values()
        return sum(sent) if self._request.transport == "distributed" else max(sent, default=0)

    @property
    def _complete(self) -> bool:
        return self._over.done() and self._over.exception() is None

    # What the trainer asks

    async def join(self, request: BeginUpdate) -> UpdateSession:
        """Also the second time, and also of the other senders: they all get the same engines."""
        ours = self._request
        if (request.transport, request.senders, request.version) != (ours.transport, ours.senders, ours.version):
            raise invalid(
                "BadRequest",
                f"update {self.id} was begun with transport {ours.transport}, {ours.senders} senders and version "
                f"{ours.version}; sender {request.sender} says {request.transport}, {request.senders} and "
                f"{request.version}",
            )
        try:
            await asyncio.shield(self._begun)
        except asyncio.CancelledError:
            self.abandon(conflict("SenderLost", f"sender {request.sender} of the trainer hung up before it had begun"))
            raise
        self._joined.setdefault(request.sender, time.monotonic())
        if request.tensors is not None:
            self._announced[request.sender] = [tensor.name for tensor in request.tensors]
            with self._abandoning():
                compare_tensors(self._reference, request.tensors)
        if len(self._joined) == request.senders:
            with self._abandoning():
                self._compare_announced()
            if not self._all_joined.done():
                self._all_joined.set_result(None)
        transaction = self._running()
        engines = [self._engine_for(participant, request) for participant in transaction.alive()]
        return UpdateSession(
            id=self.id, version=transaction.target, engines=engines, deadline_seconds=round(transaction.left, 3)
        )

    def _compare_announced(self) -> None:
        """Raises AgentError when senders that have all said what they will send leave something out."""
        if len(self._announced) < self._request.senders:
            return
        if self._request.transport == "distributed":
            compare_whole(self._reference, {name for names in self._announced.values() for name in names})
        else:
            for names in self._announced.values():
                compare_whole(self._reference, names)

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """A refusal is the end of the update as well."""
        try:
            yield
        except AgentError as error:
            self.abandon(error)
            raise

    def _engine_for(self, participant: Participant, request: BeginUpdate) -> UpdateEngine:
        key = (participant.uid, request.sender)
        whole = self._groups.get(key, "")
        keeps = bool(whole) and request.groups.get(participant.uid) == whole
        name = whole if keeps else self._names.get(key) or f"rolloutfleet-{uuid.uuid4().hex[:12]}"
        self._names[key] = name
        return UpdateEngine(
            uid=participant.uid,
            pod=participant.pod,
            url=participant.url,
            ranks=participant.ranks,
            group=name,
            join=request.transport == "distributed" and not keeps,
        )

    async def join_groups(self, request: JoinGroups) -> StepResult:
        ports = {entry.uid: entry.port for entry in request.groups}
        transaction = self._running()
        self._require_open(request.sender)

        async def join(participant: Participant, engine: EngineClient, seconds: float) -> None:
            key = (participant.uid, request.sender)
            stale = self._groups.pop(key, "")
            if stale:
                await _left(engine, stale)
            await engine.join_group(
                address=self._address,
                port=ports[participant.uid],
                world_size=participant.ranks + 1,
                name=self._names[key],
                backend=self._request.backend,
                seconds=seconds,
            )
            self._groups[key] = self._names[key]

        await self._step(join, [one for one in transaction.alive() if one.uid in ports], within=JOIN_SECONDS)
        return self._so_far()

    async def send_bucket(self, request: SendBucket) -> StepResult:
        if request.number in self._numbers[request.sender]:
            raise invalid("BadRequest", f"number: bucket {request.number} of sender {request.sender} is there already")
        self._numbers[request.sender].add(request.number)
        await self._stand_still(request.sender, request.tensors)

        async def receive(participant: Participant, engine: EngineClient, seconds: float) -> None:
            key = (participant.uid, request.sender)
            try:
                async with self._turns[key].turn(request.number):
                    await engine.receive_broadcast(request.tensors, group=self._names[key], seconds=seconds)
            except EngineError:
                self._groups.pop(key, None)
                raise

        await self._step(receive, self._running().alive())
        self._note(request.tensors, self._running().alive())
        return self._so_far()

    async def send_tensors(self, request: SendTensors) -> StepResult:
        payloads = {entry.uid: entry.payloads for entry in request.engines}
        await self._stand_still(request.sender, request.tensors)

        async def receive(participant: Participant, engine: EngineClient, seconds: float) -> None:
            await engine.receive_tensors(payloads[participant.uid], load_format=request.load_format, seconds=seconds)

        chosen = [one for one in self._running().alive() if one.uid in payloads]
        await self._step(receive, chosen)
        self._note(request.tensors, chosen)
        return self._so_far()

    async def finish(self, request: SenderDone) -> UpdateResult:
        """Raises AgentError if no version was committed."""
        self._require_open(request.sender)
        self._done[request.sender] = request.bytes
        if len(self._done) == self._request.senders and not self._over.done():
            self._over.set_result(None)
        return await asyncio.shield(self._result)

    async def hold(self, sender: int) -> UpdateResult:
        """Answered when the update is over; cancelled when the trainer hangs up, which abandons it."""
        self._held.add(sender)
        try:
            return await asyncio.shield(self._result)
        except asyncio.CancelledError:
            self.abandon(conflict("SenderLost", f"sender {sender} of the trainer hung up in the middle of the update"))
            raise

    def abandon(self, why: AgentError) -> None:
        if not self._over.done():
            logger.warning("update %s is abandoned: %s", self.id, why.message)
            self._over.set_exception(why)
            self._over.exception()  # told to whoever asks: not a forgotten one

    # Parts

    def _running(self) -> Transaction:
        if self._transaction is None:
            raise conflict("NotBegun", f"update {self.id} has not begun")
        return self._transaction

    def _require_open(self, sender: int) -> None:
        if self._over.done():
            failure = self._over.exception()
            raise failure if isinstance(failure, AgentError) else conflict("UpdateOver", f"update {self.id} is over")
        if sender not in self._joined:
            raise conflict("NotBegun", f"sender {sender} has not begun (POST .../updates)")

    async def _stand_still(self, sender: int, tensors: Sequence[TensorMeta]) -> None:
        """Pause the fleet when the first bucket is there and every sender is, and no earlier."""
        self._require_open(sender)
        with self._abandoning():
            compare_tensors(self._reference, tensors)
        await asyncio.wait({self._all_joined, self._over}, return_when=asyncio.FIRST_COMPLETED)
        self._require_open(sender)
        if self._standing_still is None:
            self._standing_still = asyncio.ensure_future(self._paused())
        await asyncio.shield(self._standing_still)

    async def _paused(self) -> None:
        transaction = self._running()
        await transaction.pause()

        async def begin(_: Participant, engine: EngineClient, seconds: float) -> None:
            await engine.begin_weight_update()

        await transaction.everywhere(begin)
        transaction.began_to_load = time.monotonic()

    async def _step(self, step: Step, among: Sequence[Participant], *, within: float | None = None) -> None:
        """In a task that the end of the update cancels."""
        task = asyncio.ensure_future(self._running().everywhere(step, among=among, within=within))
        self._steps.add(task)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                self._require_open(next(iter(self._joined)))  # it was the end: say which
            raise
        finally:
            self._steps.discard(task)

    def _note(self, tensors: Sequence[TensorMeta], engines: Sequence[Participant]) -> None:
        for participant in engines:
            self._sent.setdefault(participant.uid, set()).update(tensor.name for tensor in tensors)

    def _so_far(self) -> StepResult:
        return StepResult(failed=dict(self._running().errors))

    def _fail(self, error: BaseException) -> None:
        """Whoever waits for any part of the update is told."""
        told = error if isinstance(error, AgentError) else _as_agent_error(error)
        waited_for: tuple[asyncio.Future[Any], ...] = (self._begun, self._over, self._result)
        for future in waited_for:
            if not future.done():
                future.set_exception(told)
                future.exception()  # told to whoever asks: not a forgotten one


def _as_agent_error(error: BaseException) -> AgentError:
    return AgentError("UpdateFailed", f"{type(error).__name__}: {error}", status=502)


async def _left(engine: EngineClient, group: str) -> None:
    try:
        await engine.leave_group(group)
    except EngineError as error:
        logger.info("%s had no group %s: %s", engine.url, group, error)


def _told_by_the_session(task: asyncio.Task[None]) -> None:
    """Its error goes to the trainer's requests."""
    if not task.cancelled():
        task.exception()
