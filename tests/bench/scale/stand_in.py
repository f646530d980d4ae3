"""Answers for every engine and every router of the bench.

An address is a pod, and what is asked of it tells whether it is an engine or a router. As a process in a pod would, it
knows its arguments (from the harness's watch of pods: a watch of its own would cost half of its CPU) and forgets all
with the pod: addresses are given out again. HTTP/1.1 is read by hand, since thousands of engines are asked every few
seconds and the machine should be the operator's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable
from typing import Any

from rolloutfleet.kube import client as kube

PORT = 30000

ENGINE: dict[tuple[str, str], Any] = {
    ("GET", "/ping"): {},
    ("GET", "/ready"): {},
    ("GET", "/health"): {},
    ("GET", "/health_generate"): {},
    ("GET", "/server_info"): {"disaggregation_mode": "null", "tp_size": 1, "pp_size": 1, "version": "stand-in"},
    ("GET", "/v1/loads"): {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]},
    ("POST", "/weights_checker"): {"success": True, "per_engine_checksum": "the-same-weights"},
    ("POST", "/continue_generation"): {},
}


def response(status: int, body: Any) -> bytes:
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


FIXED = {request: response(200, body) for request, body in ENGINE.items()}


class Pods:
    """Who is at which address."""

    def __init__(self) -> None:
        self._labels: dict[str, asyncio.Future[str]] = {}
        self._tables: dict[str, dict[str, dict[str, Any]]] = {}
        self._last_id = 0

    def saw(self, kind: str, pod: kube.Object) -> None:
        address = (pod.get("status") or {}).get("podIP")
        if not address:
            return
        if kind == "DELETED":
            self._labels.pop(address, None)
            self._tables.pop(address, None)
            return
        label = self._label(address)
        if not label.done():
            words = pod["spec"]["containers"][0].get("args") or []
            flags = dict(itertools.pairwise([*words, ""]))
            label.set_result(flags.get("--weight-version", ""))

    def _label(self, address: str) -> asyncio.Future[str]:
        return self._labels.setdefault(address, asyncio.get_running_loop().create_future())

    async def model_info(self, address: str) -> bytes:
        """The operator's watch may be ahead of ours."""
        return response(200, {"model_path": "/models/bench", "weight_version": await self._label(address)})

    def table(self, address: str, method: str, path: str, body: bytes) -> bytes:
        """The worker table of a router."""
        table = self._tables.setdefault(address, {})
        if (method, path) == ("GET", "/workers"):
            return response(200, {"workers": list(table.values())})
        if (method, path) == ("POST", "/workers"):
            worker = json.loads(body)
            self._last_id += 1
            worker |= {"id": str(self._last_id), "is_healthy": True}
            table[worker["id"]] = worker
            return response(202, {"worker_id": worker["id"]})
        if method == "DELETE" and path.startswith("/workers/"):
            return response(202 if table.pop(path.rpartition("/")[2], None) else 404, {})
        return response(404, {"error": f"{method} {path}"})


class Connection(asyncio.Protocol):
    """Of a client that asks one thing at a time."""

    def __init__(self, pods: Pods) -> None:
        self._pods = pods
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._address = transport.get_extra_info("sockname")[0]

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            head, _, rest = self._received.partition(b"\r\n\r\n")
            line, *headers = head.decode("latin-1").split("\r\n")
            lengths = [header.partition(":")[2] for header in headers if header.lower().startswith("content-length:")]
            length = int(lengths[0]) if lengths else 0
            if len(rest) < length:
                return
            body, self._received = rest[:length], rest[length:]
            method, target, _ = line.split(" ")
            path = target.partition("?")[0]
            if path == "/model_info":
                self._answering = asyncio.create_task(self._answer(self._pods.model_info(self._address)))
            else:
                fixed = FIXED.get((method, path))
                self._transport.write(fixed or self._pods.table(self._address, method, path, body))

    async def _answer(self, text: Awaitable[bytes]) -> None:
        self._transport.write(await text)


async def serve(pods: Pods) -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(lambda: Connection(pods), "0.0.0.0", PORT, backlog=4096)
