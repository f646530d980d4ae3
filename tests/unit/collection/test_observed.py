"""What whoever watches a collection is told: all of it, and once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rolloutfleet.api.samples import SampleStatus
from rolloutfleet.api.samples_view import SamplesView
from unit.collection.world import CollectionWorld, collect


def seen(world: CollectionWorld) -> SamplesView:
    return world.fleet_world.observations.view(role="actor", server="qwen")


def test_steps_with_their_rewards_and_where_the_groups_stand(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        world.commit(7)
        await world.begin(world.asked(rows=4, reward="unit.collection.plugins:label"))
        await world.batch(1)
        world.commit(8)
        await world.batch(2)
        await world.batch(2)
        await world.acknowledge(1)
        view = seen(world)
        assert view.ended == {SampleStatus.TRUNCATED: 8}
        assert view.groups == 4
        assert [(step.step, step.reward_mean, step.reward_std) for step in view.steps] == [(1, 0.5, 0.5), (2, 2.5, 0.5)]
        assert [(step.pass_rate, step.zero_variance, step.trained) for step in view.steps] == [
            (0.5, 2, True),
            (1.0, 2, False),
        ]
        assert {bar.low: bar.count for bar in view.rewards} == {0.0: 2, 1.0: 2, 2.0: 2, 3.0: 2}
        assert {sample.id: sample.reward for sample in view.samples}["0/3/1"] == 3.0
        assert view.queue is not None
        assert (view.queue.open, view.queue.leased) == (0, 2)

    collect(tmp_path, story)


def test_dropped_groups_are_told_with_their_reason(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(rows=4, filters=["unit.collection.plugins:only_odd"]))
        await world.batch(1)
        view = seen(world)
        assert (view.dropped, view.groups) == ({"even": 2}, 2)
        assert {sample.id: sample.dropped for sample in view.samples}["0/0/1"] == "even"

    collect(tmp_path, story)


def test_a_sample_that_ended_before_its_group_was_stopped_is_told_once(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        asked = 0

        async def second_of_a_group_is_slow(body: dict[str, Any]) -> tuple[int, Any]:
            nonlocal asked
            asked += 1
            if body["input_ids"] == [100] and asked % 2 == 0:
                event = world.engines.open[body["rid"]] = asyncio.Event()
                await event.wait()
                return 200, world.engines.said(body, 2, "abort")
            return 200, world.engines.said(body, body["sampling_params"]["max_new_tokens"], "length")

        world.engines.answers = second_of_a_group_is_slow
        await world.begin(world.asked(rows=3, over_sampling=1.5))
        await world.batch(1)
        before = seen(world)
        world.engines.answers = None
        await world.batch(2)
        after = seen(world)
        assert before.ended == {SampleStatus.TRUNCATED: 5}
        assert after.ended == {SampleStatus.TRUNCATED: 6}

    collect(tmp_path, story)
