"""A weight update commits what engines provably hold, and resumes those and no others."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.api.rollout_server import WeightsPhase
from unit.agent.world import World, play, refused_update, signed, wanted, write_checkpoint


def outcomes(world: World) -> list[str]:
    weights = world.training.weights
    assert weights is not None
    assert [verdict.pod for verdict in weights.engines] == [engine.pod for engine in world.engines]
    return [verdict.outcome for verdict in weights.engines]


# It works


def test_every_engine_takes_the_version_and_generates_again(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        result = await world.updater.update(wanted(world))
        assert (result.version, result.committed) == (1, True)
        assert [verdict.outcome for verdict in result.engines] == ["Committed"] * 3
        assert set(result.seconds) == {"pause", "load", "verify", "paused", "total"}
        for engine in world.engines:
            assert (engine.label, engine.checksum, engine.paused) == (signed(1), "sum-of-w1", False)
            assert engine.asked[:4] == ["model_info", "pause_generation", "flush_cache", "update_weights_from_disk"]
            assert engine.asked[-1] == "continue_generation"

    play(tmp_path, story)


def test_an_engine_that_the_operator_proves_just_before_the_intent_takes_part(tmp_path: Path) -> None:
    """A router may be about to list it: left out, it would answer requests with the old weights."""

    async def story(world: World) -> None:
        world.change_engine(2, phase="Stale", weightVersion=None)
        world.cluster.before_apply.append(lambda: world.change_engine(2, weightVersion=0))
        result = await world.updater.update(wanted(world))
        assert [verdict.outcome for verdict in result.engines] == ["Committed"] * 3
        assert world.engines[2].label == signed(1)

    play(tmp_path, story)


def test_the_intent_is_recorded_before_a_pause_and_the_commit_before_a_continuation(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        seen: dict[str, WeightsPhase] = {}

        def looking(path: str) -> Callable[[], Awaitable[None]]:
            async def look() -> None:
                assert world.training.weights is not None
                seen[path] = world.training.weights.phase

            return look

        world.engines[0].before = {p: looking(p) for p in ("pause_generation", "continue_generation")}
        await world.updater.update(wanted(world))
        assert seen == {"pause_generation": WeightsPhase.UPDATING, "continue_generation": WeightsPhase.COMMITTED}
        intent, commit = (training.weights for training in world.cluster.written)
        assert intent is not None
        assert commit is not None
        assert (intent.version, intent.target_version, intent.target_path) == (0, 1, str(world.volume / "w1"))
        assert intent.deadline != ""
        assert (commit.version, commit.path, commit.deadline) == (1, str(world.volume / "w1"), "")
        assert commit.target_version is None
        assert [(c.group, c.revision, c.checksum) for c in commit.checksums] == [("qwen-main", "r1", "sum-of-w1")]
        assert {training.fence for training in world.cluster.written} == {1}
        assert {training.holder for training in world.cluster.written} == {"train"}

    play(tmp_path, story)


def test_the_next_version_follows_the_committed_one_and_a_version_may_be_named(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        assert (await world.updater.update(wanted(world, version=7))).version == 7
        write_checkpoint(world.volume / "w2", [2, 3])
        assert (await world.updater.update(wanted(world, "w2"))).version == 8
        assert {engine.label for engine in world.engines} == {signed(8)}
        assert world.training.weights is not None
        assert world.training.weights.transaction == 2

    play(tmp_path, story)


def test_a_write_of_the_operator_in_between_is_no_reason_to_fail(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.cluster.before_apply = [lambda: world.change_server(), lambda: world.change_server()]
        assert (await world.updater.update(wanted(world))).committed
        assert len(world.cluster.written) == 2

    play(tmp_path, story)


def test_what_the_trainer_has_recorded_of_memory_is_kept(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        engines = [{"pod": e.pod, "uid": e.uid, "released": ["kv_cache"]} for e in world.engines]
        memory = {"phase": "Released", "tags": ["kv_cache"], "engines": engines}
        world.change_training(memory=memory)
        await world.updater.update(wanted(world))
        assert world.training.memory is not None
        assert world.training.memory.tags == ("kv_cache",)

    play(tmp_path, story)


def test_what_the_update_took_is_in_status(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.engines[1].breaks_at = "update_weights_from_disk"
        await world.updater.update(wanted(world, version=5))
        last = world.training.last_update
        assert last is not None
        assert (last.version, last.transport, last.committed, last.transaction) == (5, "disk", True, 1)
        assert (last.engines, last.fell_out) == (3, 1)
        assert set(last.seconds) == {"pause", "load", "verify", "paused", "total"}

    play(tmp_path, story)


def test_casualties_are_an_event_on_the_server_and_an_update_without_any_is_none(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.updater.update(wanted(world))
        assert world.cluster.events == []
        world.engines[1].breaks_at = "update_weights_from_disk"
        write_checkpoint(world.volume / "w2", [2, 3])
        await world.updater.update(wanted(world, "w2"))
        (event,) = world.cluster.events
        assert (event["type"], event["reason"]) == ("Warning", "EnginesFellOut")
        assert (event["regarding"]["kind"], event["regarding"]["name"]) == ("RolloutServer", "qwen")
        assert event["note"].startswith("1 of 3 engines fell out of the update to 2: qwen-main-1-e1-r0: Unreachable: ")

    play(tmp_path, story)


# Some engines fail


@pytest.mark.parametrize(
    "answer",
    [(400, {"success": False, "message": "no room"}), (200, {"success": False, "message": "no room"})],
)
def test_an_engine_that_refuses_stays_paused_and_the_others_commit(tmp_path: Path, answer: tuple[int, Any]) -> None:
    async def story(world: World) -> None:
        world.engines[1].refuses["update_weights_from_disk"] = answer
        result = await world.updater.update(wanted(world))
        assert result.committed
        assert outcomes(world) == ["Committed", "Failed", "Committed"]
        assert "no room" in result.engines[1].message
        assert [engine.paused for engine in world.engines] == [False, True, False]

    play(tmp_path, story)


@pytest.mark.parametrize("moment", ["pause_generation", "update_weights_from_disk", "weights_checker"])
def test_an_engine_that_dies_at_any_step_is_unreachable_and_the_others_commit(tmp_path: Path, moment: str) -> None:
    async def story(world: World) -> None:
        world.engines[2].breaks_at = moment
        assert (await world.updater.update(wanted(world))).committed
        assert outcomes(world) == ["Committed", "Committed", "Unreachable"]
        assert "continue_generation" not in world.engines[2].asked
        assert [engine.paused for engine in world.engines[:2]] == [False, False]

    play(tmp_path, story)


def test_an_engine_that_could_not_be_paused_is_sent_no_weights(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.engines[0].refuses["flush_cache"] = (400, {"error": "not idle"})
        assert (await world.updater.update(wanted(world))).committed
        assert outcomes(world) == ["Failed", "Committed", "Committed"]
        assert "update_weights_from_disk" not in world.engines[0].asked
        assert "continue_generation" not in world.engines[0].asked

    play(tmp_path, story)


def test_where_no_cache_is_flushed_beside_requests_that_wait_they_are_aborted(tmp_path: Path) -> None:
    """As SGLang 0.5.16 after pause_generation in mode retract."""

    async def story(world: World) -> None:
        older = world.engines[0]
        older.refuses["flush_cache"] = (400, {"error": "pending requests"})

        async def aborted() -> None:
            del older.refuses["flush_cache"]

        older.before["abort_request"] = aborted
        assert (await world.updater.update(wanted(world))).committed
        assert outcomes(world) == ["Committed", "Committed", "Committed"]
        assert "abort_request" not in world.engines[1].asked

    play(tmp_path, story)


def test_an_engine_that_says_success_and_holds_other_weights_is_not_continued(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.engines[1].refuses["weights_checker"] = (200, {"success": True, "per_engine_checksum": "torn"})
        assert (await world.updater.update(wanted(world))).committed
        assert outcomes(world) == ["Committed", "Failed", "Committed"]
        assert [engine.paused for engine in world.engines] == [False, True, False]

    play(tmp_path, story)


def test_an_engine_that_loaded_but_kept_its_old_label_is_not_continued(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.engines[1].refuses["model_info"] = (200, {"weight_version": signed(0)})
        await world.updater.update(wanted(world))
        assert outcomes(world) == ["Committed", "Failed", "Committed"]
        assert world.engines[1].paused

    play(tmp_path, story)


def test_an_engine_of_another_fleet_at_a_known_address_is_not_touched(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        stranger = world.engines[1]
        stranger.label = signed(0, "beef0000")
        result = await world.updater.update(wanted(world))
        assert outcomes(world) == ["Committed", "Failed", "Committed"]
        assert "an engine of another fleet answers: its weights are labelled 0@beef0000" in result.engines[1].message
        assert set(stranger.asked) == {"model_info", "weights_checker"}
        assert stranger.label == signed(0, "beef0000")

    play(tmp_path, story)


def test_a_continuation_that_fails_once_is_tried_again(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        engine = world.engines[0]
        engine.refuses["continue_generation"] = (500, {"error": "busy"})

        async def recover() -> None:
            if engine.asked.count("continue_generation") > 1:
                engine.refuses.clear()

        engine.before["continue_generation"] = recover
        assert (await world.updater.update(wanted(world))).committed
        assert engine.asked.count("continue_generation") == 2
        assert not engine.paused

    play(tmp_path, story)


# All engines fail


def test_if_all_refuse_the_old_version_stays_and_its_engines_generate_again(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for engine in world.engines:
            engine.refuses["update_weights_from_disk"] = (400, {"success": False, "message": "no room"})
        error = await refused_update(world, wanted(world))
        assert (error.code, error.status) == ("UpdateFailed", 502)
        assert "version 0 stays" in error.message
        assert len(error.details) == 3
        assert all("has version 0 as before: POST" in detail for detail in error.details)
        (event,) = world.cluster.events
        assert event["reason"] == "UpdateFailed"
        assert event["note"].startswith("version 1 was not committed, version 0 stays; ")
        assert event["note"].count("no room") == 3, "the cause, also of engines that go on"
        assert not any(engine.paused for engine in world.engines)
        assert outcomes(world) == ["Committed"] * 3, "at the end they provably hold the committed version, which is 0"
        weights = world.training.weights
        assert weights is not None
        assert (weights.phase, weights.version, weights.path) == (WeightsPhase.COMMITTED, 0, "")
        assert (weights.target_version, weights.deadline, weights.transaction) == (None, "", 1)

    play(tmp_path, story)


def test_after_a_failed_update_the_previous_commits_path_and_checksums_stay(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        write_checkpoint(world.volume / "w2", [2, 3])
        await world.updater.update(wanted(world))
        for engine in world.engines:
            engine.refuses["update_weights_from_disk"] = (400, {"message": "no room"})
        await refused_update(world, wanted(world, "w2"))
        weights = world.training.weights
        assert weights is not None
        assert (weights.version, weights.path, weights.transaction) == (1, str(world.volume / "w1"), 2)
        assert [checksum.checksum for checksum in weights.checksums] == ["sum-of-w1"]
        assert not any(engine.paused for engine in world.engines)

    play(tmp_path, story)


def test_an_engine_left_with_torn_weights_by_a_failed_update_is_not_continued(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for engine in world.engines:
            engine.refuses["update_weights_from_disk"] = (400, {"message": "no room"})
        world.engines[1].checksum = "torn"
        await refused_update(world, wanted(world))
        assert outcomes(world) == ["Committed", "Failed", "Committed"]
        assert [engine.paused for engine in world.engines] == [False, True, False]

    play(tmp_path, story)


async def one_of_three_dies_of_a_checkpoint_that_could_not_be_compared(world: World) -> None:
    shutil.rmtree(world.volume.parent / "m0")
    for engine in world.engines:
        engine.breaks_at = "update_weights_from_disk"
    assert (await refused_update(world, wanted(world))).code == "UpdateFailed"
    assert [engine.dead for engine in world.engines] == [True, False, False]
    assert outcomes(world) == ["Unreachable", "Committed", "Committed"]
    assert [engine.paused for engine in world.engines[1:]] == [False, False]


def test_a_checkpoint_that_could_not_be_compared_kills_one_engine_and_not_all(tmp_path: Path) -> None:
    play(tmp_path, one_of_three_dies_of_a_checkpoint_that_could_not_be_compared)


def test_what_killed_an_engine_is_not_tried_on_those_that_come_late(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.change_engine(2, phase="Stale", weightVersion=None)
        world.cluster.before_apply.append(lambda: world.change_engine(2, weightVersion=0))
        await one_of_three_dies_of_a_checkpoint_that_could_not_be_compared(world)

    play(tmp_path, story)


def test_a_late_engine_that_could_not_be_paused_keeps_no_other_late_one_from_loading(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        def prove_both() -> None:
            for index in (2, 3):
                world.change_engine(index, weightVersion=0)

        shutil.rmtree(world.volume.parent / "m0")
        for index in (2, 3):
            world.change_engine(index, phase="Stale", weightVersion=None)
        world.cluster.before_apply.append(prove_both)
        world.engines[2].breaks_at = "pause_generation"
        assert (await world.updater.update(wanted(world))).committed
        assert outcomes(world) == ["Committed", "Committed", "Unreachable", "Committed"]

    play(tmp_path, story, engines=4)


def test_files_that_not_everybody_may_read_kill_one_engine_and_not_all(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        (world.volume / "w1" / "model.safetensors").chmod(0o640)
        for engine in world.engines:
            engine.breaks_at = "update_weights_from_disk"
        assert (await refused_update(world, wanted(world))).code == "UpdateFailed"
        assert [engine.dead for engine in world.engines] == [True, False, False]
        assert world.training.weights is not None
        told = world.training.weights.engines[0].message
        assert f"while it loaded {world.volume / 'w1'}; may its user read the files?" in told
        assert "some of mode 640 of user" in told

    play(tmp_path, story)


def test_once_engines_have_read_such_files_all_load_at_once(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        loading = asyncio.Barrier(3)
        for name in ("w1", "w2"):
            if name == "w2":
                write_checkpoint(world.volume / name, [2, 3])
                for engine in world.engines:
                    engine.before["update_weights_from_disk"] = loading.wait  # type: ignore[assignment]
            (world.volume / name / "model.safetensors").chmod(0o640)
            assert (await world.updater.update(wanted(world, name))).committed

    play(tmp_path, story)


# Which engines take part


def test_engines_that_do_not_serve_are_left_to_the_operator(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.change_engine(1, phase="Stale")
        world.change_engine(2, url="")
        result = await world.updater.update(wanted(world))
        assert [verdict.pod for verdict in result.engines] == [world.engines[0].pod]
        assert world.engines[1].asked == world.engines[2].asked == []

    play(tmp_path, story)


def test_engines_that_our_last_update_proved_take_part_though_they_are_not_back_in_status(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.updater.update(wanted(world))
        world.change_engine(0, phase="Held")
        world.change_engine(1, phase="Stale", pod="qwen-main-1-e2-r0", podUid="uid-qwen-main-1-e2-r0")
        write_checkpoint(world.volume / "w2", [2, 3])
        result = await world.updater.update(wanted(world, "w2"))
        assert [verdict.pod for verdict in result.engines] == [world.engines[0].pod, world.engines[2].pod]

    play(tmp_path, story)


# Leadership is lost on the way


@pytest.mark.parametrize(
    ("lose", "code"),
    [(World.lose_the_lease, "NotLeading"), (World.be_overtaken, "Fenced")],
)
@pytest.mark.parametrize("moment", ["pause_generation", "update_weights_from_disk", "weights_checker"])
def test_an_agent_that_lost_its_lease_between_pause_and_commit_continues_nothing(
    tmp_path: Path, lose: Callable[[World], None], code: str, moment: str
) -> None:
    async def story(world: World) -> None:
        async def lost() -> None:
            lose(world)

        world.engines[0].before[moment] = lost
        assert (await refused_update(world, wanted(world))).code == code
        assert len(world.cluster.written) == 1, "the intent, and no commit"
        assert all(engine.paused for engine in world.engines)
        assert not any("continue_generation" in engine.asked for engine in world.engines)

    play(tmp_path, story)


def test_an_agent_that_lost_its_lease_after_the_pause_loads_nothing(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async def lost() -> None:
            world.lose_the_lease()

        world.engines[0].before["pause_generation"] = lost
        await refused_update(world, wanted(world))
        assert not any("update_weights_from_disk" in engine.asked for engine in world.engines)

    play(tmp_path, story)


# Callers that go away, and callers that come too soon


def test_a_caller_that_goes_away_does_not_leave_the_fleet_paused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        paused, gate, continued = asyncio.Event(), asyncio.Event(), asyncio.Semaphore(0)

        async def wait() -> None:
            paused.set()
            await gate.wait()

        async def seen() -> None:
            continued.release()

        world.engines[0].before["update_weights_from_disk"] = wait
        for engine in world.engines:
            engine.before["continue_generation"] = seen
        caller = asyncio.create_task(world.updater.update(wanted(world)))
        await paused.wait()
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        assert caller.cancelled()
        gate.set()
        for _ in world.engines:
            await continued.acquire()
        assert world.training.weights is not None
        assert (world.training.weights.phase, world.training.weights.version) == (WeightsPhase.COMMITTED, 1)
        assert outcomes(world) == ["Committed"] * 3

    play(tmp_path, story)


def test_a_second_update_is_refused_while_one_runs_and_finish_waits_for_it(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        loading, gate = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            loading.set()
            await gate.wait()

        world.engines[0].before["update_weights_from_disk"] = wait
        first = asyncio.create_task(world.updater.update(wanted(world)))
        await loading.wait()
        assert (await refused_update(world, wanted(world))).code == "UpdateInProgress"
        finishing = asyncio.create_task(world.updater.finish())
        await asyncio.sleep(0)
        assert not finishing.done()
        gate.set()
        assert (await first).version == 1
        await finishing
        assert [engine.asked.count("pause_generation") for engine in world.engines] == [1, 1, 1]

    play(tmp_path, story)


def test_engines_with_the_committed_weights_take_part_whatever_else_keeps_them_from_serving(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.change_engine(0, phase="Stale", reason="PairUnproved", weightVersion=0)
        world.change_engine(1, phase="Draining", reason="Draining", weightVersion=0)
        result = await world.updater.update(wanted(world))
        assert [verdict.pod for verdict in result.engines] == [world.engines[0].pod, world.engines[2].pod]

    play(tmp_path, story, engines=3)


def test_prefill_engines_go_on_before_decode_engines(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        order: list[str] = []

        def note(role: str) -> Callable[[], Awaitable[None]]:
            async def append() -> None:
                order.append(role)

            return append

        for index, role in enumerate(("Decode", "Prefill", "Decode", "Prefill")):
            facts = {"role": role, "tensorParallel": 1, "pipelineParallel": 1, "memorySaver": False}
            world.change_engine(index, facts=facts)
            world.engines[index].before["continue_generation"] = note(role)
        await world.updater.update(wanted(world))
        assert order == ["Prefill", "Prefill", "Decode", "Decode"]

    play(tmp_path, story, engines=4)
