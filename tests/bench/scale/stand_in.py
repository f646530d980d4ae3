"""Answers for every engine and every router of the bench, in one process: `python -m bench.scale.stand_in`.

An address is a pod; what is asked of it tells whether it is an engine or a router. HTTP/1.1 is read by hand, since
thousands of engines are asked every few seconds and the machine should be the operator's.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

PORT = 30000
FORGET = "/forget"
"""POST: routers forget their workers, as processes do that end. Addresses are given out again."""

ENGINE: dict[tuple[str, str], Any] = {
    ("GET", "/ping"): {},
    ("GET", "/ready"): {},
    ("GET", "/health"): {},
    ("GET", "/health_generate"): {},
    ("GET", "/model_info"): {"model_path": "/models/bench", "weight_version": "0"},
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


class Routers:
    """The worker table of each router, by its address."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[str, dict[str, Any]]] = {}
        self._last_id = 0

    def answer(self, address: str, method: str, path: str, body: bytes) -> bytes:
        if (method, path) == ("POST", FORGET):
            self._tables.clear()
            return response(200, {})
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
    def __init__(self, routers: Routers) -> None:
        self._routers = routers
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
            fixed = FIXED.get((method, path))
            self._transport.write(fixed or self._routers.answer(self._address, method, path, body))


async def serve() -> None:
    routers = Routers()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(routers), "0.0.0.0", PORT, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve())
