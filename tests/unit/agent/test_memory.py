"""Memory is released and resumed once, whatever is asked for twice: SGLang's scheduler dies of the second call."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.agent.memory_record import TAGS
from rolloutfleet.api.agent import MemoryRequest
from rolloutfleet.kube.errors import Forbidden
from unit.agent.world import World, play, refused, signed, wanted

EVERYTHING = list(TAGS)


def of(*tags: str) -> MemoryRequest:
    return MemoryRequest.model_validate({"tags": list(tags)}) if tags else MemoryRequest()


def recorded(world: World) -> tuple[str, list[str], list[str]]:
    memory = world.training.memory
    assert memory is not None
    return memory.phase, list(memory.tags), [engine.pod for engine in memory.engines if engine.state == "Known"]


def test_offload_aborts_what_runs_waits_for_idleness_and_releases_everything(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        result = await world.memory.offload(of())
        pods = [engine.pod for engine in world.engines]
        assert (result.released, result.engines, result.failed) == (EVERYTHING, pods, {})
        for engine in world.engines:
            assert engine.asked == ["model_info", "pause_generation", "flush_cache", "release_memory_occupation"]
            assert engine.stand_in.asked[1].body == {"mode": "abort"}
            assert engine.stand_in.asked[2].path == "/flush_cache?timeout=120"
            assert engine.released == set(EVERYTHING)
        assert recorded(world) == ("Released", EVERYTHING, pods)

    play(tmp_path, story, engines=2)


def test_the_intent_is_recorded_before_the_first_call(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        seen: list[str] = []

        async def look() -> None:
            seen.append(recorded(world)[0])

        world.engines[0].before = {"pause_generation": look, "resume_memory_occupation": look}
        await world.memory.offload(of())
        await world.memory.onload(of())
        assert seen == ["Releasing", "Resuming"]

    play(tmp_path, story, engines=2)


def test_a_second_offload_asks_no_engine_and_tells_the_same(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        first = await world.memory.offload(of())
        asked = [list(engine.asked) for engine in world.engines]
        second = await world.memory.offload(of("weights"))
        assert [engine.asked for engine in world.engines] == asked
        assert (second.released, second.engines) == (first.released, first.engines)
        assert not any(engine.dead for engine in world.engines)

    play(tmp_path, story, engines=2)


def test_an_engine_of_another_fleet_at_a_known_address_is_neither_released_nor_resumed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        strangers = world.engines[:2]
        strangers[0].label = signed(0, "beef0000")
        result = await world.memory.offload(of())
        assert "another fleet" in result.failed[strangers[0].pod]
        strangers[1].label = signed(0, "beef0000")  # while its memory is away
        result = await world.memory.onload(of())
        assert sorted(result.failed) == sorted(stranger.pod for stranger in strangers)
        assert set(strangers[0].asked) == {"model_info"}
        assert "resume_memory_occupation" not in strangers[1].asked
        assert world.engines[2].asked[-1] == "continue_generation"

    play(tmp_path, story)


def test_two_offloads_at_once_release_once(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await asyncio.gather(world.memory.offload(of()), world.memory.offload(of()))
        assert [engine.asked.count("release_memory_occupation") for engine in world.engines] == [1, 1]

    play(tmp_path, story, engines=2)


def test_an_agent_that_starts_anew_does_not_release_again(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.memory.offload(of())
        world.restart_agent()
        await world.leadership.lease.acquire()
        assert (await world.memory.offload(of())).released == EVERYTHING
        assert not any(engine.dead for engine in world.engines)
        await world.memory.onload(of())
        assert [engine.released for engine in world.engines] == [set(), set()]

    play(tmp_path, story, engines=2)


def test_tags_are_released_one_after_the_other_without_a_second_pause(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.memory.offload(of("kv_cache"))
        result = await world.memory.offload(of("weights", "kv_cache"))
        assert result.released == ["weights", "kv_cache"]
        engine = world.engines[0]
        assert engine.asked.count("pause_generation") == 1
        assert [a.body for a in engine.stand_in.asked if "release" in a.path] == [
            {"tags": ["kv_cache"]},
            {"tags": ["weights"]},
        ]

    play(tmp_path, story, engines=2)


def test_onload_resumes_weights_before_the_cache_and_continues_with_the_last_tag(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.memory.offload(of())
        partly = await world.memory.onload(of("weights"))
        assert partly.released == ["kv_cache", "cuda_graph"]
        assert all(engine.paused for engine in world.engines), "nothing can be generated without a cache"
        assert recorded(world)[0] == "Released"
        whole = await world.memory.onload(of("cuda_graph", "kv_cache"))
        assert whole.released == []
        assert [engine.paused for engine in world.engines] == [False, False]
        resumed = [a.body for a in world.engines[0].stand_in.asked if "resume" in a.path]
        assert resumed == [{"tags": ["weights"]}, {"tags": ["kv_cache", "cuda_graph"]}]
        assert recorded(world) == ("Resident", [], [])

    play(tmp_path, story, engines=2)


def test_onload_of_what_is_resident_asks_no_engine(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        assert (await world.memory.onload(of())).released == []
        assert world.untouched
        await world.memory.offload(of("kv_cache"))
        asked = [list(engine.asked) for engine in world.engines]
        assert (await world.memory.onload(of("weights"))).released == ["kv_cache"]
        assert [engine.asked for engine in world.engines] == asked

    play(tmp_path, story, engines=2)


def test_after_a_round_memory_can_be_released_again(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for _ in range(2):
            await world.memory.offload(of())
            await world.memory.onload(of())
        assert not any(engine.dead for engine in world.engines)
        assert [engine.asked.count("release_memory_occupation") for engine in world.engines] == [2, 2]

    play(tmp_path, story, engines=2)


def test_an_engine_that_fails_falls_out_alone_and_is_not_resumed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        broken, whole = world.engines
        broken.breaks_at = "release_memory_occupation"
        result = await world.memory.offload(of())
        assert list(result.failed) == [broken.pod]
        assert result.engines == [whole.pod]
        assert recorded(world)[2] == [whole.pod]
        await world.memory.onload(of())
        assert "resume_memory_occupation" not in broken.asked
        assert (whole.released, whole.paused, whole.dead) == (set(), False, False)

    play(tmp_path, story, engines=2)


def test_an_engine_that_is_not_idle_in_time_is_not_released(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.engines[0].refuses["flush_cache"] = (400, {"error": "not idle"})
        result = await world.memory.offload(of())
        assert "not idle" in result.failed[world.engines[0].pod]
        assert "release_memory_occupation" not in world.engines[0].asked

    play(tmp_path, story, engines=2)


def test_a_later_life_of_an_engine_has_released_nothing_and_is_not_resumed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.memory.offload(of())
        world.change_engine(0, pod="qwen-main-0-e2-r0", podUid="uid-qwen-main-0-e2-r0")
        world.engines[0].released = set()
        result = await world.memory.onload(of())
        assert "resume_memory_occupation" not in world.engines[0].asked
        assert world.engines[1].released == set()
        assert result.failed == {}

    play(tmp_path, story, engines=2)


def test_engines_that_do_not_serve_are_left_alone(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.change_engine(0, phase="Stale")
        assert (await world.memory.offload(of())).engines == [world.engines[1].pod]
        assert world.engines[0].asked == []

    play(tmp_path, story, engines=2)


def test_without_a_serving_engine_there_is_nothing_to_release(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.change_engine(0, phase="Failed")
        assert (await refused(world.memory.offload(of()))).code == "NoEngines"
        assert world.untouched

    play(tmp_path, story, engines=1)


def without_saver(world: World, **spec: Any) -> None:
    body = world.cluster.seen("servergroups", "qwen-main")
    body["spec"] |= {"offload": False, **spec}
    world.cluster.put("servergroups", body)


def test_a_fleet_without_the_memory_saver_is_refused_by_name(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.change_server(groups=[{"name": "main", "engine": {"image": "engine:1"}}])
        without_saver(world)
        error = await refused(world.memory.offload(of()))
        assert (error.code, error.status) == ("OffloadNotEnabled", 409)
        assert "spec.groups[main].offload" in error.message
        assert world.untouched

    play(tmp_path, story, engines=2)


def test_external_engines_take_part_that_were_started_with_the_memory_saver(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        urls = [{"url": engine.stand_in.url} for engine in world.engines]
        world.change_server(groups=[{"name": "main", "engine": {"image": "engine:1"}}], external={"engines": urls})
        without_saver(world, external={"engines": urls})
        facts = {"role": "Regular", "tensorParallel": 1, "pipelineParallel": 1}
        for index in range(2):
            world.change_engine(index, facts={**facts, "memorySaver": False})
        error = await refused(world.memory.offload(of()))
        assert (error.code, error.status) == ("OffloadNotEnabled", 409)
        assert world.engines[1].stand_in.url in error.message
        world.change_engine(0, facts={**facts, "memorySaver": True})
        assert (await world.memory.offload(of())).engines == [world.engines[0].pod]
        assert world.engines[1].asked == []

    play(tmp_path, story, engines=2)


def test_a_group_without_offload_is_left_alone_and_the_others_take_part(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        main = {"name": "main", "engine": {"image": "engine:1"}, "offload": True}
        world.change_server(groups=[main, {"name": "more", "engine": {"image": "engine:1"}}])
        body = world.cluster.seen("servergroups", "qwen-main")
        more = {"metadata": {"name": "qwen-more", "namespace": "rl"}, "spec": {**body["spec"], "offload": False}}
        kept = [engine for engine in body["status"]["engines"] if engine["index"] == 1]
        world.cluster.put("servergroups", {**more, "status": {**body["status"], "engines": kept}})
        body["status"]["engines"] = [engine for engine in body["status"]["engines"] if engine["index"] == 0]
        world.cluster.put("servergroups", body)
        assert (await world.memory.offload(of())).engines == [world.engines[0].pod]
        await world.memory.onload(of())
        assert world.engines[1].asked == []
        assert world.engines[0].released == set()
        assert not world.engines[0].paused

    play(tmp_path, story, engines=2)


def test_an_update_meanwhile_pauses_and_continues_only_engines_whose_memory_is_resident(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        kept, lost, whole = world.engines
        await world.memory.offload(of("kv_cache"))
        memory = world.training.memory
        assert memory is not None
        engines = [entry.model_dump(mode="json") for entry in memory.engines]
        engines[1]["state"] = "Unknown"
        world.change_training(memory={"phase": "Released", "tags": ["kv_cache"], "engines": engines[:2]})
        whole.released, whole.paused = set(), False
        for engine in world.engines:
            engine.stand_in.asked.clear()
        result = await world.updater.update(wanted(world))
        assert sorted(verdict.pod for verdict in result.engines) == [kept.pod, whole.pod]
        assert lost.asked == [], "nobody knows whether it has weights to write to"
        assert kept.paused
        assert not {"pause_generation", "continue_generation"} & set(kept.asked)
        assert {"pause_generation", "continue_generation"} < set(whole.asked)
        assert not whole.paused

    play(tmp_path, story)


def test_weights_come_back_before_anything_else(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.memory.offload(of())
        error = await refused(world.memory.onload(of("kv_cache")))
        assert (error.code, error.status) == ("WeightsFirst", 409)
        assert "onload the rest" in error.message
        assert all(engine.released == set(EVERYTHING) for engine in world.engines)

    play(tmp_path, story, engines=2)


def test_an_agent_that_dies_while_engines_drain_costs_no_engine(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async def look() -> None:
            memory = world.training.memory
            assert memory is not None
            assert {engine.state for engine in memory.engines} == {"Known"}
            assert not any(engine.released for engine in memory.engines)

        world.engines[0].before = {"pause_generation": look, "flush_cache": look}
        await world.memory.offload(of())
        assert all(engine.released for engine in world.engines)

    play(tmp_path, story, engines=2)


def test_engines_that_the_agent_before_had_only_drained_are_the_operators_again(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        entries = [{"pod": engine.pod, "uid": engine.uid} for engine in world.engines]
        world.change_training(fence=0, memory={"phase": "Releasing", "engines": entries})
        await world.memory.look()
        assert recorded(world) == ("Resident", [], [])
        assert not any(engine.asked for engine in world.engines)

    play(tmp_path, story, engines=2)


def test_an_answer_is_recorded_while_other_engines_still_run(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        states: list[dict[str, str]] = []
        recorded_one = asyncio.Event()

        async def wait() -> None:
            await recorded_one.wait()
            memory = world.training.memory
            assert memory is not None
            states.append({engine.pod: engine.state for engine in memory.engines})

        write = world.leadership.write

        async def written(training: Any) -> None:
            await write(training)
            if any(engine.released for engine in training.memory.engines):
                recorded_one.set()

        world.leadership.write = written  # type: ignore[method-assign]
        world.engines[1].before["release_memory_occupation"] = wait
        await world.memory.offload(of())
        assert states == [{world.engines[0].pod: "Known", world.engines[1].pod: "Changing"}]

    play(tmp_path, story, engines=2)


def test_an_engine_of_which_nobody_knows_what_it_holds_is_marked_and_never_asked_again(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        lost, other = world.engines
        lost.breaks_at = "release_memory_occupation"
        await world.memory.offload(of())
        asked = list(lost.asked)
        memory = world.training.memory
        assert memory is not None
        assert {engine.pod: engine.state for engine in memory.engines} == {lost.pod: "Unknown", other.pod: "Known"}
        world.restart_agent()
        await world.leadership.lease.acquire()
        await world.memory.offload(of("weights"))
        await world.memory.onload(of())
        assert lost.asked == asked
        memory = world.training.memory
        assert memory is not None
        assert (memory.phase, memory.uids) == ("Resident", [lost.uid]), "until the operator has replaced it"

    play(tmp_path, story, engines=2)


def test_what_the_agent_before_left_in_the_middle_of_a_call_is_not_asked_again(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        halfway, whole = world.engines
        whole.released, whole.paused = set(EVERYTHING), True
        entries = [
            {"pod": halfway.pod, "uid": halfway.uid, "state": "Changing"},
            {"pod": whole.pod, "uid": whole.uid, "released": EVERYTHING},
        ]
        world.change_training(fence=0, memory={"phase": "Releasing", "tags": EVERYTHING, "engines": entries})
        await world.memory.onload(of())
        assert halfway.asked == []
        assert (whole.released, whole.paused, whole.dead) == (set(), False, False)

    play(tmp_path, story, engines=2)


def test_an_engine_that_comes_back_to_an_offloaded_fleet_is_offloaded(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        back = world.engines[0]
        await world.memory.offload(of("weights", "kv_cache"))
        back.released, back.paused, back.uid = set(), False, "uid-of-a-later-life"
        world.change_engine(0, pod="qwen-main-0-e2-r0", podUid=back.uid, phase="Starting")
        await world.memory.look()
        assert back.released == set(), "it does not answer yet"
        world.change_engine(0, phase="Held")
        await world.memory.look()
        assert (back.released, back.paused, back.dead) == ({"weights", "kv_cache"}, True, False)
        assert not any(engine.dead for engine in world.engines)
        await world.memory.onload(of())
        assert [engine.paused for engine in world.engines] == [False, False]

    play(tmp_path, story, engines=2)


def test_an_update_waits_for_an_engine_that_is_being_offloaded_after_the_others(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        back = world.engines[0]
        await world.memory.offload(of("kv_cache"))
        back.released, back.paused, back.uid = set(), False, "uid-of-a-later-life"
        world.change_engine(0, podUid=back.uid, phase="Held")
        releasing, gate = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            releasing.set()
            await gate.wait()

        back.before["release_memory_occupation"] = wait
        look = asyncio.create_task(world.leadership.alone(world.memory.look(), unasked=True))
        await releasing.wait()
        update = asyncio.create_task(world.updater.update(wanted(world)))
        await asyncio.sleep(0)
        gate.set()
        await look
        assert (await update).committed
        assert [engine.paused for engine in world.engines] == [True, True]

    play(tmp_path, story, engines=2)


def test_what_changes_in_the_fleet_meanwhile_does_not_break_an_operation_off(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async def another_life() -> None:
            world.change_engine(0, podUid="uid-of-a-later-life", phase="Starting")
            await world.fleet.refresh()

        world.engines[1].before = {"flush_cache": another_life}
        result = await world.memory.offload(of())
        assert result.failed == {}
        assert world.engines[1].released == set(EVERYTHING)
        world.engines[1].before = {"resume_memory_occupation": another_life}
        await world.memory.onload(of())
        assert not world.engines[1].paused

    play(tmp_path, story, engines=2)


def test_an_engine_whose_turn_has_not_come_when_an_operation_ends_is_known_as_it_is(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        facts = {"tensorParallel": 1, "pipelineParallel": 1, "memorySaver": True}
        for index, role in enumerate(("Prefill", "Decode")):
            world.change_engine(index, facts={**facts, "role": role})
        world.cluster.before_apply = [lambda: None, lambda: None, not_allowed]
        with pytest.raises(Forbidden):
            await world.memory.offload(of())
        assert [bool(engine.released) for engine in world.engines] == [True, False]
        result = await world.memory.offload(of())
        assert (result.failed, len(result.engines)) == ({}, 2)
        assert not any(engine.dead for engine in world.engines)

    play(tmp_path, story, engines=2)


def test_an_update_that_died_with_its_leader_is_not_written_again_in_our_name(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        dead = {
            "phase": "Updating",
            "version": 0,
            "transaction": 4,
            "targetVersion": 1,
            "deadline": "2099-01-01T00:00:00Z",
        }
        world.change_training(fence=0, weights=dead)
        await world.memory.offload(of("kv_cache"))
        weights = world.training.weights
        assert weights is not None
        assert (weights.phase, weights.transaction, weights.deadline) == ("Committed", 4, "")

    play(tmp_path, story, engines=2)


def not_allowed() -> None:
    raise Forbidden("its Role is gone", status=403)


def test_what_could_not_be_written_is_written_later_and_nothing_is_done_twice(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.cluster.before_apply = [lambda: None, lambda: None, not_allowed]
        with pytest.raises(Forbidden):
            await world.memory.offload(of())
        assert recorded(world) == ("Releasing", EVERYTHING, [])
        await world.memory.look()
        assert recorded(world) == ("Released", EVERYTHING, [engine.pod for engine in world.engines])
        await world.memory.onload(of())
        assert not any(engine.dead or engine.paused for engine in world.engines)

    play(tmp_path, story, engines=1)


def test_nothing_is_called_when_the_intent_cannot_be_written(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.cluster.before_apply = [lambda: None, not_allowed]
        with pytest.raises(Forbidden):
            await world.memory.offload(of())
        assert "release_memory_occupation" not in world.engines[0].asked
        assert (await world.memory.offload(of())).engines == [world.engines[0].pod]
        assert not world.engines[0].dead

    play(tmp_path, story, engines=1)


def test_prefill_engines_are_released_and_resumed_before_decode_engines(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        facts = {"tensorParallel": 1, "pipelineParallel": 1, "memorySaver": True}
        world.change_engine(0, facts={**facts, "role": "Decode"})
        world.change_engine(1, facts={**facts, "role": "Prefill"})
        decode, prefill = world.engines

        async def released() -> None:
            assert prefill.released == set(EVERYTHING)

        async def resumed() -> None:
            assert prefill.released == set()

        async def continued() -> None:
            assert not prefill.paused

        decode.before = {
            "release_memory_occupation": released,
            "resume_memory_occupation": resumed,
            "continue_generation": continued,
        }
        await world.memory.offload(of())
        assert (await world.memory.onload(of())).failed == {}
        assert [engine.released for engine in world.engines] == [set(), set()]

    play(tmp_path, story, engines=2)


def test_a_placeholder_has_no_memory_to_release_and_refuses_nothing(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        main = {"name": "main", "engine": {"image": "engine:1"}, "offload": True}
        world.change_server(groups=[main, {"name": "held", "role": "Placeholder", "engine": {}}])
        result = await world.memory.offload(of())
        assert len(result.engines) == 2

    play(tmp_path, story, engines=2)


def test_an_agent_that_does_not_lead_touches_nothing(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.lose_the_lease()
        assert (await refused(world.memory.offload(of()))).code == "NotLeading"
        assert (await refused(world.memory.onload(of()))).code == "NotLeading"
        assert world.untouched

    play(tmp_path, story, engines=2)


def test_a_caller_that_goes_away_does_not_leave_the_intent_unfulfilled(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        paused, gate = asyncio.Event(), asyncio.Event()
        finished = asyncio.Event()

        async def wait() -> None:
            paused.set()
            await gate.wait()

        world.engines[0].before["pause_generation"] = wait
        write = world.leadership.write

        async def written(training: Any) -> None:
            await write(training)
            if training.memory.phase == "Released":
                finished.set()

        world.leadership.write = written  # type: ignore[method-assign]
        caller = asyncio.create_task(world.memory.offload(of()))
        await paused.wait()
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        gate.set()
        await finished.wait()
        assert recorded(world) == ("Released", EVERYTHING, [engine.pod for engine in world.engines])
        assert [engine.released for engine in world.engines] == [set(EVERYTHING)] * 2

    play(tmp_path, story, engines=2)
