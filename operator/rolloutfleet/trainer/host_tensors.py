"""Tensors as bytes on the host, as files hold them. torch and numpy are imported where they are needed:
the rest of this library runs in images that have neither."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from rolloutfleet.engine.changes import Elements

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}
"""torch's names and those of safetensors."""


class NonFiniteWeights(ValueError):
    """A tensor holds NaN or an infinity: engines would serve noise at full speed."""


@dataclass(frozen=True)
class HostTensor:
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    elements: Elements
    """Bit patterns; its own, whatever becomes of the tensor."""


def named_tensors(
    tensors: torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], in_base: frozenset[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """All of them; of tied ones in a module or mapping those that the base has. An iterable is taken as it comes."""
    import torch

    if not isinstance(tensors, torch.nn.Module | Mapping):
        yield from tensors
        return
    state = tensors.state_dict() if isinstance(tensors, torch.nn.Module) else tensors
    written: set[int] = set()
    for name, tensor in sorted(state.items(), key=lambda item: item[0] not in in_base):
        if tensor.data_ptr() in written and name not in in_base:
            continue  # tied to one that is written
        written.add(tensor.data_ptr())
        yield name, tensor


def on_host(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> HostTensor:
    """A copy, as `dtype` if that is given. Raises NonFiniteWeights, ValueError for a type that no checkpoint has."""
    import numpy as np
    import torch

    tensor = tensor.detach()
    narrow = tensor.is_floating_point() and tensor.element_size() == 1
    if not torch.isfinite(tensor.float() if narrow else tensor).all():
        raise NonFiniteWeights(f"{name}: holds NaN or an infinity; nothing was written")
    host = tensor.to(device="cpu", dtype=dtype or tensor.dtype).contiguous()
    if host.data_ptr() == tensor.data_ptr():
        host = host.clone()
    kind = str(host.dtype).removeprefix("torch.")
    if kind not in _DTYPES:
        raise ValueError(f"{name}: {host.dtype} has no name in safetensors; give dtype, for example torch.bfloat16")
    flat = host.reshape(-1).view(torch.uint8).numpy()
    return HostTensor(
        dtype=_DTYPES[kind], shape=tuple(host.shape), elements=flat.view(np.dtype(f"u{host.element_size()}"))
    )


def write_safetensors(file: Path, tensors: Mapping[str, HostTensor]) -> None:
    """As the package safetensors would, without a second copy of everything in memory. Raises OSError."""
    order = sorted(tensors, key=lambda name: (-tensors[name].elements.itemsize, name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].elements.nbytes
        header[name] = {"dtype": tensors[name].dtype, "shape": tensors[name].shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            stream.write(tensors[name].elements.data)
