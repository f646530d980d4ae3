"""Copies of a version in the engines' pods, made by the workers there before anybody stands still."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from rolloutfleet.agent.together import together
from rolloutfleet.engine.worker import WorkerClient
from rolloutfleet.plan.update import Participant

logger = logging.getLogger(__name__)

STRAGGLER_SECONDS = 30.0


class Copies:
    """Of one version."""

    def __init__(self, *, path: str, worker: Callable[[str], WorkerClient], deadline: float) -> None:
        """`path`: folder of a full version or a delta, as workers see it. `worker`: beside the engine at a URL.
        `deadline`: by the monotonic clock."""
        self._path = path
        self._worker = worker
        self._deadline = deadline
        self.paths: dict[str, str] = {}
        """Folder of the full checkpoint in the engine's pod, by the pod's UID."""
        self.errors: dict[str, str] = {}
        """Why there is none, likewise."""
        self.delta = False
        """The version is one."""

    async def make(self, participants: Iterable[Participant]) -> None:
        """In all of these pods at once, where it was not tried before; each error stays with its pod."""
        tried = self.paths.keys() | self.errors.keys()
        await together(
            [one for one in participants if one.uid not in tried],
            "the copy",
            self._copy,
            falls_out=self._failed,
            slack=STRAGGLER_SECONDS,
            deadline=self._deadline,
        )

    async def _copy(self, participant: Participant) -> None:
        seconds = max(self._deadline - time.monotonic(), 0.1)
        made = await self._worker(participant.url).copy(self._path, seconds=seconds)
        self.paths[participant.uid] = made.path
        self.delta = self.delta or made.delta

    def _failed(self, participant: Participant, why: str) -> None:
        self.errors[participant.uid] = f"its worker has not copied {self._path}: {why}"
        logger.warning("%s: %s", participant.pod, self.errors[participant.uid])
