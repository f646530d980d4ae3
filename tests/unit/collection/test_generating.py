"""Users' code that makes samples: several turns, several samples from one prompt, and what becomes of it when engines
stop."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rolloutfleet.agent.errors import AgentError
from rolloutfleet.api.collection import Evaluate
from rolloutfleet.api.samples import SampleStatus
from rolloutfleet.trainer import connect
from unit.collection.test_judging import plugin
from unit.collection.world import CollectionWorld, collect


def test_turns_of_a_user_are_one_sample_in_which_the_tools_tokens_are_not_trained(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        async with AsyncExitStack() as stack:
            await world.serve(stack)
            await world.begin(world.asked(generate=plugin("two_turns"), reward=plugin("label")))
            batch = await world.batch(1)
        for sample in batch.samples:
            first = sample.prompt_tokens[0]
            assert sample.response_tokens == [first + 1, 7, 8]
            assert sample.loss_mask == [1, 0, 1]
            assert (sample.status, sample.reward, sample.attempts) == ("truncated", sample.group_index, 2)

    collect(tmp_path, story)


def test_turns_that_are_stopped_go_on_later_with_what_they_have(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        async with AsyncExitStack() as stack:
            await world.serve(stack)
            world.engines.held, world.engines.tokens_when_held = True, 0
            asked = world.asked(generate=plugin("two_turns"), groups_per_step=1)
            await world.begin(asked)
            await world.end_with_open_requests(2)
            await world.begin(asked)
            batch = await world.batch(1)
        assert [sample.loss_mask for sample in batch.samples] == [[1, 0, 1]] * 2

    collect(tmp_path, story)


def test_several_samples_of_one_prompt_are_one_trajectory(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        async with AsyncExitStack() as stack:
            await world.serve(stack)
            asked = world.asked(
                rows=4, generate=plugin("as_many_as_the_label"), reward=plugin("index"), estimator="dr_grpo"
            )
            await world.begin(asked)
            first, second = await world.batch(1), await world.batch(2)
            dropped = (await world.collections.current.view()).dropped
        assert dropped == {"failed": 1}, "the label 0 makes no sample"
        by_prompt = {n: [s for b in (first, second) for s in b.samples if s.group_index == n] for n in (1, 2, 3)}
        assert {n: len(samples) for n, samples in by_prompt.items()} == {1: 2, 2: 4, 3: 6}
        for samples in by_prompt.values():
            assert [sample.index for sample in samples] == list(range(len(samples)))
        assert [sample.rollout_id for sample in by_prompt[2]] == [0, 0, 1, 1]
        assert len({*[(s.rollout_id, s.reward) for s in by_prompt[2]]}) == 2, "parts share a reward"

    collect(tmp_path, story)


def test_a_function_that_never_answers_costs_its_samples_only(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        async with AsyncExitStack() as stack:
            await world.serve(stack)
            await world.begin(world.asked(rows=1, generate=plugin("never"), request_seconds=0.3, groups_per_step=1))
            waiting = await asyncio.gather(world.batch(1), return_exceptions=True)
            view = await world.collections.current.view()
        assert "no more prompts" in str(waiting[0])
        assert view.dropped == {"failed": 1}

    collect(tmp_path, story)


def test_an_evaluation_takes_every_row_in_its_order_and_keeps_nothing(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        asked = Evaluate.model_validate(
            {
                "data": {"path": str(world.data(5))},
                "n": 2,
                "sampling_params": {"max_new_tokens": 2, "temperature": 0},
                "reward": plugin("label"),
            }
        )
        found = await world.collections.evaluate(asked)
        assert [group.prompt for group in found.groups] == [[100], [200], [300], [400], [500]]
        assert [[sample.reward for sample in group.samples] for group in found.groups] == [[n, n] for n in range(5)]
        assert (found.mean_reward, found.truncated, found.failed) == (2.0, 10, 0)
        (shown,) = world.fleet_world.observations.view(role="actor", server="qwen").evaluations
        assert (shown.name, shown.version, shown.prompts, shown.samples, shown.reward_mean) == ("data-5", 0, 5, 10, 2.0)
        assert not world.fleet_world.observations.ended, "they are no samples of training"
        assert all(s.status is SampleStatus.TRUNCATED for group in found.groups for s in group.samples)

    collect(tmp_path, story)


def test_an_evaluation_whose_reward_has_parts_names_the_one_that_is_meant(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        asked = {"data": {"path": str(world.data(1))}, "reward": plugin("parts")}
        with pytest.raises(AgentError, match="reward_key: ''; the reward has right, short") as refusal:
            await world.collections.evaluate(Evaluate.model_validate(asked))
        assert refusal.value.code == "BadRequest"
        found = await world.collections.evaluate(Evaluate.model_validate(asked | {"reward_key": "short"}))
        assert found.mean_reward == 0.5

    collect(tmp_path, story)


def test_a_trainer_iterates_over_its_run_through_the_api(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        async with AsyncExitStack() as stack:
            url = await world.serve(stack)

            def train() -> list[tuple[int, int]]:
                fields = world.asked(rows=5, reward=plugin("label")).model_dump(exclude={"trainer"}, exclude_unset=True)
                fleet = connect("actor", url=url)
                run = fleet.collect(**fields)
                steps = []
                for batch in run.batches(1, token_budget=8):
                    assert [len(micro) for micro in batch.micro_batches] == [2] * batch.groups
                    steps.append((batch.step, batch.groups))
                    run.acknowledge(batch.step)
                assert run.view().state == "Exhausted"
                run.end()
                fleet.close()
                return steps

            assert await asyncio.to_thread(train) == [(1, 2), (2, 2), (3, 1)]

    collect(tmp_path, story)
