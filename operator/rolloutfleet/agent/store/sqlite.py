"""A file on a volume of one node, written by one agent at a time.

WAL with synchronous=FULL: a transaction that was committed is on the disk. WAL needs memory that all openers of the
file share, so the volume must not be a network file system that two nodes mount: PostgreSQL is for that.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rolloutfleet.agent.store.database import Row, Transaction, Values
from rolloutfleet.agent.store.errors import StoreBusy, StoreDamaged, StoreError, StoreUnwritable

BUSY_SECONDS = 5.0
"""How long a transaction waits for that of a former agent, which may be stopped in the middle of its last one."""

_KINDS: dict[int, type[StoreError]] = {
    sqlite3.SQLITE_BUSY: StoreBusy,
    sqlite3.SQLITE_LOCKED: StoreBusy,
    sqlite3.SQLITE_FULL: StoreUnwritable,
    sqlite3.SQLITE_IOERR: StoreUnwritable,  # quotas and limits of a file's size are told so
    sqlite3.SQLITE_READONLY: StoreUnwritable,
    sqlite3.SQLITE_CANTOPEN: StoreUnwritable,
    sqlite3.SQLITE_CORRUPT: StoreDamaged,
    sqlite3.SQLITE_NOTADB: StoreDamaged,
}


class SQLite:
    """For several threads, one transaction at a time."""

    bytes_type = "BLOB"
    schema_lock = ""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises StoreError."""
        self.path = Path(path)
        self._one = threading.Lock()
        with self._told():
            self._connection = sqlite3.connect(
                self.path, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS
            )
            mode = self._connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
            self._connection.execute("PRAGMA synchronous=FULL")
        if mode != "wal":
            self.close()
            raise StoreError(f"{self.path}: journal mode {mode}; the volume's file system bears no WAL")

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        with self._one, self._told():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def run(self, statement: str, **values: Any) -> list[Row]:
        return self._connection.execute(_ours(statement), values).fetchall()

    def run_many(self, statement: str, values: Iterable[Values]) -> None:
        self._connection.executemany(_ours(statement), values)

    def now(self) -> float:
        return time.time()

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            kind = _KINDS.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, StoreError)
            raise kind(f"{self.path}: {error}{self._room() if kind is StoreUnwritable else ''}") from error

    def _room(self) -> str:
        try:
            volume = os.statvfs(self.path.parent)
        except OSError as error:
            return f"; {error}"
        free = volume.f_bavail * volume.f_frsize
        return f"; {free} bytes are free on the volume. Nothing that was committed is lost: make room and go on"


def _ours(statement: str) -> str:
    return statement.replace("{lock}", "").replace("{skip_locked}", "")
