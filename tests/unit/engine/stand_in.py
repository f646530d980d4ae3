"""A loopback HTTP server that stands in for an engine or a router: it records what it is asked, and answers as told."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    """With the query."""
    body: Any
    headers: dict[str, str]


Answer = tuple[int, Any]
"""Status, and a JSON body or a plain text."""
Answering = Callable[[Asked], Awaitable[Answer]]


class HangUp(Exception):
    """Raised in place of an answer: the connection breaks."""


class StandIn:
    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self.asked: list[Asked] = []
        self.url = ""

    @classmethod
    def always(cls, status: int, body: Any) -> StandIn:
        async def answer(_: Asked) -> Answer:
            return status, body

        return cls(answer)

    async def __aenter__(self) -> StandIn:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        text = await request.text()
        asked = Asked(request.method, request.path_qs, json.loads(text) if text else None, dict(request.headers))
        self.asked.append(asked)
        try:
            status, body = await self._answering(asked)
        except HangUp:
            if request.transport is not None:
                request.transport.close()
            status, body = 500, "nobody hears this"
        if isinstance(body, str):
            return web.Response(status=status, text=body)
        return web.json_response(body, status=status)
