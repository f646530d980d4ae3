"""Commands in pods: what the websocket protocol says of their output and their end."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from rolloutfleet.kube.config import Credentials
from rolloutfleet.kube.errors import ApiError, Forbidden, Unreachable
from rolloutfleet.kube.exec import Ended, run_in_pod

Script = Callable[[web.WebSocketResponse], Awaitable[None]]


class Kubelet:
    """Stands in for the API server: a websocket on which `script` speaks."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.asked: list[web.Request] = []

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        self.asked.append(request)
        socket = web.WebSocketResponse(protocols=["v5.channel.k8s.io"])
        await socket.prepare(request)
        await self._script(socket)
        return socket


def execute(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], *, seconds: float = 10.0) -> Ended:
    async def scenario() -> Ended:
        app = web.Application()
        app.router.add_get("/{path:.*}", handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        credentials = Credentials(server=url, tls=ssl.create_default_context(), token=lambda: "t-1", namespace="rl")
        try:
            return await run_in_pod(
                credentials,
                namespace="rl",
                pod="qwen-main-0-e1-r0",
                container="engine",
                command=["python3", "-c", "print('a b&c')"],
                seconds=seconds,
            )
        finally:
            await runner.cleanup()

    return asyncio.run(scenario())


def status(**body: Any) -> bytes:
    return b"\3" + json.dumps(body).encode()


SUCCESS = status(status="Success")


def exited(code: int) -> bytes:
    causes = [{"reason": "ExitCode", "message": str(code)}]
    return status(status="Failure", reason="NonZeroExitCode", details={"causes": causes})


def saying(*messages: bytes) -> Script:
    async def speak(socket: web.WebSocketResponse) -> None:
        for message in messages:
            await socket.send_bytes(message)

    return speak


def test_output_comes_in_pieces_and_by_channel() -> None:
    kubelet = Kubelet(saying(b"\1", b"\1on", b"\2oh", b"\1e\n", b"\xff\1", SUCCESS))
    assert execute(kubelet.handle) == Ended(exit_code=0, stdout="one\n", stderr="oh")
    (request,) = kubelet.asked
    assert request.path == "/api/v1/namespaces/rl/pods/qwen-main-0-e1-r0/exec"
    assert request.query.getall("command") == ["python3", "-c", "print('a b&c')"]
    assert request.query["container"] == "engine"
    assert request.headers["Authorization"] == "Bearer t-1"


def test_the_exit_code_is_the_commands() -> None:
    assert execute(Kubelet(saying(b"\2no such thing", exited(137))).handle) == Ended(137, "", "no such thing")


def test_a_command_that_cannot_be_started_says_why() -> None:
    message = 'exec: "python3": executable file not found in $PATH'
    with pytest.raises(ApiError, match="executable file not found"):
        execute(Kubelet(saying(status(status="Failure", reason="InternalError", message=message))).handle)


def test_a_connection_that_breaks_before_the_end_says_nothing_about_the_command() -> None:
    with pytest.raises(Unreachable):
        execute(Kubelet(saying(b"\1half")).handle)


def test_a_command_that_takes_too_long_is_no_longer_waited_for() -> None:
    async def forever(socket: web.WebSocketResponse) -> None:
        await socket.receive()

    with pytest.raises(Unreachable, match=r"exec .*pods/qwen-main-0-e1-r0/exec"):
        execute(Kubelet(forever).handle, seconds=0.3)


def test_what_the_api_server_refuses_is_told_as_everywhere() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        body = {"kind": "Status", "reason": "Forbidden", "message": "pods/exec is forbidden"}
        return web.json_response(body, status=403)

    with pytest.raises(Forbidden, match="pods/exec is forbidden"):
        execute(refuse)
