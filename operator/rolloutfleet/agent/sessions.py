"""Weight updates in which the trainer sends tensors itself, one after the other, and what is kept between them.

A process group is of one engine and one sender, rank 0: whoever dies takes its own group along and no other. Groups
are kept between updates, as long as the engine lives and the sender still has its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rolloutfleet.agent.errors import AgentError, conflict
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.session import Session
from rolloutfleet.agent.updates import refuse_beside_another
from rolloutfleet.api.agent import BeginUpdate, UpdateSession
from rolloutfleet.engine.sglang import EngineClient


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


def _told_by_the_session(task: asyncio.Task[None]) -> None:
    """Its error goes to the trainer's requests."""
    if not task.cancelled():
        task.exception()
