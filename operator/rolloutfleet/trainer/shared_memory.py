"""Tensors for engines that share this machine's memory: of a GPU by CUDA IPC, of a CPU by a file in /dev/shm.

Both pods must see the same /dev/shm (CUDA IPC keeps its counters there); neither needs the other's process or IPC
namespace. The payload is what SGLang's /update_weights_from_tensor takes for each rank: a pickle of
{"flattened_tensor": tensor, "metadata": [name, shape, dtype, start_idx, end_idx, numel]} in base64, made of globals
that its unpickler allows.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rolloutfleet.api.agent import UpdateEngine
from rolloutfleet.trainer.tensors import Bucket

if TYPE_CHECKING:
    import torch

DEVICE_ARGUMENT = 6
"""Of torch's rebuild_cuda_tensor: the GPU, for which SGLang takes a UUID, since pods count GPUs differently."""


def payloads(bucket: Bucket, engines: Iterable[UpdateEngine]) -> dict[str, list[str]]:
    """By UID of the engine, one for each rank. `bucket` must live until the engines have answered.

    One for each reader: the counter of a handle goes down once for each that was opened.
    """
    metadata = _metadata(bucket)
    return {engine.uid: [_payload(bucket.flat, metadata) for _ in range(engine.ranks)] for engine in engines}


def collect() -> None:
    """Give back what readers have closed."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.ipc_collect()


def _metadata(bucket: Bucket) -> list[SimpleNamespace]:
    import torch

    found, start = [], 0
    for tensor in bucket.tensors:
        dtype = getattr(torch, tensor.dtype)
        shape = torch.Size(tensor.shape)
        end = start + shape.numel() * dtype.itemsize
        found.append(
            SimpleNamespace(name=tensor.name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=end - start)
        )
        start = end
    return found


def _payload(flat: torch.Tensor, metadata: list[SimpleNamespace]) -> str:
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing as multiprocessing

    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")  # by name: a descriptor would ask this process for it
    try:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump({"flattened_tensor": _Shared(flat), "metadata": metadata})
    finally:
        multiprocessing.set_sharing_strategy(before)
    return base64.b64encode(buffer.getvalue()).decode()


class _Shared:
    """Pickled as a handle of the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        import torch
        from torch.multiprocessing import reductions

        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        if self._tensor.is_cuda:
            uuid = str(torch.cuda.get_device_properties(self._tensor.device).uuid)
            arguments = (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
        return rebuild, arguments
