"""A shared volume that the agent may not read, or that does not answer."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from rolloutfleet.agent.volume import announce
from rolloutfleet.kube.client import Resource
from stand_ins.kubernetes import Object
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


def test_a_volume_that_may_not_be_read_is_told_before_the_first_update_and_until_it_may(open_folder: Path) -> None:
    async def story(world: World) -> None:
        await world.fleet.refresh()
        create, told = world.cluster.create, asyncio.Event()

        async def creating(resource: Resource, manifest: Object) -> Object:
            told.set()
            return await create(resource, manifest)

        world.volume.chmod(0)
        with without_privileges(), mock.patch.object(world.cluster, "create", creating):
            announcing = asyncio.ensure_future(announce(world.fleet, first_pause=0.01))
            await told.wait()
            assert not announcing.done()
        world.volume.chmod(0o755)
        await announcing
        (event,) = world.cluster.events
        assert (event["type"], event["reason"]) == ("Warning", "WeightsUnreadable")
        assert (event["regarding"]["kind"], event["regarding"]["name"]) == ("RolloutServer", "qwen")
        assert str(world.volume) in event["note"]

    play(open_folder, story)


@pytest.mark.parametrize("spec", [{}, {"weights": None}, {"updateWeights": False}])
def test_nothing_is_told_of_a_volume_that_can_be_read_or_that_nobody_needs(
    tmp_path: Path, spec: dict[str, object]
) -> None:
    async def story(world: World) -> None:
        world.change_server(**spec)
        await world.fleet.refresh()
        await announce(world.fleet)
        assert world.cluster.events == []

    play(tmp_path, story)


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
