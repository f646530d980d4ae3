"""Every sample is trained once, no budget is exceeded, and no rank waits longer than the known bounds allow."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rolloutfleet.plan.batching import largest_multiple, pack, schedule, split_by_length, split_evenly

LENGTHS = st.lists(st.integers(1, 1000), max_size=40)
RANKS = st.integers(1, 8)


@st.composite
def even_lengths(draw: st.DrawFn) -> tuple[list[int], int]:
    ranks = draw(RANKS)
    count = ranks * draw(st.integers(1, 6))
    return draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count)), ranks


def sums(parts: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in part) for part in parts]


@given(even_lengths())
def test_an_even_split_differs_by_no_more_than_two_samples_do(
    drawn: tuple[list[int], int],
) -> None:
    lengths, ranks = drawn
    parts = split_evenly(lengths, ranks)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    assert {len(part) for part in parts} == {len(lengths) // ranks}
    totals = sums(parts, lengths)
    assert max(totals) - min(totals) <= max(lengths) - min(lengths)


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 3))
def test_a_split_by_length_is_within_four_thirds_of_the_best(lengths: list[int], ranks: int) -> None:
    parts = split_by_length(lengths, ranks)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    best = min(
        max(sum(length for length, rank in zip(lengths, chosen, strict=True) if rank == r) for r in range(ranks))
        for chosen in itertools.product(range(ranks), repeat=len(lengths))
    )
    assert 3 * ranks * max(sums(parts, lengths)) <= (4 * ranks - 1) * best


@given(LENGTHS, st.integers(1, 1500))
def test_packing_takes_every_sample_once_and_keeps_the_budget(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    for bin, total in zip(bins, sums(bins, lengths), strict=True):
        assert total <= budget or len(bin) == 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), max_size=6), st.integers(20, 40))
def test_packing_takes_few_bins(lengths: list[int], budget: int) -> None:
    def fits(count: int, chosen: tuple[int, ...]) -> bool:
        totals = [0] * count
        for length, bin in zip(lengths, chosen, strict=True):
            totals[bin] += length
        return all(total <= budget for total in totals)

    counts = range(len(lengths) + 1)
    fewest = next(n for n in counts if any(fits(n, c) for c in itertools.product(range(n), repeat=len(lengths))))
    assert 9 * len(pack(lengths, budget)) <= 11 * fewest + 6, "11/9 OPT + 6/9 (Dosa 2007)"


@given(even_lengths(), st.integers(1, 1500), st.integers(1, 3))
def test_all_ranks_make_equally_many_micro_batches_within_the_budget(
    drawn: tuple[list[int], int], budget: int, multiple: int
) -> None:
    lengths, ranks = drawn
    fewest = max(len(pack([lengths[i] for i in part], budget)) for part in split_evenly(lengths, ranks))
    assume(-(-fewest // multiple) * multiple <= len(lengths) // ranks)
    made = schedule(lengths, ranks=ranks, token_budget=budget, multiple=multiple)
    everything = [bin for rank in range(ranks) for bin in made.of(rank)]
    assert sorted(itertools.chain(*everything)) == list(range(len(lengths)))
    assert all(bin for bin in everything)
    assert len({len(bins) for bins in made.micro_batches}) == 1
    assert len(made.of(0)) % multiple == 0
    for bin, total in zip(everything, sums(everything, lengths), strict=True):
        assert total <= budget or len(bin) == 1


@given(st.lists(st.integers(0, 9), max_size=9), st.integers(1, 12))
def test_a_global_batch_leaves_as_few_samples_as_can_be_for_the_next_step(sizes: list[int], multiple: int) -> None:
    kept = largest_multiple(sizes, multiple)
    assert kept == sorted({*kept})
    total = sum(sizes[number] for number in kept)
    assert total % multiple == 0
    best = max(
        sum(subset)
        for count in range(len(sizes) + 1)
        for subset in itertools.combinations(sizes, count)
        if sum(subset) % multiple == 0
    )
    assert total == best


def test_of_groups_of_one_size_the_last_ones_wait() -> None:
    assert largest_multiple([8] * 5, 16) == [0, 1, 2, 3]
    assert largest_multiple([8, 8, 7, 8], 8) == [0, 1, 3]
    assert largest_multiple([3, 3], 8) == []


def test_an_example_by_hand() -> None:
    lengths = [9, 8, 7, 1, 1, 1]
    assert sums(split_evenly(lengths, 3), lengths) == [10, 9, 8]
    assert sums(split_by_length([7, 6, 5, 4, 3], 2), [7, 6, 5, 4, 3]) == [14, 11]
    assert pack([6, 5, 4, 3, 2, 1], 7) == [[0, 5], [1, 4], [2, 3]]
    made = schedule([6, 5, 4, 3, 2, 1, 1, 1], ranks=2, token_budget=8)
    assert [len(bins) for bins in made.micro_batches] == [2, 2]


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ValueError, match="5 samples for 2 ranks"):
        schedule([1] * 5, ranks=2, token_budget=8)
    with pytest.raises(ValueError, match="2 samples a rank cannot make 4 micro-batches, a multiple of 4"):
        schedule([1] * 4, ranks=2, token_budget=8, multiple=4)
    with pytest.raises(ValueError, match="token_budget: 0"):
        pack([1], 0)
