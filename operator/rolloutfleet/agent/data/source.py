"""Which prompt is number n of epoch e. The ledger keeps these numbers, so the answer never changes within a run."""

from __future__ import annotations

import hashlib
import random
import re
from array import array
from pathlib import Path
from typing import Any, Protocol

from rolloutfleet.agent.data.errors import DataError
from rolloutfleet.agent.data.json_lines import JsonLines
from rolloutfleet.agent.data.rows import to_prompt
from rolloutfleet.agent.data.tables import Table, files_of
from rolloutfleet.api.data import DataSource, Prompt

_SLICE = re.compile(r"(.+)@\[(-?\d*):(-?\d*)\]")
ORDERS_KEPT = 2
"""Epochs overlap: while one ends the next begins."""


class Rows(Protocol):
    fingerprint: str
    problems: list[str]

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> Any: ...
    def close(self) -> None: ...


class Prompts:
    """An opened data set."""

    def __init__(self, source: DataSource) -> None:
        """Reads and checks every row: minutes for many gigabytes. Raises DataError."""
        self._source = source
        path, first, end = _sliced(source.path)
        self._rows = _opened(path, lambda row: to_prompt(row, source))
        problems = self._rows.problems
        self._numbers = range(len(self._rows))[first:end]
        try:
            if problems and source.bad_rows == "refuse":
                message = f"{path}: {len(problems)} rows cannot be used; `bad_rows: skip` would leave them out"
                raise DataError(message, problems)
            if not self._numbers:
                raise DataError(f"{source.path}: no rows, of {len(self._rows)} that can be used", problems)
        except DataError:
            self.close()
            raise
        self.skipped = list(problems)
        """Rows that are left out, each with its line and why."""
        order = f"{self._numbers} {source.shuffle} {source.seed if source.shuffle else ''}"
        keys = f"{source.input_key} {source.label_key} {source.metadata_key} {source.multimodal_keys}"
        self.fingerprint = hashlib.sha256(f"{self._rows.fingerprint} {order} {keys}".encode()).hexdigest()[:32]
        self._orders: dict[int, array[int]] = {}

    def __len__(self) -> int:
        """Prompts an epoch."""
        return len(self._numbers)

    def get(self, epoch: int, prompt: int) -> Prompt:
        """Raises DataError if the file was changed meanwhile."""
        number = self._order(epoch)[prompt] if self._source.shuffle else prompt
        return to_prompt(self._rows[self._numbers[number]], self._source)

    def close(self) -> None:
        self._rows.close()

    def _order(self, epoch: int) -> array[int]:
        if epoch not in self._orders:
            numbers = list(range(len(self)))
            random.Random(self._source.seed + epoch).shuffle(numbers)  # noqa: S311 - an order, not a secret
            while len(self._orders) >= ORDERS_KEPT:
                del self._orders[min(self._orders)]
            self._orders[epoch] = array("Q", numbers)
        return self._orders[epoch]


def _opened(path: Path, check: Any) -> Rows:
    if path.is_dir():
        return Table(files_of(path), check)
    if path.suffix == ".parquet":
        return Table([path], check)
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return JsonLines(path, check)
    raise DataError(f"{path}: .jsonl, .parquet or a folder is needed" if path.exists() else f"{path}: no such file")


def _sliced(path: str) -> tuple[Path, int | None, int | None]:
    found = _SLICE.fullmatch(path)
    if not found:
        if path.endswith("]") and "@[" in path:
            raise DataError(f"{path}: a slice is written @[a:b]")
        return Path(path), None, None
    name, first, end = found.groups()
    try:
        return Path(name), int(first) if first else None, int(end) if end else None
    except ValueError as error:
        raise DataError(f"{path}: a slice is written @[a:b]") from error
