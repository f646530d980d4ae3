"""Real SGLang servers as processes of a test or a benchmark, and plain calls of them. Needs no torch itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stand_ins.agent import FIRST_LABEL

ROOT = Path(__file__).parents[1]
START_SECONDS = 300.0
CALL_SECONDS = 60.0
ON_CPU = [
    *("--device", "cpu", "--load-format", "auto", "--max-total-tokens", "8192", "--sleep-on-idle"),
    *("--skip-tokenizer-init", "--skip-server-warmup", "--grammar-backend", "none", "--sampling-backend", "pytorch"),
]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def wait_until(done: Callable[[], bool], *, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.05)


class Process:
    """A process with all its children."""

    def __init__(self, command: Sequence[str], *, log: Path, **environment: str) -> None:
        self.log = log
        self._started = time.monotonic()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def members(self) -> list[int]:
        """It and its children."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.getsid(int(process.name)) == self._process.pid:
                    found.append(int(process.name))
            except ProcessLookupError:
                continue
        return found

    def signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()


def ask(url: str, path: str, body: Any = None, *, seconds: float = CALL_SECONDS) -> Any:
    """JSON as what it says, anything else as text. POST if there is a body. Raises OSError: without an answer, and for
    a status that is not 2xx (HTTPError)."""
    request = urllib.request.Request(url + path, headers={"Content-Type": "application/json"})
    if body is not None:
        request.data = json.dumps(body).encode()
    with urllib.request.urlopen(request, timeout=seconds) as response:
        content = response.read().decode()
        is_json = response.headers.get_content_type() == "application/json"
    return json.loads(content) if is_json and content else content


def tokens(url: str) -> list[int]:
    """Sixteen, the most probable ones: another model gives others."""
    sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = ask(url, "/generate", {"input_ids": [1, 2, 3, 4], "sampling_params": sampling})
    return [int(token) for token in answer["output_ids"]]


class Engine(Process):
    """An SGLang server, by its command without port and label."""

    def __init__(
        self, command: Sequence[str], *, name: str, logs: Path, label: str = FIRST_LABEL, **environment: str
    ) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(
            [*command, "--port", str(self.port), "--weight-version", label], log=logs / f"{name}.log", **environment
        )

    def wait(self) -> float:
        """Until it serves; returns the seconds since its start."""

        def serves() -> bool:
            if not self.running:
                raise RuntimeError(f"{self.name} has ended: {self.log.read_text()[-2000:]}")
            return self.answers("/ping")

        wait_until(serves, seconds=START_SECONDS, what=f"{self.name} serves")
        return round(time.monotonic() - self._started, 1)

    def answers(self, path: str) -> bool:
        try:
            self.ask(path, seconds=2.0)
        except OSError:
            return False
        return True

    def ask(self, path: str, body: Any = None, *, seconds: float = CALL_SECONDS) -> Any:
        return ask(self.url, path, body, seconds=seconds)

    def tokens(self) -> list[int]:
        return tokens(self.url)

    def checksum(self, *, seconds: float = CALL_SECONDS) -> str:
        return str(self.ask("/weights_checker", {"action": "checksum"}, seconds=seconds)["per_engine_checksum"])


class CpuEngine(Engine):
    def __init__(
        self,
        checkpoint: Path,
        *,
        name: str,
        logs: Path,
        label: str = FIRST_LABEL,
        options: Sequence[str] = (),
        prefix: Sequence[str] = (),
    ) -> None:
        """`options`: of SGLang, beside the usual ones or instead. `prefix`: command that runs it."""
        # Killed, it removes nothing itself. Not below `logs`: paths of sockets have 107 bytes.
        self._scratch = tempfile.TemporaryDirectory(prefix="sglang-")
        python = os.environ.get("ENGINE_PYTHON", sys.executable)
        super().__init__(
            [*prefix, python, "-m", "sglang.launch_server", "--model-path", str(checkpoint), *ON_CPU, *options],
            name=name,
            logs=logs,
            label=label,
            HF_HUB_OFFLINE="1",
            SGLANG_USE_CPU_ENGINE="1",
            PYTHONPATH=str(ROOT / "images/engine-cpu/shim"),
            TMPDIR=self._scratch.name,
        )

    @property
    def scratch(self) -> Path:
        return Path(self._scratch.name)

    def kill(self) -> None:
        super().kill()
        self._scratch.cleanup()
