"""What an engine calls its weights: SGLang's `weight_version`, a text that it puts on every answer.

`3@1a2b3c4d` is version 3 of the fleet 1a2b3c4d. An address may pass to an engine of another fleet while a router still
lists it, and at the same version both would sign alike: so the label names the fleet. It proves no weights; that is
the checksum's part.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LABEL = re.compile(r"([0-9]{1,18})(?:@(\S+))?")
FLEET_CHARACTERS = 8


class WeightLabel(NamedTuple):
    version: int
    fleet: str
    """Empty in a plain number: given by an operator that did not sign yet, or by somebody else's trainer."""


def fleet_id(server_uid: str) -> str:
    """Short, and one RolloutServer object's alone: a server that is made anew under the same name is another fleet."""
    return server_uid[:FLEET_CHARACTERS]


def weight_label(version: int, fleet: str) -> str:
    return f"{version}@{fleet}" if fleet else str(version)


def parse_label(text: str) -> WeightLabel | None:
    """None for a text that names no version, as SGLang's own `default`."""
    found = _LABEL.fullmatch(text)
    return WeightLabel(int(found[1]), found[2] or "") if found else None


def belongs_elsewhere(text: str, fleet: str) -> bool:
    """Signed for another fleet. A label that names none belongs to nobody."""
    label = parse_label(text)
    return label is not None and label.fleet not in ("", fleet)


def claims(text: str, version: int, fleet: str) -> bool:
    """It says that these are the weights; a plain number may say so too, until it is signed."""
    return parse_label(text) in (WeightLabel(version, fleet), WeightLabel(version, ""))
