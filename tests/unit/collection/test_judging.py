"""Users' code makes, judges and filters samples; what is wrong with it costs its own samples only, and is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.agent.errors import AgentError
from unit.collection.world import CollectionWorld, collect

PLUGINS = "unit.collection.plugins"


def plugin(name: str) -> str:
    return f"{PLUGINS}:{name}"


def test_rewards_of_a_group_and_their_advantages(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(group_reward=plugin("ranked"), estimator="dr_grpo"))
        batch = await world.batch(1)
        assert [sample.reward for sample in batch.samples] == [0.0, -1.0, 0.0, -1.0]
        assert batch.advantages == [0.5, -0.5, 0.5, -0.5]

    collect(tmp_path, story)


def test_of_a_reward_with_parts_the_trained_one_is_named(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(reward=plugin("parts"), reward_key="short"))
        batch = await world.batch(1)
        assert (batch.rewards, batch.advantages) == ([0.5] * 4, [0.5] * 4)
        world.trainer = "life-2"
        await world.begin(world.asked(reward=plugin("parts")))
        with pytest.raises(AgentError, match="reward_key: ''; the reward has right, short"):
            await world.batch(1)

    collect(tmp_path, story)


@pytest.mark.parametrize("judge", ["judge_that_fails_for_the_second", "judge_that_hangs_for_the_second"])
def test_a_judge_that_fails_or_hangs_costs_the_sample_that_it_was_about(tmp_path: Path, judge: str) -> None:
    async def story(world: CollectionWorld) -> None:
        asked = world.asked(rows=2, groups_per_step=2, reward=plugin(judge), plugin_seconds=0.5)
        await world.begin(asked)
        batch = await world.batch(1, wait_seconds=30.0)
        assert [(s.status, s.reward, s.effective_response_length) for s in batch.samples] == [
            ("truncated", 1.0, 3),
            ("failed", None, 0),
        ] * 2
        assert all(judge in sample.error for sample in batch.samples if sample.status == "failed")

    collect(tmp_path, story)


def test_filters_drop_groups_with_their_reason_and_others_take_their_place(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(rows=8, filters=[plugin("only_odd")]))
        batches = [await world.batch(step) for step in (1, 2)]
        assert {s.group_index for batch in batches for s in batch.samples} == {1, 3, 5, 7}
        assert (await world.collections.current.view()).dropped == {"even": 4}

    collect(tmp_path, story)


def test_groups_whose_rewards_are_all_the_same_can_be_dropped(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(rows=4, reward=plugin("label"), filters=["zero_variance"]))
        with pytest.raises(AgentError) as refusal:
            await world.batch(1)
        assert refusal.value.code == "Exhausted"
        assert (await world.collections.current.view()).dropped == {"zero_variance": 4}

    collect(tmp_path, story)


def test_a_filter_that_drops_everything_ends_in_a_refusal_with_counts_and_the_next_request_goes_on(
    tmp_path: Path,
) -> None:
    async def story(world: CollectionWorld) -> None:
        filters = [plugin("nothing_is_good_enough")]
        await world.begin(world.asked(rows=8, epochs=None, filters=filters, max_drops_per_step=16))
        for _ in range(2):
            with pytest.raises(AgentError) as refusal:
                await world.batch(1)
            assert refusal.value.code == "TooManyDropped"
            assert "16 groups were dropped for one step (filtered 16)" in refusal.value.message
        await world.until_nothing_runs()
        view = await world.collections.current.view()
        assert (view.state, view.trained) == ("Failed", 0)
        assert not world.engines.open

    collect(tmp_path, story)


def test_a_request_that_the_engine_refuses_fails_its_sample_and_a_group_of_such_is_dropped(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        async def answers(body: dict[str, Any]) -> tuple[int, Any]:
            if body["input_ids"][0] == 100:
                return 400, {"error": {"message": "too long"}}
            return 200, world.engines.said(body, 3, "length")

        world.engines.answers = answers
        await world.begin(world.asked(rows=3))
        batch = await world.batch(1)
        assert {sample.group_index for sample in batch.samples} == {1, 2}
        assert (await world.collections.current.view()).dropped == {"failed": 1}

    collect(tmp_path, story)


def test_hooks_buffer_filter_and_post_processing_are_asked(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(
            world.asked(
                rows=4,
                mode="asynchronous",
                ahead=2,
                sample_hooks=[plugin("noted")],
                buffer_filter=plugin("newest_first"),
                post_process=plugin("shares"),
            )
        )
        await world.until_finished(4)
        batch = await world.batch(1)
        assert all(sample.metadata == {"noted": True} for sample in batch.samples)
        assert batch.advantages == [0.5] * 4
        rest = await world.batch(2)
        assert {s.group_index for s in batch.samples} | {s.group_index for s in rest.samples} == {0, 1, 2, 3}

    collect(tmp_path, story)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reward", "no.such.module:judge"),
        ("reward", plugin("missing")),
        ("filters", [plugin("PLUGINS")]),
        ("generate", plugin("label")),
    ],
)
def test_a_plug_in_that_is_not_there_is_told_before_the_first_request(tmp_path: Path, field: str, value: Any) -> None:
    async def story(world: CollectionWorld) -> None:
        with pytest.raises(AgentError) as refusal:
            await world.begin(world.asked(**{field: value}))
        assert refusal.value.code == "PluginNotFound"
        assert not world.engines.requests

    collect(tmp_path, story)


def test_prompts_that_are_texts_need_a_tokenizer_and_long_ones_are_dropped(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        texts = tmp_path / "texts.jsonl"
        texts.write_text('{"prompt": "one"}\n')
        await world.begin(world.asked(data={"path": str(texts)}))
        with pytest.raises(AgentError) as refusal:
            await world.batch(1)
        assert refusal.value.code == "NoTokenizer"

        longer = tmp_path / "longer.jsonl"
        longer.write_text('{"prompt": [1, 2, 3]}\n{"prompt": [1]}\n')
        await world.begin(
            world.asked(
                run="other", data={"path": str(longer), "shuffle": False}, max_prompt_tokens=2, groups_per_step=1
            )
        )
        batch = await world.batch(1)
        assert [sample.prompt_tokens for sample in batch.samples] == [[1], [1]]
        assert (await world.collections.current.view()).dropped == {"prompt_too_long": 1}

    collect(tmp_path, story)
