"""`python -m gpu PHASE...` on a machine with GPUs: PHASES below, and README.md.

Each phase prints JSON lines, and goes on where another one has failed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engines import Agent
from safetensors.torch import load_file

from gpu import bare
from gpu.machine import ANOTHER_POD, FOLDER, SCRATCH, STATE, GpuEngine, make_checkpoints, start, used_bytes
from rolloutfleet.trainer import Fleet, NonFiniteWeights
from rolloutfleet.trainer.tensors import NumberCheck

BUCKETS = (512 << 20, 2 << 30)
ROUNDS = 5
BESIDE = "beside"
"""An engine on the trainer's GPU, in namespaces of its own as in another pod."""
FAR = ("far0", "far1", "far2")
"""Engines on the other GPU."""

State = dict[str, torch.Tensor]


def say(phase: str, **facts: Any) -> None:
    print(json.dumps({"phase": phase, **facts}), flush=True)


def states() -> list[State]:
    return [load_file(FOLDER / f"m{seed}" / "model.safetensors", device="cuda:0") for seed in (0, 1)]


def size(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seconds.items()}


class Reference:
    """What engines answer with each checkpoint, read from disk."""

    def __init__(self, engine: GpuEngine) -> None:
        self.tokens = []
        for seed in (1, 0):
            engine.ask(
                "/update_weights_from_disk", {"model_path": str(FOLDER / f"m{seed}"), "weight_version": "by-hand"}
            )
            self.tokens.insert(0, engine.tokens())
        if self.tokens[0] == self.tokens[1]:
            raise RuntimeError("both checkpoints give the same tokens: nothing could be told")


class Trainer:
    """The agent, the library, and engines."""

    def __init__(self, *engines: GpuEngine) -> None:
        self.agent = Agent(engines, served=FOLDER / "m0", folder=FOLDER)
        self.fleet: Fleet = self.agent.connect()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.close()
        self.agent.kill()


def measured(phase: str, engine: GpuEngine, fleet: Fleet, transport: str, by_hand: bare.Transfer) -> None:
    """Ours and the bare sequence in turns, each with both checkpoints; tokens after each of ours."""
    weights = states()
    right = Reference(engine).tokens
    gigabytes = size(weights[0]) / 1e9
    began = time.perf_counter()
    for _ in range(100):
        fleet.view()
    say(phase, agent_answers_in_s=round((time.perf_counter() - began) / 100, 5))
    looked = []
    for state in weights * 2:
        torch.cuda.synchronize()
        began = time.perf_counter()
        NumberCheck().look(list(state.items()))
        looked.append(round(time.perf_counter() - began, 4))
    say(phase, seconds_to_look_for_nan=looked)
    for bucket_bytes in BUCKETS:
        ours, bares, correct = [], [], []
        for turn in range(ROUNDS):
            new = 1 - turn % 2
            torch.cuda.synchronize()
            began = time.perf_counter()
            result = fleet.update_weights(weights[new], transport=transport, bucket_bytes=bucket_bytes)
            ours.append({**result.seconds, "call": time.perf_counter() - began})
            correct.append(engine.tokens() == right[new])
            bares.append(bare.whole(engine, partial(by_hand, state=weights[1 - new], bucket_bytes=bucket_bytes)))
            correct.append(engine.tokens() == right[1 - new])
        settled = ours[1:]
        medians = {name: statistics.median(each[name] for each in settled) for name in settled[0]}
        by_bare = {name: statistics.median(each[name] for each in bares[1:]) for name in bares[0]}
        say(
            phase,
            bucket_bytes=bucket_bytes,
            gigabytes=round(gigabytes, 2),
            first=rounded(ours[0]),
            ours=rounded(medians),
            bare=rounded(by_bare),
            ratio_load=round(medians["load"] / by_bare["transfer"], 2),
            ratio_call=round(medians["call"] / by_bare["total"], 2),
            ours_gb_s=round(gigabytes / medians["load"], 1),
            bare_gb_s=round(gigabytes / by_bare["transfer"], 1),
            all_calls=[round(each["call"], 4) for each in ours],
            all_loads=[round(each["load"], 4) for each in ours],
            all_bare_transfers=[round(each["transfer"], 4) for each in bares],
            tokens_right=f"{sum(correct)} of {len(correct)}",
        )


def nccl() -> None:
    engine = GpuEngine.found(FAR[0])
    with Trainer(engine) as trainer:
        # First ours: it sets NCCL_CUMEM_ENABLE before NCCL reads it.
        trainer.fleet.update_weights(states()[0])
        by_hand = bare.Nccl(engine)
        measured("nccl", engine, trainer.fleet, "distributed", by_hand.transfer)
        by_hand.close()


