"""Updates of engines that keep a copy of the weights: what happens before anybody stands still, and who falls out."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from rolloutfleet.agent import copies
from unit.agent.copies import write_deltas
from unit.agent.world import World, play, refused_update, signed, wanted, write_checkpoint

ENOSPC = "/var/lib/rolloutfleet/weights/copies: ENOSPC: No space left on device"


def test_every_pod_has_its_copy_before_the_first_engine_is_paused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.keep_copies()
        order: list[str] = []
        for engine in world.engines:
            for path in ("v1/copies", "pause_generation"):

                async def note(path: str = path) -> None:
                    order.append(path)

                engine.before[path] = note
        _, delta = write_deltas(world)
        result = await world.updater.update(wanted(world, delta, version=2))
        assert order == ["v1/copies"] * 3 + ["pause_generation"] * 3
        for engine in world.engines:
            loads = [a.body["model_path"] for a in engine.stand_in.asked if "update_weights_from_disk" in a.path]
            assert loads == ["/copies/v000002"]
            assert (engine.label, engine.checksum) == (signed(2), "sum-of-v000002")
        assert result.committed
        assert {"copy", "pause", "load", "total"} <= result.seconds.keys()
        assert result.seconds["total"] >= result.seconds["copy"]

    play(tmp_path, story)


def test_what_is_recorded_is_the_folder_on_the_volume(tmp_path: Path) -> None:
    """The operator gives it to workers of engines that come back."""

    async def story(world: World) -> None:
        world.keep_copies()
        for engine in world.engines:
            engine.delta = True
        _, delta = write_deltas(world)
        await world.updater.update(wanted(world, delta, version=2))
        weights = world.training.weights
        assert weights is not None
        assert (weights.path, weights.transport) == (str(world.volume / delta), "delta")

    play(tmp_path, story)


def test_a_full_version_is_copied_as_well(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.keep_copies()
        await world.updater.update(wanted(world))
        weights = world.training.weights
        assert weights is not None
        assert weights.transport == "disk"
        assert all("v1/copies" in engine.asked for engine in world.engines)

    play(tmp_path, story)


def test_an_engine_whose_worker_fails_falls_out_untouched_and_the_others_go_on(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.keep_copies()
        world.engines[1].refuses["v1/copies"] = 507, {"error": {"message": ENOSPC}}
        result = await world.updater.update(wanted(world))
        outcomes = {verdict.pod: verdict for verdict in result.engines}
        fallen = outcomes[world.engines[1].pod]
        assert fallen.outcome == "Failed"
        assert ENOSPC in fallen.message
        assert "pause_generation" not in world.engines[1].asked
        assert [verdict.outcome for verdict in outcomes.values()].count("Committed") == 2

    play(tmp_path, story)


def test_if_no_worker_can_copy_nothing_is_begun(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.keep_copies()
        for engine in world.engines:
            engine.refuses["v1/copies"] = 404, {"error": {"message": "v000002: no such folder"}}
        error = await refused_update(world, wanted(world))
        assert (error.code, error.status) == ("NotCopied", 502)
        assert len(error.details) == 3
        assert "no such folder" in error.details[0]
        assert world.cluster.written == []
        assert all(engine.asked == ["v1/copies"] for engine in world.engines)

    play(tmp_path, story)


def test_a_worker_that_hangs_leaves_time_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        monkeypatch.setattr(copies, "STRAGGLER_SECONDS", 0.05)
        world.keep_copies()
        released = asyncio.Event()

        async def hang() -> None:
            await released.wait()

        world.engines[0].before["v1/copies"] = hang
        result = await world.updater.update(wanted(world))
        released.set()
        outcomes = {verdict.pod: verdict for verdict in result.engines}
        assert "not done after" in outcomes[world.engines[0].pod].message
        assert [verdict.outcome for verdict in outcomes.values()].count("Committed") == 2

    play(tmp_path, story)


def test_an_engine_that_joins_while_the_others_copy_copies_too(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.keep_copies()
        world.change_engine(2, phase="Stale")
        world.cluster.before_apply.append(lambda: world.change_engine(2, phase="Serving"))
        result = await world.updater.update(wanted(world))
        assert [verdict.outcome for verdict in result.engines] == ["Committed"] * 3
        assert world.engines[2].asked.index("v1/copies") < world.engines[2].asked.index("pause_generation")

    play(tmp_path, story)


@pytest.mark.parametrize("change", ["rewritten", "removed"])
def test_a_checkpoint_that_changes_while_engines_read_it_is_not_committed(tmp_path: Path, change: str) -> None:
    async def story(world: World) -> None:
        folder = world.volume / "w1"

        async def changes() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            if change == "rewritten":
                write_checkpoint(folder, [2, 3])

        world.engines[0].before["update_weights_from_disk"] = changes
        error = await refused_update(world, wanted(world))
        assert error.code == "UpdateFailed"
        assert (
            "changed since it was first read" if change == "rewritten" else "gone while it was read"
        ) in error.details[0]
        assert world.training.weights is not None
        assert world.training.weights.version == 0

    play(tmp_path, story, engines=1)
