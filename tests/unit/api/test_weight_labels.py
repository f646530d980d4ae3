"""A label of weights says which version of which fleet; other people's labels are told apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutfleet.api.weight_labels import WeightLabel, belongs_elsewhere, claims, fleet_id, parse_label, weight_label

fleets = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=8)


@given(version=st.integers(0, 10**18 - 1), fleet=fleets | st.just(""))
def test_what_is_written_is_read(version: int, fleet: str) -> None:
    assert parse_label(weight_label(version, fleet)) == WeightLabel(version, fleet)


@pytest.mark.parametrize(
    "text", ["default", "", "None", "-1", "1.5", "@f", "1@", "1@a b", "²", "v3", "3@f\n", "9" * 5000]
)
def test_a_text_without_a_version_is_no_label(text: str) -> None:
    assert parse_label(text) is None
    assert not belongs_elsewhere(text, "f")
    assert not claims(text, 1, "f")


def test_a_label_belongs_to_its_fleet_and_a_plain_number_to_nobody() -> None:
    assert claims("3@f", 3, "f")
    assert claims("3", 3, "f")
    assert not claims("2@f", 3, "f")
    assert not claims("3@g", 3, "f")
    assert belongs_elsewhere("3@g", "f")
    assert not belongs_elsewhere("2@f", "f")
    assert not belongs_elsewhere("3", "f")


def test_a_fleet_is_known_by_the_beginning_of_its_servers_uid() -> None:
    assert fleet_id("5e1f0a27-8c4b-4f7e-9d3a-000000000001") == "5e1f0a27"
