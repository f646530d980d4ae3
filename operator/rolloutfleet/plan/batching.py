"""How the samples of a step become micro-batches of data-parallel ranks: pure, deterministic, every sample once.

Lengths are tokens a sample, prompt and response. Results are numbers of samples, so every rank that has the same
lengths makes the same plan: no rank has to tell another.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    micro_batches: list[list[list[int]]]
    """By rank: its micro-batches, each the numbers of its samples. All ranks have equally many, none of them empty."""

    def of(self, rank: int) -> list[list[int]]:
        return self.micro_batches[rank]


def schedule(lengths: Sequence[int], *, ranks: int, token_budget: int, multiple: int = 1) -> Schedule:
    """Equally many samples and micro-batches for each of `ranks`, of at most `token_budget` tokens each; a longer
    sample is alone in one. `multiple`: the number of micro-batches is a multiple of it (pipeline stages that
    interleave).

    Raises ValueError where the samples cannot be divided so: see `largest_multiple`.
    """
    if len(lengths) % ranks:
        raise ValueError(f"{len(lengths)} samples for {ranks} ranks: trim them to a multiple first")
    parts = split_evenly(lengths, ranks)
    packed = [[[part[i] for i in bin] for bin in pack([lengths[i] for i in part], token_budget)] for part in parts]
    wanted = -(-max(map(len, packed), default=0) // multiple) * multiple
    if wanted > len(lengths) // ranks:
        raise ValueError(
            f"{len(lengths) // ranks} samples a rank cannot make {wanted} micro-batches, a multiple of {multiple}"
        )
    return Schedule([_divided(bins, lengths, wanted) for bins in packed])


def split_evenly(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Sample numbers by rank, equally many each, with sums of lengths that differ by no more than the longest and the
    shortest sample do (largest differencing method on tuples, as Karmarkar and Karp). Raises ValueError."""
    if ranks < 1 or len(lengths) % ranks:
        raise ValueError(f"{len(lengths)} samples cannot be split evenly over {ranks} ranks")
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    # A partial split: (spread of its sums, order of its making, [(sum, samples)] with the largest sum first).
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for made, start in enumerate(range(0, len(by_length), ranks)):
        parts = [(lengths[i], [i]) for i in by_length[start : start + ranks]]
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], made, parts))
    made = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], made, joined))
        made += 1
    return [sorted(part) for _, part in heap[0][2]] if heap else [[] for _ in range(ranks)]


def split_by_length(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Sample numbers by rank, as many each as fit: the longest sum is at most 4/3 of the best possible (Graham 1969,
    longest processing time first)."""
    if ranks < 1:
        raise ValueError(f"ranks: {ranks}; at least 1 is needed")
    parts: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        total, rank = heap[0]
        parts[rank].append(i)
        heapq.heapreplace(heap, (total + lengths[i], rank))
    return [sorted(part) for part in parts]


def pack(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Sample numbers in as few bins as first-fit decreasing makes: at most 11/9 of the fewest possible, plus 1. No bin
    has more than `token_budget` tokens but those of one sample that is longer."""
    if token_budget < 1:
        raise ValueError(f"token_budget: {token_budget}; at least 1 is needed")
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = next((b for b, left in enumerate(room) if lengths[i] <= left), None)
        if at is None:
            bins.append([])
            room.append(token_budget)
            at = len(bins) - 1
        bins[at].append(i)
        room[at] -= lengths[i]
    return [sorted(bin) for bin in bins]


def largest_multiple(sizes: Sequence[int], multiple: int) -> list[int]:
    """Numbers of the groups to train now so that their samples are a multiple of `multiple`: the dynamic global batch.
    `sizes`: samples by group. As few samples as possible wait for the next step, and of those the last groups."""
    if multiple < 1:
        raise ValueError(f"multiple: {multiple}; at least 1 is needed")
    surplus = sum(sizes) % multiple
    if not surplus:
        return list(range(len(sizes)))
    # For each remainder, the groups to leave out with the fewest samples.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for number in reversed(range(len(sizes))):
        for left, (samples, out) in list(best.items()):
            found = (samples + sizes[number], (*out, number))
            key = (left + sizes[number]) % multiple
            if key not in best or found[0] < best[key][0]:
                best[key] = found
    if surplus not in best:
        return []
    left_out = {*best[surplus][1]}
    return [number for number in range(len(sizes)) if number not in left_out]


def _divided(bins: list[list[int]], lengths: Sequence[int], wanted: int) -> list[list[int]]:
    """More bins of the same samples: the one with the most tokens that can be halved is, until there are enough."""
    bins = list(bins)
    while len(bins) < wanted:
        halved = max((b for b in bins if len(b) > 1), key=lambda b: sum(lengths[i] for i in b))
        bins.remove(halved)
        bins += [[halved[i] for i in part] for part in split_by_length([lengths[i] for i in halved], 2)]
    return bins
