"""Stands in for router and engine, and answers at once: how fast is the agent, when engines cost nothing?"""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from types import TracebackType

from aiohttp import web

from stand_ins.agent import FIRST_LABEL


class FastEngine:
    """In a thread of its own."""

    def __init__(self, *, tokens: int) -> None:
        logprobs = [[-0.5, 1000 + n, None] for n in range(tokens)]
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": logprobs,
            "weight_version": FIRST_LABEL,
            "completion_tokens": tokens,
        }
        self._generated = json.dumps({"text": "", "meta_info": meta}).encode()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.generated = 0
        self.url = ""

    def __enter__(self) -> FastEngine:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/abort_request", self._done)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._over.wait()
        await runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        await request.read()
        self.generated += 1
        return web.Response(body=self._generated, content_type="application/json")

    async def _loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]})

    async def _done(self, _: web.Request) -> web.Response:
        return web.json_response({})


def serve_until_killed(tokens: int, told: Path) -> None:
    """In a process of its own, which writes its URL into the file `told`."""
    with FastEngine(tokens=tokens) as engine:
        partial = told.with_suffix(".partial")
        partial.write_text(engine.url)
        partial.rename(told)
        threading.Event().wait()
