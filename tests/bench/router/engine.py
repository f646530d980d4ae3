"""A stand-in engine that runs in a process of its own, so that it can be killed, stopped and cut off.

It generates one token a millisecond. What else it does with a request is in the request's `rid`: `400-x` is answered
400, `die-x` ends the process. A decode engine waits for its prefill engine as SGLang's does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

import aiohttp
from aiohttp import web

TRANSFER_SECONDS = 15.0
"""How long a decode engine waits for its prefill: SGLang asks 15 times, a second apart."""


class Engine:
    def __init__(self, name: str, role: str) -> None:
        self.name = name
        self.role = role
        self.rooms: dict[int, asyncio.Event] = {}

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        rid, room = str(body.get("rid") or ""), body.get("bootstrap_room")
        what = rid.partition("-")[0]
        if what == "die":
            os._exit(137)
        if what.isdigit():
            return web.json_response({"error": {"message": f"told to answer {what}"}}, status=int(what))
        if self.role == "prefill":
            self._room(room).set()
        else:
            if self.role == "decode" and not await self._transferred(body):
                return web.json_response({"error": {"message": "no transfer from the prefill engine"}}, status=500)
            await asyncio.sleep((body.get("sampling_params") or {}).get("max_new_tokens", 1) / 1000)
        return web.json_response({"text": self.name, "meta_info": {"id": rid, "finish_reason": {"type": "length"}}})

    async def _transferred(self, body: dict[str, Any]) -> bool:
        url = f"http://{body['bootstrap_host']}:{body['bootstrap_port']}/rooms/{body['bootstrap_room']}"
        deadline = asyncio.get_running_loop().time() + TRANSFER_SECONDS
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http:
            while asyncio.get_running_loop().time() < deadline:
                try:
                    async with http.get(url) as answer:
                        return answer.status == 200
                except (aiohttp.ClientError, TimeoutError):
                    await asyncio.sleep(1)
        return False

    async def room(self, request: web.Request) -> web.Response:
        await self._room(int(request.match_info["room"])).wait()
        return web.json_response({})

    def _room(self, room: Any) -> asyncio.Event:
        return self.rooms.setdefault(int(room), asyncio.Event())

    async def fine(self, _: web.Request) -> web.Response:
        mode = "null" if self.role == "regular" else self.role
        return web.json_response({"disaggregation_mode": mode, "tp_size": 1, "model_path": "/models/none"})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--role", default="regular")
    asked = parser.parse_args()
    engine = Engine(f"{asked.host}:{asked.port}", asked.role)
    app = web.Application()
    app.router.add_post("/generate", engine.generate)
    app.router.add_get("/rooms/{room}", engine.room)
    for path in ("/health", "/ping", "/ready", "/server_info", "/model_info"):
        app.router.add_get(path, engine.fine)
    web.run_app(app, host=asked.host, port=asked.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
