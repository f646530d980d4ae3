"""A weight update whose tensors this process sends: it asks the agent for each step and does its own part beside it.

The agent orders engines to receive while we send, so each step is a request in one thread and the transfer in others.
Whoever dies: an engine falls out (the agent says so, and its group is aborted); if this process dies, the line that it
holds open to the agent breaks, and the agent restores the fleet.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar

from pydantic import BaseModel, ValidationError

from rolloutfleet.api.agent import (
    BeginUpdate,
    EngineTensors,
    GroupAt,
    JoinGroups,
    SendBucket,
    SenderDone,
    SendTensors,
    StepResult,
    UpdateEngine,
    UpdateResult,
    UpdateSession,
)
from rolloutfleet.trainer.errors import FleetError, Refused
from rolloutfleet.trainer.groups import Backend, Groups, require_matching_nccl
from rolloutfleet.trainer.shared_memory import Shared, collect, places, share
from rolloutfleet.trainer.tensors import (
    Bucket,
    NumberCheck,
    Tensors,
    buckets,
    described,
    resident,
    sharded,
    stream,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

BUCKET_BYTES = 512 << 20
JOIN_SECONDS = 60.0
SETTLE_SECONDS = 10.0
"""How much later than an engine has answered our own end of the same broadcast may be through."""
END_SECONDS = 90.0
"""What the agent may take to verify, commit and resume after the last bucket."""
UNDER_WAY = 2
"""Buckets at once: while one travels, the agent and the engines are told of the next one."""

Answer = TypeVar("Answer", bound=BaseModel)


@dataclass(frozen=True)
class _UnderWay:
    """A bucket that is being sent."""

    bucket: Bucket
    ordered: Future[StepResult]
    """What the agent has been asked for. With NCCL an engine answers as soon as it has begun to receive."""
    sent: dict[str, Future[None]]
    """Our own part of it by engine's UID."""
    shared: Shared | None = None
    """Where engines read it from, with the tensor transport."""


class Nothing(BaseModel):
    """An answer that says nothing."""


class Agent(Protocol):
    """The part of trainer/client.py's Fleet that is needed here."""

    def call(
        self,
        method: str,
        path: str,
        answer: type[Answer],
        *,
        body: BaseModel | None = None,
        seconds: float = 30.0,
    ) -> Answer: ...


class Progress(Protocol):
    def __call__(self, *, sent_bytes: int, buckets: int) -> None: ...


class SendingOptions(TypedDict, total=False):
    """Of `Fleet.update_weights` with tensors."""

    transport: Literal["distributed", "tensor"]
    """distributed (default): broadcast, by NCCL from a GPU and by gloo from a CPU. tensor: handles of shared memory,
    for engines on the trainer's own GPUs."""
    bucket_bytes: int
    """Default 512 MiB: up to three copies of that size are made on the trainer's side, and one on each engine's."""
    dtype: torch.dtype | None
    """Of the served model, where the trainer's is another. Default: each tensor as it is."""
    source: str
    """A checkpoint of the same weights that engines see: engines that come back later catch up from it."""
    senders: int
    sender: int
    update: str
    """Several processes that each send a part of the tensors: how many, which one this is, and a name of the update
    (8 to 64 lower-case letters and digits) that all of them use and no other update does."""
    engines: Callable[[UpdateEngine], bool]
    """With transport tensor: to which engines this process sends, those on its own GPU. Each of several senders sends
    all tensors to its own. Default: to all."""
    gpus: Callable[[UpdateEngine], Sequence[int]]
    """With transport tensor: the GPU of each rank of an engine, as this process counts them; each gets a copy of the
    bucket there. Needed for engines of several ranks whose memory can be released. Default: they take it from where the
    tensors are."""
    progress: Progress
    """Called after each bucket."""


class Senders:
    """What this process keeps between updates."""

    def __init__(self) -> None:
        self.groups: dict[int, Groups] = {}
        """By number of the sender."""

    def of(self, sender: int) -> Groups:
        return self.groups.setdefault(sender, Groups())

    def close(self) -> None:
        for groups in self.groups.values():
            groups.close()


def send(
    agent: Agent, kept: Senders, tensors: Tensors, options: dict[str, Any], sending: SendingOptions
) -> UpdateResult:
    """Raises Refused, NonFiniteWeights, ZeroWeights, GroupError, ValueError: the old version still serves then, as far
    as engines still hold it."""
    state = resident(tensors)
    dtype = sending.get("dtype")
    named: Iterable[tuple[str, torch.Tensor]] = state.items() if state is not None else tensors  # type: ignore[assignment]
    whole = stream(named, dtype)
    gathers = state is not None and sharded(state)
    try:
        if state is not None:
            numbers = NumberCheck()
            numbers.look(list(state.items()))
            if not gathers:  # of shards this process may hold none but empty ones
                numbers.end()
        return _Update(agent, kept, options, sending).run(state, whole)
    finally:
        if gathers:
            # What is left when there is nobody to send to, or something has gone wrong: others wait for us in it.
            for _ in whole:
                pass


