"""The wires of one operator process: to the API server and to engines and routers. Every call goes through here, so
here the process dies at a given call, and here calls are broken as networks and servers break them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import aiohttp
import httpx
from yarl import URL

from rolloutfleet.engine.http import Answer, Send
from rolloutfleet.kube import http as kube_http
from rolloutfleet.kube.client import KubeApi
from rolloutfleet.kube.config import Credentials

Moment = Literal["before", "after"]
"""Before the call is sent; or after it was performed, and before its answer is seen."""

Pass = Callable[[httpx.Request], Awaitable[httpx.Response]]
Disturb = Callable[[httpx.Request, Pass], Awaitable[httpx.Response]]
"""What becomes of a call: it may be sent or not, and its answer come back or not."""


async def undisturbed(request: httpx.Request, send: Pass) -> httpx.Response:
    return await send(request)


class Wires:
    def __init__(self) -> None:
        self.dead = asyncio.Event()
        self.writes: list[str] = []
        """Calls that may change something, since the count began."""
        self.disturb: Disturb = undisturbed
        self._last: tuple[int, Moment] | None = None

    def count_from_here(self, *, die_at: tuple[int, Moment] | None = None) -> None:
        self.writes = []
        self._last = die_at

    async def pass_on(self, request: httpx.Request, inner: httpx.AsyncBaseTransport) -> httpx.Response:
        if self.dead.is_set():
            await _for_ever()
        writes = request.method not in ("GET", "HEAD")
        if writes:
            self.writes.append(f"{request.method} {request.url.host}{request.url.raw_path.decode()}")
        last = self._last is not None and writes and len(self.writes) == self._last[0]
        if last and self._last is not None and self._last[1] == "before":
            await self._die()
        answer = await self.disturb(request, inner.handle_async_request)
        if last:
            await self._die()
        if self.dead.is_set():
            await _for_ever()
        return answer

    async def _die(self) -> None:
        self.dead.set()
        await _for_ever()


class Network(httpx.AsyncBaseTransport):
    """Connections that all processes share, made by aiohttp: with httpx's own, calls would take three times the time
    of a processor, and these tests are little else than calls. Answers come whole, so it is not for watches."""

    def __init__(self, credentials: Credentials) -> None:
        self.credentials = credentials
        connector = aiohttp.TCPConnector(ssl=credentials.tls, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)

    def api(self, wires: Wires | None = None) -> KubeApi:
        return KubeApi(self.credentials, wire=_ToApiServer(self.through(wires or Wires()), self.credentials))

    def through(self, wires: Wires) -> httpx.AsyncBaseTransport:
        return _Transport(wires, self)

    def to_engines(self, wires: Wires) -> Send:
        """The way to engines and routers, as their clients want it."""
        transport = self.through(wires)

        async def send(
            method: str, url: URL, body: Any, timeout: aiohttp.ClientTimeout, headers: dict[str, str] | None
        ) -> Answer:
            limits = {"connect": timeout.sock_connect, "read": timeout.sock_read}
            request = httpx.Request(method, str(url), json=body, headers=headers, extensions={"timeout": limits})
            try:
                response = await transport.handle_async_request(request)
                return Answer(status=response.status_code, body=await response.aread())
            except httpx.TimeoutException as error:
                raise TimeoutError(str(error)) from error
            except httpx.HTTPError as error:
                raise aiohttp.ClientError(str(error)) from error

        return send

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        limits = request.extensions["timeout"]
        try:
            async with self._session.request(
                request.method,
                URL(str(request.url), encoded=True),
                headers=request.headers,
                data=request.content,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(sock_connect=limits["connect"], sock_read=limits["read"]),
            ) as answer:
                return httpx.Response(answer.status, headers=answer.headers, content=await answer.read())
        except aiohttp.ClientConnectorError as error:
            raise httpx.ConnectError(str(error), request=request) from error
        except TimeoutError as error:
            raise httpx.ReadTimeout(str(error), request=request) from error
        except aiohttp.ClientError as error:
            raise httpx.ReadError(str(error), request=request) from error

    async def close(self) -> None:
        await self._session.close()


class _Transport(httpx.AsyncBaseTransport):
    def __init__(self, wires: Wires, network: Network) -> None:
        self._wires = wires
        self._network = network

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._wires.pass_on(request, self._network)


class _ToApiServer(kube_http.Wire):
    def __init__(self, transport: httpx.AsyncBaseTransport, credentials: Credentials) -> None:
        super().__init__(tls=credentials.tls, max_connections=1)
        self._transport = transport

    async def ask(
        self, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None, seconds: float
    ) -> kube_http.Answer:
        limits = {"connect": kube_http.CONNECT_SECONDS, "read": seconds}
        request = httpx.Request(method, url, headers=headers, content=body, extensions={"timeout": limits})
        try:
            response = await self._transport.handle_async_request(request)
            content = await response.aread()
        except httpx.ConnectError as error:
            raise kube_http.NotSent(str(error)) from error
        except httpx.HTTPError as error:
            raise kube_http.Unanswered(str(error)) from error
        return kube_http.Answer(response.status_code, content, response.headers.get("Retry-After", ""))

    @asynccontextmanager
    async def follow(
        self, url: str, *, headers: Mapping[str, str], seconds: float
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        await _for_ever()  # the hub tells
        raise AssertionError("unreachable")
        yield


async def _for_ever() -> None:
    """Until the process that waits here is ended."""
    await asyncio.Event().wait()
