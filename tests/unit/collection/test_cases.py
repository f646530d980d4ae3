"""What broke others' sample collection, tried here: docs/cases-samples.md says what it was. Numbers are the cases'."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
from contextlib import AsyncExitStack, ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.agent.errors import AgentError
from rolloutfleet.api.collection import Evaluate
from rolloutfleet.api.samples import SampleStatus, VersionSpan
from rolloutfleet.trainer import connect
from rolloutfleet.trainer.collecting import StepBatch
from rolloutfleet.trainer.errors import Refused
from unit.agent.world import answer, signed
from unit.collection.fast_engine import FastEngine
from unit.collection.test_judging import plugin
from unit.collection.test_kills import PROMPTS, asked_for, require_once
from unit.collection.test_shared import Side
from unit.collection.world import CollectionWorld, collect
from unit.engine.stand_in import Answer, HangUp

UNICODE = Path(__file__).parents[1] / "data/unicode.jsonl"


def test_50_texts_that_break_others_come_back_through_data_store_api_and_client(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in UNICODE.read_text("ascii").splitlines() if "lone-" not in line]
    data = tmp_path / "unicode.jsonl"
    lines = [{"prompt": [n + 1], "label": row["label"], "metadata": {row["id"]: row}} for n, row in enumerate(rows)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))

    async def story(world: CollectionWorld) -> None:
        async with AsyncExitStack() as stack:
            url = await world.serve(stack)
            asked = world.asked(data={"path": str(data), "shuffle": False}, groups_per_step=len(rows))

            def trained() -> None:
                with closing(connect("actor", url=url)) as fleet:
                    batch = fleet.collect(**asked.model_dump(exclude_unset=True)).batch(1)
                    assert len(fleet.observed(samples=64).samples) == 2 * len(rows)
                found = {sample.group_index: (sample.label, sample.metadata) for sample in batch.samples}
                assert found == {n: (row["label"], {row["id"]: row}) for n, row in enumerate(rows)}

            await asyncio.to_thread(trained)

    collect(tmp_path, story)


@pytest.mark.parametrize(
    ("options", "dropped"),
    [
        ({"reward": plugin("complains_in_half_a_surrogate_pair")}, {"failed": 1}),
        ({"filters": [plugin("drops_for_half_a_surrogate_pair")]}, {"\ufffd is dull": 1}),
    ],
)
def test_50_users_code_that_makes_what_is_no_text_costs_its_own_group_and_can_be_watched(
    tmp_path: Path, options: dict[str, Any], dropped: dict[str, int]
) -> None:
    async def story(world: CollectionWorld) -> None:
        async with AsyncExitStack() as stack:
            url = await world.serve(stack)
            await world.begin(world.asked(rows=1, groups_per_step=1, **options))
            with pytest.raises(AgentError, match="no more prompts"):
                await world.batch(1)
            assert (await world.collections.current.view()).dropped == dropped

            def watched() -> dict[str, int]:
                with closing(connect("actor", url=url)) as fleet:
                    return fleet.observed(samples=8).dropped

            assert await asyncio.to_thread(watched) == dropped

    collect(tmp_path, story)


def test_50_a_response_with_half_a_character_is_shown_with_a_mark_in_its_place(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        hooks = [plugin("writes_half_a_surrogate_pair")]
        await world.begin(world.asked(rows=1, groups_per_step=1, sample_hooks=hooks))
        assert [sample.response for sample in (await world.batch(1)).samples] == ["good \ufffd"] * 2
        shown = world.fleet_world.observations.view(role="actor", server="qwen").model_dump_json()
        assert "good \ufffd" in shown

    collect(tmp_path, story)


def test_50_metadata_that_are_no_text_reach_the_trainer_as_they_are(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(rows=1, groups_per_step=1, sample_hooks=[plugin("notes_half_a_surrogate_pair")]))
        batch = await world.batch(1)
        assert [sample.metadata for sample in batch.samples] == [{"note": "\ud83d"}] * 2

    collect(tmp_path, story)


def test_51_fewer_rows_than_a_batch_wrap_into_the_next_epoch(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        await world.begin(world.asked(rows=3, epochs=None, groups_per_step=8))
        batch = await world.batch(1)
        assert (
            sorted({(sample.epoch, sample.group_index) for sample in batch.samples})
            == [(epoch, prompt) for epoch in range(3) for prompt in range(3)][:8]
        )

    collect(tmp_path, story)


def test_55_a_group_of_which_one_sample_alone_was_judged_teaches_nothing_and_is_finite(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        judge = plugin("judge_that_fails_for_the_second")
        await world.begin(world.asked(rows=2, reward=judge, estimator="grpo"))
        batch = await world.batch(1)
        assert [sample.reward for sample in batch.samples] == [1.0, None] * 2
        assert batch.advantages == [0.0] * 4

    collect(tmp_path, story)


def write_to(path: str) -> None:
    with open(path, "a") as data:
        data.write('{"prompt": [7]}\n')


def test_56_data_that_change_under_a_run_stop_it_with_the_reason_and_nothing_is_trained(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        asked = world.asked(rows=4)
        await world.begin(asked)
        await world.batch(1)
        write_to(asked.data.path)
        for _ in range(2):
            with pytest.raises(AgentError, match="it was changed while the run reads it"):
                await world.batch(2)
            assert not world.engines.open
        view = await world.collections.current.view()
        assert (view.state, view.trained, view.leased) == ("Failed", 0, 2)

    collect(tmp_path, story)


def test_56_an_evaluation_of_nothing_is_refused(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        nothing = tmp_path / "nothing.jsonl"
        nothing.touch()
        with pytest.raises(AgentError, match="no rows") as refusal:
            await world.collections.evaluate(Evaluate.model_validate({"data": {"path": str(nothing)}}))
        assert refusal.value.status == 422

    collect(tmp_path, story)


def test_57_a_group_of_which_an_engine_died_with_one_sample_is_completed_and_nothing_aborted_is_judged(
    tmp_path: Path,
) -> None:
    async def story(world: CollectionWorld) -> None:
        died = 0

        async def answers(body: dict[str, Any]) -> Answer:
            nonlocal died
            if died < 3:
                died += 1
                raise HangUp
            return 200, world.engines.said(body, 3, "length")

        world.engines.answers = answers
        await world.begin(world.asked(rows=1, n=8, groups_per_step=1, reward=plugin("index")))
        batch = await world.batch(1)
        assert [sample.reward for sample in batch.samples] == [float(n) for n in range(8)]
        assert sorted(sample.attempts for sample in batch.samples) == [1] * 5 + [2] * 3

    collect(tmp_path, story)


def test_57_a_group_whose_samples_all_are_aborted_twice_in_a_row_is_neither_delivered_nor_lost(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        asked_for: dict[int, int] = {}

        async def answers(body: dict[str, Any]) -> Answer:
            """Each request is aborted with a token, until the second update has come."""
            length = len(body["input_ids"])
            asked_for[length] = asked_for.get(length, 0) + 1
            if length == 3:
                return 200, world.engines.said(body, 9, "length")
            told = answer([body["input_ids"][-1] + 1], version=signed(length - 1), kind="abort")
            if asked_for[length] == 8:
                world.commit(length)
                await world.fleet_world.fleet.refresh()
            return 200, told

        world.engines.answers = answers
        await world.begin(world.asked(rows=1, n=8, groups_per_step=1, reward=plugin("index")))
        batch = await world.batch(1)
        assert asked_for == {1: 8, 2: 8, 3: 8}
        for sample in batch.samples:
            assert (sample.status, sample.attempts) == (SampleStatus.TRUNCATED, 3)
            assert sample.response_tokens == [101, 102, 103]
            assert sample.weight_versions == [VersionSpan(version=n, start=n, end=n + 1) for n in range(3)]
            assert sample.reward == float(sample.index)
        assert world.fleet_world.observations.ended[SampleStatus.ABORTED] == 0
        assert world.fleet_world.observations.counts.judged == 8

    collect(tmp_path, story)


def test_58_samples_that_cannot_differ_are_refused_where_they_are_compared(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        greedy = {"max_new_tokens": 3, "temperature": 0}
        with pytest.raises(AgentError, match=r"sampling_params.temperature: 0 makes all samples of a prompt the same"):
            await world.begin(world.asked(estimator="grpo", sampling_params=greedy))
        await world.begin(world.asked(estimator="reinforce_plus_plus", sampling_params=greedy))

    collect(tmp_path, story)


def test_61_images_go_with_every_request_of_their_prompt_and_are_kept_in_none_of_its_samples(tmp_path: Path) -> None:
    image = "data:image/png;base64," + "A" * (4 << 20)
    data = tmp_path / "seen.jsonl"
    data.write_text(json.dumps({"prompt": [100], "image_data": [image, image]}) + "\n" + '{"prompt": [200]}\n')

    async def story(world: CollectionWorld) -> None:
        source = {"path": str(data), "shuffle": False, "multimodal_keys": ["image_data"], "bad_rows": "skip"}
        asked = world.asked(data=source, n=8, groups_per_step=1, mode="asynchronous")
        world.engines.held = True
        await world.begin(asked)
        await world.until(lambda: len(world.engines.open) == 8)
        await world.collections.end()
        world.engines.held = False
        await world.begin(asked)
        batch = await world.batch(1)
        assert [sample.attempts for sample in batch.samples] == [2] * 8
        assert sorted(len(body["input_ids"]) for body in world.engines.requests) == [1] * 8 + [2] * 8
        assert all(body["image_data"] == [image, image] for body in world.engines.requests)

    collect(tmp_path, story, seconds=30.0)
    assert sum(file.stat().st_size for file in tmp_path.glob("ledger.sqlite*")) < 1 << 20


def test_61_users_code_of_several_turns_sends_the_images_of_its_prompt_with_each(tmp_path: Path) -> None:
    image = "data:image/png;base64," + "A" * (4 << 20)
    data = tmp_path / "seen.jsonl"
    data.write_text(json.dumps({"prompt": [100], "image_data": [image]}) + "\n")

    async def story(world: CollectionWorld) -> None:
        async with AsyncExitStack() as stack:
            await world.serve(stack)
            source = {"path": str(data), "multimodal_keys": ["image_data"]}
            await world.begin(world.asked(data=source, n=2, groups_per_step=1, generate=plugin("two_turns")))
            batch = await world.batch(1)
        assert [sample.status.value for sample in batch.samples] == ["truncated"] * 2, batch.samples[0].error
        assert sorted(len(body["input_ids"]) for body in world.engines.requests) == [1, 1, 3, 3]
        assert all(body["image_data"] == [image] for body in world.engines.requests)

    collect(tmp_path, story, seconds=30.0)


def test_62_one_three_or_no_samples_of_a_prompt_with_everything_else_at_once(tmp_path: Path) -> None:
    async def story(world: CollectionWorld) -> None:
        async with AsyncExitStack() as stack:
            await world.serve(stack)
            asked = world.asked(
                rows=4,
                n=3,
                generate=plugin("one_three_or_none"),
                group_reward=plugin("by_position"),
                filters=["zero_variance"],
                estimator="dr_grpo",
                over_sampling=2.0,
                multiple=2,
            )
            world.engines.held = True
            await world.begin(asked)
            await world.end_with_open_requests(12)
            await world.begin(asked)
            whole = await world.batch(1)
            shares = [await world.batch(1, rank=rank, ranks=2) for rank in range(2)]
        assert (whole.groups, len(whole.samples)) == (2, 10)
        for number in range(2):
            group = whole.samples[5 * number : 5 * number + 5]
            assert [sample.rollout_id for sample in group] == [None, 1, 1, 1, None]
            assert [sample.status.value for sample in group] == ["truncated"] * 4 + ["failed"]
            assert [sample.reward for sample in group] == [0.0, 1.0, 1.0, 1.0, None], "one a trajectory"
            assert whole.advantages[5 * number : 5 * number + 5] == [-0.5, 0.5, 0.5, 0.5, 0.0]
        shared = [(sample.group_index, sample.index) for share in shares for sample in share.samples]
        assert sorted(shared) == sorted((sample.group_index, sample.index) for sample in whole.samples)

    collect(tmp_path, story)


def freeze_between_transactions(process: int, store: str) -> None:
    """In the middle of one its lock keeps out whoever comes next (StoreBusy), as SQLite's locks do until it ends."""
    for _ in range(100):
        os.kill(process, signal.SIGSTOP)
        with closing(sqlite3.connect(store, timeout=0.2, isolation_level=None)) as file:
            try:
                file.execute("BEGIN IMMEDIATE")
                file.execute("ROLLBACK")
                return
            except sqlite3.OperationalError:
                os.kill(process, signal.SIGCONT)
    raise AssertionError("it was in a transaction each time")


