"""What engines are asked for: sessions, seeds, fields that only engines know, and as many requests as they bear."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.agent.errors import AgentError
from rolloutfleet.agent.slots import Slots, Stop
from rolloutfleet.agent.store.errors import Fenced
from rolloutfleet.plan.collecting import groups_to_hold, sampling_seed
from rolloutfleet.plan.concurrency import LEAST_PER_ENGINE, MOST_PER_ENGINE, per_engine
from unit.collection.world import CollectionWorld, collect


def test_requests_of_a_sample_carry_its_session_and_a_seed_of_its_own(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(rows=2, seed=5))
        batch = await world.batch(1)
        keys = [asked.headers["X-SMG-Routing-Key"] for asked in world.engines.router.asked]
        assert sorted(keys) == sorted(sample.session_id for sample in batch.samples)
        seeds = {body["sampling_params"]["sampling_seed"] for body in world.engines.requests}
        assert seeds == {sampling_seed(5, epoch=0, prompt=prompt, index=index) for prompt in (0, 1) for index in (0, 1)}
        assert len(seeds) == 4

    collect(tmp_path, story)


def test_direct_requests_go_to_engines_with_fields_that_the_router_drops(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        fields = {"return_routed_experts": True}
        await world.begin(world.asked(direct=True, request_fields=fields, keep_meta=["weight_version"]))
        batch = await world.batch(1)
        assert world.engines.router.asked == []
        assert all(body["return_routed_experts"] for body in world.engines.requests)
        assert all("weight_version" in sample.train_metadata for sample in batch.samples)

    collect(tmp_path, story)


def test_an_agent_that_was_followed_by_another_one_can_hand_out_nothing(tmp_path: Path) -> None:
    """It was frozen, its Lease ran out, and it is thawed."""

    async def story(world: CollectionWorld) -> None:
        asked = world.asked(rows=6, mode="asynchronous")
        await world.begin(asked)
        await world.until_finished(2)
        thawed = world.collections
        world.new_agent()
        world.trainer = "life-2"
        await world.begin(world.asked(rows=6, mode="asynchronous"))
        await world.batch(1)
        world.trainer, world.collections = "life-1", thawed
        with pytest.raises(Fenced):
            await world.batch(1)

    collect(tmp_path, story)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shared": True}, "shared: store .* is a file"),
        ({"request_fields": {"a": 1}}, "request_fields: the router drops"),
        ({"request_fields": {"rid": "x"}, "direct": True}, "request_fields: rid: set by the agent"),
        ({"reward": "a:b", "group_reward": "a:c"}, "one of them"),
        ({"n": 0}, "n"),
        ({"run": "a/b"}, "run"),
        ({"misspelled": 1}, "misspelled"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    async def story(world: CollectionWorld) -> None:
        with pytest.raises(ValueError, match=message):
            world.asked(**fields)

    collect(tmp_path, story)


def test_an_estimator_that_compares_needs_something_to_compare_with(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        with pytest.raises(AgentError, match="n: grpo compares samples of one prompt"):
            await world.begin(world.asked(n=1, estimator="grpo"))

    collect(tmp_path, story)


# Whiteboard rules


@pytest.mark.parametrize(
    ("target", "finished", "over_sampling", "hold"),
    [(8, 0, 1.0, 8), (8, 3, 1.0, 5), (8, 0, 1.5, 12), (8, 7, 1.5, 5), (8, 8, 1.5, 0), (8, 9, 1.0, 0), (0, 0, 2.0, 0)],
)
def test_as_many_prompts_are_in_work_as_are_missing_and_some_more(
    target: int, finished: int, over_sampling: float, hold: int
) -> None:
    assert groups_to_hold(target=target, finished=finished, over_sampling=over_sampling) == hold


@pytest.mark.parametrize(
    ("current", "open_requests", "waiting", "after"),
    [
        (64, 128, [0, 0], 80),  # the bound is reached and nobody waits: more
        (64, 100, [0, 0], 64),  # it is not what holds us back
        (64, 128, [8, 8], 64),  # a short queue keeps engines busy
        (64, 128, [40, 40], 28),  # a long one could have gone elsewhere: what runs, and a short queue
        (64, 128, [], 64),  # nobody answered
        (2000, 4000, [0, 0], MOST_PER_ENGINE),
        (9, 18, [17, 17], LEAST_PER_ENGINE),
    ],
)
def test_the_bound_on_open_requests_follows_the_queues(
    current: int, open_requests: int, waiting: list[int], after: int
) -> None:
    assert per_engine(current, open_requests=open_requests, engines=2, waiting=waiting) == after


def test_slots_are_given_in_turn_and_none_is_lost_by_those_who_stop_waiting() -> None:
    async def story() -> None:
        slots, stop = Slots(), Stop()
        assert await slots.take(stop)
        late = await slots.take(stop, 0.001)
        assert not late
        impatient = asyncio.create_task(slots.take(stop))
        second = asyncio.create_task(slots.take(Stop()))
        third = asyncio.create_task(slots.take(Stop()))
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.gather(impatient, return_exceptions=True)
        slots.give_back()
        assert await second
        assert (slots.open, third.done()) == (1, False)
        slots.limit = 2
        slots.admit()
        assert await third
        stopped = asyncio.create_task(slots.take(stop))
        await asyncio.sleep(0)
        stop.say()
        assert not await stopped
        assert not await slots.take(stop)
        slots.give_back()
        slots.give_back()
        assert slots.open == 0

    asyncio.run(story())
