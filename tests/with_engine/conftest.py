"""A real SGLang server on this machine's CPU, outside of any cluster. tests/run.sh builds what it needs and says where
it is: ENGINE (an environment with SGLang), MODELS (tiny checkpoints), ROUTER_PYTHON (of one with the router)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from rolloutfleet.engine.errors import EngineError
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.sglang import EngineClient
from unit.agent.world import INITIAL_LABEL
from unit.collection.world import free_port

SHIM = Path(__file__).parents[2] / "images/engine-cpu/shim"
START_SECONDS = 240.0
LOG_SHOWN = 3000
MOONCAKE = ("--disaggregation-transfer-backend", "mooncake")


def place(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.fail(f"{variable} is not set: run these tests by `make with-engine`")
    return Path(value)


class Server:
    """One process group; `begin_anew` starts it, or takes it back to how it was."""

    def __init__(
        self, folder: Path, models: Path, http: Http, *flags: str, model: str = "m0", sees: bool = False
    ) -> None:
        """`model`: what it starts with, of the folder `models`. `sees`: takes images, and has its tokenizer."""
        self._folder, self._models, self._http, self._flags = folder, models, http, flags
        self._model, self._sees = model, sees
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self.url = ""
        self.starts = 0

    @property
    def client(self) -> EngineClient:
        return EngineClient(self.url, http=self._http)

    async def start(self) -> None:
        self.starts += 1
        port = free_port()
        books = self._folder / "books"
        books.write_text("[]")
        # Not below the test's folder: paths of sockets have 107 bytes.
        self._scratch = tempfile.TemporaryDirectory(prefix="sglang-")
        environment = {
            **os.environ,
            "TMPDIR": self._scratch.name,  # killed as it will be, it removes nothing itself
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": str(SHIM),
            "MEMORY_SAVER_BOOKS": str(books),
            "PYTHONDONTWRITEBYTECODE": "1",
            "MC_FORCE_TCP": "1",  # for pairs: no RDMA here
            **({"SGLANG_CPU_ENGINE_IMAGES": "1", "TORCHDYNAMO_DISABLE": "1"} if self._sees else {}),
        }
        arguments = [
            *(str(place("ENGINE") / "bin/python"), "-m", "sglang.launch_server"),
            *("--model-path", str(self._models / self._model), "--load-format", "auto"),
            *("--weight-version", INITIAL_LABEL, "--device", "cpu", *(() if self._sees else ["--skip-tokenizer-init"])),
            *("--max-total-tokens", "2048", "--enable-memory-saver"),
            *("--host", "127.0.0.1", "--port", str(port), *self._flags),
        ]
        with (self._folder / "log").open("wb") as log:
            self._process = launch(arguments, environment, log)
        self.url = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(START_SECONDS):
            while not await self._up():
                assert self._process.poll() is None, f"SGLang ended at its start: {self._log()}"
                await asyncio.sleep(0.5)

    async def _up(self) -> bool:
        try:
            return await self.client.ping()
        except EngineError:
            return False

    def end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._scratch is not None:
            self._scratch.cleanup()

    async def memory_paused(self) -> frozenset[str]:
        process = self._process
        assert process is not None
        try:
            await self.client.checksum(seconds=20)  # the scheduler answers it
        except EngineError as error:
            pytest.fail(f"its scheduler is dead: {error}; {self._log()}")
        return frozenset(json.loads((self._folder / "books").read_text()))

    async def begin_anew(self) -> None:
        """Not by a start, which takes 20 s, except for the first one."""
        if self._process is None:
            await self.start()
            return
        await self.client.pause("abort")
        paused: list[Any] = sorted(await self.memory_paused())
        if paused:
            await self.client.resume_memory(paused)
        await self.client.update_weights_from_disk(
            str(self._models / self._model), label=INITIAL_LABEL, flush_cache=False
        )
        await self.client.flush_cache(wait_seconds=5)
        await self.client.continue_generation()

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-LOG_SHOWN:]


def launch(arguments: list[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """In a process group of its own: SGLang is several processes."""
    return subprocess.Popen(arguments, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all tests of a module, since the server's connections belong to one."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def http(runner: asyncio.Runner) -> Iterator[Http]:
    http = Http(max_connections=64)
    yield http
    runner.run(http.close())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, http: Http) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("engine"), place("MODELS"), http)
    yield server
    server.end()


@pytest.fixture
def bootstrap_port() -> str:
    return str(free_port())


@pytest.fixture
def pair(tmp_path: Path, http: Http, bootstrap_port: str) -> Iterator[tuple[Server, Server]]:
    servers = []
    for mode in ("prefill", "decode"):
        folder = tmp_path / mode
        folder.mkdir()
        flags = ["--disaggregation-mode", mode, *MOONCAKE]
        if mode == "prefill":
            flags += ["--disaggregation-bootstrap-port", bootstrap_port]
        else:  # else it wants host memory beyond a reserve of 10 GiB
            flags += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        servers.append(Server(folder, place("MODELS"), http, *flags))
    yield servers[0], servers[1]
    for server in servers:
        server.end()
