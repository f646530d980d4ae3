"""Weight versions made of numpy arrays: what a trainer would write, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rolloutfleet.engine.checkpoint import ITEM_BYTES, tensors_in
from rolloutfleet.trainer.deltas import DeltaWriter
from rolloutfleet.trainer.host_tensors import HostTensor, write_safetensors

Weights = dict[str, tuple[str, NDArray[Any]]]
"""Name to dtype (as safetensors names it) and bit patterns."""


def bits(dtype: str, *values: int) -> tuple[str, NDArray[Any]]:
    return dtype, np.array(values, dtype=f"u{ITEM_BYTES[dtype]}")


def host(weights: Weights) -> Iterator[tuple[str, HostTensor]]:
    for name, (dtype, elements) in weights.items():
        yield name, HostTensor(dtype=dtype, shape=elements.shape, elements=elements.reshape(-1).copy())


def served_model(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return folder


def writer(root: Path, *, full_every: int = 20) -> DeltaWriter:
    (root / "weights").mkdir(exist_ok=True)
    return DeltaWriter(root / "weights", base=served_model(root / "base"), full_every=full_every)


def foreign_checkpoint(folder: Path, weights: Weights) -> Path:
    """As somebody else's program writes one."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    write_safetensors(folder / "model.safetensors", dict(host(weights)))
    return folder


def read_weights(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = {}
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        for name, tensor in tensors_in(file).items():
            found[name] = (tensor.dtype, tensor.shape, data[tensor.begin : tensor.end])
    return found


def as_read(weights: Weights) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (dtype, elements.shape, elements.tobytes()) for name, (dtype, elements) in weights.items()}


class Killed(BaseException):
    """No cleaning up follows: whatever it would do to files raises this again."""


CALLS: Mapping[str, tuple[str, ...]] = {
    "os": ("mkdir", "rename", "rmdir", "unlink", "open", "pwrite", "preadv", "fsync", "utime", "chmod"),
    "shutil": ("copyfile", "rmtree"),
}


@contextmanager
def killed_at(call: int) -> Iterator[list[str]]:
    """The process ends before its `call`-th step on files. Yields the steps that were made, to which a test may look:
    when fewer steps were made than that, nobody was killed."""
    import os
    import shutil

    steps: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (os, shutil):
            for name in CALLS[module.__name__]:
                original = getattr(module, name)

                def step(*args: Any, _name: str = name, _original: Any = original, **named: Any) -> Any:
                    if len(steps) >= call:
                        raise Killed
                    steps.append(_name)
                    return _original(*args, **named)

                patch.setattr(module, name, step)
        yield steps
