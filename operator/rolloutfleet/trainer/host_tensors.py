"""Tensors as bytes on the host, as files hold them. torch and numpy are imported where they are needed:
the rest of this library runs in images that have neither."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rolloutfleet.trainer.tensors import NumberCheck, Tensors, held_here, resident, stream

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


@dataclass(frozen=True)
class HostTensor:
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    elements: Elements
    """Bit patterns; its own, whatever becomes of the tensor."""


def on_host(
    tensors: Tensors, dtype: torch.dtype | None, *, in_base: frozenset[str]
) -> Iterator[tuple[str, HostTensor]]:
    """Copies, floating ones as `dtype` if that is given; of tied ones in a module or mapping those that the base has.

    A DTensor is gathered, which is a collective call. Raises NonFiniteWeights naming a tensor, ZeroWeights at the
    end, and ValueError for a type that no checkpoint has.
    """
    state = resident(tensors)
    named = _without_ties(state, in_base) if state is not None else cast("Iterable[tuple[str, torch.Tensor]]", tensors)
    numbers = NumberCheck()
    for name, tensor in stream(named, dtype):
        numbers.look([(name, tensor)])
        yield name, _copied(name, tensor)
    numbers.end()


def _without_ties(state: Mapping[str, torch.Tensor], in_base: frozenset[str]) -> Iterator[tuple[str, torch.Tensor]]:
    written: set[int] = set()
    for name, tensor in sorted(state.items(), key=lambda item: item[0] not in in_base):
        place = held_here(tensor).data_ptr()
        if place in written and name not in in_base:
            continue  # tied to one that is written
        written.add(place)
        yield name, tensor


def _copied(name: str, tensor: torch.Tensor) -> HostTensor:
    import numpy as np
    import torch

    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in _DTYPES:
        raise ValueError(f"{name}: {tensor.dtype} has no name in safetensors; give dtype, for example torch.bfloat16")
    # Always: what is on the host already is trained in place.
    host = tensor.to(device="cpu", copy=True).contiguous()
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
