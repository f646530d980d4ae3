"""What to do about a reason: the runbook's words, from the runbook itself (docs/runbook.md; a wheel has a copy)."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_COPIES = (Path(__file__).with_name("runbook.md"), Path(__file__).parents[3] / "docs/runbook.md")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_ASIDE = re.compile(r"`[^`]*`|\([^)]*\)")
_WORD = re.compile(r"[A-Z]\w+")


def advice(reason: str, *, external: bool = False) -> str:
    """Empty for a reason that the runbook does not know. `external`: of an engine that somebody else runs."""
    return (external and _advice().get((reason, True))) or _advice().get((reason, False), "")


@cache
def _advice() -> dict[tuple[str, bool], str]:
    return parse(next((copy.read_text() for copy in _COPIES if copy.exists()), ""))


def parse(runbook: str) -> dict[tuple[str, bool], str]:
    """By (reason, whether of external engines only); of several rows about a reason the first counts."""
    found: dict[tuple[str, bool], str] = {}
    for section in runbook.split("\n## ")[1:]:
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
        if rows[:1] != [["reason", "meaning", "what to do"]]:
            continue
        for words, _, todo in rows[2:]:
            for reason in _WORD.findall(_ASIDE.sub("", words)):
                found.setdefault((reason, "(external engine)" in words), _LINK.sub(r"\1", todo))
    return found
