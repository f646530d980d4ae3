"""A user's code that raises, hangs, blocks, ends its process or answers nonsense costs its own samples only."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.agent.plugins.errors import (
    PluginDied,
    PluginError,
    PluginNotFound,
    PluginRaised,
    PluginTimeout,
    WrongAnswer,
)
from rolloutfleet.agent.plugins.kinds import Kind, Verdict
from rolloutfleet.agent.plugins.runner import Plugin, PluginRunner
from unit.store.world import sample

HERE = str(Path(__file__).parents[2])
SHORT = 0.3


def code(name: str, kind: Kind = Kind.REWARD, seconds: float = 30.0) -> Plugin:
    return Plugin(kind, f"unit.plugins.users_code:{name}", seconds)


GOOD = code("reward")


def run(scenario: Callable[[PluginRunner], Awaitable[None]]) -> None:
    async def all_of_it() -> None:
        runner = PluginRunner(folders=[HERE], grace_seconds=0.5)
        try:
            await scenario(runner)
        finally:
            await runner.close()

    asyncio.run(all_of_it())


def test_each_kind_is_called_and_answers_in_its_type() -> None:
    async def scenario(runner: PluginRunner) -> None:
        pair = [sample(0), sample(1)]
        assert await runner.call(GOOD, sample()) == 3.0
        assert await runner.call(code("plain"), sample()) == {"length": 3.0, "thread": 1.0}
        assert await runner.call(code("group", Kind.GROUP_REWARD), pair) == [0.0, 1.0]
        assert await runner.call(code("keep_varied", Kind.FILTER), pair) == Verdict(True)
        assert await runner.call(code("keep_varied", Kind.FILTER), [pair[0]]) == Verdict(False, "zero_std")
        assert await runner.call(code("mark", Kind.SAMPLE_HOOK), pair[1]) == pair[1].changed(metadata={"seen": True})
        assert await runner.call(code("nothing", Kind.SAMPLE_HOOK), pair[1]) == pair[1]
        assert await runner.call(code("advantages", Kind.POST_PROCESS), [pair, [pair[0]]]) == [[0.5, 0.5], [0.5]]
        made = await runner.call(code("two_turns", Kind.GENERATE), pair[0], {}, None)
        assert [(each.index, each.rollout_id) for each in made] == [(0, 0), (1, 0)]

    run(scenario)


def test_calls_share_one_process_that_is_not_the_agents_and_keeps_its_state() -> None:
    async def scenario(runner: PluginRunner) -> None:
        hosts = await asyncio.gather(*[runner.call(code("process"), sample()) for _ in range(50)])
        assert len({*hosts}) == 1
        assert hosts[0] != os.getpid()
        assert [await runner.call(code("Counting"), sample()) for _ in range(3)] == [1, 2, 3]

    run(scenario)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("raises", PluginRaised, "users_code:raises: RuntimeError: the judge is ill"),
        ("its_own_timeout", PluginRaised, "TimeoutError: of something within"),
        ("hangs", PluginTimeout, "users_code:hangs: no answer in 0.3 s"),
        ("hangs_in_a_thread", PluginTimeout, "no answer in 0.3 s"),
        ("will_not_be_cancelled", PluginTimeout, "its process answered nothing in 0.8 s"),
        ("blocks_the_loop", PluginTimeout, "its process answered nothing in 0.8 s"),
        ("never_lets_go_of_the_interpreter", PluginTimeout, "its process answered nothing in 0.8 s"),
        ("ends_the_process", PluginDied, "its process ended with 3"),
        ("exits", PluginDied, "its process ended with 4"),
    ],
)
def test_code_that_goes_wrong_fails_its_own_call_and_no_other(name: str, error: type[PluginError], said: str) -> None:
    async def scenario(runner: PluginRunner) -> None:
        await runner.load(GOOD)
        slow = code("hangs")  # long enough to be in the process when it is ended
        calls = [runner.call(code(name, seconds=SHORT), sample()), *[runner.call(GOOD, sample()) for _ in range(8)]]
        beside = asyncio.create_task(runner.call(slow, sample()))
        bad, *good = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(bad, error)
        assert said in str(bad)
        assert good == [3.0] * 8
        assert not beside.done(), "a call that was in the same process goes on, in another"
        beside.cancel()
        assert await runner.call(GOOD, sample()) == 3.0

    run(scenario)


def test_what_the_code_raised_is_there_with_its_lines() -> None:
    async def scenario(runner: PluginRunner) -> None:
        with pytest.raises(PluginRaised) as raised:
            await runner.call(code("raises"), sample())
        assert 'raise RuntimeError("the judge is ill")' in raised.value.details

    run(scenario)


@pytest.mark.parametrize(
    ("plugin", "arguments", "said"),
    [
        (code("text"), [sample()], "users_code:text: a number is needed: str 'very good'"),
        (code("nothing"), [sample()], "a number is needed: NoneType None"),
        (code("not_a_number"), [sample()], "a finite number is needed: nan"),
        (code("too_few", Kind.GROUP_REWARD), [[sample(), sample(1)]], "a list of 2 rewards is needed, one a sample"),
        (code("text", Kind.FILTER), [[sample()]], "True, False or a Verdict is needed"),
        (code("text", Kind.SAMPLE_HOOK), [sample()], "a Sample or None is needed"),
        (code("another", Kind.SAMPLE_HOOK), [sample()], "another sample than it was given"),
        (code("too_few", Kind.POST_PROCESS), [[[sample()], [sample()]]], "a list of 2 lists is needed, one a group"),
        (code("nothing", Kind.GENERATE), [sample(), {}, None], "a Sample or a list of at least one is needed"),
    ],
)
def test_an_answer_of_another_type_is_refused_by_name(plugin: Plugin, arguments: list[Any], said: str) -> None:
    async def scenario(runner: PluginRunner) -> None:
        with pytest.raises(WrongAnswer) as wrong:
            await runner.call(plugin, *arguments)
        assert said in str(wrong.value)

    run(scenario)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("unit.plugins.users_code:missing", "unit.plugins.users_code has no missing"),
        ("unit.plugins.users_code.missing", "unit.plugins.users_code has no missing"),
        ("unit.plugins.nowhere:reward", "ModuleNotFoundError: No module named 'unit.plugins.nowhere'"),
        ("reward", "package.module:function is needed, or an entry point of the group rolloutfleet.plugins"),
        ("unit.plugins.users_code:NO_FUNCTION", "it is a int and cannot be called"),
        ("unit.plugins.users_code:two_arguments", "a reward is called with 1 argument(s)"),
    ],
)
def test_code_that_is_not_there_is_told_before_the_run_begins(reference: str, said: str) -> None:
    async def scenario(runner: PluginRunner) -> None:
        with pytest.raises(PluginNotFound) as missing:
            await runner.load(Plugin(Kind.REWARD, reference))
        assert said in str(missing.value)
        assert await runner.call(GOOD, sample()) == 3.0

    run(scenario)


def test_the_way_that_slime_writes_a_path_is_understood() -> None:
    async def scenario(runner: PluginRunner) -> None:
        assert await runner.call(Plugin(Kind.REWARD, "unit.plugins.users_code.reward"), sample()) == 3.0

    run(scenario)


def test_an_entry_point_is_found_by_its_name(tmp_path: Path) -> None:
    installed = tmp_path / "judges-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: judges\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[rolloutfleet.plugins]\nlength = judges:length\n")
    (tmp_path / "judges.py").write_text("def length(sample):\n    return sample.response_length * 10\n")

    async def scenario() -> None:
        runner = PluginRunner(folders=[str(tmp_path)])
        assert await runner.call(Plugin(Kind.REWARD, "length"), sample()) == 30.0
        await runner.close()

    asyncio.run(scenario())


def test_a_call_that_nobody_waits_for_any_more_is_cancelled() -> None:
    async def scenario(runner: PluginRunner) -> None:
        await runner.load(GOOD)
        call = asyncio.create_task(runner.call(code("hangs"), sample()))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await runner.call(GOOD, sample()) == 3.0

    run(scenario)
