"""Seconds of an update by phase, beside the same by hand."""

from __future__ import annotations

import statistics
import time
from typing import Literal

import torch
from safetensors.torch import load_file

from gpu import bare
from gpu.machine import FOLDER, GpuEngine
from gpu.setting import BESIDE, FAR, Reference, Trainer, checkpoint, rounded, say, size, states
from rolloutfleet.trainer import Fleet
from rolloutfleet.trainer.sending import BUCKET_BYTES
from rolloutfleet.trainer.tensors import NumberCheck

BUCKETS = (BUCKET_BYTES, 2 << 30)
ROUNDS = 9


def nccl() -> None:
    engine = GpuEngine.found(FAR[0])
    with Trainer(engine) as trainer:
        # First ours: it sets NCCL_CUMEM_ENABLE before NCCL reads it.
        trainer.fleet.update_weights(states()[0])
        by_hand = bare.Nccl(engine)
        measured("nccl", engine, trainer.fleet, "distributed", by_hand.transfer)
        by_hand.close()


def ipc() -> None:
    engine = GpuEngine.found(BESIDE)
    with Trainer(engine) as trainer:
        measured("ipc", engine, trainer.fleet, "tensor", bare.Ipc().transfer)


def host() -> None:
    """Tensors on the trainer's CPU, an engine on a GPU: over gloo."""
    engine = GpuEngine.found(FAR[0])
    right = Reference(engine).tokens
    with Trainer(engine) as trainer:
        for new in (1, 0, 1):
            weights = load_file(checkpoint(new))
            began = time.perf_counter()
            result = trainer.fleet.update_weights(weights)
            called = time.perf_counter() - began
            say(
                "host",
                call=round(called, 3),
                seconds=rounded(result.seconds),
                tokens_right=engine.tokens() == right[new],
            )


def disk() -> None:
    engine = GpuEngine.found(BESIDE)
    right = Reference(engine).tokens
    with Trainer(engine) as trainer:
        for new in (1, 0, 1, 0):
            result = trainer.fleet.update_weights(FOLDER / f"m{new}")
            say("disk", seconds=rounded(result.seconds), tokens_right=engine.tokens() == right[new])


def measured(
    phase: str, engine: GpuEngine, fleet: Fleet, transport: Literal["distributed", "tensor"], by_hand: bare.Transfer
) -> None:
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
        answered: list[float] = []

        def told(*, sent_bytes: int, buckets: int, answered: list[float] = answered) -> None:
            answered.append(time.perf_counter())

        for turn in range(ROUNDS):
            new = 1 - turn % 2
            answered.clear()
            torch.cuda.synchronize()
            began = time.perf_counter()
            result = fleet.update_weights(weights[new], transport=transport, bucket_bytes=bucket_bytes, progress=told)
            ours.append({**result.seconds, "call": time.perf_counter() - began})
            correct.append(engine.tokens() == right[new])
            bares.append(bare.whole(engine, by_hand, weights[1 - new], bucket_bytes))
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
            ratio_paused=round(medians["paused"] / by_bare["total"], 2),
            ratio_call=round(medians["call"] / by_bare["total"], 2),
            ours_gb_s=round(gigabytes / medians["load"], 1),
            bare_gb_s=round(gigabytes / by_bare["transfer"], 1),
            all_calls=[round(each["call"], 4) for each in ours],
            all_pauses=[round(each["paused"], 4) for each in ours],
            all_bare_totals=[round(each["total"], 4) for each in bares],
            last_buckets_answered_at=[round(at - began, 4) for at in answered],
            all_loads=[round(each["load"], 4) for each in ours],
            all_bare_transfers=[round(each["transfer"], 4) for each in bares],
            tokens_right=f"{sum(correct)} of {len(correct)}",
        )
