"""What the phases share: checkpoints on the trainer's GPU, the right tokens, an agent with its library, JSON lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engines import Agent
from safetensors.torch import load_file

from gpu.machine import FOLDER, GpuEngine
from rolloutfleet.api.agent import UpdateEngine
from rolloutfleet.trainer import Fleet

BESIDE = "beside"
"""An engine on the trainer's GPU, in namespaces of its own as in another pod."""
FAR = ("far0", "far1", "far2")
"""Engines on the other GPU; on a machine with one GPU on that one, and NCCL goes through sockets."""
BOTH = "both"
"""An engine of two ranks, one on each GPU."""

State = dict[str, torch.Tensor]


def say(phase: str, **facts: Any) -> None:
    print(json.dumps({"phase": phase, **facts}), flush=True)


def checkpoint(seed: int) -> str:
    return str(FOLDER / f"m{seed}" / "model.safetensors")


def states() -> list[State]:
    return [load_file(checkpoint(seed), device="cuda:0") for seed in (0, 1)]


def size(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in seconds.items()}


def own_gpus(engine: UpdateEngine) -> Sequence[int]:
    """Of the ranks of BESIDE and of BOTH."""
    return range(engine.ranks)


class Reference:
    """What engines answer with each checkpoint, read from disk."""

    def __init__(self, engine: GpuEngine) -> None:
        self.tokens: list[list[int]] = []
        for seed in (1, 0):
            engine.ask(
                "/update_weights_from_disk", {"model_path": str(FOLDER / f"m{seed}"), "weight_version": "by-hand"}
            )
            self.tokens.insert(0, engine.tokens())
        if self.tokens[0] == self.tokens[1]:
            raise RuntimeError("both checkpoints give the same tokens: nothing could be told")


class Trainer:
    """The agent, the library, and engines."""

    def __init__(
        self, *engines: GpuEngine, ranks: int = 1, colocated: bool = False, served: Path = FOLDER / "m0"
    ) -> None:
        """`ranks`: of each engine. `colocated`: on the trainer's GPUs. `served`: what the engines have started with."""
        self.agent = Agent(engines, served=served, folder=FOLDER, ranks=ranks, colocated=colocated)
        self.fleet: Fleet = self.agent.connect()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.close()
        self.agent.kill()
