"""`python -m gpu PHASE...` on a machine with GPUs: PHASES below, and README.md.

Each phase prints JSON lines, and goes on where another one has failed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable

import torch

from gpu import deaths, layouts, memory, pauses, quantised, refusals, speed
from gpu.machine import ANOTHER_POD, FOLDER, SCRATCH, STATE, GpuEngine, make_checkpoints, start
from gpu.setting import BESIDE, BOTH, FAR, say

TWO_RANKS = [
    *("--tp-size", "2", "--enable-memory-saver"),
    *("--mem-fraction-static", "0.9"),  # of one GPU another engine takes half meanwhile
    *("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"),  # may use NVLink multicast
]


def start_engines() -> None:
    """All, or those that ENGINES names; one that runs already is started anew."""
    make_checkpoints()
    wanted = os.environ.get("ENGINES", ",".join((BESIDE, *FAR, BOTH))).split(",")
    running = json.loads(STATE.read_text()) if STATE.exists() else {}
    for name in running.keys() & set(wanted):
        GpuEngine.found(name).kill()
    only_one = torch.cuda.device_count() == 1
    far_gpu, shared = ("0", ["--mem-fraction-static", "0.9"]) if only_one else ("1", [])
    small = ["--disable-cuda-graph", "--max-total-tokens", "65536"]
    engines = []
    if BESIDE in wanted:
        flags = ["--enable-memory-saver", "--cuda-graph-max-bs", "8"]
        engines.append(start(BESIDE, gpus="0", flags=flags, prefix=ANOTHER_POD))
    engines += [start(name, gpus=far_gpu, flags=[*small, *shared]) for name in FAR if name in wanted]
    if not only_one and BOTH in wanted:
        engines.append(start(BOTH, gpus="0,1", flags=[*small, *TWO_RANKS]))
    began = time.monotonic()
    STATE.write_text(json.dumps(running | {engine.name: engine.noted for engine in engines}))
    for engine in engines:
        try:
            engine.wait()
            say("start", engine=engine.name, seconds=round(time.monotonic() - began, 1))
        except (RuntimeError, TimeoutError) as error:
            say("start", engine=engine.name, error=str(error)[-1500:])


def stop() -> None:
    for name in json.loads(STATE.read_text()):
        GpuEngine.found(name).kill()
    STATE.unlink()  # their process ids may be given to others now
    shutil.rmtree(SCRATCH)


PHASES: dict[str, Callable[[], None]] = {
    "models": make_checkpoints,
    "start": start_engines,
    "nccl": speed.nccl,
    "ipc": speed.ipc,
    "host": speed.host,
    "disk": speed.disk,
    "memory": memory.memory,
    "load": pauses.load,
    "mismatch": refusals.mismatch,
    "poison": refusals.poison,
    "fp8": quantised.fp8,
    "ranks": layouts.ranks,
    "ranks-nccl": layouts.ranks_nccl,
    "senders": layouts.senders,
    "shards": layouts.shards,
    "leaving": deaths.leaving,
    "casualty": deaths.casualty,
    "sender": deaths.sender,
    "sudden": deaths.sudden,
    "stop": stop,
}

if __name__ == "__main__":
    failed = False
    for phase in sys.argv[1:]:
        try:
            PHASES[phase]()
        except Exception:
            failed = True
            print(phase, "FAILED", traceback.format_exc(), flush=True)
            for log in sorted(FOLDER.glob("fleet-*.log")):
                print(log.name, log.read_text()[-1500:], flush=True)
    sys.exit(failed)
