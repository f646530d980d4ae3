"""One control plane for all tests of this folder."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from api_server.control_plane import ControlPlane, control_plane


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    # What was told of hundreds of fleets stays: to look through it again and again costs an eighth of the time.
    gc.set_threshold(100_000, 50, 100)
    folder: Path = tmp_path_factory.mktemp("control-plane")
    with control_plane(folder) as started:
        yield started