def host() -> None:
    """Tensors on the trainer's CPU, an engine on a GPU: over gloo."""
    engine = GpuEngine.found(FAR[0])
    right = Reference(engine).tokens
    with Trainer(engine) as trainer:
        for new in (1, 0, 1):
            weights = load_file(FOLDER / f"m{new}" / "model.safetensors")
            began = time.perf_counter()
            result = trainer.fleet.update_weights(weights)
            called = time.perf_counter() - began
            say(
                "host",
                call=round(called, 3),
                seconds=rounded(result.seconds),
                tokens_right=engine.tokens() == right[new],
            )


def ipc() -> None:
    engine = GpuEngine.found(BESIDE)
    with Trainer(engine) as trainer:
        measured("ipc", engine, trainer.fleet, "tensor", bare.Ipc().transfer)


def disk() -> None:
    engine = GpuEngine.found(BESIDE)
    right = Reference(engine).tokens
    with Trainer(engine) as trainer:
        for new in (1, 0, 1, 0):
            result = trainer.fleet.update_weights(FOLDER / f"m{new}")
            say("disk", seconds=rounded(result.seconds), tokens_right=engine.tokens() == right[new])


def poison() -> None:
    """One bad number is found on a GPU as well."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        for bad in (float("nan"), float("inf"), float("-inf")):
            tensor = torch.ones(1 << 24, device="cuda:0").to(dtype)
            NumberCheck().look([("good", tensor)])
            tensor[12345] = bad
            found = False
            try:
                NumberCheck().look([("good", torch.ones(3, device="cuda:0")), ("bad", tensor)])
            except NonFiniteWeights as error:
                found = str(error).startswith("bad")
            say("poison", dtype=str(dtype), value=str(bad), became=str(tensor[12345].item()), found=found)


def memory() -> None:
    engine = GpuEngine.found(BESIDE)
    right = Reference(engine).tokens
    weights = states()
    with Trainer(engine) as trainer:
        fleet = trainer.fleet
        for new in (1, 0):
            torch.cuda.empty_cache()
            used = {"before": used_bytes(0)}
            began = time.perf_counter()
            with fleet.offloaded() as released:
                offload_s = time.perf_counter() - began
                used["released"] = used_bytes(0)
                taken = torch.empty(used["before"] - used["released"], dtype=torch.uint8, device="cuda:0")
                used["trainer_took_it"] = used_bytes(0)
                del taken
                torch.cuda.empty_cache()
                began = time.perf_counter()
                fleet.onload("weights")
                weights_s = time.perf_counter() - began
                result = fleet.update_weights(weights[new], transport="tensor")
                began = time.perf_counter()
            say(
                "memory",
                gib={name: round(value / 2**30, 2) for name, value in used.items()},
                after_gib=round(used_bytes(0) / 2**30, 2),
                released=released.model_dump(),
                offload_s=round(offload_s, 4),
                onload_weights_s=round(weights_s, 4),
                update=rounded(result.seconds),
                onload_rest_s=round(time.perf_counter() - began, 4),
                tokens_right=engine.tokens() == right[new],
            )


def casualty() -> None:
    """Engines that die while NCCL sends: one that has stopped before its part, and one at some moment of it."""
    survivor, stopped, sudden = (GpuEngine.found(name) for name in FAR)
    weights = states()
    right = Reference(survivor).tokens
    with Trainer(survivor, stopped, sudden) as trainer:
        fleet = trainer.fleet
        fleet.update_weights(weights[0])
        killed: list[float] = []

        def kill(engine: GpuEngine) -> None:
            killed.append(time.perf_counter())
            engine.kill()

        def stopping() -> Iterator[tuple[str, torch.Tensor]]:
            for index, entry in enumerate(weights[1].items()):
                if index == len(weights[1]) // 2:
                    stopped.signal(signal.SIGSTOP)
                    threading.Timer(2.0, kill, [stopped]).start()
                yield entry

        result = fleet.update_weights(stopping(), bucket_bytes=512 << 20)
        say(
            "casualty stopped",
            seconds_from_kill_to_return=round(time.perf_counter() - killed[-1], 3),
            seconds=rounded(result.seconds),
            verdicts={verdict.pod: f"{verdict.outcome} {verdict.message}"[:160] for verdict in result.engines},
            tokens_right=survivor.tokens() == right[1],
        )
        trainer.agent.serve(survivor, sudden)
        again = fleet.update_weights(weights[0])
        say("after it", seconds=rounded(again.seconds), outcomes=[verdict.outcome for verdict in again.engines])

        def at_some_moment(*, sent_bytes: int, buckets: int) -> None:
            if buckets == 3:
                threading.Timer(0.003, kill, [sudden]).start()

        result = fleet.update_weights(weights[1], bucket_bytes=256 << 20, progress=at_some_moment)
        say(
            "casualty sudden",
            seconds_from_kill_to_return=round(time.perf_counter() - killed[-1], 3),
            seconds=rounded(result.seconds),
            verdicts={verdict.pod: f"{verdict.outcome} {verdict.message}"[:160] for verdict in result.engines},
            tokens_right=survivor.tokens() == right[1],
        )
        trainer.agent.serve(survivor)
        again = fleet.update_weights(weights[0])
        say(
            "after it",
            seconds=rounded(again.seconds),
            outcomes=[verdict.outcome for verdict in again.engines],
            tokens_right=survivor.tokens() == right[0],
        )


DYING_SENDER = """
import os, signal, sys, time, torch
from safetensors.torch import load_file
from rolloutfleet.trainer import connect
from rolloutfleet.trainer.groups import Groups
weights = load_file(sys.argv[2], device="cuda:0")
fleet = connect("actor", url=sys.argv[1])
fleet.update_weights(weights)
def die(*_, **__):
    time.sleep(0.5)
    print(time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
Groups.broadcasting = die
fleet.update_weights(weights)
"""


LEAVING = """
import sys
from safetensors.torch import load_file
from rolloutfleet.trainer import connect
fleet = connect("actor", url=sys.argv[1])
fleet.update_weights(load_file(sys.argv[2], device="cuda:0"))
if sys.argv[3] == "closed":
    fleet.close()
"""


def leaving() -> None:
    """A trainer ends well, whether or not it says goodbye."""
    engine = GpuEngine.found(FAR[0])
    with Trainer(engine) as trainer:
        for how in ("closed", "open"):
            arguments = [trainer.agent.url, str(FOLDER / "m1" / "model.safetensors"), how]
            ended = subprocess.run([sys.executable, "-c", LEAVING, *arguments], timeout=60, check=False)
            say("leaving", how=how, exit=ended.returncode)


def sender() -> None:
    """The trainer is killed while an engine waits for its broadcast. What becomes of the engine?"""
    engine = GpuEngine.found(FAR[0])
    with Trainer(engine) as trainer:
        checkpoint = str(FOLDER / "m1" / "model.safetensors")
        dying = subprocess.run(
            [sys.executable, "-c", DYING_SENDER, trainer.agent.url, checkpoint],
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
        killed = float(dying.stdout)
        watch = float(os.environ.get("WATCH_SECONDS", "60"))
        freed = settled = None
        while time.time() - killed < watch and (freed is None or settled is None) and engine.running:
            if settled is None and trainer.agent.training["weights"]["phase"] == "Committed":
                settled = round(time.time() - killed, 2)
            if freed is None:
                try:
                    engine.checksum(seconds=2.0)
                    freed = round(time.time() - killed, 2)
                except OSError:
                    pass
        say(
            "sender",
            exit=dying.returncode,
            engine_free_after_s=freed,
            agent_settled_after_s=settled,
            engine_running=engine.running,
            watched_s=round(time.time() - killed, 1),
            engine_says=engine.log.read_text()[-600:],
        )


def start_engines() -> None:
    """All, or those that ENGINES names."""
    make_checkpoints()
    wanted = os.environ.get("ENGINES", ",".join((BESIDE, *FAR))).split(",")
    engines = []
    if BESIDE in wanted:
        flags = ["--enable-memory-saver", "--cuda-graph-max-bs", "8"]
        engines.append(start(BESIDE, gpu=0, flags=flags, prefix=ANOTHER_POD))
    if torch.cuda.device_count() > 1:
        flags = ["--disable-cuda-graph", "--max-total-tokens", "65536"]
        engines += [start(name, gpu=1, flags=flags) for name in FAR if name in wanted]
    began = time.monotonic()
    STATE.write_text(json.dumps({engine.name: engine.noted for engine in engines}))
    for engine in engines:
        try:
            engine.wait()
            say("start", engine=engine.name, seconds=round(time.monotonic() - began, 1))
        except (RuntimeError, TimeoutError) as error:
            say("start", engine=engine.name, error=str(error)[-1500:])


def stop() -> None:
    for name in json.loads(STATE.read_text()):
        GpuEngine.found(name).kill()
    shutil.rmtree(SCRATCH)


PHASES: dict[str, Callable[[], None]] = {
    "models": make_checkpoints,
    "start": start_engines,
    "nccl": nccl,
    "host": host,
    "ipc": ipc,
    "poison": poison,
    "memory": memory,
    "disk": disk,
    "leaving": leaving,
    "casualty": casualty,
    "sender": sender,
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
            for log in sorted(Path(FOLDER).glob("fleet-*.log")):
                print(log.name, log.read_text()[-1500:], flush=True)
    sys.exit(failed)
