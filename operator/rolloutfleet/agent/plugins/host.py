"""`python -m rolloutfleet.agent.plugins.host FD`: runs plug-ins for the agent at the other end of the socket, and ends
when the agent does."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rolloutfleet.agent.plugins.errors import PluginError, PluginRaised, PluginTimeout, WrongAnswer
from rolloutfleet.agent.plugins.kinds import Kind, checked
from rolloutfleet.agent.plugins.loader import load
from rolloutfleet.agent.plugins.wire import Cancel, Reply, Request, framed, read

THREADS = 64
"""Plain functions at once."""


class Host:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._threads = ThreadPoolExecutor(THREADS)
        self._functions: dict[tuple[str, Kind], Callable[..., Any]] = {}

    async def serve(self) -> None:
        running: dict[int, asyncio.Task[None]] = {}
        while True:
            try:
                message: Request | Cancel = await read(self._reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            if isinstance(message, Cancel):
                if message.id in running:
                    running[message.id].cancel()
                continue
            task = running[message.id] = asyncio.create_task(self._answer(message))
            task.add_done_callback(functools.partial(_forget, running, message.id))

    async def _answer(self, request: Request) -> None:
        try:
            reply = Reply(request.id, await self._called(request))
        except _Stuck as stuck:
            reply = Reply(request.id, error=stuck.error, stuck=True)
        except PluginError as error:
            reply = Reply(request.id, error=error)
        try:
            frame = framed(reply)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            frame = framed(Reply(request.id, error=WrongAnswer(f"{request.reference}: its answer: {error}")))
        self._writer.write(frame)

    async def _called(self, request: Request) -> Any:
        key = (request.reference, request.kind)
        if key not in self._functions:
            self._functions[key] = load(*key)
        if request.arguments is None:
            return None
        function, in_thread = self._functions[key], False
        try:
            async with asyncio.timeout(request.timeout_seconds) as limit:
                if _is_async(function):
                    result = await function(*request.arguments)
                else:
                    in_thread = True
                    running = asyncio.get_running_loop().run_in_executor(self._threads, function, *request.arguments)
                    result = await running
            return checked(request.kind, result, request.arguments)
        except WrongAnswer as wrong:
            raise WrongAnswer(f"{request.reference}: {wrong.message}") from wrong
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                late = PluginTimeout(f"{request.reference}: no answer in {request.timeout_seconds:g} s")
                raise (_Stuck(late) if in_thread else late) from error
            said = f"{request.reference}: {type(error).__name__}: {error}"
            raise PluginRaised(said, traceback.format_exc()) from error


def _forget(running: dict[int, asyncio.Task[None]], id: int, _: asyncio.Task[None]) -> None:
    del running[id]


class _Stuck(Exception):
    def __init__(self, error: PluginError) -> None:
        super().__init__(error)
        self.error = error


def _is_async(function: Callable[..., Any]) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - of an object that is called like a function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def _main(descriptor: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=1 << 20)
    writer.write(framed(Reply(0)))  # ready
    await Host(reader, writer).serve()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
