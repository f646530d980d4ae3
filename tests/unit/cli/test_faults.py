"""`inject-fault`: what it refuses, what it sends into pods, and that its scripts hit the engine's container alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rolloutfleet.cli import faults
from rolloutfleet.cli.in_pod import memory, network, signals
from rolloutfleet.cli.main import main
from unit.cli.objects import Body, condition, engine, group, server
from unit.cli.stand_in_api import EXEC_SUCCESS, StandInApi, exec_answer, exec_failure, serving

POD = "qwen-main-0-e1-r0"
Call = Callable[..., tuple[int, str, str]]


def pod(name: str = POD, *, running: bool = True, **spec: Any) -> Body:
    state = {"running": {}} if running else {"terminated": {"exitCode": 137}}
    container = {"name": "engine", "image": "engine:1", "resources": {"limits": {"memory": "1Gi"}}}
    return {
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "spec": {"containers": [{"name": "side"}, container], **spec},
        "status": {"containerStatuses": [{"name": "engine", "state": state}]},
    }


@pytest.fixture
def api() -> StandInApi:
    body = server(condition("Ready", "True", "Serving"))
    body["metadata"]["annotations"] = {"rolloutfleet.dev/test-fleet": "true"}
    external = group(engine(0, url="http://10.0.0.5:30000"), name="external", role="External")
    return StandInApi(
        ("rolloutservers", body),
        ("servergroups", group(engine(0), engine(1, 2, "Failed", "EngineExited"))),
        ("servergroups", external),
        ("servergroups", group(engine(0, 1, "Reserved"), name="spare", role="Placeholder")),
        ("servergroups", group(engine(0), name="vision", role="Encoder")),
        ("pods", pod()),
        ("pods", pod("qwen-vision-0-e1-r0")),
    )


@pytest.fixture
def call(api: StandInApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Exit code, stdout, stderr of `inject-fault qwen ARGUMENTS`."""
    with serving(api, tmp_path) as kubeconfig:

        def run(*arguments: str) -> tuple[int, str, str]:
            code = main(["inject-fault", "qwen", *arguments, f"--kubeconfig={kubeconfig}", "--context=here"])
            output = capsys.readouterr()
            return code, output.out, output.err

        yield run


class Shell:
    """What exec in the pod answers: messages of the websocket protocol; and what was asked."""

    def __init__(self, api: StandInApi, *messages: bytes, then: Callable[[], None] = lambda: None) -> None:
        self.commands: list[list[str]] = []
        self._messages = messages
        self._then = then
        api.others[f"pods/{POD}/exec"] = self._handle

    async def _handle(self, request: web.Request, _: Any) -> web.WebSocketResponse:
        self.commands.append(request.query.getall("command"))
        socket = await exec_answer(request, self._messages)
        self._then()
        return socket


# Refusals


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["qwen-external-0", "--fault=kill"], "an external engine"),
        (["qwen-spare-0", "--fault=kill"], "a placeholder"),
        (["qwen-main-9", "--fault=kill"], "it has: qwen-external-0, qwen-main-0,"),
        (["qwen-main-1", "--fault=kill"], "qwen-main-1-e2 is Failed and has no pod qwen-main-1-e2-r0"),
        (["qwen-main-0", "--fault=kill", "--rank=1"], "--rank 1: qwen-main-0 has ranks 0 to 0"),
        (["qwen-main-0", "--fault=kill", "--seconds=3"], "only hang and network end by themselves, not kill"),
        (["qwen-main-0", "--fault=hang", "--seconds=0"], "must be above 0"),
        (["qwen-main-0", "--fault=weights"], "--path"),
        (["qwen-main-0", "--fault=kill", "--path=/models/m1"], "--path"),
        (["qwen-vision-0", "--fault=weights", "--path=/models/m1"], "an encoder"),
    ],
)
def test_what_makes_no_sense_is_refused(api: StandInApi, call: Call, arguments: list[str], said: str) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (3, "")
    assert said in err
    assert api.patches == []


