"""An update that cannot succeed is refused before any engine is asked and anything is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from rolloutfleet.api.agent import BeginUpdate, UpdateWeights
from unit.agent.copies import write_deltas
from unit.agent.world import World, play, refused, refused_update, signed, wanted, write_checkpoint

BEGIN = BeginUpdate(id="step0001", transport="distributed", backend="gloo")


@pytest.mark.parametrize("version", [3, 2])
def test_a_version_that_is_not_newer_is_refused(tmp_path: Path, version: int) -> None:
    async def story(world: World) -> None:
        world.change_training(weights={"phase": "Committed", "version": 3, "path": str(world.volume / "w1")})
        error = await refused_update(world, wanted(world, version=version))
        assert (error.code, error.status) == ("VersionNotNewer", 409)
        assert "the next one is 4" in error.message
        assert world.untouched

    play(tmp_path, story)


def test_a_trainer_goes_back_to_an_older_version_on_purpose(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.change_training(weights={"phase": "Committed", "version": 3, "path": str(world.volume / "w3")})
        for engine in world.engines:
            engine.label = signed(3)
        result = await world.updater.update(wanted(world, version=2, rollback=True))
        assert (result.version, result.committed) == (2, True)
        assert {engine.label for engine in world.engines} == {signed(2)}

    play(tmp_path, story)


def test_going_back_needs_the_version_to_go_back_to() -> None:
    with pytest.raises(ValidationError, match="rollback: needs the version to go back to"):
        UpdateWeights(path="/weights/v000001", rollback=True)


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        error = await refused_update(world, wanted(world, "absent"))
        assert (error.code, error.status) == ("BadCheckpoint", 422)
        assert "no such folder" in error.message
        assert world.untouched

    play(tmp_path, story)


def test_a_checkpoint_of_another_shape_is_refused_with_the_tensors_named(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        write_checkpoint(world.volume / "w2", [3, 3])
        error = await refused_update(world, wanted(world, "w2"))
        assert error.code == "BadCheckpoint"
        assert error.details == ["weight: shape [3, 3], the model has [2, 3]"]
        assert world.untouched

    play(tmp_path, story)


@pytest.mark.parametrize("path", ["/etc", "{volume}", "{volume}/", "{volume}/../m0", "w1", "{volume}-other/w1"])
def test_a_path_outside_of_the_volume_is_refused(tmp_path: Path, path: str) -> None:
    async def story(world: World) -> None:
        error = await refused_update(world, UpdateWeights(path=path.format(volume=world.volume)))
        assert (error.code, error.status) == ("PathOutsideVolume", 422)
        assert world.untouched

    play(tmp_path, story)


@pytest.mark.parametrize("name", ["latest", "Current"])
def test_a_path_that_is_whatever_is_newest_is_refused(tmp_path: Path, name: str) -> None:
    async def story(world: World) -> None:
        write_checkpoint(world.volume / name, [2, 3])
        error = await refused_update(world, wanted(world, name))
        assert (error.code, error.status) == ("MutablePath", 422)
        assert "write each version into a folder of its own" in error.message
        assert world.untouched

    play(tmp_path, story)


@pytest.mark.parametrize("name", ["link", "link/w1"])
def test_a_symbolic_link_is_refused_wherever_it_is_on_the_way(tmp_path: Path, name: str) -> None:
    async def story(world: World) -> None:
        (world.volume / "link").symlink_to(world.volume / "w1" if name == "link" else world.volume)
        error = await refused_update(world, wanted(world, name))
        assert error.code == "MutablePath"
        assert f"{world.volume / 'link'} is a symbolic link" in error.message
        assert world.untouched

    play(tmp_path, story)


def test_a_folder_that_was_rewritten_since_it_was_loaded_is_refused_and_unchanged_it_is_not(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.updater.update(wanted(world))
        assert (await world.updater.update(wanted(world))).version == 2, "the same once more, as after an onload"
        shutil.rmtree(world.volume / "w1")
        write_checkpoint(world.volume / "w1", [2, 3])
        error = await refused_update(world, wanted(world))
        assert error.code == "MutablePath"
        assert "changed since it was first read" in error.message
        assert world.training.weights is not None
        assert world.training.weights.version == 2

    play(tmp_path, story)


def test_a_delta_is_refused_where_engines_keep_no_copy(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        error = await refused_update(world, wanted(world, write_deltas(world)[1]))
        assert (error.code, error.status) == ("NoLocalCopy", 409)
        assert world.untouched

    play(tmp_path, story)


def test_a_delta_whose_base_is_gone_is_refused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.keep_copies()
        full, delta = write_deltas(world)
        shutil.rmtree(world.volume / full)
        error = await refused_update(world, wanted(world, delta))
        assert error.code == "BadCheckpoint"
        assert "which v000002 rests on: no such folder" in error.message
        assert world.untouched

    play(tmp_path, story)


def test_frozen_weights_are_refused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.change_server(updateWeights=False)
        assert (await refused_update(world, wanted(world))).code == "Frozen"
        assert world.untouched

    play(tmp_path, story)


@pytest.mark.parametrize("args", [{"quantization": "fp8"}, {"torchao-config": "int4wo-128"}])
def test_engines_that_quantise_what_they_load_are_refused_by_name(tmp_path: Path, args: dict[str, str]) -> None:
    async def story(world: World) -> None:
        world.change_group(engine={"image": "engine:1", "args": args})
        for error in (await refused_update(world, wanted(world)), await refused(world.sessions.begin(BEGIN))):
            assert (error.code, error.status) == ("NotReloadable", 409)
            assert f"qwen-main has engine.args.{next(iter(args))}" in error.message
        assert world.untouched
        world.change_group(engine={"image": "engine:1", "args": {**args, "load-format": "flash_rl"}})
        assert (await world.updater.update(wanted(world))).committed

    play(tmp_path, story)


BY_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NOT_RELOADABLE = {
    "fp8": {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
    "awq": {"quantization_config": {"quant_method": "awq", "bits": 4}},
    "compressed-tensors": {"quantization_config": {}, "compression_config": {"quant_method": "compressed-tensors"}},
    "gptq": {"text_config": {"quantization_config": {"quant_method": "gptq"}}},
}


@pytest.mark.parametrize("args", [{}, {"quantization": "fp8"}])
def test_engines_that_serve_fp8_by_blocks_are_updated(tmp_path: Path, args: dict[str, str]) -> None:
    async def story(world: World) -> None:
        world.change_group(engine={"image": "engine:1", "args": args})
        for folder in (tmp_path / "m0", world.volume / "w1"):
            (folder / "config.json").write_text(json.dumps({"quantization_config": BY_BLOCKS}))
        assert (await world.updater.update(wanted(world))).committed

    play(tmp_path, story)


@pytest.mark.parametrize("method", NOT_RELOADABLE)
def test_a_served_checkpoint_that_sglang_may_not_reload_is_refused_by_name(tmp_path: Path, method: str) -> None:
    """FP8 by tensor ended SGLang's scheduler on a GPU: docs/guides/weight-updates-gpu.md."""

    async def story(world: World) -> None:
        (tmp_path / "m0" / "config.json").write_text(json.dumps(NOT_RELOADABLE[method]))
        for error in (await refused_update(world, wanted(world)), await refused(world.sessions.begin(BEGIN))):
            assert (error.code, error.status) == ("NotReloadable", 409)
            assert f"qwen-main serves {tmp_path / 'm0'}, which is quantised ({method})" in error.message
            assert "or is fp8 by blocks" in error.message
        assert world.untouched

    play(tmp_path, story)


