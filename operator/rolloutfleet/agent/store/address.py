"""Which store an agent uses, from one setting."""

from __future__ import annotations

from rolloutfleet.agent.store.database import Database
from rolloutfleet.agent.store.schema import prepare
from rolloutfleet.agent.store.sqlite import SQLite


def open_store(address: str) -> Database:
    """`address`: postgresql://..., else the path of a file on the agent's volume. Raises StoreError."""
    if address.startswith(("postgresql://", "postgres://")):
        from rolloutfleet.agent.store.postgres import PostgreSQL  # 0.1 s that agents with a file need not wait

        database: Database = PostgreSQL(address)
    else:
        database = SQLite(address)
    try:
        prepare(database)
    except BaseException:
        database.close()
        raise
    return database
