"""The trainer's process: the trainer library, on one GPU or on the CPU. Prints one JSON object a line.

usage: python -m gpu.trainer SCENARIO OPTIONS.json
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gpu.engines import call, tokens
from rolloutfleet.api.agent import PauseMode
from rolloutfleet.trainer import Fleet, FleetError, connect
from rolloutfleet.trainer.groups import Groups

Options = dict[str, Any]
MIB = 1 << 20


def tell(what: str, **values: Any) -> None:
    print(json.dumps({"what": what, **values}), flush=True)


def loaded(options: Options) -> list[dict[str, torch.Tensor]]:
    device = options["device"]
    states = [load_file(f"{options['mount']}/m{index}/model.safetensors", device=device) for index in (0, 1)]
    if device != "cpu":
        torch.cuda.synchronize()
    return states


def used_mib(gpu: int) -> int:
    """As NVML sees it: of all processes."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)).used) >> 20


class Measured:
    """Ours and by hand in turn, the same engine, the same process."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.states = loaded(options)
        self.bytes = sum(tensor.nbytes for tensor in self.states[0].values())
        self.version = options.get("version", 0)

    def compare(
        self, name: str, engine: str, ours: Callable[[int, int], Any], by_hand: Callable[[int], dict[str, float]]
    ) -> None:
        """ours(k, version) and by_hand(k) bring the weights of m`k`."""
        told: dict[str, list[float]] = {}
        right = True
        first = self._ours(ours, engine, told={})
        tell(f"{name}, first", **first)
        for _ in range(self.options["rounds"]):
            answer = self._ours(ours, engine, told)
            right = right and answer["tokens_right"]
            k = (self.version + 1) % 2
            seconds = by_hand(k)
            for phase, value in seconds.items():
                told.setdefault(f"by_hand_{phase}", []).append(value)
            right = right and tokens(engine) == self.options["tokens"][k]
        medians = {phase: round(statistics.median(values), 4) for phase, values in told.items()}
        least = {phase: round(min(values), 4) for phase, values in told.items()}
        tell(
            name,
            tokens_right=right,
            gb_per_second=round(self.bytes / 1e9 / medians["load"], 1),
            by_hand_gb_per_second=round(self.bytes / 1e9 / medians["by_hand_load"], 1),
            transfer_ratio=round(medians["load"] / medians["by_hand_load"], 2),
            pause_ratio=round(medians["paused"] / medians["by_hand_paused"], 2),
            median=medians,
            least=least,
        )

    def _ours(self, ours: Callable[[int, int], Any], engine: str, told: dict[str, list[float]]) -> dict[str, Any]:
        self.version += 1
        k = self.version % 2
        began = time.perf_counter()
        result = ours(k, self.version)
        wall = time.perf_counter() - began
        for phase, value in {**result.seconds, "wall": wall}.items():
            told.setdefault(phase, []).append(value)
        found = tokens(engine)
        return {
            "seconds": result.seconds,
            "wall": round(wall, 4),
            "tokens_right": found == self.options["tokens"][k],
            "verdicts": [verdict.outcome for verdict in result.engines],
        }


def measure(options: Options) -> None:
    run = Measured(options)
    tell("weights", gigabytes=round(run.bytes / 1e9, 3), tensors=len(run.states[0]))
    far, near = connect(url=options["distributed_agent"]), connect(url=options["tensor_agent"])
    for size in options["bucket_mib"]:
        attempt(distributed, run, far, size)
    for size in options["bucket_mib"]:
        attempt(tensor, run, near, size)
    attempt(disk, run, far)
    attempt(memory, run, near)
    far.close()
    near.close()


def attempt(part: Callable[..., None], *arguments: Any) -> None:
    """What comes after a failure is measured all the same."""
    try:
        part(*arguments)
    except Exception:
        tell(f"{part.__name__} FAILED", error=traceback.format_exc()[-2000:])


def by_hand(run: Measured, url: str, size: int) -> Any:
    from gpu.bare import Bare  # SGLang's own helpers: only where they are compared with

    return Bare(url, device=run.options["device"], bucket_bytes=size * MIB)


def distributed(run: Measured, fleet: Fleet, size: int) -> None:
    url = run.options["distributed_engine"]
    hand = by_hand(run, url, size)
    joined: list[float] = []

    def ours(k: int, version: int) -> Any:
        return fleet.update_weights(
            run.states[k], version=version, transport="distributed", bucket_bytes=size * MIB, timeout=60
        )

    def bare(k: int) -> dict[str, float]:
        if not joined:
            joined.append(hand.join(run.options["port"]))
            run.options["port"] += 1
        seconds: dict[str, float] = hand.whole(lambda: hand.distributed(run.states[k]), "0")
        return seconds

    run.compare(f"distributed, buckets of {size} MiB", url, ours, bare)
    tell("group joined by hand", seconds=joined)
    hand.leave()


def tensor(run: Measured, fleet: Fleet, size: int) -> None:
    url = run.options["tensor_engine"]
    hand = by_hand(run, url, size)

    def ours(k: int, version: int) -> Any:
        return fleet.update_weights(
            run.states[k], version=version, transport="tensor", bucket_bytes=size * MIB, timeout=60
        )

    def bare(k: int) -> dict[str, float]:
        seconds: dict[str, float] = hand.whole(lambda: hand.tensor(run.states[k]), "0")
        return seconds

    run.compare(f"tensor, buckets of {size} MiB", url, ours, bare)


def disk(run: Measured, fleet: Fleet) -> None:
    url = run.options["distributed_engine"]
    hand = by_hand(run, url, 1)
    folders = [f"{run.options['mount']}/m{k}" for k in (0, 1)]
    run.compare(
        "disk",
        url,
        lambda k, version: fleet.update_weights(folders[k], version=version, timeout=60),
        lambda k: hand.whole(lambda: hand.disk(folders[k]), "0"),
    )


def memory(run: Measured, fleet: Fleet) -> None:
    """Offload, the trainer's turn, then weights -> update -> KV cache."""
    options = run.options
    gpu = options["tensor_gpu"]

    def used() -> int | None:
        return used_mib(gpu) if options["device"] != "cpu" else None

    for _ in range(2):
        before = used()
        released = fleet.offload("weights", "kv_cache", "cuda_graph")
        at_once = used()
        time.sleep(1)
        tell(
            "offload", used_mib=before, at_once=at_once, later=used(), seconds=released.seconds, failed=released.failed
        )
        began = time.perf_counter()
        weights = fleet.onload("weights")
        run.version += 1
        k = run.version % 2
        update = fleet.update_weights(run.states[k], version=run.version, transport="tensor", timeout=60)
        rest = fleet.onload("kv_cache", "cuda_graph")
        tell(
            "onload",
            weights=weights.seconds,
            update=update.seconds,
            rest=rest.seconds,
            failed={**weights.failed, **rest.failed},
            whole=round(time.perf_counter() - began, 3),
            used_mib=used(),
            tokens_right=tokens(options["tensor_engine"]) == options["tokens"][k],
        )


