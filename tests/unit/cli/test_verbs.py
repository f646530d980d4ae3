"""The verbs as users call them, against a stand-in for the API server: what they print, write and refuse."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rolloutfleet.cli.main import main
from rolloutfleet.cli.requests import merged
from unit.cli.objects import condition, engine, group, server
from unit.cli.stand_in_api import StandInApi, serving

RESTART = "rolloutfleet.dev/restart"
RESUME = "rolloutfleet.dev/resume"

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def api() -> StandInApi:
    ill = engine(1, 4, "Failed", "OOMKilled", message="killed for memory", retryAt="T1", restarts=3)
    recovery = {"epoch": 4, "reason": "OOMKilled", "detected": "2026-01-01T00:00:00+00:00"}
    ready = condition("Ready", "True", "OOMKilled", "1/2 engines routable; qwen-main-1-e4: killed for memory")
    router = {"url": "http://qwen-router.rl.svc:30000", "replicas": 1, "ready": 1}
    outside = engine(0, 1, url="http://10.0.0.5:30000")
    labels = {"rolloutfleet.dev/server": "qwen", "rolloutfleet.dev/component": "engine"}
    lease = {"holderIdentity": "trainer-0", "renewTime": "2026-01-01T00:00:00.000000Z", "leaseDurationSeconds": 15}
    pod = {"metadata": {"name": "qwen-main-0-e1-r0", "labels": labels}, "spec": {"nodeName": "node-7"}}
    return StandInApi(
        ("rolloutservers", server(ready, routable=1, router=router, weights={"version": 3, "path": "/weights/3"})),
        ("servergroups", group(engine(0), {**ill, "recoveries": [recovery]})),
        ("servergroups", group(outside, name="external", role="External")),
        ("servergroups", group(engine(0, 1, "Reserved"), name="spare", role="Placeholder")),
        ("pods", pod),
        ("leases", {"metadata": {"name": "qwen-trainer"}, "spec": lease}),
    )


@pytest.fixture
def call(api: StandInApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Exit code, stdout, stderr of a verb about the context `here`."""
    with serving(api, tmp_path) as kubeconfig:

        def run(verb: str, *arguments: str, context: str = "here") -> tuple[int, str, str]:
            code = main([verb, *arguments, f"--kubeconfig={kubeconfig}", f"--context={context}"])
            output = capsys.readouterr()
            return code, output.out, output.err

        yield run


def asked_of(api: StandInApi, name: str = "qwen-main") -> dict[str, str]:
    found: dict[str, str] = api.objects["servergroups", name]["metadata"].get("annotations", {})
    return found


# Looking


def test_status_shows_the_worst_engine_first_with_node_and_lease(call: Call) -> None:
    code, out, _ = call("status", "qwen")
    assert code == 0
    engines = [line.split() for line in out.split("\n\n")[-1].splitlines()]
    assert engines[0] == ["ENGINE", "LIFE", "ROLE", "PHASE", "REASON", "WEIGHTS", "RESTARTS", "NODE", "SERVING"]
    assert engines[1] == ["qwen-main-1", "e4", "Regular", "Failed", "OOMKilled", "-", "3", "-", "-"]
    assert ["qwen-main-0", "e1", "Regular", "Serving", "-", "-", "0", "node-7", "-"] in engines
    assert "version 3 from /weights/3" in out
    assert "trainer-0 leads, lease renewed " in out
    assert "http://qwen-router.rl.svc:30000, 1/1 replicas take traffic" in out


def test_status_goes_without_what_the_user_may_not_read(api: StandInApi, call: Call) -> None:
    api.forbidden |= {"pods", "leases"}
    code, out, _ = call("status", "qwen")
    assert code == 0
    assert "nobody leads" in out
    assert "node-7" not in out


def test_status_for_programs_has_everything_in_one_object(call: Call) -> None:
    _, out, _ = call("status", "qwen", "-o", "json")
    found = json.loads(out)
    assert found["engines"][0]["name"] == "qwen-main-1"
    assert found["status"]["weights"] == {"version": 3, "path": "/weights/3", "skew": 0}
    assert {each["name"] for each in found["groups"]} == {"qwen-main", "qwen-external", "qwen-spare"}


def test_why_says_a_sentence_and_its_exit_code_says_how_much_serves(api: StandInApi, call: Call) -> None:
    code, out, _ = call("why", "qwen")
    assert code == 1
    assert out.startswith("qwen serves partly: 1/2 engines routable; qwen-main-1-e4 is Failed (OOMKilled)")
    assert "\nnext: read the failed pod's log" in out
    for status, expected in (("False", 2), ("True", 0)):
        reason = "Serving" if status == "True" else "OOMKilled"
        api.objects["rolloutservers", "qwen"]["status"]["conditions"] = [condition("Ready", status, reason)]
        assert call("why", "qwen")[0] == expected


def test_timeline_marks_what_still_runs(call: Call) -> None:
    code, out, _ = call("timeline", "qwen")
    assert code == 0
    assert "qwen-main-1-e4   OOMKilled   waits " in out


def test_the_namespace_is_the_contexts_unless_it_is_named(call: Call) -> None:
    assert call("why", "qwen", context="elsewhere")[0] == 3
    assert call("why", "qwen", "-n", "rl", context="elsewhere")[0] == 1


