"""Tensors for engines that share this machine's memory: of a GPU by CUDA IPC, of a CPU by a file in /dev/shm.

Both pods must see the same /dev/shm (CUDA IPC keeps its counters there); neither needs the other's process or IPC
namespace. The payload is what SGLang's /update_weights_from_tensor takes for each rank: a pickle of
{"flattened_tensor": tensor, "metadata": [name, shape, dtype, start_idx, end_idx, numel]} in base64, made of globals
that its unpickler allows.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rolloutfleet.api.agent import UpdateEngine
from rolloutfleet.trainer.errors import Refused
from rolloutfleet.trainer.tensors import Bucket

if TYPE_CHECKING:
    import torch

DEVICE_ARGUMENT = 6
"""Of torch's rebuild_cuda_tensor: the GPU, for which SGLang takes a UUID, since pods count GPUs differently."""


@dataclass(frozen=True)
class Shared:
    """A bucket for engines on this machine."""

    payloads: dict[str, list[str]]
    """By UID of the engine, one for each rank."""
    flats: list[torch.Tensor]
    """What they refer to: must live until the engines have answered."""


def places(
    engines: Iterable[UpdateEngine], gpus: Callable[[UpdateEngine], Sequence[int]] | None
) -> dict[str, Sequence[int]]:
    """By UID, the GPU of each rank where it is said, as this process counts them. Raises Refused where it must be.

    A rank copies to its GPU what is on another one, unless its memory can be released: then CUDA refuses the write, and
    SGLang's scheduler dies of that (0.5.16, measured).
    """
    found: dict[str, Sequence[int]] = {}
    for engine in engines:
        if gpus is None:
            if engine.ranks > 1 and engine.releasable:
                raise Refused(
                    f"gpus: {engine.pod} has {engine.ranks} ranks whose memory can be released, so each takes tensors "
                    "from its own GPU only; say which one that is: gpus=lambda engine: [0, 1]",
                    code="BadRequest",
                )
            continue
        found[engine.uid] = list(gpus(engine))
        if len(found[engine.uid]) != engine.ranks:
            raise Refused(
                f"gpus: {found[engine.uid]} for {engine.pod}, which has {engine.ranks} ranks", code="BadRequest"
            )
    return found


def share(bucket: Bucket, engines: Iterable[UpdateEngine], gpus: Mapping[str, Sequence[int]]) -> Shared:
    """`gpus`: by UID, one for each rank; of those that are not in it all ranks take the bucket where it is.

    A payload for each reader: the counter of a handle goes down once for each that was opened.
    """
    metadata = _metadata(bucket)
    copies = {bucket.flat.device.index: bucket.flat}
    for gpu in {gpu for each in gpus.values() for gpu in each} - copies.keys():
        copies[gpu] = bucket.flat.to(f"cuda:{gpu}")
    here = bucket.flat.device.index
    told = {
        engine.uid: [_payload(copies[gpu], metadata) for gpu in gpus.get(engine.uid, [here] * engine.ranks)]
        for engine in engines
    }
    return Shared(told, list(copies.values()))


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
