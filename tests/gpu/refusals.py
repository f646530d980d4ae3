"""What the trainer library refuses before anything is paused: NCCL set up otherwise than the engines', bad numbers."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from gpu.machine import GpuEngine
from gpu.setting import FAR, Trainer, checkpoint, say
from rolloutfleet.trainer import NonFiniteWeights
from rolloutfleet.trainer.tensors import NumberCheck

MISMATCHED = """
import sys, time
from safetensors.torch import load_file
from rolloutfleet.trainer import connect
weights = load_file(sys.argv[2], device="cuda:0")
began = time.perf_counter()
try:
    connect("actor", url=sys.argv[1]).update_weights(weights)
except Exception as error:
    print(f"{time.perf_counter() - began:.3f} s: {type(error).__name__}: {error}")
"""


def mismatch() -> None:
    """NCCL_CUMEM_ENABLE differs from the engines': refused before anything is paused. Else the broadcast hangs."""
    engine = GpuEngine.found(FAR[0])
    with Trainer(engine) as trainer:
        asked = subprocess.run(
            [sys.executable, "-c", MISMATCHED, trainer.agent.url, checkpoint(1)],
            env={**os.environ, "NCCL_CUMEM_ENABLE": "1"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
        say("mismatch", refused=asked.stdout.strip(), committed=trainer.fleet.weight_version)


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