def test_a_context_that_does_not_exist_and_a_cluster_that_does_not_answer_are_errors(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = call("why", "qwen", context="missing")
    assert (code, "missing" in err) == (3, True)
    monkeypatch.setattr("rolloutfleet.kube.client.ATTEMPTS", 1)
    code, _, err = call("why", "qwen", context="nowhere")
    assert code == 3
    assert err.startswith("rolloutfleet why: ")


def test_a_server_that_does_not_exist_is_answered_with_those_that_do(call: Call) -> None:
    code, _, err = call("status", "qwem")
    assert code == 3
    assert "qwem: no such RolloutServer in namespace rl; there are: qwen" in err


# Asking


def test_a_restart_names_the_life_that_is_meant(api: StandInApi, call: Call) -> None:
    code, out, _ = call("restart", "qwen", "qwen-main-0")
    assert code == 0
    assert asked_of(api) == {RESTART: "0-e1"}
    assert "qwen-main-0-e1: restart asked for\nwatch: kubectl rolloutfleet timeline qwen -n rl\n" in out


@pytest.mark.parametrize("name", ["qwen-main-0", "qwen-main-0-e1", "qwen-main-0-e1-r0"])
def test_an_engine_is_known_by_its_name_its_life_and_its_pod(api: StandInApi, call: Call, name: str) -> None:
    assert call("restart", "qwen", name)[0] == 0
    assert asked_of(api) == {RESTART: "0-e1"}


def test_options_may_stand_anywhere_among_the_names(api: StandInApi, call: Call) -> None:
    assert call("restart", "qwen", "-n", "rl", "qwen-main-0")[0] == 0
    assert call("restart", "-n", "rl", "qwen", "qwen-main-1")[0] == 0
    assert asked_of(api) == {RESTART: "0-e1,1-e4"}
    for wrong in (["restart", "qwen", "--none", "qwen-main-0"], ["why", "qwen", "qwen-main-0"]):
        with pytest.raises(SystemExit):
            call(*wrong)


def test_all_are_those_that_the_operator_runs(api: StandInApi, call: Call) -> None:
    assert call("restart", "qwen", "--all")[0] == 0
    assert asked_of(api) == {RESTART: "0-e1,1-e4"}
    assert asked_of(api, "qwen-external") == asked_of(api, "qwen-spare") == {}


def test_resume_without_names_means_every_failed_engine(api: StandInApi, call: Call) -> None:
    code, out, _ = call("resume", "qwen")
    assert code == 0
    assert asked_of(api) == {RESUME: "1-e4"}
    assert "qwen-main-1-e4: resume asked for (it was Failed: OOMKilled)" in out


def test_a_request_that_somebody_else_made_is_kept_and_a_stale_one_goes(api: StandInApi, call: Call) -> None:
    api.write("servergroups", "qwen-main", {"metadata": {"annotations": {RESTART: "1-e4, 0-e0,nonsense"}}})
    assert call("restart", "qwen", "qwen-main-0")[0] == 0
    assert asked_of(api) == {RESTART: "1-e4,0-e1"}


def test_two_users_at_the_same_moment_do_not_lose_each_others_request(api: StandInApi, call: Call) -> None:
    def other_user() -> None:
        api.before_patch = lambda: None
        api.write("servergroups", "qwen-main", {"metadata": {"annotations": {RESTART: "1-e4"}}})

    api.before_patch = other_user
    assert call("restart", "qwen", "qwen-main-0")[0] == 0
    assert asked_of(api) == {RESTART: "1-e4,0-e1"}
    assert len(api.patches) == 2


def test_a_life_that_ends_meanwhile_is_not_exchanged_for_the_next_one(api: StandInApi, call: Call) -> None:
    def end() -> None:
        api.before_patch = lambda: None
        api.write("servergroups", "qwen-main", {"status": {"engines": [engine(0, 7)]}})

    api.before_patch = end
    code, _, err = call("restart", "qwen", "qwen-main-0")
    assert code == 3
    assert "qwen-main-0-e1: ended meanwhile" in err
    assert asked_of(api) == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["restart", "qwen"], "--all"),
        (["restart", "qwen", "--all", "qwen-main-0"], "one of the two"),
        (["restart", "qwen", "qwen-main-9"], "it has: qwen-external-0, qwen-main-0, qwen-main-1, qwen-spare-0"),
        (["restart", "qwen", "nonsense"], "nonsense: qwen has no such engine"),
        (["restart", "qwen", "qwen-main-1-e3"], "this life has ended; the engine is qwen-main-1-e4 now"),
        (["restart", "qwen", "qwen-external-0"], "an external engine; ask who runs http://10.0.0.5:30000"),
        (["restart", "qwen", "qwen-spare-0"], "a placeholder"),
        (["resume", "qwen", "qwen-main-0"], "nothing to resume, it is Serving"),
        (["resume", "qwen", "qwen-external-0"], "an external engine"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_written(
    api: StandInApi, call: Call, arguments: list[str], said: str
) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (3, "")
    assert said in err
    assert api.patches == []


def test_nothing_to_resume_is_said(api: StandInApi, call: Call) -> None:
    api.write("servergroups", "qwen-main", {"status": {"engines": [engine(0), engine(1)]}})
    code, _, err = call("resume", "qwen")
    assert code == 3
    assert "qwen: nothing to resume, no engine is Failed" in err


@pytest.mark.parametrize(
    ("value", "asked", "expected"),
    [
        ("", ["0-e1"], "0-e1"),
        ("0-e1", ["0-e1"], "0-e1"),
        ("1-e2", ["0-e1"], "1-e2,0-e1"),
        (" 1-e2 ,, 0-e9,x", ["0-e1"], "1-e2,0-e1"),
        ("", ["0-e9"], ""),
    ],
)
def test_requests_are_merged_once_each_and_only_for_lives_that_are(value: str, asked: list[str], expected: str) -> None:
    assert merged(value, asked, ["0-e1", "1-e2"]) == expected