def test_a_served_checkpoint_that_the_agent_may_not_read_stops_no_update(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        (tmp_path / "m0" / "config.json").mkdir()  # OSError, also for root
        assert (await world.updater.update(wanted(world))).committed

    play(tmp_path, story)


def test_a_new_checkpoint_that_sglang_may_not_reload_is_refused_where_the_served_one_is_not_seen(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> None:
        shutil.rmtree(tmp_path / "m0")
        (world.volume / "w1" / "config.json").write_text(json.dumps(NOT_RELOADABLE["fp8"]))
        error = await refused_update(world, wanted(world))
        assert error.code == "NotReloadable"
        assert f"path {world.volume / 'w1'}, which is quantised (fp8)" in error.message
        assert world.untouched

    play(tmp_path, story)


def test_a_server_without_a_weights_volume_is_refused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.change_server(weights=None)
        assert (await refused_update(world, wanted(world))).code == "NoWeightsVolume"
        assert world.untouched

    play(tmp_path, story)


def test_weights_that_are_offloaded_cannot_be_updated(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.change_training(memory={"phase": "Released", "tags": ["weights"], "engines": []})
        assert (await refused_update(world, wanted(world))).code == "WeightsReleased"
        assert world.untouched

    play(tmp_path, story)


def test_an_agent_that_does_not_lead_is_refused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.lose_the_lease()
        for error in (await refused_update(world, wanted(world)), await refused(world.sessions.begin(BEGIN))):
            assert (error.code, error.status) == ("NotLeading", 409)
        assert world.untouched

    play(tmp_path, story)


def test_without_an_engine_that_serves_there_is_nothing_to_update(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.change_engine(0, phase="Stale")
        assert (await refused_update(world, wanted(world))).code == "NoEngines"
        assert world.untouched

    play(tmp_path, story, engines=1)