@pytest.mark.parametrize("value", [None, "", "false", "True"])
def test_a_fleet_that_is_not_marked_is_left_alone_and_the_mark_is_named(
    api: StandInApi, call: Call, value: str | None
) -> None:
    annotations = {} if value is None else {"rolloutfleet.dev/test-fleet": value}
    api.objects["rolloutservers", "qwen"]["metadata"]["annotations"] = annotations
    code, _, err = call("qwen-main-0", "--fault=kill")
    assert code == 3
    assert "kubectl annotate -n rl rolloutserver qwen rolloutfleet.dev/test-fleet=true" in err


def test_a_container_that_has_ended_cannot_be_broken(api: StandInApi, call: Call) -> None:
    api.objects["pods", POD]["status"] = pod(running=False)["status"]
    assert "its container does not run" in call("qwen-main-0", "--fault=kill")[2]


def test_memory_is_filled_only_up_to_a_limit(api: StandInApi, call: Call) -> None:
    api.objects["pods", POD]["spec"]["containers"][1]["resources"] = {"requests": {"memory": "1Gi"}}
    code, _, err = call("qwen-main-0", "--fault=memory")
    assert code == 3
    assert "no memory limit" in err


def test_a_nodes_network_is_not_cut(api: StandInApi, call: Call) -> None:
    api.objects["pods", POD]["spec"]["hostNetwork"] = True
    code, _, err = call("qwen-main-0", "--fault=network")
    assert code == 3
    assert "the node would be cut off" in err


# What is done


def test_kill_sends_the_script_and_says_what_it_did(api: StandInApi, call: Call) -> None:
    shell = Shell(api, b"\1SIGKILL to 4 processes\n", EXEC_SUCCESS)
    code, out, _ = call("qwen-main-0", "--fault=kill")
    assert (code, out.splitlines()[0]) == (0, f"pod {POD}: SIGKILL to 4 processes")
    assert shell.commands == [["python3", "-I", "-S", "-c", Path(str(signals.__file__)).read_text(), "SIGKILL"]]


def test_a_kill_that_takes_the_shell_with_it_has_worked(api: StandInApi, call: Call) -> None:
    Shell(api, exec_failure(137))
    assert call("qwen-main-0", "--fault=kill")[0] == 0


def test_a_kill_whose_end_nobody_hears_is_judged_by_the_container(
    api: StandInApi, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "END_SECONDS", 0.5)
    Shell(api)
    assert call("qwen-main-0", "--fault=kill")[0] == 3
    Shell(api, then=lambda: api.write("pods", POD, {"status": pod(running=False)["status"]}))
    assert call("qwen-main-0", "--fault=kill")[0] == 0


def test_a_hang_ends_after_the_seconds_that_were_given(api: StandInApi, call: Call) -> None:
    shell = Shell(api, b"\1SIGSTOP to 4 processes\n", EXEC_SUCCESS)
    assert "SIGSTOP to 4 processes, SIGCONT in 7 s" in call("qwen-main-0", "--fault=hang", "--seconds=7")[1]
    assert shell.commands[0][-2:] == ["SIGSTOP", "7.0"]


def test_a_script_that_fails_says_its_last_line(api: StandInApi, call: Call) -> None:
    Shell(api, b"\2Traceback\nnobody was killed\n", exec_failure(1))
    code, _, err = call("qwen-main-0", "--fault=memory")
    assert code == 3
    assert f"{POD}: nobody was killed" in err


def ephemeral(api: StandInApi, state: Body) -> None:
    """The kubelet's answer to whatever ephemeral container is asked for."""

    async def take(_: web.Request, body: Any) -> Body:
        api.patches.append((f"pods/{POD}/ephemeralcontainers", body))
        name = body["spec"]["ephemeralContainers"][-1]["name"]
        api.write("pods", POD, {"status": {"ephemeralContainerStatuses": [{"name": name, "state": state}]}})
        return api.objects["pods", POD]

    api.others[f"pods/{POD}/ephemeralcontainers"] = take


