"""What has changed in a tensor is found, and done to the old one again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rolloutfleet.engine.changes import BadChanges, apply, encode

Pair = tuple[NDArray[Any], NDArray[Any]]


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """Old and new bit patterns, of any width and with any share of them changed."""
    dtype = np.dtype(draw(st.sampled_from(("u1", "u2", "u4", "u8"))))
    count = draw(st.integers(0, 3000))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = generator.integers(0, np.iinfo(dtype).max, count, dtype=dtype, endpoint=True)
    new = generator.integers(0, np.iinfo(dtype).max, count, dtype=dtype, endpoint=True)
    share = draw(st.sampled_from((0.0, 0.001, 0.01, 0.3, 1.0)))
    return old, np.where(generator.random(count) < share, new, old)


@given(pairs())
def test_applied_changes_give_the_new_bits(pair: Pair) -> None:
    old, new = pair
    changes, count = encode(old, new)
    assert count == int((old != new).sum())
    assert bool(changes) == bool(count)
    if changes:
        result = old.copy()
        apply(changes, result)
        assert result.tobytes() == new.tobytes()


@given(pairs(), st.data())
def test_damaged_changes_are_refused_or_stay_within_the_piece(pair: Pair, data: st.DataObject) -> None:
    changes, _ = encode(*pair)
    cut = data.draw(st.integers(0, max(len(changes) - 1, 0)))
    damaged = bytearray(changes[:cut] + data.draw(st.binary(max_size=4)) + changes[cut + 2 :])
    result = pair[0].copy()
    try:
        apply(bytes(damaged), result)
    except BadChanges:
        return
    assert result.shape == pair[0].shape


def test_few_small_changes_take_about_a_byte_each() -> None:
    generator = np.random.default_rng(1)
    old = generator.integers(0, 1 << 15, 1 << 20, dtype=np.uint16)
    new = old + (generator.random(1 << 20) < 0.01).astype(np.uint16)
    changes, count = encode(old, new)
    assert len(changes) < 1.5 * count


def test_what_inflates_beyond_the_piece_is_refused() -> None:
    changes, _ = encode(np.zeros(1 << 16, np.uint16), np.ones(1 << 16, np.uint16))
    with pytest.raises(BadChanges, match="too long"):
        apply(changes, np.zeros(8, np.uint16))
