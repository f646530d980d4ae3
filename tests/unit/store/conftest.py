from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from unit.store.world import Opened, Store, clean, postgres_store, sqlite_store


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An empty store; the same tests for both kinds."""
    opened = Opened()
    if request.param == "sqlite":
        yield sqlite_store(tmp_path / "ledger.sqlite", opened)
    else:
        conninfo: str = request.getfixturevalue("postgres")
        clean(conninfo)
        yield postgres_store(conninfo, opened)
    opened.close()
