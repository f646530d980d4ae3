"""Stores of both kinds, with a clock that tests move and connections that break at a chosen statement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from rolloutfleet.agent.store.database import Database, Row, Transaction, Values
from rolloutfleet.agent.store.handover import Handover
from rolloutfleet.agent.store.ledger import Claim, GroupUpdate, Ledger, Run
from rolloutfleet.agent.store.postgres import PostgreSQL
from rolloutfleet.agent.store.schema import prepare
from rolloutfleet.agent.store.sqlite import SQLite
from rolloutfleet.api.samples import Sample, SampleStatus, VersionSpan

RUN = Run("run", source="sha256:abc", epoch_size=6, epochs=2)


class Crash(Exception):
    """The process died here: nobody sees an answer, and the connection is gone."""


@dataclass
class Opened:
    databases: list[Database] = field(default_factory=list)

    def close(self) -> None:
        for database in self.databases:
            database.close()


class Breakable:
    """A database whose process dies after `fuse` statements; BEGIN and COMMIT count too. A fuse that ends with the
    COMMIT's statement stands for the worst moment: committed, and nobody was told."""

    def __init__(self, inner: Database, clock: Callable[[], float]) -> None:
        self._inner, self._clock = inner, clock
        self.bytes_type, self.schema_lock = inner.bytes_type, inner.schema_lock
        self.fuse: int | None = None

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        self._burn()
        with self._inner.transaction() as self._current:
            yield self
            self._burn()
        self._burn()

    def run(self, statement: str, **values: Any) -> list[Row]:
        rows = self._current.run(statement, **values)
        self._burn()
        return rows

    def run_many(self, statement: str, values: Iterable[Values]) -> None:
        for one in values:
            self._current.run_many(statement, [one])
            self._burn()

    def now(self) -> float:
        return self._clock()

    def close(self) -> None:
        self._inner.close()

    def _burn(self) -> None:
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Crash


@dataclass
class Store:
    """`connect` opens it as another process would."""

    open: Callable[[], Database]
    opened: Opened
    time: float = 1000.0

    def connect(self) -> Breakable:
        inner = self.open()
        prepare(inner)
        database = Breakable(inner, lambda: self.time)
        self.opened.databases.append(database)
        return database

    def ledger(self, agent: str = "agent", run: Run = RUN, **options: Any) -> Ledger:
        return Ledger(self.connect(), run, agent=agent, **options)

    def handover(self, trainer: str = "trainer", step: int = 0, **options: Any) -> Handover:
        return Handover(self.connect(), RUN.name, trainer=trainer, step=step, **options)


def sqlite_store(path: Path, opened: Opened) -> Store:
    return Store(lambda: SQLite(path), opened)


def postgres_store(conninfo: str, opened: Opened) -> Store:
    return Store(lambda: PostgreSQL(conninfo), opened)


def clean(conninfo: str) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")


def sample(index: int = 0, *, status: str = "completed", version: int = 1, tokens: int = 3) -> Sample:
    return Sample(
        index=index,
        prompt_tokens=[1, 2],
        response_tokens=[10 + index] * tokens,
        rollout_log_probs=[-0.1 * (index + 1)] * tokens,
        weight_versions=[VersionSpan(version=version, start=0, end=tokens)],
        status=SampleStatus(status),
        reward=float(index) if status == "completed" else None,
    )


def finished(claim: Claim, *, n: int = 2, version: int = 1) -> GroupUpdate:
    return GroupUpdate(claim, [sample(index, version=version) for index in range(n)], "finished")
