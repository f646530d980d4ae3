"""One weight update in which the trainer sends tensors itself, driven by its requests (api/agent.py, BeginUpdate).

The trainer's processes may die at any of them. So the update is a task of its own, which ends by itself: when all
senders are done, when one has hung up, or when its time is over; and each end resumes the fleet.
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
    refuse_layouts,
    served_checkpoint,
    target_version,
)
from rolloutfleet.agent.senders import Senders
from rolloutfleet.agent.transaction import Step, Transaction
from rolloutfleet.agent.turns import Turns
from rolloutfleet.agent.volume import looking
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
from rolloutfleet.engine.errors import EngineError
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.plan.update import Participant

logger = logging.getLogger(__name__)

HOLD_SECONDS = 15.0
"""A sender that has begun and does not hold its line (GET .../updates/{id}) by then is taken for dead."""
JOIN_SECONDS = 60.0


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
        self._senders = Senders(request)
        self._turns: defaultdict[tuple[str, int], Turns] = defaultdict(Turns)
        """By engine's UID and sender."""

    @property
    def ended(self) -> bool:
        return self._over.done()

    # The task that it is

    async def run(self) -> None:
        try:
            await self._fleet.refresh()
            path, seconds = self._request.source or "the served checkpoint", self._request.timeout_seconds
            transaction = self._transaction = await looking(path, self._prepared, seconds=seconds)
            await transaction.begin()
        except BaseException as error:
            self._fail(error)
            raise
        abandoned: AgentError | None = None
        try:
            try:
                await transaction.recognize()
                await transaction.admit_late()
                self._begun.set_result(None)
                await self._until_over()
            except AgentError as error:
                abandoned = error
            finally:
                await self._closed()
                result = await transaction.settle(sent_bytes=self._senders.bytes, abandoned=abandoned)
        except BaseException as error:
            self._fail(error)
            raise
        self._result.set_result(result)

    def _prepared(self) -> Transaction:
        """Raises AgentError for what must not begin."""
        request = self._request
        target = target_version(self._fleet, request)
        refuse_layouts(self._fleet, request.transport)
        if request.source:
            compare_checkpoint(self._fleet, checkpoint_folder(self._fleet, request.source))
        self._senders.reference = served_checkpoint(self._fleet)
        if self._senders.reference is None:
            logger.warning("no checkpoint of %s is mounted here: tensors are not compared", self._fleet.name)
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
            silent = self._senders.silent(since=now - HOLD_SECONDS)
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
        await transaction.everywhere("the end of the transfer", end)

    def _drop_incomplete(self, transaction: Transaction) -> None:
        """An engine to which nobody has sent some tensor keeps the old one."""
        for participant in transaction.alive():
            lacks = self._senders.lacking(participant.uid)
            if lacks:
                transaction.errors[participant.uid] = f"{len(lacks)} tensors were not sent to it: {lacks[0]}"

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
        with self._abandoning():
            self._senders.join(request, now=time.monotonic())
            if self._senders.all_joined:
                self._senders.compare_announced()
        if self._senders.all_joined and not self._all_joined.done():
            self._all_joined.set_result(None)
        transaction = self._running()
        engines = [self._engine_for(participant, request) for participant in transaction.alive()]
        return UpdateSession(
            id=self.id, version=transaction.target, engines=engines, deadline_seconds=round(transaction.left, 3)
        )

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
            releasable=participant.releasable,
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

        await self._step(
            "joining the group", join, [one for one in transaction.alive() if one.uid in ports], within=JOIN_SECONDS
        )
        return self._so_far()

    async def send_bucket(self, request: SendBucket) -> StepResult:
        self._senders.number(request)
        await self._stand_still(request.sender, request.tensors)

        async def receive(participant: Participant, engine: EngineClient, seconds: float) -> None:
            key = (participant.uid, request.sender)
            try:
                async with self._turns[key].turn(request.number):
                    await engine.receive_broadcast(request.tensors, group=self._names[key], seconds=seconds)
            except EngineError:
                self._groups.pop(key, None)
                raise

        await self._step("a bucket", receive, self._running().alive())
        self._senders.sent(request.tensors, [one.uid for one in self._running().alive()])
        return self._so_far()

    async def send_tensors(self, request: SendTensors) -> StepResult:
        payloads = {entry.uid: entry.payloads for entry in request.engines}
        await self._stand_still(request.sender, request.tensors)

        async def receive(participant: Participant, engine: EngineClient, seconds: float) -> None:
            await engine.receive_tensors(payloads[participant.uid], load_format=request.load_format, seconds=seconds)

        chosen = [one for one in self._running().alive() if one.uid in payloads]
        await self._step("a bucket", receive, chosen)
        self._senders.sent(request.tensors, [one.uid for one in chosen])
        return self._so_far()

    async def finish(self, request: SenderDone) -> UpdateResult:
        """Raises AgentError if no version was committed."""
        self._require_open(request.sender)
        self._senders.finish(request)
        if self._senders.all_done and not self._over.done():
            self._over.set_result(None)
        return await asyncio.shield(self._result)

    async def hold(self, sender: int) -> UpdateResult:
        """Answered when the update is over; cancelled when the trainer hangs up, which abandons it."""
        self._senders.hold(sender)
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

    def _require_not_over(self) -> None:
        if self._over.done():
            failure = self._over.exception()
            raise failure if isinstance(failure, AgentError) else conflict("UpdateOver", f"update {self.id} is over")

    def _require_open(self, sender: int) -> None:
        self._require_not_over()
        if not self._senders.has_joined(sender):
            raise conflict("NotBegun", f"sender {sender} has not begun (POST .../updates)")

    async def _stand_still(self, sender: int, tensors: Sequence[TensorMeta]) -> None:
        """Pause the fleet when the first bucket is there and every sender is, and no earlier."""
        self._require_open(sender)
        with self._abandoning():
            self._senders.compare(tensors)
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

        await transaction.everywhere("the begin of the transfer", begin)
        transaction.began_to_load = time.monotonic()

    async def _step(self, what: str, step: Step, among: Sequence[Participant], *, within: float | None = None) -> None:
        """In a task that the end of the update cancels."""
        task = asyncio.ensure_future(self._running().everywhere(what, step, among=among, within=within))
        self._steps.add(task)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                self._require_not_over()  # it was the end: say which
            raise
        finally:
            self._steps.discard(task)

    def _so_far(self) -> StepResult:
        return StepResult(failed=dict(self._running().errors))

    def _fail(self, error: BaseException) -> None:
        """Whoever waits for any part of the update is told."""
        told = error
        if not isinstance(told, AgentError):
            told = AgentError("UpdateFailed", f"{type(error).__name__}: {error}", status=502)
        waited_for: tuple[asyncio.Future[Any], ...] = (self._begun, self._over, self._result)
        for future in waited_for:
            if not future.done():
                future.set_exception(told)
                future.exception()  # told to whoever asks: not a forgotten one


async def _left(engine: EngineClient, group: str) -> None:
    try:
        await engine.leave_group(group)
    except EngineError as error:
        logger.info("%s had no group %s: %s", engine.url, group, error)
