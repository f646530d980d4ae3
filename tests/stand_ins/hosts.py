"""Engines and routers at addresses of their own (127.64.0.0/10, port 30000), all served by one process.

An address refuses connections before its program starts and after it has ended, as a pod's does.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable
from typing import Any, Protocol

from aiohttp import web

from rolloutfleet.api.names import ENGINE_PORT
from stand_ins.sglang import Died

SLOW = {"/update_weights_from_disk": 0.05, "/weights_checker": 0.01}
"""Seconds that an answer takes, for calls that are not instantaneous in any engine."""


class Program(Protocol):
    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]: ...


class Hosts:
    def __init__(self, asked: Callable[[str, str], None] = lambda address, path: None) -> None:
        """`asked` is told after each POST that a program has answered."""
        self._asked = asked
        # Somewhere else than another run on this machine.
        self._numbers = itertools.count(secrets.randbelow(1 << 22))
        self._programs: dict[str, Program] = {}
        self._sites: dict[str, web.TCPSite] = {}

    async def __aenter__(self) -> Hosts:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._programs.clear()
        await self._runner.cleanup()

    def new_address(self) -> str:
        number = next(self._numbers)
        return f"127.{64 + (number >> 16 & 63)}.{number >> 8 & 255}.{number & 255}"

    async def start(self, address: str, program: Program) -> None:
        site = web.TCPSite(self._runner, address, ENGINE_PORT)
        await site.start()
        self._programs[address], self._sites[address] = program, site

    async def end(self, address: str) -> None:
        self._programs.pop(address, None)
        site = self._sites.pop(address, None)
        if site is not None:
            await site.stop()

    def program(self, url: str) -> Program | None:
        return self._programs.get(url.removeprefix("http://").rpartition(":")[0])

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        address = str(request.transport.get_extra_info("sockname")[0]) if request.transport else ""
        await asyncio.sleep(SLOW.get(request.path, 0.0))
        program = self._programs.get(address)
        if program is None:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=500)
        try:
            status, answer = program.answer(request.method, request.path, body)
        except Died:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=500)
        if request.method != "GET":
            self._asked(address, request.path)
        return web.json_response(answer, status=status)
