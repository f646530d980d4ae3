"""Reconcile one fleet: observe, plan, act. Everything that the operator decides happens in these three steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import groupby

from pydantic import ValidationError

from rolloutfleet.control.executor import Executor
from rolloutfleet.control.freshness import NotLeading, Stop
from rolloutfleet.control.progress import PROGRESS_SECONDS, Progress, patience
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.control.trainer_lease import TrainerLease
from rolloutfleet.kube.client import ApiError
from rolloutfleet.kube.queue import WorkQueue
from rolloutfleet.plan.actions import (
    Action,
    Apply,
    CreatePod,
    DeletePod,
    Deregister,
    Emit,
    Register,
    Requeue,
    SetGate,
)
from rolloutfleet.plan.fleet import plan_fleet
from rolloutfleet.plan.objects import Defaults

logger = logging.getLogger(__name__)

INDEPENDENT = (Apply, CreatePod, DeletePod, Deregister, Register, SetGate, Emit)
"""Of one such kind, what the plan lists in a row may be done at the same time; a plan relies on the order between
kinds: out of the routers before deleted, in status before created."""
IN_FLIGHT = 16
NOT_LEADING_SECONDS = 1.0


class Reconciler:
    def __init__(
        self,
        *,
        store: FleetStore,
        executor: Executor,
        queue: WorkQueue[FleetKey],
        defaults: Defaults,
        clock: Callable[[], datetime],
        looked_at: Callable[[FleetKey], bool],
        lease: TrainerLease,
        progress_seconds: float = PROGRESS_SECONDS,
    ) -> None:
        """`looked_at`: whether the fleet's engines and routers have been asked how they are since this term began.
        `progress_seconds`: how long a status that only tells of progress waits where nothing else does."""
        self._store = store
        self._executor = executor
        self._queue = queue
        self._defaults = defaults
        self._clock = clock
        self._looked_at = looked_at
        self._lease = lease
        self._progress_seconds = progress_seconds
        self._progress: dict[FleetKey, Progress] = {}

    async def __call__(self, key: FleetKey) -> None:
        # Observe
        if not self._looked_at(key):
            return  # an engine that nobody has asked yet is not one that does not answer
        try:
            fleet = self._store.fleet(key)
            if fleet is not None and await self._lease.catches_up(key, fleet):
                fleet = self._store.fleet(key)
        except ValidationError as error:
            logger.error("RolloutServer %s/%s cannot be read: %s", key.namespace, key.name, error)
            return
        if fleet is None:
            self._progress.pop(key, None)
            return

        # Plan
        actions = plan_fleet(
            fleet,
            defaults=self._defaults,
            applied_versions=self._store.applied_versions.get(key, {}),
            now=self._clock(),
        )

        # Act
        actions = self._progress.setdefault(key, Progress()).held_back(
            actions,
            self._store.statuses(key),
            asyncio.get_running_loop().time(),
            seconds=patience(self._progress_seconds, waiting=self._queue.depth()),
        )
        for kind, run in groupby(actions, key=type):
            try:
                if kind in INDEPENDENT:
                    await self._together(key, list(run))
                else:
                    for action in run:
                        await self._perform(key, action)
            except NotLeading:
                self._queue.add_after(key, NOT_LEADING_SECONDS)  # unless the term ends, and with it this queue
                return
            except Stop:
                # The world has moved: what remains of this plan was made for another one.
                self._queue.add(key)
                return

    async def _together(self, key: FleetKey, actions: Sequence[Action]) -> None:
        """All of them are tried, then the first error counts."""
        slots = asyncio.Semaphore(IN_FLIGHT)

        async def perform(action: Action) -> None:
            async with slots:
                await self._perform(key, action)

        results = await asyncio.gather(*(perform(action) for action in actions), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                raise error

    async def _perform(self, key: FleetKey, action: Action) -> None:
        if isinstance(action, Requeue):
            self._queue.add_after(key, action.seconds)
            return
        try:
            await self._executor.perform(key, action)
        except ApiError as error:
            logger.warning("%s/%s: %s failed: %s", key.namespace, key.name, type(action).__name__, error)
            raise
