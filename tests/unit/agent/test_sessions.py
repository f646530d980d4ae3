"""Updates that the trainer drives: whoever dies at whatever step, survivors commit and nothing stays paused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.agent import session as session_module
from rolloutfleet.agent import together, transaction
from rolloutfleet.agent.session import Session
from rolloutfleet.api.agent import (
    BeginUpdate,
    EngineTensors,
    GroupAt,
    JoinGroups,
    SendBucket,
    SenderDone,
    SendTensors,
    TensorMeta,
    UpdateSession,
)
from rolloutfleet.api.rollout_server import WeightsPhase
from unit.agent.test_updates import outcomes
from unit.agent.world import Engine, World, play, refused, signed

UPDATE = "update00"
WEIGHT = TensorMeta(name="weight", dtype="bfloat16", shape=[2, 3])


def beginning(**request: Any) -> BeginUpdate:
    return BeginUpdate.model_validate({"id": UPDATE, "transport": "distributed", "backend": "gloo", **request})


async def begin(world: World, **request: Any) -> tuple[Session, UpdateSession, asyncio.Task[Any]]:
    """A sender that has begun and holds its line."""
    asked = beginning(**request)
    told = await world.sessions.begin(asked)
    session = world.sessions.of(asked.id)
    held = asyncio.ensure_future(session.hold(asked.sender))
    await asyncio.sleep(0)
    return session, told, held


async def joined(session: Session, told: UpdateSession, *, sender: int = 0) -> None:
    groups = [GroupAt(uid=engine.uid, port=20000 + n) for n, engine in enumerate(told.engines) if engine.join]
    assert (await session.join_groups(JoinGroups(sender=sender, groups=groups))).failed == {}


async def hung_up(held: asyncio.Task[Any]) -> None:
    held.cancel()
    await asyncio.wait({held})


async def over(world: World) -> None:
    async with world.leadership.operations:
        return


def generating(world: World) -> list[bool]:
    return [not engine.paused for engine in world.engines]


def committed(world: World) -> int:
    assert world.training.weights is not None
    assert world.training.weights.phase is WeightsPhase.COMMITTED
    return world.training.weights.version


# It works


def test_a_broadcast_to_each_engine_is_committed_and_every_engine_generates_again(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        session, told, held = await begin(world, tensors=[WEIGHT])
        assert told.version == 1
        assert [(engine.uid, engine.ranks, engine.join) for engine in told.engines] == [
            (engine.uid, 1, True) for engine in world.engines
        ]
        assert len({engine.group for engine in told.engines}) == 3
        await joined(session, told)
        assert generating(world) == [True] * 3, "nobody stands still before there is something to load"
        assert (await session.send_bucket(SendBucket(tensors=[WEIGHT]))).failed == {}
        assert generating(world) == [False] * 3
        result = await session.finish(SenderDone(bytes=12))
        assert (result.version, result.committed, result.bytes) == (1, True, 12)
        assert set(result.seconds) == {"pause", "load", "verify", "paused", "total"}
        assert (await held).version == 1
        assert committed(world) == 1
        assert generating(world) == [True] * 3
        assert {engine.label for engine in world.engines} == {signed(1)}
        assert world.training.weights is not None
        assert (world.training.weights.transport, world.training.weights.path) == ("distributed", "")
        first = world.engines[0]
        (bucket,) = [asked.body for asked in first.stand_in.asked if asked.path == "/update_weights_from_distributed"]
        assert bucket == {
            "names": ["weight"],
            "dtypes": ["bfloat16"],
            "shapes": [[2, 3]],
            "group_name": told.engines[0].group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }

    play(tmp_path, story)


def test_groups_are_kept_for_the_next_update_unless_the_sender_has_lost_them(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        session, first, _ = await begin(world)
        await joined(session, first)
        await session.send_bucket(SendBucket(tensors=[WEIGHT]))
        await session.finish(SenderDone())

        mine = {engine.uid: engine.group for engine in first.engines}
        session, second, _ = await begin(world, id="update01", groups=mine)
        assert [(engine.group, engine.join) for engine in second.engines] == [
            (engine.group, False) for engine in first.engines
        ]
        await session.send_bucket(SendBucket(tensors=[WEIGHT]))
        await session.finish(SenderDone())

        session, third, _ = await begin(world, id="update02")  # a new process of the trainer
        assert all(engine.join and engine.group not in mine.values() for engine in third.engines)
        await joined(session, third)
        assert [engine.groups for engine in world.engines] == [{engine.group} for engine in third.engines]
        await session.send_bucket(SendBucket(tensors=[WEIGHT]))
        assert (await session.finish(SenderDone())).version == 3

    play(tmp_path, story)


def test_tensors_over_shared_memory_go_to_the_engine_that_they_are_for(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        session, told, _ = await begin(world, transport="tensor")
        assert not any(engine.join for engine in told.engines)
        engines = [EngineTensors(uid=engine.uid, payloads=["cGlja2xl"]) for engine in told.engines]
        assert (await session.send_tensors(SendTensors(tensors=[WEIGHT], engines=engines))).failed == {}
        assert (await session.finish(SenderDone())).committed
        (asked,) = [a.body for a in world.engines[0].stand_in.asked if a.path == "/update_weights_from_tensor"]
        assert asked["serialized_named_tensors"] == ["cGlja2xl"]

    play(tmp_path, story)


def test_a_sender_is_told_whose_memory_can_be_released(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        _, told, held = await begin(world, transport="tensor")
        assert all(engine.releasable for engine in told.engines)
        await hung_up(held)
        await over(world)
        body = world.cluster.seen("servergroups", "qwen-main")
        body["spec"]["offload"] = False
        world.cluster.put("servergroups", body)
        _, told, _ = await begin(world, id="update01", transport="tensor")
        assert not any(engine.releasable for engine in told.engines)

    play(tmp_path, story)


def test_several_senders_send_each_a_part_and_the_last_one_commits(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        both: dict[str, Any] = {"senders": 2}
        session, told, _ = await begin(world, **both, sender=0, tensors=[WEIGHT])
        await joined(session, told)
        early = asyncio.ensure_future(session.send_bucket(SendBucket(tensors=[WEIGHT])))
        await asyncio.sleep(0.05)
        assert generating(world) == [True] * 3, "the second sender is not there yet"
        _, other, _ = await begin(world, **both, sender=1, tensors=[])
        assert {engine.group for engine in other.engines}.isdisjoint({engine.group for engine in told.engines})
        await joined(session, other, sender=1)
        await early
        first = asyncio.ensure_future(session.finish(SenderDone(sender=0, bytes=5)))
        await asyncio.sleep(0.05)
        assert not first.done()
        last = await session.finish(SenderDone(sender=1, bytes=7))
        assert (last.version, last.bytes) == (1, 12)
        assert await first == last

    play(tmp_path, story)


# Buckets overlap


def bucket(number: int) -> SendBucket:
    return SendBucket(number=number, tensors=[WEIGHT])


def told_of_buckets(engine: Engine) -> int:
    return engine.asked.count("update_weights_from_distributed")


def test_the_next_bucket_waits_at_the_agent_while_one_travels_and_each_engine_takes_it_when_it_can(
    tmp_path: Path,
) -> None:
    async def story(world: World) -> None:
        slow, gate, quick = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            slow.set()
            await gate.wait()

        async def second() -> None:
            if told_of_buckets(world.engines[1]) == 2:
                quick.set()

        world.engines[0].before["update_weights_from_distributed"] = wait
        world.engines[1].before["update_weights_from_distributed"] = second
        session, told, _ = await begin(world)
        await joined(session, told)
        sending = [asyncio.ensure_future(session.send_bucket(bucket(number))) for number in (0, 1)]
        await asyncio.gather(slow.wait(), quick.wait())
        assert told_of_buckets(world.engines[0]) == 1, "in its scheduler a broadcast is known by its order alone"
        gate.set()
        assert [(await each).failed for each in sending] == [{}, {}]
        assert [told_of_buckets(engine) for engine in world.engines] == [2, 2, 2]
        assert (await session.finish(SenderDone())).committed

    play(tmp_path, story)


def test_buckets_reach_an_engine_in_the_order_of_their_numbers_however_their_requests_arrive(tmp_path: Path) -> None:
    def named(number: int) -> SendBucket:
        # The fleet's checkpoint is not mounted here: any name will do.
        return SendBucket(number=number, tensors=[TensorMeta(name=f"w{number}", dtype="bfloat16", shape=[2])])

    async def story(world: World) -> None:
        world.change_server(model={"path": "/elsewhere"})
        session, told, _ = await begin(world)
        await joined(session, told)
        sending = [asyncio.ensure_future(session.send_bucket(named(number))) for number in (2, 0, 1)]
        await asyncio.gather(*sending)
        assert {engine.checksum for engine in world.engines} == {"sum-of-m0+w0+w1+w2"}
        assert (await refused(session.send_bucket(named(1)))).code == "BadRequest"

    play(tmp_path, story)


def test_an_engine_that_has_not_taken_a_bucket_is_not_told_of_the_next_one(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.engines[1].refuses["update_weights_from_distributed"] = (400, {"message": "no"})
        session, told, _ = await begin(world)
        await joined(session, told)
        answers = await asyncio.gather(*(session.send_bucket(bucket(number)) for number in (0, 1)))
        assert [set(answer.failed) for answer in answers] == [{world.engines[1].uid}] * 2
        assert [told_of_buckets(engine) for engine in world.engines] == [2, 1, 2]
        assert (await session.finish(SenderDone())).committed
        assert outcomes(world) == ["Committed", "Failed", "Committed"]

    play(tmp_path, story)


# Something dies


DISTRIBUTED_STEPS = [
    "init_weights_update_group",
    "pause_generation",
    "flush_cache",
    "begin_weight_update",
    "update_weights_from_distributed",
    "end_weight_update",
    "update_weight_version",
    "weights_checker",
]


@pytest.mark.parametrize("moment", DISTRIBUTED_STEPS)
def test_an_engine_that_dies_at_any_step_falls_out_and_the_others_commit(tmp_path: Path, moment: str) -> None:
    async def story(world: World) -> None:
        world.engines[1].breaks_at = moment
        session, told, _ = await begin(world)
        groups = [GroupAt(uid=engine.uid, port=20000) for engine in told.engines]
        failed = (await session.join_groups(JoinGroups(groups=groups))).failed
        failed |= (await session.send_bucket(SendBucket(tensors=[WEIGHT]))).failed
        fell_out_while_sending = DISTRIBUTED_STEPS.index(moment) < DISTRIBUTED_STEPS.index("end_weight_update")
        assert set(failed) == ({world.engines[1].uid} if fell_out_while_sending else set())
        assert (await session.finish(SenderDone())).committed
        assert outcomes(world) == ["Committed", "Unreachable", "Committed"]
        assert [not engine.paused for engine in (world.engines[0], world.engines[2])] == [True, True]

    play(tmp_path, story)


def test_an_engine_that_answers_nothing_any_more_falls_out_when_its_pod_is_gone(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async def vanish() -> None:
            world.change_engine(1, phase="Pending", podUid="")
            await world.fleet.refresh()
            await asyncio.Event().wait()

        world.engines[1].before["update_weights_from_distributed"] = vanish
        session, told, _ = await begin(world)
        await joined(session, told)
        failed = (await session.send_bucket(SendBucket(tensors=[WEIGHT]))).failed
        assert "its pod has gone" in failed[world.engines[1].uid]
        assert (await session.finish(SenderDone())).committed
        assert outcomes(world) == ["Committed", "Unreachable", "Committed"]

    play(tmp_path, story)


@pytest.mark.parametrize(
    ("moment", "doing"),
    [
        ("init_weights_update_group", "joining the group"),
        ("pause_generation", "the pause (Retract)"),
        ("update_weights_from_distributed", "a bucket"),
    ],
)
def test_an_engine_that_hangs_falls_out_soon_after_the_others_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, doing: str
) -> None:
    monkeypatch.setattr(transaction, "STRAGGLER_SECONDS", 0.2)
    monkeypatch.setattr(together, "STRAGGLER_FACTOR", 1.0)
    monkeypatch.setattr(transaction, "RECOGNIZE_SECONDS", 0.3)

    async def story(world: World) -> None:
        async def hang() -> None:
            world.engines[1].before |= {"weights_checker": hang, "model_info": hang}
            await asyncio.Event().wait()

        world.engines[1].before[moment] = hang
        session, told, _ = await begin(world)
        groups = [GroupAt(uid=engine.uid, port=20000) for engine in told.engines]
        failed = (await session.join_groups(JoinGroups(groups=groups))).failed
        failed |= (await session.send_bucket(SendBucket(tensors=[WEIGHT]))).failed
        assert f"{doing} was not done after" in failed[world.engines[1].uid]
        assert "long after another engine was" in failed[world.engines[1].uid]
        assert (await session.finish(SenderDone())).committed
        assert outcomes(world) == ["Committed", "Unreachable", "Committed"]

    play(tmp_path, story)


async def before_the_groups(_: Session, __: UpdateSession) -> None:
    pass


async def after_the_groups(session: Session, told: UpdateSession) -> None:
    await joined(session, told)


async def half_way(session: Session, told: UpdateSession) -> None:
    await joined(session, told)
    await session.send_bucket(SendBucket(tensors=[WEIGHT]))


@pytest.mark.parametrize(("moment", "kept"), [(before_the_groups, 3), (after_the_groups, 3), (half_way, 0)])
def test_a_trainer_that_hangs_up_leaves_no_fleet_paused(
    tmp_path: Path, moment: Callable[[Session, UpdateSession], Awaitable[None]], kept: int
) -> None:
    """Engines that have received something stay paused for the operator, which loads the old weights anew."""

    async def story(world: World) -> None:
        session, told, held = await begin(world)
        await moment(session, told)
        await hung_up(held)
        await over(world)
        assert committed(world) == 0
        assert generating(world).count(True) == kept
        assert not any(engine.updating for engine in world.engines)
        assert (await refused(session.finish(SenderDone()))).code == "SenderLost"

    play(tmp_path, story)


def test_a_sender_that_never_holds_its_line_is_taken_for_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "HOLD_SECONDS", 0.2)

    async def story(world: World) -> None:
        await world.sessions.begin(beginning())
        await over(world)
        assert committed(world) == 0
        assert generating(world) == [True] * 3

    play(tmp_path, story)


def test_an_update_that_is_not_finished_in_time_ends_by_itself(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        session, told, held = await begin(world, timeout_seconds=0.5)
        await joined(session, told)
        await over(world)
        assert (await refused(held)).code == "UpdateTimedOut"
        assert generating(world) == [True] * 3

    play(tmp_path, story)


def test_an_engine_to_which_a_tensor_was_not_sent_is_not_committed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        session, told, _ = await begin(world, transport="tensor")
        some = [EngineTensors(uid=engine.uid, payloads=["cA=="]) for engine in told.engines[:2]]
        await session.send_tensors(SendTensors(tensors=[WEIGHT], engines=some))
        result = await session.finish(SenderDone())
        assert outcomes(world) == ["Committed", "Committed", "Failed"]
        assert "1 tensors were not sent" in result.engines[2].message

    play(tmp_path, story)


def test_a_session_that_a_dead_agent_left_open_on_an_engine_is_closed_first(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.engines[0].updating = True
        session, told, _ = await begin(world)
        await joined(session, told)
        await session.send_bucket(SendBucket(tensors=[WEIGHT]))
        assert (await session.finish(SenderDone())).committed
        assert outcomes(world) == ["Committed"] * 3

    play(tmp_path, story)


def test_engines_that_know_no_update_sessions_need_none(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        def older(engine: Engine) -> None:
            engine.updating = True  # takes tensors without being asked
            engine.refuses = {p: (404, {"detail": "Not Found"}) for p in ("begin_weight_update", "end_weight_update")}

        for engine in world.engines:
            older(engine)
        session, told, _ = await begin(world)
        await joined(session, told)
        await session.send_bucket(SendBucket(tensors=[WEIGHT]))
        assert (await session.finish(SenderDone())).committed

    play(tmp_path, story)


def test_an_agent_that_lost_its_lease_and_leads_again_does_not_go_on_with_the_update(tmp_path: Path) -> None:
    """In between the operator has taken the update for dead, and may be loading the old weights."""

    async def story(world: World) -> None:
        session, told, held = await begin(world)
        await joined(session, told)
        await session.send_bucket(SendBucket(tensors=[WEIGHT]))
        world.lose_the_lease()
        await world.leadership.lease.acquire()
        assert world.leadership.lease.valid
        written = len(world.cluster.written)
        assert (await refused(session.finish(SenderDone()))).code == "NotLeading"
        await asyncio.wait({held})
        await over(world)
        assert len(world.cluster.written) == written, "nothing is committed"
        assert generating(world) == [False] * 3, "the operator resumes them"

    play(tmp_path, story)


# Refusals


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ({"name": "weight", "shape": [3, 2]}, "shape [3, 2], the model has [2, 3]"),
        ({"name": "weights", "shape": [2, 3]}, "weights: not a tensor of this model"),
    ],
)
def test_tensors_that_the_model_does_not_have_are_refused_before_anything_is_paused(
    tmp_path: Path, tensor: dict[str, Any], says: str
) -> None:
    wrong = TensorMeta.model_validate({"dtype": "bfloat16", **tensor})

    async def story(world: World) -> None:
        refusal = await refused(world.sessions.begin(beginning(tensors=[wrong])))
        assert refusal.code == "BadCheckpoint"
        assert any(says in detail for detail in refusal.details)
        await over(world)

        session, told, _ = await begin(world, id="update01")
        await joined(session, told)
        assert (await refused(session.send_bucket(SendBucket(tensors=[wrong])))).code == "BadCheckpoint"
        await over(world)
        assert not any("pause_generation" in engine.asked for engine in world.engines)
        assert committed(world) == 0

    play(tmp_path, story)


def test_senders_that_leave_a_tensor_out_are_refused_before_anything_is_paused(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await begin(world, senders=2, sender=0, tensors=[])
        refusal = await refused(world.sessions.begin(beginning(senders=2, sender=1, tensors=[])))
        assert refusal.details == ["weight: missing"]
        await over(world)
        assert not any("pause_generation" in engine.asked for engine in world.engines)

    play(tmp_path, story)


def test_another_update_waits_for_the_one_that_runs(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        _, __, held = await begin(world)
        assert (await refused(world.sessions.begin(beginning(id="another0")))).code == "UpdateInProgress"
        await hung_up(held)
        await over(world)
        session, told, _ = await begin(world, id="another0")
        await joined(session, told)
        await session.send_bucket(SendBucket(tensors=[WEIGHT]))
        assert (await session.finish(SenderDone())).committed

    play(tmp_path, story)


def test_pipeline_stages_are_refused_by_name(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        body = world.cluster.seen("servergroups", "qwen-main")
        body["spec"]["engine"]["pipelineParallel"] = 2
        world.cluster.put("servergroups", body)
        refusal = await refused(world.sessions.begin(beginning()))
        assert refusal.code == "UnsupportedLayout"
        assert "qwen-main has 2 pipeline stages" in refusal.message
        assert world.untouched

    play(tmp_path, story)
