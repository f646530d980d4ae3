"""What the ledger asks of a database, so that SQLite and PostgreSQL run the same statements.

Statements name their values `:name`. `{lock}` and `{skip_locked}` stand where rows that are read will be changed by the
same transaction: SQLite has one writer at a time and needs neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

Row = tuple[Any, ...]
Values = Mapping[str, Any]


class Transaction(Protocol):
    def run(self, statement: str, **values: Any) -> list[Row]:
        """Rows that it returns, if any. Raises StoreError."""

    def run_many(self, statement: str, values: Iterable[Values]) -> None:
        """Once for each of `values`. Raises StoreError."""


class Database(Protocol):
    bytes_type: str
    """Name of the column type for bytes."""
    schema_lock: str
    """Statement after which no other transaction makes tables, until this one ends; empty where that is so anyway."""

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Committed, durably, when the block ends; rolled back when it raises. Raises StoreError.

        StoreBusy at its end leaves open whether it was committed: only calls that may be repeated may be made in it.
        """

    def now(self) -> float:
        """Seconds since 1970, one clock for all that share the database."""

    def close(self) -> None: ...
