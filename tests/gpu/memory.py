"""Memory that goes to the trainer and comes back, as NVML counts it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from gpu.machine import GpuEngine, used_bytes
from gpu.setting import BESIDE, BOTH, Reference, Trainer, own_gpus, rounded, say, states


def memory() -> None:
    """Of an engine on the trainer's GPU, and of one with a rank on each."""
    for name, ranks in ((BESIDE, 1), (BOTH, 2)):
        if GpuEngine.started(name):
            _lent(GpuEngine.found(name), ranks)


def _lent(engine: GpuEngine, ranks: int) -> None:
    right = Reference(engine).tokens
    weights = states()
    for gpu in range(ranks):
        torch.zeros(1, device=f"cuda:{gpu}")  # what the trainer uses in any case
    with Trainer(engine, ranks=ranks, colocated=True) as trainer:
        fleet = trainer.fleet
        for new in (1, 0):
            torch.cuda.empty_cache()
            used = {"before": used_bytes()[:ranks]}
            began = time.perf_counter()
            with fleet.offloaded() as released:
                offload_s = time.perf_counter() - began
                used["released"] = used_bytes()[:ranks]
                less = [before - now for before, now in zip(used["before"], used["released"], strict=True)]
                taken = [torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu, size in enumerate(less)]
                used["trainer_took_it"] = used_bytes()[:ranks]
                del taken
                torch.cuda.empty_cache()
                began = time.perf_counter()
                fleet.onload("weights")
                weights_s = time.perf_counter() - began
                result = fleet.update_weights(weights[new], transport="tensor", gpus=own_gpus)
                began = time.perf_counter()
            onload_rest_s = time.perf_counter() - began
            used["after"] = used_bytes()[:ranks]
            say(
                "memory",
                engine=engine.name,
                gib={moment: _gib(each) for moment, each in used.items()},
                agent_saw_freed_gib=_gib(list(released.freed_bytes.values())),
                failed=released.failed,
                offload_s=round(offload_s, 4),
                onload_weights_s=round(weights_s, 4),
                update=rounded(result.seconds),
                onload_rest_s=round(onload_rest_s, 4),
                tokens_right=engine.tokens() == right[new],
            )


def _gib(sizes: Sequence[int]) -> list[float]:
    return [round(size / 2**30, 2) for size in sizes]
