"""More than one process on either side: an engine of two ranks, two senders, a trainer whose shards are on two GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import load_file

from gpu.machine import FOLDER, GpuEngine
from gpu.setting import BESIDE, BOTH, FAR, Reference, Trainer, checkpoint, own_gpus, rounded, say, states
from rolloutfleet.trainer import Refused
from servers import free_port

TURNS = (1, 0, 1)

Story = subprocess.Popen[str]
"""A process of the trainer: for each line {"seed", "update"} it does an update and answers with a line."""

STORY = """
import json, os, sys
import torch
from safetensors.torch import load_file
from rolloutfleet.trainer import connect

url, device, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if device != "cpu":
    torch.cuda.set_device(device)
own = options.pop("pods", None)
if own:
    options["engines"] = lambda engine: engine.pod in own
part, parts = options.pop("part", (0, 1))
weights = []
for path in options.pop("checkpoints"):
    whole = load_file(path, device=device)
    weights.append({name: whole[name] for name in sorted(whole)[part::parts]})
    del whole
fleet = connect("actor", url=url)
print("ready", flush=True)
for line in sys.stdin:
    told = json.loads(line)
    result = fleet.update_weights(weights[told["seed"]], timeout=60.0, update=told["update"], **options)
    outcomes = [verdict.outcome for verdict in result.engines]
    print(json.dumps({"outcomes": outcomes, "seconds": result.seconds, "bytes": result.bytes}), flush=True)
fleet.close()
"""

SHARDED = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2ForCausalLM
from rolloutfleet.trainer import connect, gather

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
mesh = dist.init_device_mesh("cuda", (2,))
models = []
for folder in json.loads(sys.argv[2]):
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    models.append(fully_shard(model, mesh=mesh))
fleet = connect("actor", url=sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    model = models[json.loads(line)["seed"]]
    if rank:
        gather(model)
        print(json.dumps({}), flush=True)
        continue
    result = fleet.update_weights(model, timeout=60.0)
    outcomes = [verdict.outcome for verdict in result.engines]
    print(json.dumps({"outcomes": outcomes, "seconds": result.seconds, "bytes": result.bytes}), flush=True)
fleet.close()
dist.destroy_process_group()
"""


def ranks() -> None:
    """An engine of two ranks: by CUDA IPC with a copy on each GPU, and by gloo from the trainer's CPU."""
    engine = GpuEngine.found(BOTH)
    right = Reference(engine).tokens
    with Trainer(engine, ranks=2) as trainer:
        on_gpu = states()
        try:
            trainer.fleet.update_weights(on_gpu[1], transport="tensor")
        except Refused as refused:
            say("ranks without gpus", refused=str(refused), committed=trainer.fleet.weight_version)
        for new in TURNS:
            result = trainer.fleet.update_weights(on_gpu[new], transport="tensor", gpus=own_gpus, timeout=60.0)
            _told("ranks ipc", result.seconds, right[new] == engine.tokens())
        del on_gpu
        torch.cuda.empty_cache()
        for new in TURNS:
            result = trainer.fleet.update_weights(load_file(checkpoint(new)), timeout=60.0)
            _told("ranks gloo", result.seconds, right[new] == engine.tokens())


def ranks_nccl() -> None:
    """An engine of two ranks by NCCL, which takes no GPU twice: so it is told that the trainer, which shares one with
    the engine here, is on another host, and goes through sockets."""
    engine = GpuEngine.found(BOTH)
    right = Reference(engine).tokens
    elsewhere = [{"NCCL_HOSTID": "another"}]
    with (
        Trainer(engine, ranks=2) as trainer,
        _trainers(STORY, [_sender(trainer, "cuda:0", {})], elsewhere) as processes,
    ):
        _updates("ranks nccl", processes, {engine.name: right}, [engine])


def senders() -> None:
    """Two senders, each with half of the tensors, over NCCL; then each with all of them for the engine on its GPU."""
    beside, far = GpuEngine.found(BESIDE), GpuEngine.found(FAR[0])
    right = {engine.name: Reference(engine).tokens for engine in (beside, far)}
    with Trainer(far) as trainer:
        halves = [_sender(trainer, "cuda:0", {"senders": 2, "sender": n, "part": (n, 2)}) for n in range(2)]
        with _trainers(STORY, halves) as processes:
            _updates("senders nccl", processes, right, [far])
    with Trainer(beside, far) as trainer:
        own = [
            _sender(trainer, f"cuda:{n}", {"senders": 2, "sender": n, "transport": "tensor", "pods": [engine.name]})
            for n, engine in enumerate((beside, far))
        ]
        with _trainers(STORY, own) as processes:
            _updates("senders ipc", processes, right, [beside, far])


def shards() -> None:
    """FSDP2 over both GPUs; rank 0 gathers a tensor at a time and sends it to the engine on the other GPU."""
    far = GpuEngine.found(FAR[0])
    right = {far.name: Reference(far).tokens}
    with Trainer(far) as trainer:
        arguments = [trainer.agent.url, json.dumps([str(FOLDER / f"m{seed}") for seed in (0, 1)])]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        told = [{**meeting, "RANK": str(rank), "NCCL_CUMEM_ENABLE": "0"} for rank in range(2)]
        with _trainers(SHARDED, [arguments, arguments], told) as processes:
            _updates("shards", processes, right, [far])


def _sender(trainer: Trainer, device: str, options: dict[str, Any]) -> list[str]:
    return [trainer.agent.url, device, json.dumps({"checkpoints": [checkpoint(0), checkpoint(1)], **options})]


@contextmanager
def _trainers(
    story: str, arguments: Sequence[Sequence[str]], environments: Sequence[dict[str, str]] = ({}, {})
) -> Iterator[list[Story]]:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", story, *each],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for each, environment in zip(arguments, environments, strict=False)
    ]
    try:
        for process in processes:
            _line(process)
        yield processes
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            if process.wait(30) != 0:
                raise RuntimeError(f"a process of the trainer ended with {process.returncode}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _updates(
    phase: str, processes: Sequence[Story], right: dict[str, list[list[int]]], engines: Sequence[GpuEngine]
) -> None:
    for turn, new in enumerate(TURNS):
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"seed": new, "update": f"turn{turn:06d}"}) + "\n")
            process.stdin.flush()
        answers = [json.loads(_line(process)) for process in processes]
        correct = all(engine.tokens() == right[engine.name][new] for engine in engines)
        first = answers[0]
        _told(phase, first["seconds"], correct, outcomes=first["outcomes"], bytes=first["bytes"])


def _line(process: Story) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the trainer ended with {process.wait()}")
    return line


def _told(phase: str, seconds: dict[str, float], tokens_right: bool, **more: Any) -> None:
    say(phase, seconds=rounded(seconds), tokens_right=tokens_right, **more)
