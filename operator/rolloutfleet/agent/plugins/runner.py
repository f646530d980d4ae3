"""The agent's side: calls plug-ins in their hosts, bounds every call, and ends hosts that are of no use any more."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rolloutfleet.agent.plugins.errors import PluginDied, PluginError, PluginTimeout
from rolloutfleet.agent.plugins.kinds import Kind
from rolloutfleet.agent.plugins.wire import Cancel, Reply, Request, framed, read

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
LOAD_SECONDS = 180.0
"""To import its modules: torch alone takes ten."""
GRACE_SECONDS = 5.0
"""What a host may take beyond the time-out of a call to say that it was exceeded."""
ALONE_AT_ONCE = 4


@dataclass(frozen=True)
class Plugin:
    kind: Kind
    reference: str
    timeout_seconds: float = 60.0


class PluginRunner:
    def __init__(self, *, folders: Sequence[str] = (), grace_seconds: float = GRACE_SECONDS) -> None:
        """`folders`: where modules are looked for first, for example a mounted volume."""
        self._folders, self._grace = folders, grace_seconds
        self._shared: _Host | None = None
        self._retired: list[_Host] = []
        self._starting = asyncio.Lock()
        self._alone = asyncio.Semaphore(ALONE_AT_ONCE)

    async def load(self, plugin: Plugin) -> None:
        """To be told at the start of a run, and not in its middle, that it is not there. Raises PluginError."""
        await (await self._host()).load(plugin)

    async def call(self, plugin: Plugin, *arguments: Any) -> Any:
        """Its answer, of the type of its kind. Takes up to twice its time-out where another call ended the process.
        Raises PluginError."""
        host = await self._host()
        try:
            return await host.call(plugin, arguments)
        except _HostLost as lost:
            logger.warning("%s: %s; it is called again, in a process of its own", plugin.reference, lost)
        async with self._alone:
            host = await _Host.start(self._folders, self._grace)
            try:
                return await host.call(plugin, arguments)
            except _HostLost as lost:
                kind = PluginTimeout if lost.silent else PluginDied
                raise kind(f"{plugin.reference}: {lost}") from lost
            finally:
                await host.end()

    async def close(self) -> None:
        for host in [*self._retired, *filter(None, [self._shared])]:
            await host.end()

    async def _host(self) -> _Host:
        async with self._starting:
            if self._shared is None or not self._shared.usable:
                self._retired = [host for host in [*self._retired, *filter(None, [self._shared])] if not host.ended]
                self._shared = await _Host.start(self._folders, self._grace)
            return self._shared


class _HostLost(Exception):
    def __init__(self, message: str, *, silent: bool) -> None:
        super().__init__(message)
        self.silent = silent


class _Host:
    """One process."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        grace: float,
    ) -> None:
        self._process, self._reader, self._writer, self._grace = process, reader, writer, grace
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._loaded: set[Plugin] = set()
        self._why = ""
        self._listening = asyncio.create_task(self._listen())
        self.usable = True

    @classmethod
    async def start(cls, folders: Sequence[str], grace: float) -> _Host:
        """Raises PluginDied."""
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "rolloutfleet.agent.plugins.host", str(theirs.fileno())]
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command, pass_fds=[theirs.fileno()], env={**os.environ, "PYTHONPATH": path}
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(START_SECONDS):
                await read(reader)
        except BaseException as error:  # a cancellation too: nobody else knows of this process
            process.kill()
            writer.close()
            if isinstance(error, asyncio.IncompleteReadError | ConnectionError | TimeoutError):
                raise PluginDied(f"plug-ins: their process did not start: {type(error).__name__}") from error
            raise
        return cls(process, reader, writer, grace)

    async def load(self, plugin: Plugin) -> None:
        if plugin not in self._loaded:
            await self._ask(plugin, None, LOAD_SECONDS)
            self._loaded.add(plugin)

    async def call(self, plugin: Plugin, arguments: tuple[Any, ...]) -> Any:
        """Raises _HostLost where it is not known whether this call was at fault."""
        await self.load(plugin)
        return await self._ask(plugin, arguments, plugin.timeout_seconds)

    async def end(self) -> None:
        self._kill("it is no longer needed", silent=False)
        await self._process.wait()
        self._listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._listening
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    @property
    def ended(self) -> bool:
        return self._listening.done()

    async def _ask(self, plugin: Plugin, arguments: tuple[Any, ...] | None, seconds: float) -> Any:
        if self._process.returncode is not None:
            raise _HostLost(self._why or "the process of plug-ins has ended", silent=False)
        request = Request(next(self._ids), plugin.reference, plugin.kind, arguments, seconds)
        answer = self._waiting[request.id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds + self._grace) as limit:
                self._writer.write(framed(request))
                await self._writer.drain()
                return await answer
        except ConnectionError as error:
            raise _HostLost(f"the process of plug-ins has ended: {error}", silent=False) from error
        except TimeoutError:
            if not limit.expired():
                raise
            self._kill(f"its process answered nothing in {seconds + self._grace:g} s", silent=True)
            raise _HostLost(self._why, silent=True) from None
        except asyncio.CancelledError:
            if self._process.returncode is None:
                self._writer.write(framed(Cancel(request.id)))
            raise
        finally:
            self._waiting.pop(request.id, None)
            if not self.usable and not self._waiting:
                self._kill("a thread of it hangs", silent=False)

    async def _listen(self) -> None:
        try:
            while True:
                reply: Reply = await read(self._reader)
                if reply.stuck:
                    self.usable = False  # the calls in it may end; then so does it
                answer = self._waiting.get(reply.id)
                if answer is not None and not answer.done():
                    if reply.error is not None:
                        answer.set_exception(reply.error)
                    else:
                        answer.set_result(reply.result)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._process.wait()
            self._lose(self._why or f"its process ended with {code}", silent=False)
            self._writer.close()

    def _kill(self, why: str, *, silent: bool) -> None:
        self._why = self._why or why
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._lose(self._why, silent=silent)

    def _lose(self, why: str, *, silent: bool) -> None:
        self.usable = False
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(_HostLost(why, silent=silent))


__all__ = ["Plugin", "PluginError", "PluginRunner"]
