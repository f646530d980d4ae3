"""httpx over aiohttp: what callers see is httpx's, errors and all, and connections are used again."""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from aiohttp import web

from rolloutfleet.transport import AiohttpTransport


class Server:
    """A loopback server of one handler; `peers` are the client's ends of its connections."""

    def __init__(self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        self._handler = handler
        self.peers: set[Any] = set()
        self.headers: dict[str, str] = {}
        self.ended = asyncio.Event()
        """Set when the test is over: handlers that never answer wait for it."""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        self.headers = dict(request.headers)
        return await self._handler(request)

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        self.ended.set()
        await self._runner.cleanup()


def client(**timeouts: float) -> httpx.AsyncClient:
    timeout = httpx.Timeout(5.0, **timeouts)
    transport = AiohttpTransport(max_connections=4, keep_seconds=5)
    return httpx.AsyncClient(trust_env=False, transport=transport, timeout=timeout)


def ask(server: Server, question: Callable[[httpx.AsyncClient, str], Awaitable[Any]], **timeouts: float) -> Any:
    async def scenario() -> Any:
        async with server as url, client(**timeouts) as http:
            return await question(http, url)

    return asyncio.run(scenario())


def test_method_path_query_headers_and_body_arrive_as_httpx_sends_them() -> None:
    async def echo(request: web.Request) -> web.Response:
        body = await request.text()
        return web.json_response([request.method, request.path_qs, body, request.headers["X-Ours"]], status=201)

    async def question(http: httpx.AsyncClient, url: str) -> httpx.Response:
        return await http.patch(f"{url}/a%2Fb?force=true&x=1+2", content="text", headers={"X-Ours": "yes"})

    server = Server(echo)
    answer = ask(server, question)
    assert answer.status_code == 201
    assert answer.json() == ["PATCH", "/a%2Fb?force=true&x=1+2", "text", "yes"]
    assert server.headers["User-Agent"].startswith("python-httpx")
    assert "Content-Type" not in server.headers


def test_a_connection_is_used_again() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response({})

    async def question(http: httpx.AsyncClient, url: str) -> None:
        for _ in range(3):
            (await http.get(url)).raise_for_status()

    server = Server(handler)
    ask(server, question)
    assert len(server.peers) == 1


def test_a_compressed_answer_is_read() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=gzip.compress(b"much" * 1000), headers={"Content-Encoding": "gzip"})

    async def question(http: httpx.AsyncClient, url: str) -> str:
        return (await http.get(url)).text

    assert ask(Server(handler), question) == "much" * 1000


def test_a_stream_is_read_line_by_line_as_it_comes() -> None:
    seen = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first\n")
        await seen.wait()  # the second line is written only after the first one was read
        await response.write(b"second\n")
        return response

    async def question(http: httpx.AsyncClient, url: str) -> list[str]:
        lines = []
        async with http.stream("GET", url) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                seen.set()
        return lines

    assert ask(Server(handler), question) == ["first", "second"]


def test_redirects_are_the_callers_to_follow() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": "/elsewhere"})

    async def question(http: httpx.AsyncClient, url: str) -> int:
        return (await http.get(url)).status_code

    assert ask(Server(handler), question) == 302


def test_a_port_that_nobody_listens_on_is_a_connect_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening

        async def scenario() -> None:
            async with client() as http:
                await http.get(f"http://127.0.0.1:{taken.getsockname()[1]}")

        with pytest.raises(httpx.ConnectError):
            asyncio.run(scenario())


def test_no_answer_in_time_is_a_read_timeout() -> None:
    async def handler(_: web.Request) -> web.Response:
        await server.ended.wait()
        return web.Response()

    async def question(http: httpx.AsyncClient, url: str) -> None:
        await http.get(url)

    server = Server(handler)
    with pytest.raises(httpx.ReadTimeout):
        ask(server, question, read=0.05)


def test_an_answer_that_never_ends_is_a_read_timeout_as_well() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        await server.ended.wait()
        return response

    async def question(http: httpx.AsyncClient, url: str) -> None:
        await http.get(url)

    server = Server(handler)
    with pytest.raises(httpx.ReadTimeout):
        ask(server, question, read=0.05)


def test_a_connection_that_breaks_after_the_request_is_no_connect_error() -> None:
    """The peer may have performed it."""

    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def question(http: httpx.AsyncClient, url: str) -> None:
        await http.post(url, content="x")

    with pytest.raises(httpx.RemoteProtocolError):
        ask(Server(handler), question)


def test_an_answer_cut_short_is_an_error() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.close()
        return response

    async def question(http: httpx.AsyncClient, url: str) -> None:
        await http.get(url)

    with pytest.raises(httpx.RemoteProtocolError):
        ask(Server(handler), question)


def test_no_free_connection_in_time_is_a_timeout() -> None:
    async def handler(_: web.Request) -> web.Response:
        await server.ended.wait()
        return web.Response()

    async def question(http: httpx.AsyncClient, url: str) -> None:
        async with asyncio.TaskGroup() as group:
            taken = [group.create_task(http.get(url)) for _ in range(4)]
            await asyncio.sleep(0)  # they are first in the line
            try:
                await http.get(url)
            finally:
                for task in taken:
                    task.cancel()

    server = Server(handler)
    with pytest.raises(ExceptionGroup) as caught:
        ask(server, question, pool=0.05)
    assert caught.group_contains(httpx.TimeoutException)