def test_the_network_is_cut_from_a_container_of_the_engines_image_beside_those_that_are_there(
    api: StandInApi, call: Call
) -> None:
    there = {"name": "debugger", "image": "busybox"}
    api.objects["pods", POD]["spec"]["ephemeralContainers"] = [there]
    ephemeral(api, {"terminated": {"exitCode": 0}})
    code, out, _ = call("qwen-main-0", "--fault=network", "--seconds=1.5")
    assert (code, "its network is cut for 1.5 s" in out) == (0, True)
    ((_, body),) = api.patches
    assert body["metadata"] == {"resourceVersion": "1", "uid": f"uid-{POD}"}
    kept, cutter = body["spec"]["ephemeralContainers"]
    assert kept == there
    assert (cutter["name"], cutter["image"]) == ("cut-network-2", "engine:1")
    assert cutter["command"][:4] == ["python3", "-I", "-S", "-c"]
    assert cutter["command"][4:] == [Path(str(network.__file__)).read_text(), "2"]
    assert cutter["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN"]}


def test_without_seconds_the_network_stays_cut(api: StandInApi, call: Call) -> None:
    ephemeral(api, {"running": {}})
    assert "its network is cut until the pod is gone" in call("qwen-main-0", "--fault=network")[1]
    assert len(api.patches[0][1]["spec"]["ephemeralContainers"][0]["command"]) == 5


def test_a_network_that_could_not_be_cut_is_an_error(api: StandInApi, call: Call) -> None:
    ephemeral(api, {"terminated": {"exitCode": 1, "message": "needs NET_ADMIN\n"}})
    code, _, err = call("qwen-main-0", "--fault=network")
    assert code == 3
    assert "network not cut: needs NET_ADMIN" in err


def test_wrong_weights_keep_the_label(api: StandInApi, call: Call) -> None:
    sent: list[Any] = []

    async def info(_: web.Request, __: Any) -> Body:
        return {"model_path": "/models/m0", "weight_version": "3@f"}

    async def load(_: web.Request, body: Any) -> Body:
        sent.append(body)
        return {"success": True}

    api.others[f"pods/{POD}:30000/proxy/model_info"] = info
    api.others[f"pods/{POD}:30000/proxy/update_weights_from_disk"] = load
    code, out, _ = call("qwen-main-0", "--fault=weights", "--path=/models/m1")
    assert (code, "loaded /models/m1, still labelled 3@f" in out) == (0, True)
    assert sent == [{"model_path": "/models/m1", "weight_version": "3@f", "flush_cache": False}]


# The scripts themselves

POD_WITH_SIDECAR = """
import subprocess, sys, time
from pathlib import Path
text = Path(sys.argv[1]).read_text()
engine = subprocess.Popen(["unshare", "--mount", "sh", "-c", "sleep 60 & sleep 60 & wait"])
sidecar = subprocess.Popen(["sleep", "60"])
def processes():
    children = Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()
    return [str(engine.pid), *children]
def states():
    return "".join(Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in [*processes(), sidecar.pid])
def run(*arguments):
    inside = ["nsenter", f"--mount=/proc/{engine.pid}/ns/mnt", sys.executable, "-I", "-S", "-c", text]
    done = subprocess.run([*inside, *arguments], capture_output=True, text=True)
    print(done.stdout.strip() or done.stderr.strip())
while len(processes()) < 3:
    time.sleep(0.01)
run("SIGSTOP", "0.5")
print(states())
while "T" in states():
    time.sleep(0.01)
run("SIGKILL")
print(engine.wait(10), sidecar.poll())
sidecar.kill()
"""


def test_signals_reach_the_engines_container_and_no_sidecar() -> None:
    """In a process namespace of its own, as a pod's, with processes of two mount namespaces."""
    unshare = shutil.which("unshare")
    cage = [unshare or "", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--mount-proc"]
    if unshare is None or subprocess.run([*cage, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs unshare and user namespaces")
    command = [*cage, sys.executable, "-c", POD_WITH_SIDECAR, str(signals.__file__)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["SIGSTOP to 3 processes", "TTTS", "SIGKILL to 3 processes", "-9 None"]


@pytest.mark.parametrize("script", [signals, memory, network])
def test_scripts_need_nothing_but_the_standard_library(script: Any) -> None:
    text = Path(str(script.__file__)).read_text()
    code = f"import sys; sys.argv = ['none']; __name__ = 'script'; exec({text!r})"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
