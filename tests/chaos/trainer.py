"""Runs in a trainer's pod: generates without a pause in several threads, and updates the weights every few seconds.

All that happens is one JSON line in `/weights/results.jsonl`, which the test reads from outside. It ends when
`/weights/stop` appears, and then writes {"done": true}. usage: WORKERS SECONDS_BETWEEN_UPDATES KIND, where KIND is
`stand-in` (each version has other weights) or `tiny` (models /weights/base0 and /weights/base1 in turn).
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rolloutfleet.trainer import Fleet, FleetError, connect

WEIGHTS = Path("/weights")
PROMPTS, SAMPLES, TOKENS = 4, 2, 12
REFERENCE_PROMPTS = [[1, 2, 3], [7, 8, 9, 10], [100, 200, 300], [11]]
CALL_SECONDS = 150.0
KEPT = 12

stop = threading.Event()
writing = threading.Lock()


def tell(**line: Any) -> None:
    with writing, (WEIGHTS / "results.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), **line}) + "\n")


def generate(worker: int, kind: str) -> None:
    """Every call is made until it has come back: one that raised is made again."""
    fleet = connect("actor")
    number = 0
    while not stop.is_set():
        call, prompts = f"{worker}/{number}", prompts_of(worker, number, kind)
        tell(asked=call, prompts=prompts, n=SAMPLES)
        while True:
            try:
                groups = ask(fleet, prompts)
                break
            except FleetError as error:
                tell(raised=f"{error.code}: {error}"[:300])
                time.sleep(0.5)
        tell(got=call, groups=groups)
        number += 1


def prompts_of(worker: int, call: int, kind: str) -> list[list[int]]:
    if kind == "tiny":
        return REFERENCE_PROMPTS
    return [[1 + worker, 1 + call % 500, 1 + call // 500, 1 + number] for number in range(PROMPTS)]


def ask(fleet: Fleet, prompts: list[list[int]]) -> list[Any]:
    groups = fleet.generate(
        prompts, n=SAMPLES, max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True, timeout=CALL_SECONDS
    )
    return [group.model_dump(mode="json") for group in groups]


def refer(fleet: Fleet) -> None:
    """What both tiny models make of the prompts, while nothing is broken. Ends with version 2."""
    for version in range(3):
        if version:
            fleet.update_weights(checkpoint(version, "tiny"), version=version)
        tell(reference=version, groups=ask(fleet, REFERENCE_PROMPTS))


def update(seconds: float, kind: str) -> None:
    """No version is ever tried twice: whether one that failed was committed need not be known."""
    fleet = connect("actor")
    version = fleet.weight_version
    while not stop.wait(seconds):
        version += 1
        path = checkpoint(version, kind)
        try:
            result = fleet.update_weights(path, version=version, timeout=60.0)
        except FleetError as error:
            tell(update=version, code=error.code, error=str(error)[:300])
            continue
        tell(update=version, engines=[verdict.outcome for verdict in result.engines])
        for old in sorted(WEIGHTS.glob("v*"))[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def checkpoint(version: int, kind: str) -> Path:
    target, partial = WEIGHTS / f"v{version:06d}", WEIGHTS / f".v{version:06d}"
    if kind == "tiny":
        shutil.copytree(WEIGHTS / f"base{version % 2}", partial)
    else:
        partial.mkdir()
        (partial / "config.json").write_text("{}")
        (partial / "model.safetensors").write_bytes(safetensors(version))
    partial.rename(target)
    return target


def safetensors(version: int) -> bytes:
    """One tensor, which holds its version."""
    data = struct.pack("<q", version)
    header = json.dumps({"w": {"dtype": "I64", "shape": [1], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data


def main() -> None:
    workers, seconds, kind = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    fleet = connect("actor")
    fleet.wait_ready(engines=2, timeout=600)
    if kind == "tiny":
        refer(fleet)
    threads = [threading.Thread(target=generate, args=(worker, kind)) for worker in range(workers)]
    threads.append(threading.Thread(target=update, args=(seconds, kind)))
    for thread in threads:
        thread.start()
    while not (WEIGHTS / "stop").exists():
        time.sleep(0.2)
    stop.set()
    for thread in threads:
        thread.join()
    tell(done=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
