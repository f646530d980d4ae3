"""Real SGLang engines without a GPU and the real agent beside them, as processes of a test."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rolloutfleet.trainer import Fleet, connect
from stand_ins.agent import FIRST_LABEL

ROOT = Path(__file__).parents[2]
START_SECONDS = 300.0
CALL_SECONDS = 60.0
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def model(seed: int) -> Qwen2ForCausalLM:
    """Random, in float32, its output head tied to the embedding."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**TINY))


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


class Engine(Process):
    """An SGLang server, by its command without port and label."""

    def __init__(self, command: Sequence[str], *, name: str, logs: Path, **environment: str) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__(
            [*command, "--port", str(self.port), "--weight-version", FIRST_LABEL],
            log=logs / f"{name}.log",
            **environment,
        )

    def wait(self) -> None:
        def serves() -> bool:
            if not self.running:
                raise RuntimeError(f"{self.name} has ended: {self.log.read_text()[-2000:]}")
            return self.answers("/ping")

        wait_until(serves, seconds=START_SECONDS, what=f"{self.name} serves")

    def answers(self, path: str) -> bool:
        try:
            self.ask(path, seconds=2.0)
        except OSError:
            return False
        return True

    def ask(self, path: str, body: Any = None, *, seconds: float = CALL_SECONDS) -> Any:
        request = urllib.request.Request(self.url + path, headers={"Content-Type": "application/json"})
        if body is not None:
            request.data = json.dumps(body).encode()
        with urllib.request.urlopen(request, timeout=seconds) as response:
            content = response.read()
        return json.loads(content) if content else None

    def tokens(self) -> list[int]:
        """Sixteen, the most probable ones."""
        sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = self.ask("/generate", {"input_ids": [1, 2, 3, 4], "sampling_params": sampling})
        return [int(token) for token in answer["output_ids"]]

    def checksum(self, *, seconds: float = CALL_SECONDS) -> str:
        return str(self.ask("/weights_checker", {"action": "checksum"}, seconds=seconds)["per_engine_checksum"])


class CpuEngine(Engine):
    def __init__(self, checkpoint: Path, *, name: str, logs: Path, prefix: Sequence[str] = ()) -> None:
        """`prefix`: command that runs it."""
        # Killed, it removes nothing itself. Not below `logs`: paths of sockets have 107 bytes.
        self._scratch = tempfile.TemporaryDirectory(prefix="sglang-")
        flags = ["--load-format", "auto", "--device", "cpu", "--skip-tokenizer-init", "--max-total-tokens", "8192"]
        super().__init__(
            [
                *(*prefix, sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint)),
                *(*flags, "--sleep-on-idle"),
            ],
            name=name,
            logs=logs,
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


class Agent(Process):
    """The agent of a trainer beside these engines, and its fleet."""

    def __init__(
        self, engines: Sequence[Engine], *, served: Path, folder: Path, ranks: int = 1, colocated: bool = False
    ) -> None:
        """`ranks`: of each engine. `colocated`: on the trainer's GPUs."""
        self.port = free_port()
        told = {
            "port": self.port,
            "address": "127.0.0.1",
            "model": str(served),
            "volume": str(folder),
            "checksum": engines[0].checksum(),
            "router": engines[0].url,  # takes requests as a router does
            "engines": [],
            "ranks": ranks,
            "colocated": colocated,
        }
        self.file = folder / f"fleet-{self.port}.json"
        self.file.write_text(json.dumps(told))
        self.serve(*engines)
        super().__init__(
            [sys.executable, "-m", "stand_ins.agent", str(self.file)],
            log=self.file.with_suffix(".log"),
            PYTHONPATH=os.pathsep.join(sys.path),
        )
        self.url = f"http://127.0.0.1:{self.port}"
        fleet = self.connect()
        wait_until(lambda: self._leads(fleet), seconds=30.0, what="the agent leads")
        fleet.close()

    def serve(self, *engines: Engine) -> None:
        """From the agent's next look on these are the fleet."""
        told = json.loads(self.file.read_text())
        told["engines"] = [{"pod": e.name, "uid": f"uid-{e.name}", "url": e.url} for e in engines]
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(told))
        partial.rename(self.file)

    def connect(self) -> Fleet:
        return connect("actor", url=self.url)

    def _leads(self, fleet: Fleet) -> bool:
        try:
            return fleet.view().leading
        except Exception:
            if not self.running:
                raise RuntimeError(self.log.read_text()[-2000:]) from None
            return False

    @property
    def training(self) -> dict[str, Any]:
        """What it has written to status.training."""
        written = self.file.with_suffix(".training")
        return json.loads(written.read_text()) if written.exists() else {}
