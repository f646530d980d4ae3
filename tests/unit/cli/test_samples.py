"""`samples`: which trainer is asked, by a real agent behind a stand-in for exec, and what is printed."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from browser.agent import Agent
from browser.agent import serving as serving_agent
from browser.samples import sample, tell_a_step
from rolloutfleet.agent.collection.observer import Evaluation
from rolloutfleet.agent.observing.observations import Observations
from rolloutfleet.api.names import AGENT_CONTAINER
from rolloutfleet.api.samples import SampleStatus
from rolloutfleet.api.samples_view import SamplesView, SampleView
from rolloutfleet.cli.main import main
from rolloutfleet.cli.samples_text import TOKENS, _short, as_text, printable, sample_text, sparkline
from unit.cli.objects import engine, group, server
from unit.cli.stand_in_api import EXEC_SUCCESS, StandInApi, exec_answer, exec_failure, serving

Call = Callable[..., tuple[int, str, str]]


def trainer(name: str, servers: str = "actor=qwen", phase: str = "Running") -> tuple[str, dict[str, Any]]:
    metadata = {
        "name": name,
        "labels": {"rolloutfleet.dev/component": "trainer"},
        "annotations": {"rolloutfleet.dev/rollout-servers": servers},
    }
    return "pods", {"metadata": metadata, "status": {"phase": phase}}


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with serving_agent() as agent:
        for step in range(1, 13):
            agent.tell(tell_a_step, step)
        agent.ended(sample(500, versions=(12, 13), tokens=6, reward=1.0, loss_mask=[1, 1, 0, 1, 1, 1]))
        yield agent


class Exec:
    """Runs the command as it would run in the container of the pod, beside the agent."""

    def __init__(self, api: StandInApi, agent: Agent, *pods: str) -> None:
        self.asked: list[tuple[str, str]] = []
        """Pod and container."""
        self.port = urlsplit(agent.url).port
        for pod in pods:
            api.others[f"pods/{pod}/exec"] = self._run

    async def _run(self, request: web.Request, _: Any) -> web.WebSocketResponse:
        self.asked.append((request.path.split("/")[-2], request.query["container"]))
        _, *arguments = request.query.getall("command")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"ROLLOUTFLEET_AGENT_PORT": str(self.port), "http_proxy": "http://127.0.0.1:1"},
        )
        out, err = await process.communicate()
        end = exec_failure(process.returncode) if process.returncode else EXEC_SUCCESS
        return await exec_answer(request, [b"\1" + out, b"\2" + err, end])


@pytest.fixture
def api() -> StandInApi:
    lease = {"metadata": {"name": "qwen-trainer"}, "spec": {"holderIdentity": "grpo-1"}}
    return StandInApi(
        ("rolloutservers", server()),
        ("servergroups", group(engine(0))),
        ("leases", lease),
        trainer("grpo-0"),
        trainer("grpo-1", "judge=rm,actor=qwen"),
        trainer("grpo-2", phase="Succeeded"),
        trainer("other", "actor=llama"),
        trainer("odd", "actor"),
    )


@pytest.fixture
def call(api: StandInApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    with serving(api, tmp_path) as kubeconfig:

        def run(*arguments: str) -> tuple[int, str, str]:
            code = main(["samples", "qwen", *arguments, f"--kubeconfig={kubeconfig}", "--context=here"])
            output = capsys.readouterr()
            return code, output.out, output.err

        yield run


# Which trainer


def test_the_trainer_that_leads_is_asked_in_its_agent_s_container(api: StandInApi, call: Call, agent: Agent) -> None:
    shell = Exec(api, agent, "grpo-1")
    code, out, err = call()
    assert (code, err) == (0, "")
    assert shell.asked == [("grpo-1", AGENT_CONTAINER)]
    head, _, figures = out.partition("\n\n")
    assert head == "rl/qwen, role actor, beside grpo-1"
    assert figures.startswith("FIGURE         VALUE\nstep           12 from version 13, trained up to 10\n")
    assert len(re.findall(r"^(completed|truncated|failed)   prompt ", figures, re.MULTILINE)) == 3
    assert "reward 1   6 tokens, 5 trained" in out
    assert "port-forward -n rl pod/grpo-1 8477, then http://localhost:8477/v1/servers/actor/samples.html" in out
    assert "\x1b" not in out, "colours are for terminals"


def test_programs_get_all_of_it(api: StandInApi, call: Call, agent: Agent) -> None:
    Exec(api, agent, "grpo-1")
    view = SamplesView.model_validate_json(call("-o", "json", "--last=5")[1])
    assert (view.server, len(view.steps), len(view.samples)) == ("qwen", 12, 5)


def test_where_nobody_leads_the_only_trainer_is_asked_or_one_has_to_be_named(
    api: StandInApi, call: Call, agent: Agent
) -> None:
    shell = Exec(api, agent, "grpo-0", "grpo-1")
    api.forbidden.add("leases")
    code, out, err = call()
    assert (code, out) == (3, "")
    assert "it is not clear which trainer; --pod may be: grpo-0, grpo-1" in err
    assert call("--pod=grpo-0", "--last=0")[0] == 0
    del api.objects["pods", "grpo-0"]
    assert call("--last=0")[0] == 0
    assert [pod for pod, _ in shell.asked] == ["grpo-0", "grpo-1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pod=grpo-2"], "--pod grpo-2: no trainer of qwen that runs; --pod may be: grpo-0, grpo-1"),
        (["--pod=other"], "--pod other: no trainer of qwen"),
        (["--role=judge"], "--role judge: pod grpo-1 has actor for qwen"),
        (["--last=-1"], "--last -1: must be 0 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Call, arguments: list[str], said: str) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (3, "")
    assert said in err


def test_an_agent_that_does_not_answer_or_refuses_is_told(api: StandInApi, call: Call, agent: Agent) -> None:
    api.objects["pods", "grpo-1"]["metadata"]["annotations"]["rolloutfleet.dev/rollout-servers"] = "critic=qwen"
    shell = Exec(api, agent, "grpo-1")
    assert "grpo-1: the agent answered 404" in call()[2]
    shell.port = 1
    assert "grpo-1: the agent does not answer" in call()[2]


# What is printed


def view_of(*tell: Callable[[Observations], None]) -> SamplesView:
    seen = Observations()
    for each in tell:
        each(seen)
    return seen.view(role="actor", server="qwen")


def first(*tell: Callable[[Observations], None]) -> SampleView:
    return view_of(*tell).samples[0]


def test_before_the_first_sample_it_says_so() -> None:
    assert as_text(view_of(), width=80, colour=False).endswith("No sample has ended yet.")


def test_of_each_evaluation_the_last_one_is_shown() -> None:
    def ended(seen: Observations) -> None:
        for version, reward in ((3, 0.0), (4, 1.0)):
            groups = [[sample(1, reward=reward)]]
            seen.evaluation_ended(Evaluation("math\x1b", version, groups, failed=2, reward_key="", seconds=1.0))

    text = as_text(view_of(ended), width=120, colour=False)
    assert re.findall(r"^evaluation .*", text, re.MULTILINE) == [
        "evaluation     math\ufffd: reward 1, passed 100.0%, version 4, 1 samples, 2 failed, 0s ago"
    ]
    assert "No sample has ended" not in text


def test_a_sparkline_goes_from_the_lowest_to_the_highest_of_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5]) == "▄▄"
    assert sparkline([]) == ""
    assert sparkline([9.0, *range(40)])[0] == "▁", "the 9 is too old"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.1234, "0.123"), (999.4, "999"), (999.6, "1k"), (12345, "12.3k"), (999_999, "1M"), (5e12, "5e+03G")],
)
def test_large_numbers_are_short(value: float, text: str) -> None:
    assert _short(value) == text


def test_tokens_have_a_colour_a_version_and_those_that_are_not_trained_are_in_parentheses() -> None:
    made = sample(1, versions=(12, 13), tokens=4, loss_mask=[1, 0, 1, 1], response="")
    ids = made.response_tokens
    shown = first(lambda seen: seen.sample_ended(made))
    plain = sample_text(shown, width=120, colour=False).splitlines()[1]
    assert plain == f"  v12 {ids[0]} ({ids[1]}) v13 {ids[2]} {ids[3]}"
    coloured = sample_text(shown, width=120, colour=True)
    backgrounds = re.findall(r"\x1b\[97;48;5;(\d+)m", coloured)
    assert backgrounds[0] == backgrounds[1] != backgrounds[2] == backgrounds[3]
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).splitlines()[1] == plain


def test_long_responses_and_texts_are_cut_and_fit_the_terminal() -> None:
    made = sample(1, tokens=5000, response="word " * 4000)
    lines = sample_text(first(lambda seen: seen.sample_ended(made)), width=60, colour=False).splitlines()
    assert all(len(line) <= 60 for line in lines[1:])
    assert "  …" in lines
    assert "… 4940 …" in " ".join(lines)
    assert len(re.findall(r"\d{1,6}", " ".join(lines[7:]))) == TOKENS + 2, "and a version and how many are left out"


def test_what_samples_say_does_not_steer_the_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\rgone\u202e\x9b31m"
    made = sample(1, tokens=2, response=evil, engine=evil, error=evil, status=SampleStatus.FAILED)

    def happens(seen: Observations) -> None:
        seen.sample_ended(made)
        seen.group_dropped([made], evil)

    text = as_text(view_of(happens), width=80, colour=False)
    assert not set("\x1b\x07\r\u202e\x9b") & set(text)
    assert "gone" in text
    assert printable("grüße, 世界 🙂\n") == "grüße, 世界 🙂\n"
