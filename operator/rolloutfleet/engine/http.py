"""One way to call an engine or a router: a JSON body, a time-out, a typed error.

aiohttp, since hundreds of peers are asked all the time and thousands of requests are open at once: httpx looks at every
connection of its pool for each request, at 1 ms of CPU and more; this is a tenth.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import aiohttp
from yarl import URL

from rolloutfleet.engine.errors import EngineRefused, EngineTimeout, EngineUnreachable

CONNECT_SECONDS = 5.0
KEEP_SECONDS = 4.0
"""SGLang closes a connection that was idle for 5 s: one that we find closing costs a request."""
LARGE_BODY_BYTES = 1 << 20
"""Sent in pieces, so that others come in between: a prompt with images has megabytes."""

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 45_000),
)
"""A generation may be silent for hours; a machine that has vanished is silent for ever, and is known after 45 s: by
questions of the kernel's where it had taken the request, by the last one where it had not (the kernel sends a request
again for 15 minutes, and asks nothing meanwhile)."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    def json(self) -> Any:
        """None if it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None


Observer = Callable[[str, str, int | None, float], None]
"""(method, path, status, seconds) of each question; no status if there was no answer."""


def nobody(method: str, path: str, status: int | None, seconds: float) -> None:
    """Observes nothing."""


def always(method: str) -> None:
    """Lets everything pass."""


Send = Callable[[str, URL, Any, aiohttp.ClientTimeout, dict[str, str] | None], Awaitable[Answer]]
"""Method, URL, JSON body or None, time-outs, headers. Raises aiohttp.ClientError, TimeoutError, OSError."""


class Http:
    """The connection pool that clients of engines and routers share; whoever makes it closes it."""

    def __init__(
        self,
        *,
        max_connections: int,
        observe: Observer = nobody,
        before: Callable[[str], None] = always,
        send: Send | None = None,
    ) -> None:
        """`before` is called with the method just before anything is sent; what it raises is raised instead. `send`
        replaces the pool."""
        self._max_connections = max_connections
        self._observe = observe
        self._before = before
        self._send = send or self._through_pool
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Http:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(
        self, method: str, url: str, *, body: Any, timeout: aiohttp.ClientTimeout, headers: dict[str, str] | None
    ) -> Answer:
        """Raises aiohttp.ClientError, TimeoutError, OSError, and ValueError for an URL that is none."""
        self._before(method)
        target = URL(url)
        began, status = time.monotonic(), None
        try:
            answer = await self._send(method, target, body, timeout, headers)
            status = answer.status
            return answer
        finally:
            self._observe(method, target.path, status, time.monotonic() - began)

    async def _through_pool(
        self, method: str, url: URL, body: Any, timeout: aiohttp.ClientTimeout, headers: dict[str, str] | None
    ) -> Answer:
        if self._session is None:  # it wants a running loop
            connector = aiohttp.TCPConnector(
                limit=self._max_connections, keepalive_timeout=KEEP_SECONDS, socket_factory=kept_alive
            )
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        data: bytes | BytesIO | None = None
        if body is not None:
            data = json.dumps(body).encode()
            headers = {"Content-Type": "application/json", **(headers or {})}
            if len(data) > LARGE_BODY_BYTES:
                data = BytesIO(data)
        async with self._session.request(
            method, url, data=data, timeout=timeout, headers=headers, allow_redirects=False
        ) as response:
            return Answer(status=response.status, body=await response.read())


def kept_alive(address: tuple[Any, ...]) -> socket.socket:
    """A socket whose peer the kernel asks whether it is still there; of an entry of getaddrinfo."""
    family, kind, protocol, *_ = address
    made = socket.socket(family=family, type=kind, proto=protocol)
    for option in KEEPALIVE:
        made.setsockopt(*option)
    return made


class HttpPeer:
    """A base URL and a shared connection pool."""

    def __init__(self, url: str, *, http: Http) -> None:
        self.url = url
        self._http = http

    async def _call(
        self,
        method: str,
        path: str,
        *,
        seconds: float,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """`seconds`: without a byte from the peer. Raises EngineUnreachable, EngineTimeout, EngineRefused."""
        target = f"{self.url}{path}"
        timeout = aiohttp.ClientTimeout(
            total=None, connect=seconds, sock_connect=min(seconds, CONNECT_SECONDS), sock_read=seconds
        )
        try:
            answer = await self._http.ask(method, target, body=body, timeout=timeout, headers=headers)
        except TimeoutError as error:  # aiohttp's own are of this kind as well
            raise EngineTimeout(f"{method} {target}: no answer in {seconds:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # the last: an URL that is none
            raise EngineUnreachable(f"{method} {target}: {type(error).__name__} {error}".rstrip()) from error
        if 200 <= answer.status < 300:
            return answer
        raise EngineRefused(f"{method} {target}: {answer.status} {_reason(answer)}", status=answer.status)

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        seconds: float,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Like `_call`, for an answer that is a JSON object; anything else is a refusal."""
        answer = await self._call(method, path, seconds=seconds, body=body, headers=headers)
        content = answer.json()
        if not isinstance(content, dict):
            text = answer.text[:200]
            raise EngineRefused(f"{method} {self.url}{path}: not a JSON object: {text}", status=answer.status)
        return content


def _reason(answer: Answer) -> str:
    """SGLang answers {"error": {"message"}}, {"error": text}, or {"success": false, "message": text}."""
    body = answer.json()
    if isinstance(body, dict):
        error = body.get("error") or body.get("message") or body
        return str(error.get("message") or error)[:500] if isinstance(error, dict) else str(error)[:500]
    return str(body)[:500] if body is not None else answer.text[:500]
