"""The GRPO example as a Job, in both modes, while engines, the router, the agent and the trainer die: the ledger says
that each prompt of each epoch was trained once."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e import faults
from e2e.fleets import SHARED, await_routable, engines, rollout_server, router_pods
from e2e.support import Kubectl, eventually, remove_namespace

SERVER = "qwen"
EXAMPLE = Path(__file__).parents[2] / "docs/examples/grpo/trainer.yaml"
WEIGHTS = Path(SHARED) / "weights"
PROMPTS, EPOCHS, GROUPS = 24, 2, 4
RUN_SECONDS = 420.0


@pytest.fixture(scope="module")
def space(kubectl: Kubectl, operator: None, vanishing_namespaces: list[str]) -> Iterator[Kubectl]:
    name = f"e2e-samples-{uuid.uuid4().hex[:6]}"
    kubectl("create", "namespace", name)
    inside = kubectl.within(name)
    yield inside
    remove_namespace(kubectl, name)
    vanishing_namespaces.append(name)


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_each_prompt_is_trained_once_whoever_dies_meanwhile(space: Kubectl, mode: str) -> None:
    folder = WEIGHTS / f"{space.namespace}-{mode}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    try:
        volume = {"mountPath": "/weights", "volume": {"hostPath": {"path": str(folder), "type": "Directory"}}}
        space.apply(rollout_server(SERVER, replicas=2, service_accounts=("trainer",), weights=volume))
        await_routable(space, SERVER, 2)
        space.apply(*job(mode, folder))
        until_it_has_died_of_everything(space, folder)
        eventually(lambda: job_is_done(space), RUN_SECONDS, "the run has ended")
        assert_each_prompt_was_trained_once(folder / "runs/grpo/samples.sqlite")
        assert oldest_versions(space) <= 2
    finally:
        space("delete", "job/grpo", f"ros/{SERVER}", "--ignore-not-found", "--cascade=foreground")
        shutil.rmtree(folder)


def job(mode: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The example, on a volume of its own and shorter."""
    account, job = yaml.safe_load_all(EXAMPLE.read_text())
    spec = job["spec"]["template"]["spec"]
    (weights,) = (volume for volume in spec["volumes"] if volume["name"] == "weights")
    weights["hostPath"]["path"] = str(folder)
    shape = {"mode": mode, "prompts": PROMPTS, "epochs": EPOCHS, "groups": GROUPS, "samples": 4, "engines": 1}
    spec["containers"][0]["args"] = [f"--{name}={value}" for name, value in shape.items()]
    job["spec"]["backoffLimit"] = 20
    yield account
    yield job


def until_it_has_died_of_everything(space: Kubectl, folder: Path) -> None:
    """One after the other, each while the run makes steps."""
    ways: list[Callable[[Kubectl], None]] = [kill_an_engine, kill_the_agent, delete_the_router, kill_the_trainer]
    deadline = time.monotonic() + RUN_SECONDS
    for number, way in enumerate(itertools.chain(ways, [kill_the_agent, kill_the_trainer])):
        steps = number + 1
        eventually(
            lambda: leased_steps(folder / "runs/grpo/samples.sqlite") >= steps or job_is_done(space),  # noqa: B023
            deadline - time.monotonic(),
            f"step {steps} has begun",
        )
        assert not job_is_done(space), "it ended before everything had died: give it more steps"
        way(space)


def leased_steps(store: Path) -> int:
    if not store.exists():
        return 0
    try:
        with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as database:
            ((step,),) = database.execute("SELECT coalesce(max(leased_step), 0) FROM consumers")
    except sqlite3.OperationalError:  # it is made at this moment
        return 0
    return int(step)


def kill_an_engine(space: Kubectl) -> None:
    serving: list[str] = []

    def one_serves() -> bool:
        serving[:] = [e["podUid"] for e in engines(space, f"{SERVER}-main") if e["phase"] == "Serving"]
        return bool(serving)

    eventually(one_serves, 120, "an engine serves")
    faults.send(serving[0], signal.SIGKILL, part=b"sglang")


def kill_the_agent(space: Kubectl) -> None:
    faults.send(trainer(space)["metadata"]["uid"], signal.SIGKILL, part=b"rolloutfleet.agent")


def kill_the_trainer(space: Kubectl) -> None:
    faults.send(trainer(space)["metadata"]["uid"], signal.SIGKILL, part=b"train.py")


def delete_the_router(space: Kubectl) -> None:
    space("delete", "pod", router_pods(space, SERVER)[0], "--grace-period=0", "--force", "--wait=false")


def trainer(space: Kubectl) -> dict[str, Any]:
    """The running pod of the job, with all of its containers up."""

    def found() -> dict[str, Any] | None:
        pods: list[dict[str, Any]] = json.loads(space("get", "pods", "-l", "job-name=grpo", "-o", "json"))["items"]
        for pod in pods:
            states = pod["status"].get("containerStatuses", []) + pod["status"].get("initContainerStatuses", [])
            if pod["status"]["phase"] == "Running" and all("running" in state["state"] for state in states):
                return pod
        return None

    pod = eventually(found, 120, "a pod of the trainer runs")
    assert pod is not None
    return pod


def job_is_done(space: Kubectl) -> bool:
    status = json.loads(space("get", "job/grpo", "-o", "json")).get("status", {})
    assert not status.get("conditions") or all(c["type"] != "Failed" for c in status["conditions"]), status
    return bool(status.get("succeeded"))


def assert_each_prompt_was_trained_once(store: Path) -> None:
    with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as database:
        rows = database.execute("SELECT epoch, prompt, state, step FROM prompts").fetchall()
    every = {(epoch, prompt) for epoch in range(EPOCHS) for prompt in range(PROMPTS)}
    assert {(epoch, prompt) for epoch, prompt, _, _ in rows} == every
    assert len(rows) == len(every)
    assert {state for _, _, state, _ in rows} == {"trained"}
    by_step = {step: sum(row[3] == step for row in rows) for step in {row[3] for row in rows}}
    assert by_step == {step: GROUPS for step in range(1, EPOCHS * PROMPTS // GROUPS + 1)}


def oldest_versions(space: Kubectl) -> int:
    """The most versions between a step's weights and its oldest token, as the last life of the trainer says."""
    lines = [json.loads(line) for line in space("logs", "job/grpo", "-c", "trainer").splitlines() if line[:1] == "{"]
    return max((line["step"] - 1 - line["oldest_version"] for line in lines if "oldest_version" in line), default=0)
