"""Looks at the shared volume that never hold up the agent.

Whoever opens a file whose server is away waits until it is back. An agent that did so in its event loop would lose its
Lease, and leave a fleet paused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from rolloutfleet.agent.errors import AgentError, invalid
from rolloutfleet.agent.membership import Fleet

logger = logging.getLogger(__name__)

LOOK_SECONDS = 60.0
"""Headers of the many files of a large checkpoint come from a slow volume within this."""

LAST_PAUSE_SECONDS = 600.0

Seen = TypeVar("Seen")


async def looking(path: str, look: Callable[[], Seen], *, seconds: float) -> Seen:
    """What a look at `path` finds. Raises AgentError: what the look raises, BadCheckpoint for what cannot be read, and
    VolumeSilent after `seconds`, at most LOOK_SECONDS."""
    loop = asyncio.get_running_loop()
    seen: asyncio.Future[Seen] = loop.create_future()

    def settle(result: Seen | None, error: Exception | None) -> None:
        if seen.done():
            return  # nobody waits for it any more
        if error is not None:
            seen.set_exception(error)
        else:
            seen.set_result(result)  # type: ignore[arg-type]  # None is a result where Seen is None

    def run() -> None:
        result: Seen | None = None
        error: Exception | None = None
        try:
            result = look()
        except Exception as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            logger.info("%s answers when the agent has ended", path)

    # One of its own, as a daemon: one that hangs takes no worker of a pool along, and is not waited for at the end.
    threading.Thread(target=run, name=f"look at {path}", daemon=True).start()
    seconds = min(seconds, LOOK_SECONDS)
    try:
        async with asyncio.timeout(seconds):
            return await seen
    except TimeoutError as error:
        if error.errno is not None:  # the volume's own: its server has not answered
            raise unreadable(path, error) from error
        text = f"{path}: the volume has not answered within {seconds:g} s; is the server of its files up?"
        raise AgentError("VolumeSilent", text, status=504) from error
    except OSError as error:
        raise unreadable(path, error) from error


class Rights(NamedTuple):
    """Of a file or folder that not everybody may read."""

    mode: int
    user: int
    group: int

    def __str__(self) -> str:
        return f"mode {self.mode:o} of user {self.user} and group {self.group}"


def rights(folder: Path) -> frozenset[Rights]:
    """Whoever may read these here, another user may not. Raises OSError."""
    found = [(folder.stat(), stat.S_IROTH | stat.S_IXOTH)]
    found += [(file.stat(), stat.S_IROTH) for file in folder.iterdir()]
    return frozenset(
        Rights(stat.S_IMODE(one.st_mode), one.st_uid, one.st_gid) for one, needed in found if needed & ~one.st_mode
    )


async def announce(fleet: Fleet, *, first_pause: float = 1.0) -> None:
    """Until the shared volume can be read: tell by an event that it cannot, so that nobody learns it from the first
    update. A trainer's pod that does not mount it sends tensors, perhaps: that is no error."""
    pause, told = first_pause, ""
    while True:
        spec = fleet.server.spec if fleet.server is not None else None
        if spec is not None:
            if spec.weights is None or not spec.update_weights:
                return
            mount = spec.weights.mount_path
            try:
                await looking(mount, partial(_list, mount), seconds=LOOK_SECONDS)
                return
            except AgentError as problem:
                if problem.message != told:
                    told = problem.message
                    await fleet.warn_on_server("WeightsUnreadable", told)
            pause = min(2 * pause, LAST_PAUSE_SECONDS)  # each look that hangs costs a thread
        await asyncio.sleep(pause)


def _list(mount: str) -> None:
    if os.path.lexists(mount):
        os.listdir(mount)


def unreadable(path: str, error: Exception) -> AgentError:
    """`error`: an OSError, or another one that was raised from it."""
    told = f"path {path}: {error}"
    if isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError):
        told += (
            f"; the agent reads as user {os.geteuid()} and group {os.getegid()}, and engines as theirs: make it "
            "readable for all (chmod -R a+rX), or give one fsGroup to the trainer's pod and the engines' template"
        )
    return invalid("BadCheckpoint", told)
