"""One PostgreSQL database for several agents of a run."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from rolloutfleet.agent.store.database import Row, Transaction, Values
from rolloutfleet.agent.store.errors import StoreBusy, StoreError, StoreUnwritable

CONNECT_SECONDS = 10
STATEMENT_SECONDS = 60

_VALUE = re.compile(r":([a-z_]+)")


class PostgreSQL:
    """One connection, made when needed and again after it broke. For several threads, one transaction at a time."""

    bytes_type = "BYTEA"
    schema_lock = f"SELECT pg_advisory_xact_lock({0x726F6C6C})"  # CREATE IF NOT EXISTS alone collides

    def __init__(self, conninfo: str) -> None:
        """`conninfo`: a URL or keywords as libpq takes them."""
        self._conninfo = conninfo
        self._one = threading.Lock()
        self._connection: psycopg.Connection[Row] | None = None

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        with self._one, self._told():
            connection = self._connected()
            with connection.transaction():
                yield self

    def run(self, statement: str, **values: Any) -> list[Row]:
        cursor = self._connected().execute(_ours(statement), values)
        return cursor.fetchall() if cursor.description else []

    def run_many(self, statement: str, values: Iterable[Values]) -> None:
        with self._connected().cursor() as cursor:
            cursor.executemany(_ours(statement), list(values))

    def now(self) -> float:
        with self._one, self._told():
            return float(self.run("SELECT extract(epoch FROM clock_timestamp())")[0][0])

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self) -> psycopg.Connection[Row]:
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                self._conninfo,
                autocommit=True,  # transactions are explicit blocks
                connect_timeout=CONNECT_SECONDS,
                tcp_user_timeout=STATEMENT_SECONDS * 1000,
                options=f"-c statement_timeout={STATEMENT_SECONDS}s -c synchronous_commit=on"
                f" -c idle_in_transaction_session_timeout={STATEMENT_SECONDS}s",
            )
        return self._connection

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise _kind(error)(f"PostgreSQL: {type(error).__name__}: {error}") from error


def _kind(error: psycopg.Error) -> type[StoreError]:
    full = (psycopg.errors.DiskFull, psycopg.errors.ReadOnlySqlTransaction)
    if isinstance(error, full):
        return StoreUnwritable
    if isinstance(error, psycopg.OperationalError):  # unreachable, shut down, deadlock, serialisation, time-outs
        return StoreBusy
    return StoreError


def _ours(statement: str) -> str:
    located = statement.replace("{lock}", "FOR UPDATE").replace("{skip_locked}", "FOR UPDATE SKIP LOCKED")
    return _VALUE.sub(r"%(\1)s", located)
