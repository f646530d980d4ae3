"""Engines on GPUs that outlive one command, random checkpoints, and what bare HTTP costs."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from servers import Engine

FOLDER = Path("/dev/shm/rolloutfleet-gpu")
STATE = FOLDER / "engines.json"
SCRATCH = FOLDER / "tmp"
"""What engines leave behind that are killed."""
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
"""1.78 billion parameters: 3.55 GB in bfloat16."""
FLAGS = [
    *("--skip-tokenizer-init", "--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--skip-server-warmup", "--mem-fraction-static", "0.5"),
]
COMPILE_SECONDS = 200.0
ANOTHER_POD = ["unshare", "--ipc", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
"""Namespaces of its own; /dev/shm is the same."""


def make_checkpoints() -> None:
    FOLDER.mkdir(exist_ok=True)
    for seed in (0, 1):
        folder = FOLDER / f"m{seed}"
        if folder.exists():
            continue
        torch.manual_seed(seed)
        with torch.device("cuda"):
            made = Qwen2ForCausalLM(Qwen2Config(**SHAPE)).to(torch.bfloat16)
        made.save_pretrained(folder.with_suffix(".partial"))
        folder.with_suffix(".partial").rename(folder)
        del made
        torch.cuda.empty_cache()


def start(
    name: str, *, gpus: str, flags: list[str], prefix: list[str] | None = None, model: Path = FOLDER / "m0"
) -> GpuEngine:
    SCRATCH.mkdir(exist_ok=True)
    environment = {
        "TMPDIR": str(SCRATCH),
        "CUDA_VISIBLE_DEVICES": gpus,
        "PYTHONPATH": os.environ.get("ENGINE_PATH", ""),
        "HF_HUB_OFFLINE": "1",
        "FLASHINFER_WORKSPACE_BASE": "/tmp",
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    }
    if "0" in gpus.split(","):
        # The trainer's. NCCL takes no GPU twice: told that the engine is on another host, it goes through sockets.
        environment["NCCL_HOSTID"] = "engines"
    command = [*(prefix or []), sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    return GpuEngine([*command, *FLAGS, *flags], name=name, logs=FOLDER, **environment)


class GpuEngine(Engine):
    def wait(self) -> float:
        """Until it has generated: on a bare machine SGLang compiles kernels at its first requests."""
        seconds = super().wait()
        # Nothing that `tokens` begins with: FP8 gives other tokens behind a prefix from the cache.
        self.ask("/generate", {"input_ids": [9], "sampling_params": {"max_new_tokens": 1}}, seconds=COMPILE_SECONDS)
        return seconds

    @property
    def noted(self) -> dict[str, Any]:
        return {"pid": self._process.pid, "port": self.port}

    @classmethod
    def started(cls, name: str) -> bool:
        return name in json.loads(STATE.read_text())

    @classmethod
    def found(cls, name: str) -> GpuEngine:
        """One that an earlier command started."""
        noted = json.loads(STATE.read_text())[name]
        engine = cls.__new__(cls)
        engine.name, engine.port = name, noted["port"]
        engine.url = f"http://127.0.0.1:{engine.port}"
        engine.log = FOLDER / f"{name}.log"
        engine._process = Adopted(noted["pid"])  # type: ignore[assignment]
        return engine


class Adopted:
    """As much of subprocess.Popen as a process of somebody else has."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return 0
        return 0 if state == "Z" else None

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)


def used_bytes() -> list[int]:
    """Of each GPU, as NVML counts them."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) << 20 for line in subprocess.check_output(query, text=True).splitlines()]


class Bare:
    """One connection for one update (SGLang closes it after five idle seconds), and no more than is needed."""

    def __init__(self, engine: Engine) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=120)

    def post(self, path: str, **body: Any) -> tuple[int, bytes]:
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def sure(self, path: str, **body: Any) -> None:
        status, content = self.post(path, **body)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {content[:300]!r}")
