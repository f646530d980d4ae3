"""Samples and tokens over the last minutes, in slots of a few seconds."""

from __future__ import annotations

from rolloutfleet.api.samples_view import Throughput

SLOT_SECONDS = 5.0
SLOTS = 120
WINDOW_SLOTS = 12


class Meter:
    """`now`: seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[int, int]] = {}
        """(samples, tokens) by number of the slot."""
        self._began: float | None = None

    def add(self, now: float, *, tokens: int) -> None:
        if self._began is None:
            self._began = now
        slot = int(now // SLOT_SECONDS)
        samples, before = self._slots.get(slot, (0, 0))
        self._slots[slot] = (samples + 1, before + tokens)
        if len(self._slots) > SLOTS:
            del self._slots[min(self._slots)]

    def view(self, now: float) -> Throughput:
        if self._began is None:
            return Throughput(slot_seconds=SLOT_SECONDS)
        current = int(now // SLOT_SECONDS)
        first = current - WINDOW_SLOTS + 1
        # At least a second: a burst that came just now says little about a rate.
        window = max(now - max(first * SLOT_SECONDS, self._began), 1.0)
        recent = [count for slot, count in self._slots.items() if slot >= first]
        oldest = max(current - SLOTS + 1, int(self._began // SLOT_SECONDS))
        return Throughput(
            samples_per_second=sum(samples for samples, _ in recent) / window,
            tokens_per_second=sum(tokens for _, tokens in recent) / window,
            window_seconds=window,
            slot_seconds=SLOT_SECONDS,
            series=[self._slots.get(slot, (0, 0))[1] / SLOT_SECONDS for slot in range(oldest, current)],
        )
