"""Engines and trainers that end in the middle of a broadcast, and trainers that end well."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gpu.machine import GpuEngine
from gpu.setting import FAR, Reference, Trainer, checkpoint, rounded, say, states

WATCHED_SECONDS = 50.0


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
            arguments = [trainer.agent.url, checkpoint(1), how]
            ended = subprocess.run([sys.executable, "-c", LEAVING, *arguments], timeout=60, check=False)
            say("leaving", how=how, exit=ended.returncode)


DYING = """
import os, signal, sys, time
from safetensors.torch import load_file
from rolloutfleet.trainer import connect
from rolloutfleet.trainer.groups import Groups
weights = load_file(sys.argv[2], device="cuda:0")
fleet = connect("actor", url=sys.argv[1])
fleet.update_weights(weights)
send = Groups.broadcasting
def die(*arguments, **named):
    # Nothing tells from outside how far a receiver is: its answer comes after the bytes, and NCCL shows no progress.
    # So the moments are chosen: long after the request was sent, and within the 40 ms that the bytes travel; `sent`
    # tells whether they still did.
    sent = {}
    if sys.argv[3] == "before":
        time.sleep(0.5)
    else:
        sent = send(*arguments, **named)
        time.sleep(0.008)
    print(time.time(), [part.done() for part in sent.values()], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
Groups.broadcasting = die
fleet.update_weights(weights, bucket_bytes=4 << 30)
"""


def sender() -> None:
    """The trainer is killed while an engine waits for its broadcast."""
    _trainer_dies(FAR[0], "before")


def sudden() -> None:
    """The trainer is killed 8 ms into a broadcast of 3.55 GB."""
    _trainer_dies(FAR[1], "amid")


def _trainer_dies(name: str, when: str) -> None:
    """What becomes of the engine, which is spoilt by it, and of the update?"""
    engine = GpuEngine.found(name)
    with Trainer(engine) as trainer:
        dying = subprocess.run(
            [sys.executable, "-c", DYING, trainer.agent.url, checkpoint(1), when],
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
        at, _, sent = dying.stdout.partition(" ")
        killed = float(at)
        free = settled = None
        while time.time() - killed < WATCHED_SECONDS and engine.running and (free is None or settled is None):
            if settled is None and trainer.agent.training["weights"]["phase"] == "Committed":
                settled = round(time.time() - killed, 2)
            if free is None and _answers(engine):
                free = round(time.time() - killed, 2)
        say(
            f"trainer dies {when} it sends",
            engine=engine.name,
            sent=sent.strip(),
            scheduler_free_after_s=free,
            agent_settled_after_s=settled,
            engine_running=engine.running,
            watched_s=round(time.time() - killed, 1),
            answers_ping=engine.answers("/ping"),
            leaves_the_group=_answers(engine, "/destroy_weights_update_group", {"group_name": _last_group(engine.log)}),
            verdicts=trainer.agent.training["weights"]["engines"],
            engine_says=engine.log.read_text()[-600:],
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
