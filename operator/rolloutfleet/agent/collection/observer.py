"""What a collection tells whoever watches it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rolloutfleet.api.samples import Sample


@dataclass(frozen=True)
class Evaluation:
    name: str
    version: int
    """Committed when it began."""
    groups: Sequence[Sequence[Sample]]
    """By prompt, whatever became of the samples."""
    failed: int
    reward_key: str
    seconds: float


class Observer:
    """Hears everything and does nothing. All calls are from the agent's loop and must be quick."""

    def collection_began(self, *, trainer: str, step: int, reward_key: str) -> None: ...
    def sample_ended(self, sample: Sample) -> None: ...
    def group_finished(self, group: Sequence[Sample]) -> None: ...
    def group_dropped(self, group: Sequence[Sample], reason: str) -> None: ...
    def step_leased(self, step: int, groups: Sequence[Sequence[Sample]], version: int) -> None: ...
    def step_trained(self, step: int) -> None: ...
    def evaluation_ended(self, evaluation: Evaluation) -> None: ...
    def queue(self, *, open: int, finished: int, running: int) -> None: ...
