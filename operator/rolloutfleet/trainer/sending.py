"""A weight update whose tensors this process sends: it asks the agent for each step and does its own part beside it.

The agent orders engines to receive while we send, so each step is a request in one thread and the transfer in others.
Whoever dies: an engine falls out (the agent says so, and its group is aborted); if this process dies, the line that it
holds open to the agent breaks, and the agent restores the fleet.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

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
from rolloutfleet.trainer.shared_memory import collect, payloads
from rolloutfleet.trainer.tensors import (
    Bucket,
    Tensors,
    buckets,
    described,
    refuse_non_finite,
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

Answer = TypeVar("Answer", bound=BaseModel)
_UnderWay: TypeAlias = "tuple[Future[StepResult], dict[str, Future[None]]]"
"""What the agent is asked for a bucket, and our own part of it by engine."""


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
    """Raises Refused, NonFiniteWeights, GroupError, ValueError: the old version still serves then, as far as engines
    still hold it."""
    state = resident(tensors)
    dtype = sending.get("dtype")
    named: Iterable[tuple[str, torch.Tensor]] = state.items() if state is not None else tensors  # type: ignore[assignment]
    whole = stream(named, dtype)
    gathers = state is not None and sharded(state)
    try:
        if state is not None:
            refuse_non_finite(list(state.items()))
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
        self._travelling: dict[str, Future[None]] = {}
        """Our part of the last bucket by engine. With NCCL an engine answers as soon as it has begun to receive."""
        self._bytes = 0
        self._buckets = 0

    def run(self, state: Any, whole: Iterator[tuple[str, torch.Tensor]]) -> UpdateResult:
        # Of shards this process has seen its own at most, and a change of type may overflow.
        unchecked = state is None or sharded(state) or self._sending.get("dtype") is not None
        pieces = buckets(whole, self._sending.get("bucket_bytes", BUCKET_BYTES), check=unchecked)
        bucket = next(pieces, None)
        if bucket is None:
            raise Refused("weights: there is not one tensor in it", code="BadRequest")
        backend: Backend = "nccl" if bucket.flat.is_cuda else "gloo"
        if backend == "nccl" and self._transport == "distributed":
            require_matching_nccl()
        # One for the line that is held, one for steps.
        with ThreadPoolExecutor(2, thread_name_prefix="rolloutfleet") as threads:
            self._begin(state, backend)
            held = threads.submit(self._hold)
            try:
                if self._transport == "distributed":
                    self._join(backend)
                while bucket is not None and self._engines:
                    under_way = self._start(bucket, threads)
                    try:
                        following = next(pieces, None)  # made while this one travels
                    finally:
                        self._complete(bucket, under_way)
                    bucket = following
                self._collect(self._travelling)
                return self._step("finish", SenderDone(sender=self._sender, bytes=self._bytes), UpdateResult)
            except BaseException:
                self._abandon()
                raise
            finally:
                held.result()

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
        self._collect(joining)

    def _start(self, bucket: Bucket, threads: ThreadPoolExecutor) -> _UnderWay:
        if self._transport == "distributed":
            ordered = threads.submit(
                self._step, "buckets", SendBucket(sender=self._sender, tensors=bucket.tensors), StepResult
            )
            return ordered, self._groups.broadcasting(bucket.flat, seconds=self._left)
        shared = payloads(bucket, self._engines.values())
        request = SendTensors(
            sender=self._sender,
            tensors=bucket.tensors,
            engines=[EngineTensors(uid=uid, payloads=each) for uid, each in shared.items()],
        )
        return threads.submit(self._step, "tensors", request, StepResult), {}

    def _complete(self, bucket: Bucket, under_way: _UnderWay) -> None:
        ordered, sent = under_way
        self._drop(ordered.result())
        # The one before: this one travels while the engines are told of the next.
        self._collect(self._travelling)
        self._travelling = sent
        if self._transport == "tensor":
            collect()
        self._bytes += bucket.flat.numel()
        self._buckets += 1
        progress = self._sending.get("progress")
        if progress is not None:
            progress(sent_bytes=self._bytes, buckets=self._buckets)

    def _drop(self, answer: StepResult) -> None:
        for uid in answer.failed:
            self._engines.pop(uid, None)
            self._groups.abort(uid)

    def _collect(self, parts: dict[str, Future[None]]) -> None:
        """Wait for our side of what has been sent to the engines that have not fallen out. One whose group has gone
        wrong on this side hangs or holds a mixture: the checksum tells."""
        for uid, part in parts.items():
            if uid not in self._engines:
                continue
            try:
                part.result(timeout=SETTLE_SECONDS)
            except Exception as error:
                logger.warning("group with %s: %s: %s", self._engines[uid].pod, type(error).__name__, error)
                self._groups.abort(uid)

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
