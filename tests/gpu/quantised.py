"""Checkpoints that are quantised to FP8 themselves: what SGLang makes of an update of them, beside a fresh engine.

Two ways to scale, as the field writes them: a number for each block of 128 by 128 (DeepSeek's), and one for a tensor.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gpu.machine import FOLDER, GpuEngine, start
from gpu.setting import Trainer, checkpoint, rounded, say
from rolloutfleet.api.agent import UpdateResult
from rolloutfleet.trainer import FleetError

BLOCK = 128
FP8 = torch.float8_e4m3fn
FLAGS = [
    *("--disable-cuda-graph", "--max-total-tokens", "65536", "--mem-fraction-static", "0.9"),
    *("--fp8-gemm-backend", "triton"),
]

Scaled = tuple[torch.Tensor, str, torch.Tensor]
"""Weights in FP8, the ending of the scale's name, the scale."""


def by_blocks(weight: torch.Tensor) -> Scaled:
    rows, columns = weight.shape
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / torch.finfo(FP8).max
    return (blocks / scale[:, None, :, None]).view(rows, columns).to(FP8), "weight_scale_inv", scale


def by_tensor(weight: torch.Tensor) -> Scaled:
    scale = weight.float().abs().amax() / torch.finfo(FP8).max
    return (weight.float() / scale).to(FP8), "weight_scale", scale.reshape(1)


WAYS: dict[str, tuple[Callable[[torch.Tensor], Scaled], dict[str, object]]] = {
    "blocks": (by_blocks, {"weight_block_size": [BLOCK, BLOCK]}),
    "tensor": (by_tensor, {}),
}


def folder(way: str, seed: int) -> Path:
    return FOLDER / f"fp8-{way}{seed}"


def make(way: str, seed: int) -> None:
    quantise, more = WAYS[way]
    path = folder(way, seed)
    shutil.copytree(FOLDER / f"m{seed}", path, ignore=shutil.ignore_patterns("*.safetensors"))
    made: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(checkpoint(seed), device="cuda:0").items():
        if not name.endswith("_proj.weight"):
            made[name] = tensor
            continue
        made[name], ending, scale = quantise(tensor)
        made[name.removesuffix("weight") + ending] = scale
    save_file(made, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **more}
    (path / "config.json").write_text(json.dumps(config))


def fp8() -> None:
    """Of each way: an engine that started with one checkpoint and is updated to the other, from disk, by CUDA IPC and
    over NCCL, and one that started with the other."""
    for way in WAYS:
        for seed in (0, 1):
            make(way, seed)
    torch.cuda.empty_cache()
    engines = {
        (way, seed): start(f"{way}{seed}", gpus="0", flags=FLAGS, model=folder(way, seed))
        for way in WAYS
        for seed in (0, 1)
    }
    try:
        for engine in engines.values():
            engine.wait()
        for way in WAYS:
            _updated(way, [engines[way, seed] for seed in (0, 1)])
    finally:
        for engine in engines.values():
            engine.kill()


def _updated(way: str, fresh: list[GpuEngine]) -> None:
    right = [(engine.tokens(), engine.checksum()) for engine in fresh]
    states = [dict(load_file(folder(way, seed) / "model.safetensors", device="cuda:0")) for seed in (0, 1)]
    engine = fresh[0]
    with Trainer(engine, served=folder(way, 0)) as trainer:
        fleet = trainer.fleet
        updates: dict[str, Callable[[int], UpdateResult]] = {
            "disk": lambda new: fleet.update_weights(folder(way, new)),
            "tensor": lambda new: fleet.update_weights(states[new], transport="tensor"),
            "distributed": lambda new: fleet.update_weights(states[new], transport="distributed"),
        }
        for how, update in updates.items():
            for new in (1, 0):
                if not engine.running:
                    say("fp8", way=way, how=how, new=new, engine="has ended")
                    return
                try:
                    result = update(new)
                except FleetError as error:
                    say("fp8", way=way, how=how, new=new, error=str(error), details=error.details[:2])
                    continue
                tokens, checksum = engine.tokens(), engine.checksum()
                say(
                    "fp8",
                    way=way,
                    how=how,
                    new=new,
                    seconds=rounded(result.seconds),
                    tokens_right=tokens == right[new][0],
                    checksum_right=checksum == right[new][1],
                    told_apart=right[0] != right[1],
                )
