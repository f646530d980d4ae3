"""`python -m gpu.pauses PHASE...`: load mismatch sudden, with the engines that `python -m gpu start` has left running.

What becomes of requests that run while weights change, of a trainer whose NCCL is set up otherwise than the engines',
and of an engine whose sender dies in the middle of a broadcast.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, get_args

from gpu.__main__ import FAR, Reference, Trainer, rounded, say, states
from gpu.machine import FOLDER, GpuEngine
from rolloutfleet.api.agent import PauseMode
from rolloutfleet.trainer import FleetError

SENDERS = 12
SETTLED_SECONDS = 3.0
WATCHED_SECONDS = 50.0
CHECKPOINT = str(FOLDER / "m1" / "model.safetensors")


class Requests:
    """That run one after the other, some at once, and how they ended."""

    def __init__(self, engine: GpuEngine) -> None:
        self._engine = engine
        self._stop = threading.Event()
        self.ended: list[str] = []
        self._threads = [threading.Thread(target=self._send) for _ in range(SENDERS)]

    def __enter__(self) -> Requests:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        sampling = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
        while not self._stop.is_set():
            answer = self._engine.ask("/generate", {"input_ids": [1, 2, 3], "sampling_params": sampling})
            self.ended.append(answer["meta_info"]["finish_reason"]["type"])


def load() -> None:
    """Each pause mode under load. After InPlace a plain request gives wrong tokens: SGLang keeps its cache."""
    engine = GpuEngine.found(FAR[0])
    right = Reference(engine).tokens
    weights = states()
    with Trainer(engine) as trainer, Requests(engine) as requests:
        for turn, mode in enumerate(get_args(PauseMode)):
            new = 1 - turn % 2
            time.sleep(SETTLED_SECONDS)
            requests.ended.clear()
            facts: dict[str, Any]
            try:
                result = trainer.fleet.update_weights(weights[new], pause_mode=mode)
                facts = {
                    "outcomes": [verdict.outcome for verdict in result.engines],
                    "seconds": rounded(result.seconds),
                }
            except FleetError as error:
                facts = {"error": str(error)}
            tokens_right = engine.tokens() == right[new]
            time.sleep(SETTLED_SECONDS)
            ended = {reason: requests.ended.count(reason) for reason in sorted(set(requests.ended))}
            say("load", mode=mode, tokens_right=tokens_right, requests_ended=ended, **facts)


MISMATCHED = """
import sys, time
from safetensors.torch import load_file
from rolloutfleet.trainer import connect
weights = load_file(sys.argv[2], device="cuda:0")
began = time.perf_counter()
try:
    connect("actor", url=sys.argv[1]).update_weights(weights)
except Exception as error:
    print(f"{time.perf_counter() - began:.3f} s: {type(error).__name__}: {error}")
"""


def mismatch() -> None:
    """NCCL_CUMEM_ENABLE differs from the engines': refused before anything is paused. Else the broadcast hangs."""
    engine = GpuEngine.found(FAR[0])
    with Trainer(engine) as trainer:
        asked = subprocess.run(
            [sys.executable, "-c", MISMATCHED, trainer.agent.url, CHECKPOINT],
            env={**os.environ, "NCCL_CUMEM_ENABLE": "1"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
        say("mismatch", refused=asked.stdout.strip(), committed=trainer.fleet.weight_version)


SUDDEN = """
import os, signal, sys, time
from safetensors.torch import load_file
from rolloutfleet.trainer import connect
from rolloutfleet.trainer.groups import Groups
weights = load_file(sys.argv[2], device="cuda:0")
fleet = connect("actor", url=sys.argv[1])
fleet.update_weights(weights)
send = Groups.broadcasting
def die(*arguments, **named):
    sent = send(*arguments, **named)
    time.sleep(0.008)
    print(time.time(), [part.done() for part in sent.values()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
Groups.broadcasting = die
fleet.update_weights(weights, bucket_bytes=4 << 30)
"""


def sudden() -> None:
    """The sender is killed 8 ms into a broadcast of 3.55 GB. Only the engine's end frees the engine."""
    engine = GpuEngine.found(FAR[0])
    with Trainer(engine) as trainer:
        dying = subprocess.run(
            [sys.executable, "-c", SUDDEN, trainer.agent.url, CHECKPOINT],
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
        at, _, sent = dying.stdout.partition(" ")
        killed = float(at)
        free = settled = None
        while time.time() - killed < WATCHED_SECONDS and free is None:
            free = round(time.time() - killed, 1) if _answers(engine) else None
            if settled is None and trainer.agent.training["weights"]["phase"] == "Committed":
                settled = round(time.time() - killed, 1)
        group = _last_group(engine.log)
        left = _answers(engine, "/destroy_weights_update_group", {"group_name": group})
        say(
            "sudden",
            sent=sent.strip(),
            scheduler_free_after_s=free,
            agent_settled_after_s=settled,
            answers_ping=engine.answers("/ping"),
            leaves_the_group=left,
            verdicts=trainer.agent.training["weights"]["engines"],
        )


def _answers(engine: GpuEngine, path: str = "/weights_checker", body: Any = None) -> bool:
    try:
        engine.ask(path, body or {"action": "checksum"}, seconds=5.0)
    except OSError:
        return False
    return True


def _last_group(log: Path) -> str:
    """Of those that SGLang says it joins."""
    return log.read_text().rpartition("group_name=")[2].partition(",")[0]


PHASES = {"load": load, "mismatch": mismatch, "sudden": sudden}

if __name__ == "__main__":
    for phase in sys.argv[1:]:
        PHASES[phase]()
    print(json.dumps({"done": sys.argv[1:]}), flush=True)
