"""The worker's HTTP API, asked by the client that operator and agent use."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rolloutfleet.api.names import WORKER_PORT
from rolloutfleet.api.worker import LocalCopy
from rolloutfleet.engine.errors import CheckpointError, CheckpointGone, EngineRefused
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.worker import WorkerClient, worker_url
from rolloutfleet.worker.copies import Copies
from rolloutfleet.worker.server import application
from unit.worker.versions import as_read, bits, host, read_weights, writer

MADE = LocalCopy(path="/copy", version=1, delta=False, deltas=0, bytes_read=0, seconds=0.0)


class Scripted(Copies):
    def __init__(self, outcome: Exception | None = None) -> None:
        self.outcome = outcome
        self.running = self.most = 0
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def bring_to(self, path: Path) -> LocalCopy:
        self.running += 1
        self.most = max(self.most, self.running)
        self.began.set()
        assert self.go_on.wait(10)
        self.running -= 1
        if self.outcome is not None:
            raise self.outcome
        return MADE


@asynccontextmanager
async def serving(copies: Copies) -> AsyncIterator[WorkerClient]:
    runner = web.AppRunner(application(copies), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with Http(max_connections=8) as http, asyncio.timeout(10):
        yield WorkerClient(f"http://127.0.0.1:{runner.addresses[0][1]}", http=http)
    await runner.cleanup()


def test_a_version_is_copied_and_the_client_is_told_where(tmp_path: Path) -> None:
    async def story() -> None:
        state = {"a": bits("BF16", 1, 2)}
        path = writer(tmp_path).save_from_host(host(state), version=1).path
        (tmp_path / "pod").mkdir()
        async with serving(Copies(tmp_path / "pod", weights=tmp_path / "weights")) as worker:
            made = await worker.copy(str(path))
        assert (made.version, made.delta) == (1, False)
        assert read_weights(Path(made.path)) == as_read(state)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("outcome", "status", "text"),
    [
        (CheckpointGone("v1: no such folder"), 404, "v1: no such folder"),
        (CheckpointError("v1: damaged"), 422, "v1: damaged"),
        (OSError(errno.ENOSPC, "No space left on device", "/copy"), 507, "/copy: ENOSPC: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/w/v1"), 500, "/w/v1: EACCES: Permission denied"),
    ],
)
def test_what_went_wrong_is_told_with_errno_and_path(outcome: Exception, status: int, text: str) -> None:
    async def story() -> None:
        async with serving(Scripted(outcome)) as worker:
            with pytest.raises(EngineRefused, match=text) as refused:
                await worker.copy("/w/v1")
        assert refused.value.status == status

    asyncio.run(story())


def test_one_copy_is_made_at_a_time_and_health_is_answered_meanwhile() -> None:
    async def story() -> None:
        copies = Scripted()
        copies.go_on.clear()
        async with serving(copies) as worker:
            both = [asyncio.create_task(worker.copy(path)) for path in ("/w/v1", "/w/v2")]
            assert await asyncio.to_thread(copies.began.wait, 10)
            assert (await worker._ask("GET", "/healthz", seconds=5.0)) == {"status": "ok"}
            copies.go_on.set()
            assert await asyncio.gather(*both) == [MADE, MADE]
        assert copies.most == 1

    asyncio.run(story())


def test_the_copy_is_made_although_whoever_asked_has_gone() -> None:
    async def story() -> None:
        copies = Scripted()
        copies.go_on.clear()
        async with serving(copies) as worker:
            asked = asyncio.create_task(worker.copy("/w/v1"))
            assert await asyncio.to_thread(copies.began.wait, 10)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            again = asyncio.create_task(worker.copy("/w/v1"))
            copies.go_on.set()
            assert await again == MADE

    asyncio.run(story())


@pytest.mark.parametrize("body", [{}, {"path": ""}, {"path": "/w", "other": 1}])
def test_a_request_that_is_none_is_refused_with_the_field(body: dict[str, Any]) -> None:
    async def story() -> None:
        async with serving(Scripted()) as worker:
            with pytest.raises(EngineRefused, match=r"path|other") as refused:
                await worker._ask("POST", "/v1/copies", seconds=5.0, body=body)
        assert refused.value.status == 400

    asyncio.run(story())


@pytest.mark.parametrize(
    ("engine", "worker"),
    [
        ("http://10.0.0.7:30000", f"http://10.0.0.7:{WORKER_PORT}"),
        ("http://[fd00::7]:30000", f"http://[fd00::7]:{WORKER_PORT}"),
    ],
)
def test_the_worker_is_found_beside_the_engine(engine: str, worker: str) -> None:
    assert worker_url(engine) == worker


def test_the_process_serves_and_ends_at_once_when_it_is_told(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "ROLLOUTFLEET_COPY_PATH": str(tmp_path),
        "ROLLOUTFLEET_WEIGHTS_PATH": str(tmp_path),
        "ROLLOUTFLEET_BIND_ADDRESS": "127.0.0.87",
    }
    process = subprocess.Popen([sys.executable, "-m", "rolloutfleet.worker"], env=environment)

    async def answers() -> None:
        async with Http(max_connections=1) as http, asyncio.timeout(30):
            worker = WorkerClient(f"http://127.0.0.87:{WORKER_PORT}", http=http)
            while process.poll() is None:
                try:
                    await worker._ask("GET", "/healthz", seconds=5.0)
                except Exception:
                    await asyncio.sleep(0.05)
                else:
                    return
        raise AssertionError(f"ended with {process.returncode}")

    try:
        asyncio.run(answers())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.wait()
