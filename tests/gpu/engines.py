"""Real SGLang servers on this machine, and plain calls of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [1, 2, 3, 4]
COMMON = ["--skip-tokenizer-init", "--skip-server-warmup", "--grammar-backend", "none", "--sampling-backend", "pytorch"]
ON_CPU = ["--device", "cpu", "--load-format", "auto", "--max-total-tokens", "8192"]
ON_GPU = ["--attention-backend", "triton", "--cuda-graph-max-bs", "8"]
LIKE_ANOTHER_POD = ["unshare", "--ipc", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]


class Engine:
    def __init__(
        self, name: str, model: str, *, port: int, gpu: str, options: list[str], work: Path, apart: bool = False
    ) -> None:
        """`gpu`: its number, or `cpu`. `apart`: in PID, IPC and UTS namespaces of its own, /dev/shm shared."""
        self.name, self.port, self.url = name, port, f"http://127.0.0.1:{port}"
        self.log = work / f"engine-{name}.log"
        self._scratch = tempfile.TemporaryDirectory(prefix="sglang-")
        environment = {
            **os.environ,
            "TMPDIR": self._scratch.name,
            "HF_HUB_OFFLINE": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        }
        if gpu == "cpu":
            shim = str(ROOT / "images/engine-cpu/shim")
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": shim}
        else:
            environment |= {"CUDA_VISIBLE_DEVICES": gpu, "FLASHINFER_WORKSPACE_BASE": "/tmp"}
        command = [
            *(LIKE_ANOTHER_POD if apart else []),
            *(os.environ.get("ENGINE_PYTHON", sys.executable), "-m", "sglang.launch_server"),
            *("--model-path", model, "--port", str(port), *COMMON, *(ON_CPU if gpu == "cpu" else ON_GPU), *options),
        ]
        self.started = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self, seconds: float) -> float:
        """Until it serves; returns the seconds since its start."""
        while True:
            passed = time.monotonic() - self.started
            if self.process.poll() is not None or passed > seconds:
                tail = self.log.read_text()[-3000:]
                raise RuntimeError(f"engine {self.name} does not serve after {passed:.0f} s:\n{tail}")
            if call(self.url, "/ping", method="GET", seconds=2)[0] == 200:
                return round(passed, 1)
            time.sleep(0.5)

    def members(self) -> list[tuple[int, str]]:
        """Its processes and their names."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.getsid(int(entry.name)) == self.process.pid:
                    found.append((int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
            except (ProcessLookupError, FileNotFoundError):
                continue
        return found

    def stop_scheduler(self) -> None:
        """It takes no further step, and does not die."""
        schedulers = [pid for pid, command in self.members() if "scheduler" in command]
        assert schedulers, self.members()
        for pid in schedulers:
            os.kill(pid, signal.SIGSTOP)

    def kill(self) -> None:
        """As a kernel would: every process, at once."""
        for pid, _ in self.members():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(30)
        self._scratch.cleanup()

    def checksum(self, seconds: float = 60.0) -> str:
        status, answer = call(self.url, "/weights_checker", {"action": "checksum"}, seconds=seconds)
        assert status == 200, answer
        return str(answer["per_engine_checksum"])

    def tokens(self, seconds: float = 60.0) -> list[int]:
        return tokens(self.url, seconds)


def call(
    url: str, path: str, body: dict[str, Any] | None = None, *, method: str = "POST", seconds: float = 60.0
) -> tuple[int, Any]:
    """Status (0: no answer) and body."""
    content = json.dumps(body or {}).encode() if method == "POST" else None
    request = urllib.request.Request(
        url + path, data=content, method=method, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    except OSError as error:
        return 0, f"{type(error).__name__} {error}"
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def tokens(url: str, seconds: float = 60.0) -> list[int]:
    """What greedy sampling gives: another model gives others."""
    sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    status, answer = call(url, "/generate", {"input_ids": PROMPT, "sampling_params": sampling}, seconds=seconds)
    assert status == 200, answer
    found: list[int] = answer["output_ids"]
    return found