def test_64_an_agent_that_was_frozen_while_the_next_one_opened_its_file_can_hand_out_nothing_when_it_is_thawed(
    tmp_path: Path,
) -> None:
    store = str(tmp_path / "ledger.sqlite")

    def prompts(batch: StepBatch) -> list[tuple[int, int]]:
        return sorted({(sample.epoch, sample.group_index) for sample in batch.samples})

    with FastEngine(tokens=4) as engine, ExitStack() as stack:
        old, new = (Side(name, tmp_path, engine.url, store) for name in ("old", "new"))
        frozen = stack.enter_context(old.agent())
        trainer = stack.enter_context(closing(connect("actor", url=old.url)))
        run = trainer.collect(**asked_for(old.folder, done=0) | {"store": store})
        trained = {step: prompts(run.batch(step)) for step in (1, 2, 3)}
        run.acknowledge(3)
        fourth = prompts(run.batch(4))
        freeze_between_transactions(int(frozen.pid or 0), store)
        stack.callback(os.kill, int(frozen.pid or 0), signal.SIGCONT)

        stack.enter_context(new.agent())
        next_trainer = stack.enter_context(closing(connect("actor", url=new.url)))
        for batch in next_trainer.collect(**asked_for(new.folder, done=3) | {"store": store}).batches(4):
            trained[batch.step] = prompts(batch)
        os.kill(int(frozen.pid or 0), signal.SIGCONT)
        with pytest.raises(Refused) as refusal:
            run.batch(5, timeout=30.0)
        assert refusal.value.code == "Fenced"
    assert trained[4] == fourth, "of no checkpoint: handed out again"
    require_once([trained], PROMPTS)
