"""From a data set to a trainer's batches: each prompt once, in any mode, and nothing runs that nobody wants."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.agent.errors import AgentError
from rolloutfleet.api.samples import VersionSpan
from unit.collection.world import CollectionWorld, collect


def prompts(batch: Any) -> set[int]:
    return {sample.group_index for sample in batch.samples}


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_each_prompt_of_each_epoch_is_handed_out_once_and_then_the_run_has_ended(tmp_path: Path, mode: str) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(rows=5, epochs=2, mode=mode))
        seen: list[tuple[int, int]] = []
        for step in range(1, 6):
            batch = await world.batch(step)
            assert [len(batch.samples), batch.groups] == [4, 2]
            seen += {(sample.epoch, sample.group_index) for sample in batch.samples}
            await world.acknowledge(step)
        assert batch.last
        assert sorted(seen) == [(epoch, prompt) for epoch in range(2) for prompt in range(5)]
        with pytest.raises(AgentError) as refusal:
            await world.batch(6)
        assert refusal.value.code == "Exhausted"
        view = await world.collections.current.view()
        assert (view.state, view.trained, view.open) == ("Exhausted", 10, 0)

    collect(tmp_path, story)


def test_a_sample_is_all_that_training_needs(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        world.commit(7)
        await world.begin(world.asked(reward="unit.collection.plugins:label"))
        batch = await world.batch(1)
        assert batch.weight_version == 7
        for sample in batch.samples:
            first = 100 * (sample.group_index + 1)
            assert sample.prompt_tokens == [first]
            assert sample.response_tokens == [first + 1, first + 2, first + 3]
            assert sample.rollout_log_probs == [-0.5 * token for token in sample.response_tokens]
            assert sample.weight_versions == [VersionSpan(version=7, start=0, end=3)]
            assert (sample.status, sample.reward, sample.label) == ("truncated", sample.group_index, sample.group_index)
        assert batch.advantages == [float(sample.group_index) for sample in batch.samples]

    collect(tmp_path, story)


def test_a_step_has_one_batch_whoever_asks_and_ranks_share_it_without_overlap(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked())
        whole = await world.batch(1)
        shares = [await world.batch(1, rank=rank, ranks=2, token_budget=4) for rank in range(2)]
        assert await world.batch(1) == whole
        identities = [{(s.group_index, s.index) for s in share.samples} for share in shares]
        assert identities[0] | identities[1] == {(s.group_index, s.index) for s in whole.samples}
        assert not identities[0] & identities[1]
        assert [sorted(i for m in share.micro_batches for i in m) for share in shares] == [[0, 1], [0, 1]]

    collect(tmp_path, story)


def test_a_synchronous_run_asks_engines_for_nothing_before_a_step_is_asked_for(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(over_sampling=2.0))
        assert world.engines.requests == []
        await world.batch(1)
        asked = len(world.engines.requests)
        assert (await world.collections.current.view()).state == "Waiting"
        await world.batch(1)
        assert len(world.engines.requests) == asked

    collect(tmp_path, story)


def test_an_asynchronous_run_works_ahead_and_not_further(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(mode="asynchronous", ahead=2, rows=20))
        await world.until_finished(4)
        assert len(world.engines.requests) == 8
        await world.batch(1)
        await world.until_finished(4)
        assert len(world.engines.requests) == 12

    collect(tmp_path, story)


def test_what_is_stopped_keeps_its_tokens_and_goes_on_as_one_sample_of_two_versions(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        slow = {100, 200}

        async def answers(body: dict[str, Any]) -> tuple[int, Any]:
            if body["input_ids"][0] in slow:
                event = world.engines.open[body["rid"]] = asyncio.Event()
                await event.wait()
                return 200, world.engines.said(body, 2, "abort")
            return 200, world.engines.said(body, body["sampling_params"]["max_new_tokens"], "length")

        world.engines.answers = answers
        await world.begin(world.asked(rows=4, over_sampling=2.0))
        first = await world.batch(1)
        assert prompts(first) == {2, 3}
        slow.clear()
        world.commit(1)
        await world.fleet_world.fleet.refresh()
        second = await world.batch(2)
        assert prompts(second) == {0, 1}
        for sample in second.samples:
            start = sample.prompt_tokens[0]
            assert sample.response_tokens == [start + 1, start + 2, start + 3], "as if it had never been stopped"
            assert sample.weight_versions == [
                VersionSpan(version=0, start=0, end=2),
                VersionSpan(version=1, start=2, end=3),
            ]
            assert sample.attempts == 2

    collect(tmp_path, story)


@pytest.mark.parametrize(
    ("options", "tokens_of_old", "trained_of_old"),
    [
        ({"partial_rollout": False}, 0, 0),
        ({"max_staleness": 0}, 0, 0),
        ({"max_staleness": 0, "stale": "mask"}, 2, 0),
        ({"max_staleness": 1}, 2, 2),
    ],
)
def test_older_tokens_are_kept_masked_or_left_as_was_asked_for(
    tmp_path: Path, options: dict[str, Any], tokens_of_old: int, trained_of_old: int
) -> None:
    async def story(world: CollectionWorld) -> None:
        world.engines.held, world.engines.tokens_when_held = True, 2
        await world.begin(world.asked(rows=2, groups_per_step=1, mode="synchronous", **options))
        await world.end_with_open_requests(2)
        world.commit(1)
        await world.begin(world.asked(rows=2, groups_per_step=1, **options))
        (sample, _) = (await world.batch(1)).samples
        old = [span for span in sample.weight_versions if span.version == 0]
        assert sum(span.end - span.start for span in old) == tokens_of_old
        assert sum(sum(sample.loss_mask[span.start : span.end]) for span in old) == trained_of_old
        assert sample.response_length == 3

    collect(tmp_path, story)


def test_groups_that_became_too_old_while_they_waited_are_made_anew(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(mode="asynchronous", max_staleness=0, rows=4, ahead=2))
        await world.until_finished(4)
        world.commit(1)
        await world.fleet_world.fleet.refresh()
        batch = await world.batch(1)
        assert {span.version for sample in batch.samples for span in sample.weight_versions} == {1}

    collect(tmp_path, story)


def test_an_agent_that_comes_back_goes_on_where_it_was(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(rows=6))
        first = await world.batch(1)
        world.new_agent()
        with pytest.raises(AgentError) as refusal:
            await world.batch(2)
        assert refusal.value.code == "NoCollection"
        await world.begin(world.asked(rows=6))
        assert await world.batch(1) == first, "the same batch, whoever asks"
        second, third = await world.batch(2), await world.batch(3)
        assert [prompts(batch) for batch in (first, second, third)] == [{0, 1}, {2, 3}, {4, 5}]

    collect(tmp_path, story)


def test_a_trainer_that_comes_back_gets_what_its_checkpoint_does_not_have(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(rows=6))
        for step in (1, 2):
            await world.batch(step)
        await world.acknowledge(1)
        world.trainer = "life-2"
        await world.begin(world.asked(rows=6, step=1))
        assert prompts(await world.batch(2)) == {2, 3}
        world.trainer = "life-1"
        with pytest.raises(AgentError) as refusal:
            await world.batch(3)
        assert refusal.value.code == "Fenced"

    collect(tmp_path, story)


def test_a_batch_that_is_not_there_in_time_says_what_it_waits_for(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        world.engines.held = True
        await world.begin(world.asked())
        with pytest.raises(AgentError) as refusal:
            await world.batch(1, wait_seconds=0.1)
        assert (refusal.value.code, refusal.value.status) == ("NotReady", 503)
        assert "step 1: 0 of 2 groups are finished, 2 are in work, 1 of 1 engines routable" in refusal.value.message

    collect(tmp_path, story)


def test_two_rows_make_a_smaller_last_batch_and_epochs_wrap(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(rows=3, epochs=3, groups_per_step=8))
        first, second = await world.batch(1), await world.batch(2)
        assert (first.groups, second.groups, second.last) == (8, 1, True)

    collect(tmp_path, story)


def test_samples_of_a_batch_are_a_multiple_and_the_others_wait(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(rows=4, groups_per_step=3, multiple=4))
        first, second = await world.batch(1), await world.batch(2)
        assert (first.groups, second.groups) == (2, 2)

    collect(tmp_path, story)


def test_another_data_set_under_the_same_run_is_refused_and_nothing_is_collected(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(rows=4))
        await world.batch(1)
        with pytest.raises(Exception, match="it was started with data set") as refusal:
            await world.begin(world.asked(rows=5))
        assert "give the run another name" in str(refusal.value)

    collect(tmp_path, story)


def test_an_agent_that_does_not_lead_collects_nothing(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        world.fleet_world.lose_the_lease()
        with pytest.raises(AgentError) as refusal:
            await world.begin(world.asked())
        assert refusal.value.code == "NotLeading"

    collect(tmp_path, story)
