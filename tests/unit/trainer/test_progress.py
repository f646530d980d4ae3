"""The progress line: values by hand, and never longer than it may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rolloutfleet.trainer import progress_line


def test_share_bar_times_and_figures() -> None:
    line = progress_line(25, 100, seconds=50, width=79, reward=0.7126, tokens=12_345.0, stale=None)
    # All but the bar takes 68 characters, so it has 11: a quarter of them is 2 and 6 eighths.
    assert line == " 25% |██▊        | 25/100 [00:50<02:30, 2.00s/step, reward 0.713, tokens 12.3k]"


def test_the_bar_has_what_the_rest_leaves_and_none_where_that_is_little() -> None:
    times = "1/2 [1:01:01<1:01:01, 3661.00s/step]"
    assert progress_line(1, 2, seconds=3661, width=60) == f" 50% |████████        | {times}"
    assert progress_line(1, 2, seconds=3661, width=46) == f" 50%  {times}".ljust(46)


def test_before_the_first_step_nothing_is_known_about_the_time_to_come() -> None:
    line = progress_line(0, 10, seconds=3, width=60)
    assert line.startswith("  0% |  ")
    assert line.endswith("| 0/10 [00:03<?, ?s/step]")


def test_a_run_without_an_end_and_one_that_went_past_it_have_a_line_too() -> None:
    assert progress_line(0, 0, seconds=0, width=40).startswith("  0% |")
    assert progress_line(12, 10, seconds=12, width=50).startswith("100% |███████████| 12/10 [00:12<00:00")


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.floats(0, 1e7),
    st.integers(1, 200),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_it_fills_its_width_whatever_it_is_told(
    done: int, total: int, seconds: float, width: int, value: float
) -> None:
    assert len(progress_line(done, total, seconds=seconds, width=width, value=value)) == width
