"""A shared volume that the agent may not read, or that does not answer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from unit.agent.world import World, play, refused_update, wanted, write_checkpoint

NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """On whose way everybody may go, which pytest's own folders are not."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may read everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.mark.parametrize("closed", ["", "w1", "w1/model.safetensors"])
def test_what_the_agent_may_not_read_is_refused_with_the_path_and_the_remedy(open_folder: Path, closed: str) -> None:
    async def story(world: World) -> None:
        path = world.volume / closed
        mode = path.stat().st_mode
        path.chmod(0)
        with without_privileges():
            error = await refused_update(world, wanted(world))
        path.chmod(mode)
        assert (error.code, error.status) == ("BadCheckpoint", 422)
        assert str(path) in error.message
        assert "ermission denied" in error.message
        assert "chmod -R a+rX" in error.message
        assert world.untouched

    play(open_folder, story)


def test_a_volume_that_does_not_answer_holds_up_neither_the_update_nor_the_agent(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        folder = write_checkpoint(world.volume / "w2", [2, 3])
        file = folder / "model.safetensors"
        file.unlink()
        os.mkfifo(file)  # an open of it waits, as one of a file does whose server is away
        error = await refused_update(world, wanted(world, "w2", timeout_seconds=1.0))
        assert (error.code, error.status) == ("VolumeSilent", 504)
        assert str(folder) in error.message
        assert world.untouched
        assert (await world.updater.update(wanted(world))).committed, "other folders are there"
        os.close(os.open(file, os.O_WRONLY))  # back again

    play(tmp_path, story)