def mismatch(options: Options) -> None:
    """NCCL_CUMEM_ENABLE differs from the engines'."""
    states = loaded(options)
    fleet = connect(url=options["distributed_agent"])
    began = time.perf_counter()
    try:
        fleet.update_weights(states[0], transport="distributed", timeout=60)
        tell("mismatch", refused=False)
    except Exception as error:
        seconds = round(time.perf_counter() - began, 3)
        tell("mismatch", refused=True, seconds=seconds, error=f"{type(error).__name__}: {error}")


def load(options: Options) -> None:
    """Each pause mode while requests run."""
    states = loaded(options)
    fleet = connect(url=options["distributed_agent"])
    version = options["version"]
    stop = threading.Event()
    ended: list[str] = []

    def generate() -> None:
        sampling = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
        while not stop.is_set():
            status, answer = call(
                options["distributed_engine"], "/generate", {"input_ids": [1, 2, 3], "sampling_params": sampling}
            )
            ended.append(answer["meta_info"]["finish_reason"]["type"] if status == 200 else str(status))

    senders = [threading.Thread(target=generate) for _ in range(12)]
    for sender in senders:
        sender.start()
    modes: tuple[PauseMode, ...] = ("Retract", "InPlace", "Abort", "Retract")
    for mode in modes:
        time.sleep(2.0)
        ended.clear()
        version += 1
        try:
            result = fleet.update_weights(
                states[version % 2], version=version, pause_mode=mode, transport="distributed", timeout=60
            )
            told: Options = {"seconds": result.seconds, "verdicts": [verdict.outcome for verdict in result.engines]}
        except FleetError as error:
            told = {"error": str(error)}
        right = tokens(options["distributed_engine"]) == options["tokens"][version % 2]
        time.sleep(3.0)
        counted = {reason: ended.count(reason) for reason in sorted(set(ended))}
        tell("under load", mode=mode, tokens_right=right, requests_ended=counted, **told)
    stop.set()
    for sender in senders:
        sender.join()
    fleet.close()


def casualty(options: Options) -> None:
    """Two engines; one dies in the middle of the second update. The orchestrator kills it when told."""
    states = loaded(options)
    fleet = connect(url=options["distributed_agent"])
    for turn in range(4):
        version = options["version"] + 1 + turn
        if turn == 1:
            tell("stop it")
            sys.stdin.readline()
            threading.Timer(2.0, tell, ("kill it",)).start()
        began = time.time()
        result = fleet.update_weights(states[version % 2], version=version, transport="distributed", timeout=60)
        tell(
            "update",
            turn=turn,
            began=began,
            ended=time.time(),
            seconds=result.seconds,
            verdicts={verdict.pod: f"{verdict.outcome} {verdict.message}"[:200] for verdict in result.engines},
            threads=sorted(thread.name for thread in threading.enumerate() if "rolloutfleet" in thread.name),
            tokens_right=tokens(options["distributed_engine"]) == options["tokens"][version % 2],
        )
    began = time.perf_counter()
    fleet.close()
    tell("closed", seconds=round(time.perf_counter() - began, 3))


def die(options: Options) -> None:
    """The sender dies: before it sends what the engine waits for already, or while it sends."""
    states = loaded(options)
    fleet = connect(url=options["distributed_agent"])
    version = options["version"] + 1
    fleet.update_weights(states[version % 2], version=version, transport="distributed", timeout=60)
    send = Groups.broadcasting

    def die_before(self: Groups, flat: torch.Tensor, **options: Any) -> Any:
        time.sleep(1.0)
        tell("dying", at=time.time())
        os.kill(os.getpid(), signal.SIGKILL)

    def die_while(self: Groups, flat: torch.Tensor, **how: Any) -> Any:
        sent = send(self, flat, **how)
        time.sleep(options["after_seconds"])
        tell("dying", at=time.time(), sent=[part.done() for part in sent.values()])
        os.kill(os.getpid(), signal.SIGKILL)

    Groups.broadcasting = die_while if options["after_seconds"] else die_before  # type: ignore[method-assign]
    version += 1
    fleet.update_weights(
        states[version % 2], version=version, transport="distributed", bucket_bytes=4096 * MIB, timeout=60
    )


if __name__ == "__main__":
    scenario = {"measure": measure, "mismatch": mismatch, "load": load, "casualty": casualty, "die": die}[sys.argv[1]]
    scenario(json.loads(Path(sys.argv[2]).read_text()))
