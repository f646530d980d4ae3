"""Weight updates that engines read by themselves, from a checkpoint on the shared volume.

The update runs in a task of its own: a trainer that hangs up does not leave a fleet paused.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rolloutfleet.agent.errors import AgentError, conflict
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.preflight import checkpoint_folder, compare_checkpoint, target_version
from rolloutfleet.agent.transaction import Transaction
from rolloutfleet.api.agent import UpdateResult, UpdateWeights
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.plan.update import Participant


class Updater:
    """Updates of one fleet from disk, one at a time."""

    def __init__(self, *, fleet: Fleet, leadership: Leadership, engine: Callable[[str], EngineClient]) -> None:
        self._fleet = fleet
        self._leadership = leadership
        self._engine = engine

    async def update(self, request: UpdateWeights) -> UpdateResult:
        """Raises AgentError: nothing was paused, or the fleet was resumed and no version was committed."""
        refuse_beside_another(self._fleet, self._leadership)
        return await self._leadership.alone(self._from_disk(request))

    async def finish(self) -> None:
        """Wait for a running transaction: at shutdown a fleet must not be left paused."""
        async with self._leadership.operations:
            return

    async def _from_disk(self, request: UpdateWeights) -> UpdateResult:
        await self._fleet.refresh()
        target = target_version(self._fleet, request)
        folder = checkpoint_folder(self._fleet, request.path)
        compared = compare_checkpoint(self._fleet, folder)
        transaction = Transaction(
            fleet=self._fleet,
            leadership=self._leadership,
            engine=self._engine,
            options=request,
            target=target,
            transport="disk",
            path=request.path,
        )
        await transaction.begin()
        abandoned: AgentError | None = None
        try:
            await transaction.recognize()
            await transaction.pause()
            await self._load(transaction, request.path, compared=compared)
        except AgentError as error:  # we do not lead any more
            abandoned = error
        finally:
            # Also when something above was cancelled or is a bug of ours: this resumes the fleet.
            result = await transaction.settle(abandoned=abandoned)
        return result

    async def _load(self, transaction: Transaction, path: str, *, compared: bool) -> None:
        clock = time.monotonic()

        async def load(_: Participant, engine: EngineClient, seconds: float) -> None:
            await engine.update_weights_from_disk(path, label=transaction.label, flush_cache=False, seconds=seconds)

        async def load_and_live(participant: Participant, engine: EngineClient, seconds: float) -> None:
            await load(participant, engine, seconds)
            await engine.checksum(seconds=seconds)

        waiting = transaction.alive()
        if not compared and len(waiting) > 1:
            # A checkpoint of another shape kills the scheduler seconds later: let it kill one, not all.
            canary, *waiting = waiting
            await transaction.everywhere(load_and_live, among=[canary])
            why = transaction.errors.get(canary.uid)
            if why is not None:
                transaction.errors |= {one.uid: f"not tried, since {canary.pod} failed: {why}" for one in waiting}
        await transaction.everywhere(load, among=waiting)
        transaction.seconds["load"] = time.monotonic() - clock


def refuse_beside_another(fleet: Fleet, leadership: Leadership) -> None:
    if leadership.operations.locked() and not leadership.unasked:
        raise conflict(
            "UpdateInProgress", f"an update, offload or onload of {fleet.name} is running; wait for its answer"
        )
