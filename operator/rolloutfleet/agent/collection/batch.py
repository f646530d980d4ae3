"""A step's batch as a trainer gets it: advantages over all of it, and one rank's share of its samples."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from rolloutfleet.api.collection import BatchHeader, Estimator, LeaseBatch
from rolloutfleet.api.sample_codec import encode
from rolloutfleet.api.samples import Sample
from rolloutfleet.plan.advantages import advantages
from rolloutfleet.plan.batching import schedule, split_evenly
from rolloutfleet.plan.collecting import trajectories

LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Batch:
    step: int
    weight_version: int
    groups: list[list[Sample]]
    advantages: list[list[float]]
    """By group and sample."""
    last: bool
    reward_key: str


def estimated(groups: Sequence[Sequence[Sample]], estimator: Estimator, reward_key: str) -> list[list[float]]:
    """By group and sample: a trajectory of many parts counts once. Raises ValueError."""
    parts = [trajectories(group) for group in groups]
    rewards = [
        [group[trajectory[-1]].reward_value(reward_key) for trajectory in of_group]
        for group, of_group in zip(groups, parts, strict=True)
    ]
    found = [[0.0] * len(group) for group in groups]
    for number, of_trajectories in enumerate(advantages(rewards, estimator)):
        for trajectory, value in zip(parts[number], of_trajectories, strict=True):
            for position in trajectory:
                found[number][position] = value
    return found


def share(batch: Batch, asked: LeaseBatch) -> tuple[BatchHeader, list[Sample]]:
    """What one rank trains. Raises ValueError where the samples cannot be divided among the ranks."""
    samples = [sample for group in batch.groups for sample in group]
    values = [value for group in batch.advantages for value in group]
    lengths = [len(sample.tokens) for sample in samples]
    if asked.token_budget is None:
        mine = split_evenly(lengths, asked.ranks)[asked.rank]
        micro_batches = [list(range(len(mine)))]
    else:
        planned = schedule(
            lengths, ranks=asked.ranks, token_budget=asked.token_budget, multiple=asked.micro_batch_multiple
        ).of(asked.rank)
        mine = sorted(position for micro_batch in planned for position in micro_batch)
        place = {position: number for number, position in enumerate(mine)}
        micro_batches = [[place[position] for position in micro_batch] for micro_batch in planned]
    header = BatchHeader(
        step=batch.step,
        weight_version=batch.weight_version,
        groups=len(batch.groups),
        samples=len(samples),
        rewards=[sample.reward_value(batch.reward_key) for sample in samples],
        positions=mine,
        advantages=[values[position] for position in mine],
        micro_batches=micro_batches,
        last=batch.last,
    )
    return header, [samples[position] for position in mine]


def framed(header: BatchHeader, samples: Sequence[Sample]) -> bytes:
    parts = [header.model_dump_json().encode(), *map(encode, samples)]
    return b"".join(piece for part in parts for piece in (LENGTH.pack(len(part)), part))
