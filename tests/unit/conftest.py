from __future__ import annotations

from collections.abc import Iterator

import pytest

from unit.store.postgres_server import server


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Conninfo of a real server, one for all tests of the process."""
    with server() as conninfo:
        yield conninfo
