"""What somebody asks of single engines, by annotations of their ServerGroup (`kubectl rolloutfleet restart|resume`).

A request names a life, INDEX-eEPOCH, and so is carried out once however often it is read: the next life is not meant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rolloutfleet.api.names import ANNOTATION_RESTART, ANNOTATION_RESUME
from rolloutfleet.api.server_group import EngineStatus, ServerGroup

_LIFE = re.compile(r"(\d{1,6})-e(\d{1,9})")


@dataclass(frozen=True)
class Requests:
    restart: frozenset[tuple[int, int]] = frozenset()
    """(index, epoch) of lives that are to end, in good order."""
    resume: frozenset[tuple[int, int]] = frozenset()
    """Of lives that wait, and are to begin now."""
    unreadable: str = ""
    """What cannot be understood, and what would be right; empty when all can."""

    def restarts(self, record: EngineStatus) -> bool:
        return (record.index, record.epoch) in self.restart

    def resumes(self, record: EngineStatus) -> bool:
        return (record.index, record.epoch) in self.resume | self.restart


def requests_of(group: ServerGroup) -> Requests:
    annotations = group.metadata.get("annotations") or {}
    if group.spec.external is not None and annotations.keys() & {ANNOTATION_RESTART, ANNOTATION_RESUME}:
        return Requests(unreadable="external engines are not ours to restart or resume: ask their owner")
    restart, bad_restart = _lives(annotations, ANNOTATION_RESTART)
    resume, bad_resume = _lives(annotations, ANNOTATION_RESUME)
    return Requests(restart=restart, resume=resume, unreadable=bad_restart or bad_resume)


def _lives(annotations: dict[str, str], name: str) -> tuple[frozenset[tuple[int, int]], str]:
    words = [word.strip() for word in annotations.get(name, "").split(",") if word.strip()]
    found = [_LIFE.fullmatch(word) for word in words]
    bad = next((word for word, match in zip(words, found, strict=True) if match is None), None)
    lives = frozenset((int(match[1]), int(match[2])) for match in found if match is not None)
    wrong = f"annotation {name}: {bad[:60]!r} is no INDEX-eEPOCH, for example 0-e3" if bad is not None else ""
    return lives, wrong
