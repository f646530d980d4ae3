"""A model's tensors as a stream of buckets that SGLang takes: one whole tensor at a time, flat in bounded pieces.

A bucket is one tensor of bytes with the tensors one after the other, the widest element type first, so that each lies
at a multiple of its own (SGLang's FlattenedTensorBucket reads them as views and refuses others).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from rolloutfleet.api.agent import TensorMeta
from rolloutfleet.trainer.errors import NonFiniteWeights, ZeroWeights

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
    bucket is given out, and ZeroWeights before the last one is."""
    numbers = NumberCheck()
    waiting: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in whole:
        if waiting and size + tensor.nbytes > limit_bytes:
            if check:
                numbers.look(waiting)
            yield _bucket(waiting)
            waiting, size = [], 0
        waiting.append((name, tensor))
        size += tensor.nbytes
    if check:
        numbers.look(waiting)
        numbers.end()
    if waiting:
        yield _bucket(waiting)


class NumberCheck:
    """Of all tensors of an update, in parts."""

    def __init__(self) -> None:
        self._matrices = 0
        self._zeros = 0

    def look(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Raises NonFiniteWeights naming a tensor. One pass over each, and one wait for a device and type."""
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in named:
            local = held_here(tensor).detach()
            self._matrices += local.dim() > 1
            if local.is_floating_point() and local.numel():
                comparable = local if local.element_size() > 1 else local.bfloat16()  # float8 has no order in torch
                alike.setdefault((comparable.device, comparable.dtype), []).append((name, comparable))
        for (device, _), group in alike.items():
            greatest: list[float] = _greatest(device, [tensor for _, tensor in group]).tolist()
            for (name, tensor), value in zip(group, greatest, strict=True):
                if not math.isfinite(value):
                    raise NonFiniteWeights(f"{name}: holds NaN or an infinity")
                self._zeros += tensor.dim() > 1 and value == 0.0

    def end(self) -> None:
        """That was all. Raises ZeroWeights: single matrices may be zero, all of them are a mistake."""
        if self._matrices and self._zeros == self._matrices:
            raise ZeroWeights(
                f"all {self._matrices} matrices hold nothing but zeros: were they gathered, and loaded or initialised, "
                "before they were sent?"
            )


def _greatest(device: torch.device, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Of each tensor the greatest absolute value, which NaN counts as: [number of tensors]."""
    import torch

    if device.type == "cpu":  # a tenth of the time of torch.isfinite
        return torch.stack([torch.stack(torch.aminmax(tensor)).abs().amax() for tensor in tensors])
    # One launch for all, as torch.nn.utils.clip_grad_norm_ does it.
    return torch.stack(torch._foreach_norm(tensors, ord=float("inf")))


def held_here(tensor: torch.Tensor) -> torch.Tensor:
    """This process's shard of a DTensor."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _bucket(named: Sequence[tuple[str, torch.Tensor]]) -> Bucket:
    import torch

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
