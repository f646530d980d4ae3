"""Samples as tensors for a training step. Which samples a rank takes: rolloutfleet.plan.batching.

A token's log-prob, mask and advantage stand at its own position. Logits at position t speak of token t + 1, so a loss
takes `logits[:-1]` and everything else from position 1 on. Prompts and masked tokens have mask 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

from rolloutfleet.api.samples import Sample

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PackedBatch:
    """Samples one behind the other without padding, as flash attention's varlen functions take them: N tokens of S
    samples."""

    tokens: torch.Tensor
    """int64 [N]"""
    position_ids: torch.Tensor
    """int64 [N], from 0 in each sample"""
    cu_seqlens: torch.Tensor
    """int32 [S + 1], where samples begin, and N"""
    max_seqlen: int
    loss_mask: torch.Tensor
    """float32 [N]"""
    rollout_log_probs: torch.Tensor
    """float32 [N], 0 where no engine sampled"""
    advantages: torch.Tensor
    """float32 [N], its sample's for each response token, 0 for prompts"""

    def to(self, device: str | torch.device) -> PackedBatch:
        return _moved(self, device)


@dataclass(frozen=True)
class PaddedBatch:
    """A sample a row, padded on the right. S samples, the longest of T tokens."""

    tokens: torch.Tensor
    """int64 [S, T]"""
    attention_mask: torch.Tensor
    """int64 [S, T], 0 for padding"""
    loss_mask: torch.Tensor
    """float32 [S, T]"""
    rollout_log_probs: torch.Tensor
    """float32 [S, T]"""
    advantages: torch.Tensor
    """float32 [S, T]"""

    def to(self, device: str | torch.device) -> PaddedBatch:
        return _moved(self, device)


def packed(samples: Sequence[Sample], advantages: Sequence[float]) -> PackedBatch:
    """`advantages`: one a sample. Raises ValueError."""
    import torch

    rows = _rows(samples, advantages)
    lengths = torch.tensor([len(row) for row in rows.tokens], dtype=torch.int32)
    return PackedBatch(
        tokens=_flat(rows.tokens, torch.int64),
        position_ids=torch.cat([torch.arange(length) for length in lengths.tolist()]),
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen=int(lengths.max()),
        loss_mask=_flat(rows.loss_mask, torch.float32),
        rollout_log_probs=_flat(rows.log_probs, torch.float32),
        advantages=_flat(rows.advantages, torch.float32),
    )


def padded(samples: Sequence[Sample], advantages: Sequence[float], *, pad_token: int = 0) -> PaddedBatch:
    """`advantages`: one a sample. Raises ValueError."""
    import torch

    rows = _rows(samples, advantages)
    ones = [[1] * len(row) for row in rows.tokens]
    return PaddedBatch(
        tokens=_square(rows.tokens, torch.int64, pad_token),
        attention_mask=_square(ones, torch.int64),
        loss_mask=_square(rows.loss_mask, torch.float32),
        rollout_log_probs=_square(rows.log_probs, torch.float32),
        advantages=_square(rows.advantages, torch.float32),
    )


@dataclass
class _Rows:
    tokens: list[list[int]]
    loss_mask: list[list[int]]
    log_probs: list[list[float]]
    advantages: list[list[float]]


def _rows(samples: Sequence[Sample], advantages: Sequence[float]) -> _Rows:
    if len(samples) != len(advantages) or not samples:
        raise ValueError(f"{len(samples)} samples with {len(advantages)} advantages: one each is needed")
    rows = _Rows([], [], [], [])
    for sample, advantage in zip(samples, advantages, strict=True):
        before = len(sample.prompt_tokens)
        mask = [0] * sample.response_length if sample.remove_sample else sample.loss_mask
        rows.tokens.append(sample.tokens)
        rows.loss_mask.append([0] * before + mask)
        rows.log_probs.append([0.0] * before + sample.rollout_log_probs)
        rows.advantages.append([0.0] * before + [advantage] * sample.response_length)
    return rows


def _flat(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.cat([torch.tensor(row, dtype=dtype) for row in rows])


def _square(rows: Sequence[Sequence[float]], dtype: torch.dtype, value: float = 0) -> torch.Tensor:
    import torch

    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


Batch = TypeVar("Batch", PackedBatch, PaddedBatch)


def _moved(batch: Batch, device: str | torch.device) -> Batch:
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "max_seqlen"}
    return replace(batch, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})
