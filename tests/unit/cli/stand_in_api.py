"""Stands in for an API server with state: get, list by label, merge patch with resourceVersion."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

Body = dict[str, Any]


class StandInApi:
    def __init__(self, *objects: tuple[str, Body]) -> None:
        """Plural and object; all in namespace rl."""
        self.objects: dict[tuple[str, str], Body] = {}
        for plural, body in objects:
            body["metadata"].setdefault("resourceVersion", "1")
            self.objects[plural, body["metadata"]["name"]] = body
        self.forbidden: set[str] = set()
        """Plurals, or plurals with a subresource, that may not be touched."""
        self.before_patch: Callable[[], None] = lambda: None
        """Called as each patch comes: what somebody else does at that moment."""
        self.patches: list[tuple[str, Any]] = []
        """Path below the namespace, and body."""
        self.others: dict[str, Callable[[web.Request, Any], Any]] = {}
        """More paths below the namespace, and what answers there."""
        self.url = ""

    def write(self, plural: str, name: str, change: Body) -> None:
        body = self.objects[plural, name]
        _merge(body, change)
        body["metadata"]["resourceVersion"] = str(int(body["metadata"]["resourceVersion"]) + 1)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        _, namespace, path = request.path.partition("/namespaces/rl/")
        text = await request.text() if request.can_read_body else ""
        body: Any = json.loads(text) if text else None
        if not namespace:
            return _status(404, "NotFound", request.path)
        plural, _, rest = path.partition("/")
        name, _, sub = rest.partition("/")
        if plural in self.forbidden or f"{plural}/{sub}" in self.forbidden:
            return _status(403, "Forbidden", f"{plural} is forbidden")
        if path in self.others:
            answer = await self.others[path](request, body)
            return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)
        if not name:
            return web.json_response({"metadata": {}, "items": self._listed(plural, request)})
        if (plural, name) not in self.objects:
            return _status(404, "NotFound", f"{plural} {name!r} not found")
        if request.method == "PATCH" and isinstance(body, dict):
            self.patches.append((path, body))
            self.before_patch()
            wanted = body["metadata"].get("resourceVersion")
            if wanted not in (None, self.objects[plural, name]["metadata"]["resourceVersion"]):
                return _status(409, "Conflict", "the object has been modified")
            body["metadata"].pop("resourceVersion", None)
            self.write(plural, name, body)
        return web.json_response(self.objects[plural, name])

    def _listed(self, plural: str, request: web.Request) -> list[Body]:
        wanted = dict(pair.split("=") for pair in request.query.get("labelSelector", "").split(",") if pair)
        bodies = [body for (kind, _), body in self.objects.items() if kind == plural]
        return [body for body in bodies if wanted.items() <= body["metadata"].get("labels", {}).items()]


EXEC_SUCCESS = b'\3{"status": "Success"}'


def exec_failure(code: int) -> bytes:
    causes = [{"reason": "ExitCode", "message": str(code)}]
    return b"\3" + json.dumps({"status": "Failure", "details": {"causes": causes}}).encode()


async def exec_answer(request: web.Request, messages: Iterable[bytes]) -> web.WebSocketResponse:
    """What exec in a pod answers: messages, each with its channel before it (1: stdout, 2: stderr, 3: how it ended)."""
    socket = web.WebSocketResponse(protocols=["v5.channel.k8s.io"])
    await socket.prepare(request)
    for message in messages:
        await socket.send_bytes(message)
    return socket


def _merge(into: Body, change: Body) -> None:
    for key, value in change.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


def _status(code: int, reason: str, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "reason": reason, "message": message}, status=code)


@contextmanager
def serving(api: StandInApi, folder: Path) -> Iterator[Path]:
    """Serve it from a thread of its own, since `main` has a loop of its own; path of a kubeconfig for it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", api.handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(_kubeconfig(api.url)))
        yield path
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def _kubeconfig(url: str) -> Body:
    """Context `here` with namespace rl; the current one leads nowhere."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "nowhere",
        "clusters": [
            {"name": "here", "cluster": {"server": url}},
            {"name": "nowhere", "cluster": {"server": "http://127.0.0.1:1"}},
        ],
        "users": [{"name": "user", "user": {"token": "t-1"}}],
        "contexts": [
            {"name": "here", "context": {"cluster": "here", "user": "user", "namespace": "rl"}},
            {"name": "elsewhere", "context": {"cluster": "here", "user": "user", "namespace": "other"}},
            {"name": "nowhere", "context": {"cluster": "nowhere", "user": "user"}},
        ],
    }
