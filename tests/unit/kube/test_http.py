"""The way to the API server: connections are used again, lines have any length, and what was not sent is told apart."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from rolloutfleet.kube.http import Answer, NotSent, Unanswered, Wire

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """A loopback server of one handler; `peers` are the client's ends of its connections."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.peers: set[Any] = set()
        self.ended = asyncio.Event()
        """Set when the test is over: handlers that never answer wait for it."""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
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


def asked(server: Server, question: Callable[[Wire, str], Awaitable[Any]]) -> Any:
    async def scenario() -> Any:
        async with server as url:
            wire = Wire(tls=ssl.create_default_context(), max_connections=4)
            try:
                return await question(wire, url)
            finally:
                await wire.close()

    return asyncio.run(scenario())


def get(wire: Wire, url: str, *, seconds: float = 5) -> Awaitable[Answer]:
    return wire.ask("GET", url, headers={}, body=None, seconds=seconds)


async def lines(wire: Wire, url: str) -> list[bytes]:
    async with wire.follow(url, headers={}, seconds=5) as (_, found):
        return [line async for line in found]


def test_method_path_query_headers_and_body_arrive_as_they_are() -> None:
    async def echo(request: web.Request) -> web.Response:
        body = await request.text()
        return web.json_response([request.method, request.path_qs, body, request.headers["X-Ours"]], status=201)

    async def question(wire: Wire, url: str) -> Answer:
        target = f"{url}/a%2Fb?force=true&x=1+2"
        return await wire.ask("PATCH", target, headers={"X-Ours": "yes"}, body=b"text", seconds=5)

    answer = asked(Server(echo), question)
    assert (answer.status, answer.text) == (201, '["PATCH", "/a%2Fb?force=true&x=1+2", "text", "yes"]')


def test_a_connection_is_used_again() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response()

    async def question(wire: Wire, url: str) -> None:
        for _ in range(3):
            await get(wire, url)

    server = Server(handler)
    asked(server, question)
    assert len(server.peers) == 1


def test_lines_come_as_they_are_written() -> None:
    seen = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"first\nsec")
        await seen.wait()  # the rest is written only after the first line was read
        await response.write(b"ond\n")
        return response

    async def question(wire: Wire, url: str) -> list[bytes]:
        found = []
        async with wire.follow(url, headers={}, seconds=5) as (_, told):
            async for line in told:
                found.append(line)
                seen.set()
        return found

    assert asked(Server(handler), question) == [b"first", b"second"]


def test_a_line_may_be_as_long_as_an_object_in_etcd() -> None:
    long = b"x" * 1_500_000

    async def handler(_: web.Request) -> web.Response:
        return web.Response(body=b"short\n" + long + b"\nwithout an end")

    assert asked(Server(handler), lines) == [b"short", long, b"without an end"]


def test_a_port_that_nobody_listens_on_has_certainly_not_been_sent_anything() -> None:
    async def scenario(url: str) -> None:
        wire = Wire(tls=ssl.create_default_context(), max_connections=1)
        with pytest.raises(NotSent):
            await get(wire, url)
        await wire.close()

    with socket.socket() as bound:  # and not listening
        bound.bind(("127.0.0.1", 0))
        asyncio.run(scenario(f"http://127.0.0.1:{bound.getsockname()[1]}"))


@pytest.mark.parametrize("begun", [False, True])
def test_an_answer_that_does_not_come_to_its_end_in_time_leaves_it_open_what_became_of_the_request(begun: bool) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if begun:
            await response.prepare(request)
            await response.write(b"half")
        await server.ended.wait()
        return response

    server = Server(handler)
    with pytest.raises(Unanswered):
        asked(server, lambda wire, url: get(wire, url, seconds=0.05))


@pytest.mark.parametrize("begun", [False, True])
def test_so_does_a_connection_that_breaks(begun: bool) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        if begun:
            await response.prepare(request)
            await response.write(b"half")
        assert request.transport is not None
        request.transport.close()
        return response

    async def post(wire: Wire, url: str) -> Answer:
        return await wire.ask("POST", url, headers={}, body=b"x", seconds=5)

    with pytest.raises(Unanswered):
        asked(Server(handler), post)


def test_an_url_that_is_none_is_told() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response()

    with pytest.raises(Unanswered):
        asked(Server(handler), lambda wire, _: get(wire, "https://"))
