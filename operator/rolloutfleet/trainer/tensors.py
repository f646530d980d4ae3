"""A model's tensors as a stream of buckets that SGLang takes: one whole tensor at a time, flat in bounded pieces.

A bucket is one tensor of bytes with the tensors one after the other, the widest element type first, so that each lies
at a multiple of its own (SGLang's FlattenedTensorBucket reads them as views and refuses others).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from rolloutfleet.api.agent import TensorMeta
from rolloutfleet.trainer.errors import NonFiniteWeights

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = "torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]"
"""A model, its state dict, or (name, tensor) one after the other; names as in the served checkpoint."""


@dataclass(frozen=True)
class Bucket:
    tensors: list[TensorMeta]
    """In the order in which they lie in `flat`."""
    flat: torch.Tensor
    """uint8, one dimension, contiguous, on the device of the tensors."""


def resident(tensors: Tensors) -> Mapping[str, torch.Tensor] | None:
    """The state dict where all of it is there at once, sharded or not; None for a stream."""
    import torch

    if isinstance(tensors, torch.nn.Module):
        state: Mapping[str, torch.Tensor] = tensors.state_dict()
        return state
    return tensors if isinstance(tensors, Mapping) else None


def described(state: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> list[TensorMeta]:
    """What will be sent, without materialising it: a shard knows the shape of the whole."""
    return [_meta(name, tensor.shape, _cast(tensor.dtype, dtype)) for name, tensor in state.items()]


def sharded(state: Mapping[str, torch.Tensor]) -> bool:
    """Some of it must be gathered from other processes, all of which take part."""
    return any(hasattr(tensor, "full_tensor") for tensor in state.values())


def stream(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors in the wanted type, one at a time. A DTensor (FSDP2) is gathered, which is a collective call."""
    for name, tensor in tensors:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        yield name, whole.detach().to(_cast(whole.dtype, dtype))


def buckets(whole: Iterable[tuple[str, torch.Tensor]], limit_bytes: int, *, check: bool) -> Iterator[Bucket]:
    """Of at most `limit_bytes`, but for a tensor that is larger alone. With `check` raises NonFiniteWeights before a
    bucket is given out."""
    waiting: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in whole:
        if waiting and size + tensor.nbytes > limit_bytes:
            yield _bucket(waiting, check=check)
            waiting, size = [], 0
        waiting.append((name, tensor))
        size += tensor.nbytes
    if waiting:
        yield _bucket(waiting, check=check)


def refuse_non_finite(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raises NonFiniteWeights naming a tensor. One pass over each, and one wait for the device."""
    import torch

    floating = [(name, held_here(tensor)) for name, tensor in named if tensor.is_floating_point() and tensor.numel()]
    floating = [(name, local) for name, local in floating if local.numel()]
    if not floating:
        return
    # The extremes of a tensor with NaN are NaN; with an infinity, that.
    wide = [local.detach().float() if local.element_size() == 1 else local.detach() for _, local in floating]
    extremes = [torch.stack(torch.aminmax(local)).float() for local in wide]
    by_device: dict[Any, list[int]] = {}
    for position, pair in enumerate(extremes):
        by_device.setdefault(pair.device, []).append(position)
    for positions in by_device.values():
        finite = torch.isfinite(torch.stack([extremes[position] for position in positions])).all(dim=1).tolist()
        for position, fine in zip(positions, finite, strict=True):
            if not fine:
                raise NonFiniteWeights(f"{floating[position][0]}: holds NaN or an infinity")


def held_here(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a DTensor."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _bucket(named: Sequence[tuple[str, torch.Tensor]], *, check: bool) -> Bucket:
    import torch

    if check:
        refuse_non_finite(named)
    ordered = sorted(named, key=lambda item: -item[1].element_size())
    parts = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in ordered]
    return Bucket(
        tensors=[_meta(name, tensor.shape, tensor.dtype) for name, tensor in ordered],
        flat=torch.cat(parts) if len(parts) > 1 else parts[0].clone(),
    )


def _cast(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def _meta(name: str, shape: Sequence[int], dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(name=name, dtype=str(dtype).removeprefix("torch."), shape=list(shape))
