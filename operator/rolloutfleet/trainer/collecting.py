"""Batches of collected samples, step by step, from the agent in the same pod."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from rolloutfleet.api.collection import Acknowledge, BatchHeader, Collection, CollectionView, LeaseBatch
from rolloutfleet.api.sample_codec import DamagedSample, decode
from rolloutfleet.api.samples import Sample
from rolloutfleet.trainer.batches import PackedBatch, PaddedBatch, packed, padded
from rolloutfleet.trainer.errors import FleetError, Refused

if TYPE_CHECKING:
    from rolloutfleet.trainer.client import Fleet

LONG_POLL_SECONDS = 20.0
GRACE_SECONDS = 120.0
"""Beyond the long poll: until engines have stopped, and for the transfer of a large batch."""
BEGIN_SECONDS = 600.0
"""Reading a data set of many gigabytes takes minutes."""
PAUSE_SECONDS = 1.0
COMES_BACK = frozenset(
    {
        "AgentUnreachable",
        "NoCollection",
        "NoRouter",
        "NotLeading",
        "NotReady",
        "StoreBusy",
        "Unreachable",
        "WaitingForServer",
    }
)
"""An agent that was restarted, or waits for its Lease or for engines: asked again, until the caller's time is over."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class StepBatch:
    """What this rank trains in a step."""

    step: int
    weight_version: int
    """Committed when the batch was handed out."""
    samples: list[Sample]
    advantages: list[float]
    """One a sample."""
    micro_batches: list[list[int]]
    """Positions in `samples`."""
    rewards: list[float | None]
    """Of the whole batch, all ranks."""
    groups: int
    """In the whole batch."""
    last: bool
    """The run has no more prompts."""

    def packed(self) -> list[PackedBatch]:
        """Its micro-batches, without padding."""
        return [packed(*self._of(positions)) for positions in self.micro_batches]

    def padded(self, *, pad_token: int = 0) -> list[PaddedBatch]:
        return [padded(*self._of(positions), pad_token=pad_token) for positions in self.micro_batches]

    def _of(self, positions: list[int]) -> tuple[list[Sample], list[float]]:
        return [self.samples[i] for i in positions], [self.advantages[i] for i in positions]


class SampleCollection:
    """A run's samples. Every call may be repeated, and is, while the agent is away."""

    def __init__(self, fleet: Fleet, asked: Collection) -> None:
        self._fleet = fleet
        self.asked = asked

    def begin(self) -> CollectionView:
        """Tell the agent what to collect; the same once more changes nothing. Raises Refused."""
        return self._patiently(self._begin, time.monotonic() + BEGIN_SECONDS)

    def _begin(self) -> CollectionView:
        return self._fleet.call("PUT", "collection", CollectionView, body=self.asked, seconds=BEGIN_SECONDS)

    def view(self) -> CollectionView:
        return self._fleet.call("GET", "collection", CollectionView)

    def batch(
        self,
        step: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        token_budget: int | None = None,
        micro_batch_multiple: int = 1,
        timeout: float = 86400.0,
    ) -> StepBatch:
        """The batch of `step`, the same one whoever asks and however often; `timeout` in seconds.

        `ranks`: each data-parallel rank gets its own samples. `token_budget`: most tokens a micro-batch. Raises
        Refused, with code Exhausted where the run has no more prompts, and NotReady when the time is over.
        """
        deadline = time.monotonic() + timeout

        def ask() -> StepBatch:
            request = LeaseBatch(
                trainer=self.asked.trainer,
                step=step,
                wait_seconds=min(max(deadline - time.monotonic(), 0), LONG_POLL_SECONDS),
                rank=rank,
                ranks=ranks,
                token_budget=token_budget,
                micro_batch_multiple=micro_batch_multiple,
            )
            seconds = request.wait_seconds + GRACE_SECONDS
            return _read(self._fleet.ask("POST", "collection/batches", body=request, seconds=seconds))

        return self._patiently(ask, deadline)

    def batches(self, step: int, **options: object) -> Iterator[StepBatch]:
        """From `step` on, until the run has no more prompts; `options` as for `batch`."""
        while True:
            try:
                batch = self.batch(step, **options)  # type: ignore[arg-type]
            except Refused as refused:
                if refused.code == "Exhausted":
                    return
                raise
            yield batch
            step += 1

    def acknowledge(self, step: int, *, timeout: float = 600.0) -> CollectionView:
        """A checkpoint has all steps up to `step`: nothing of them is handed out again."""
        request = Acknowledge(trainer=self.asked.trainer, step=step)

        def ask() -> CollectionView:
            return self._fleet.call("POST", "collection/acknowledge", CollectionView, body=request)

        return self._patiently(ask, time.monotonic() + timeout)

    def end(self) -> None:
        """Stop collecting. What is begun is kept for the next life of the run."""
        self._fleet.ask("DELETE", "collection", seconds=GRACE_SECONDS)

    def _patiently(self, ask: Callable[[], Answer], deadline: float) -> Answer:
        while True:
            try:
                return ask()
            except FleetError as error:
                if error.code not in COMES_BACK or time.monotonic() >= deadline:
                    raise
                if error.code == "NoCollection":
                    self._begin_again(deadline)
                elif error.code != "NotReady":
                    time.sleep(min(PAUSE_SECONDS, max(deadline - time.monotonic(), 0)))

    def _begin_again(self, deadline: float) -> None:
        """The agent is a new process."""
        try:
            self._begin()
        except FleetError as error:
            if error.code not in COMES_BACK or time.monotonic() >= deadline:
                raise
            time.sleep(min(PAUSE_SECONDS, max(deadline - time.monotonic(), 0)))


def _read(content: bytes) -> StepBatch:
    """Raises Refused where it is not what an agent answers."""
    parts, at = [], 0
    try:
        while at < len(content):
            (length,) = struct.unpack_from("<I", content, at)
            parts.append(content[at + 4 : at + 4 + length])
            at += 4 + length
        header = BatchHeader.model_validate_json(parts[0])
        samples = [decode(part) for part in parts[1:]]
    except (struct.error, IndexError, ValueError, DamagedSample) as error:
        raise Refused(f"collection/batches: not the agent's answer: {error}", code="Http") from error
    return StepBatch(
        step=header.step,
        weight_version=header.weight_version,
        samples=samples,
        advantages=header.advantages,
        micro_batches=header.micro_batches,
        rewards=header.rewards,
        groups=header.groups,
        last=header.last,
    )