def gather(model: torch.nn.Module) -> None:
    """What processes call that hold shards of a model (FSDP2) and do not send them, while one of them updates."""
    for _ in stream(model.state_dict().items(), None):
        pass


class _Update:
    def __init__(self, agent: Agent, kept: Senders, options: dict[str, Any], sending: SendingOptions) -> None:
        self._agent = agent
        self._sender = sending.get("sender", 0)
        self._groups = kept.of(self._sender)
        self._transport = sending.get("transport", "distributed")
        self._sending = sending
        self._options = options
        self._id = sending.get("update") or uuid.uuid4().hex
        if sending.get("senders", 1) > 1 and "update" not in sending:
            raise Refused("update: several senders need a name of the update that all of them use", code="BadRequest")
        if sending.get("senders", 1) > 1 and self._transport == "tensor" and "engines" not in sending:
            raise Refused("engines: several senders must say which ones are on their GPU", code="BadRequest")
        self._deadline: float = time.monotonic() + options["timeout_seconds"]
        self._engines: dict[str, UpdateEngine] = {}
        """That have not fallen out."""
        self._gpus: dict[str, Sequence[int]] = {}
        """Of each rank by engine's UID, where it is said."""
        self._under_way: deque[_UnderWay] = deque()
        self._numbers = itertools.count()
        self._bytes = 0
        self._buckets = 0

    def run(self, state: Any, whole: Iterator[tuple[str, torch.Tensor]]) -> UpdateResult:
        # Of shards this process has seen its own at most, and a change of type may overflow.
        unchecked = state is None or sharded(state) or self._sending.get("dtype") is not None
        pieces = buckets(whole, self._sending.get("bucket_bytes", BUCKET_BYTES), check=unchecked)
        first = next(pieces, None)
        if first is None:
            raise Refused("weights: there is not one tensor in it", code="BadRequest")
        backend: Backend = "nccl" if first.flat.is_cuda else "gloo"
        pieces = itertools.chain(iter([first]), pieces)  # an iterator that is through keeps nothing
        del first
        if backend == "nccl" and self._transport == "distributed":
            require_matching_nccl()
        # One for the line that is held, the others for steps.
        with ThreadPoolExecutor(1 + UNDER_WAY, thread_name_prefix="rolloutfleet") as threads:
            self._begin(state, backend)
            held = threads.submit(self._hold)
            try:
                if self._transport == "distributed":
                    self._join(backend)
                elif backend == "nccl":  # on GPUs
                    self._gpus = places(self._engines.values(), self._sending.get("gpus"))
                self._send_all(pieces, threads)
                return self._finish(threads)
            except BaseException:
                self._abandon()
                raise
            finally:
                held.result()

    def _send_all(self, pieces: Iterator[Bucket], threads: ThreadPoolExecutor) -> None:
        """But for the way of the last one."""
        try:
            # Each is made while the one before travels.
            while self._engines and (bucket := next(pieces, None)) is not None:
                self._under_way.append(self._start(bucket, threads))
                if len(self._under_way) == UNDER_WAY:
                    self._complete()
        except BaseException:
            # An engine that has begun to receive must get all of it.
            while self._under_way:
                self._complete()
            raise
        while len(self._under_way) > 1:
            self._complete()

    def _finish(self, threads: ThreadPoolExecutor) -> UpdateResult:
        last = self._under_way.popleft() if self._under_way else None
        if last is not None:
            self._answered(last)
        done = SenderDone(sender=self._sender, bytes=self._bytes)
        finished = threads.submit(self._step, "finish", done, UpdateResult)
        if last is not None:
            self._arrived(last.sent, finished)
        return finished.result()

    def _begin(self, state: Any, backend: Backend) -> None:
        try:
            request = BeginUpdate.model_validate(
                {
                    **self._options,
                    "id": self._id,
                    "transport": self._transport,
                    "senders": self._sending.get("senders", 1),
                    "sender": self._sender,
                    "backend": backend,
                    "tensors": described(state, self._sending.get("dtype")) if state is not None else None,
                    "groups": self._groups.names(backend),
                    "source": self._sending.get("source", ""),
                }
            )
        except ValidationError as error:
            raise Refused(str(error), code="BadRequest") from error
        session = self._agent.call("POST", "updates", UpdateSession, body=request, seconds=self._left)
        chosen = self._sending.get("engines") or (lambda _: True)
        self._engines = {engine.uid: engine for engine in session.engines if chosen(engine)}
        self._groups.keep({engine.uid: engine.group for engine in session.engines if not engine.join})

    def _hold(self) -> None:
        """Held open until the update is over; that it breaks tells the agent that this process is dead."""
        path = f"updates/{self._id}?sender={self._sender}"
        with contextlib.suppress(FleetError):  # the same is told to whoever finishes
            self._agent.call("GET", path, UpdateResult, seconds=self._left + END_SECONDS)

    def _join(self, backend: Backend) -> None:
        new = [engine for engine in self._engines.values() if engine.join]
        if not new:
            return
        seconds = min(self._left, JOIN_SECONDS)
        ports = [GroupAt(uid=engine.uid, port=self._groups.open(engine.uid, seconds=seconds)) for engine in new]
        joining = {
            engine.uid: self._groups.joining(
                engine.uid, engine.group, ranks=engine.ranks, backend=backend, seconds=seconds
            )
            for engine in new
        }
        self._drop(self._step("groups", JoinGroups(sender=self._sender, groups=ports), StepResult))
        self._arrived(joining, None)

    def _start(self, bucket: Bucket, threads: ThreadPoolExecutor) -> _UnderWay:
        if self._transport == "distributed":
            request = SendBucket(sender=self._sender, number=next(self._numbers), tensors=bucket.tensors)
            ordered = threads.submit(self._step, "buckets", request, StepResult)
            return _UnderWay(bucket, ordered, self._groups.broadcasting(bucket.flat, seconds=self._left))
        shared = share(bucket, self._engines.values(), self._gpus)
        tensors = SendTensors(
            sender=self._sender,
            tensors=bucket.tensors,
            engines=[EngineTensors(uid=uid, payloads=each) for uid, each in shared.payloads.items()],
        )
        return _UnderWay(bucket, threads.submit(self._step, "tensors", tensors, StepResult), {}, shared)

    def _complete(self) -> None:
        """The oldest."""
        oldest = self._under_way.popleft()
        self._answered(oldest)
        self._arrived(oldest.sent, self._under_way[0].ordered if self._under_way else None)

    def _answered(self, sending: _UnderWay) -> None:
        self._drop(sending.ordered.result())
        if self._transport == "tensor":
            collect()
        self._bytes += sending.bucket.flat.numel()
        self._buckets += 1
        progress = self._sending.get("progress")
        if progress is not None:
            progress(sent_bytes=self._bytes, buckets=self._buckets)

    def _drop(self, answer: StepResult | UpdateResult) -> None:
        if isinstance(answer, StepResult):
            fell_out = list(answer.failed)
        else:
            fell_out = [verdict.uid for verdict in answer.engines if verdict.outcome != "Committed"]
        for uid in fell_out:
            self._engines.pop(uid, None)
            self._groups.abort(uid)

    def _collect(self, parts: dict[str, Future[None]]) -> None:
        """Each has been sent, or its group has gone wrong on this side: the engine hangs or holds a mixture, and its
        checksum tells."""
        for uid, part in parts.items():
            if uid not in self._engines:
                continue
            error = part.exception() if part.done() else TimeoutError("not sent long after the engine had answered")
            if error is not None:
                logger.warning("group with %s: %s: %s", self._engines[uid].pod, type(error).__name__, error)
                self._groups.abort(uid)

    def _arrived(self, parts: dict[str, Future[None]], told: Future[StepResult] | Future[UpdateResult] | None) -> None:
        """Wait for our side of what has been sent to the engines that have not fallen out. `told` is what the agent is
        asked next: it knows of an engine that dies meanwhile, which NCCL does not."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while waiting := [part for uid, part in parts.items() if uid in self._engines and not part.done()]:
            if told is not None and told.done():
                self._drop(told.result())
                told = None
                continue
            watched: list[Future[Any]] = [*waiting, *([told] if told is not None else ())]
            if not wait(watched, timeout=max(deadline - time.monotonic(), 0.0), return_when=FIRST_COMPLETED).done:
                break
        self._collect(parts)

    def _step(self, step: str, body: BaseModel, answer: type[Answer]) -> Answer:
        seconds = self._left + END_SECONDS
        return self._agent.call("POST", f"updates/{self._id}/{step}", answer, body=body, seconds=seconds)

    def _abandon(self) -> None:
        # First, so that engines which wait for us in a group hear of the end.
        self._groups.close()
        with contextlib.suppress(FleetError):  # it ends by itself when our line breaks
            self._agent.call("DELETE", f"updates/{self._id}", Nothing)

    @property
    def _left(self) -> float:
        return max(self._deadline - time.monotonic(), 1.0)
