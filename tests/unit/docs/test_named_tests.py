"""Tests that documents name exist, and each complaint about other operators and each case that broke others has one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from unit.docs.test_docs import DOCS, PAGES, ROOT

NAMED = re.compile(r"`([\w/.-]+\.py)::(\w+)(?:\[[^`]*\])?`")
"""`path::test`, of one that is parametrised with or without the parameters."""
COMPLAINTS = DOCS / "peers-complaints.md"
OWN_TESTS = "tests/unit/plan/test_complaints.py"
CASES = {
    DOCS / "cases-operator.md": {6, 7, 9, 12, 14, 15, 17, 19, 20, 21, 23, 24, 25, 47, 65, 67, 70, 72},
    DOCS / "cases-samples.md": {27, 28, 29, 30, 50, 51, 55, 56, 57, 58, 61, 62, 64},
    DOCS / "cases-weights.md": {30, 34, 35, 38, 39, 40, 41},
}
"""Tables of cases, and the numbers that each has."""
TESTS_OF_CASES = (
    "tests/unit/plan/test_cases.py",
    "tests/unit/agent/test_cases.py",
    "tests/unit/collection/test_cases.py",
    "tests/api_server/test_injected_pods.py",
)


@cache
def collected_from(path: str) -> frozenset[str]:
    """Functions at the top of a file, and methods of unittest's classes: nothing else is collected here."""
    module = ROOT / path
    tree = ast.parse(module.read_text()) if module.is_file() else ast.Module([], [])
    parts = [*tree.body, *(part for node in tree.body if isinstance(node, ast.ClassDef) for part in node.body)]
    return frozenset(node.name for node in parts if isinstance(node, ast.FunctionDef))


def rows(page: Path = COMPLAINTS) -> Iterator[tuple[int, str]]:
    """(number, text) of each complaint, or case."""
    for line in page.read_text().splitlines():
        if numbered := re.match(r"\| C?(\d+) \|", line):
            yield int(numbered[1]), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    missing = [f"{path}::{name}" for path, name in NAMED.findall(page.read_text()) if name not in collected_from(path)]
    assert missing == []


def test_nothing_that_looks_like_the_name_of_a_test_is_overlooked() -> None:
    for page in PAGES:
        text = page.read_text()
        assert text.count(".py::") == len(NAMED.findall(text)), page.name


def test_every_complaint_is_there_once_and_has_a_test() -> None:
    assert [number for number, _ in rows()] == list(range(1, 37))
    assert [number for number, text in rows() if not NAMED.search(text)] == []


def test_a_test_that_was_written_for_a_complaint_is_named_in_its_row() -> None:
    named = {(number, name) for number, text in rows() for path, name in NAMED.findall(text) if path == OWN_TESTS}
    written = {(int(name.split("_")[1]), name) for name in collected_from(OWN_TESTS) if name.startswith("test_")}
    assert written - named == set()


@pytest.mark.parametrize("page", CASES, ids=lambda page: page.name)
def test_every_case_is_there_once_and_has_a_test(page: Path) -> None:
    assert [number for number, _ in rows(page)] == sorted(CASES[page])
    assert [number for number, text in rows(page) if not NAMED.search(text)] == []


def test_a_test_that_was_written_for_a_case_is_named_in_its_row() -> None:
    named = {(number, name) for page in CASES for number, text in rows(page) for _, name in NAMED.findall(text)}
    written = {
        (int(numbered[1]), name)
        for path in TESTS_OF_CASES
        for name in collected_from(path)
        if (numbered := re.match(r"test_(\d+)_", name))
    }
    assert written - named == set()
