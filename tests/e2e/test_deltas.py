"""Versions as deltas on a real cluster: what engines end with equals an engine that loaded the full checkpoint. The
tests run in order and share one fleet."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from e2e import faults
from e2e.fleets import (
    SHARED,
    Trainer,
    TrainerError,
    await_routable,
    engines,
    host_path,
    label_for,
    label_of,
    rollout_server,
    trainer_pod,
)
from e2e.load import updated_under_load
from e2e.support import Kubectl, eventually, remove_namespace

GROUP = "qwen-main"
PROMPTS = [[1, 2, 3], [7, 8, 9, 10]]
GREEDY = f"fleet.generate({PROMPTS}, n=1, temperature=0.0, max_new_tokens=16, ignore_eos=True)"
VOLUME = {"mountPath": "/weights", "volume": {"hostPath": {"path": f"{SHARED}/weights", "type": "Directory"}}}

# Versions 1 (full), 2 to 4 (deltas); 5, by a trainer that began anew, and so full; and what 3 is, as one checkpoint.
WRITE = """
import json, sys, torch
from safetensors.torch import load_file
from rolloutfleet.trainer import DeltaWriter, save_checkpoint
folder, base = sys.argv[1], "/models/m0"
torch.manual_seed(0)
state = load_file(base + "/model.safetensors")
def train():
    for name, tensor in state.items():
        state[name] = (tensor.float() * (1 + 2.0 * torch.randn(tensor.shape) * (torch.rand(tensor.shape) < 0.05))).to(
            tensor.dtype)
writer = DeltaWriter(folder, base=base)
found = []
for version in (1, 2, 3):
    train()
    found.append(writer.save(state, version=version))
save_checkpoint(state, folder, version=100, base=base)
train()
found.append(writer.save(state, version=4))
train()
found.append(DeltaWriter(folder, base=base).save(state, version=5))
print(json.dumps([[saved.version, saved.full, saved.density, saved.bytes] for saved in found]))
"""


@pytest.fixture(scope="module")
def space(kubectl: Kubectl, operator: None, vanishing_namespaces: list[str]) -> Iterator[Kubectl]:
    name = f"e2e-delta-{uuid.uuid4().hex[:6]}"
    kubectl("create", "namespace", name)
    inside = kubectl.within(name)
    inside("create", "serviceaccount", "trainer")
    yield inside
    remove_namespace(kubectl, name)
    vanishing_namespaces.append(name)


@pytest.fixture(scope="module")
def trainer(space: Kubectl) -> Iterator[Trainer]:
    pod = trainer_pod("trainer", "actor=qwen")
    pod["spec"]["volumes"] = [
        host_path("environment", "engine"),
        host_path("models", "models"),
        host_path("w", "weights"),
    ]
    pod["spec"]["containers"][0]["volumeMounts"] = [
        {"name": "environment", "mountPath": "/opt/engine", "readOnly": True},
        {"name": "models", "mountPath": "/models", "readOnly": True},
        {"name": "w", "mountPath": "/weights"},
    ]
    space.apply(pod)
    space("wait", "pod/trainer", "--for=condition=Ready", "--timeout=60s")
    yield Trainer(space, "trainer")
    space("exec", "trainer", "--container=trainer", "--", "rm", "-rf", f"/weights/{space.namespace}")


def folder(space: Kubectl, version: int) -> str:
    return f"/weights/{space.namespace}/v{version:06d}"


def update(
    space: Kubectl, trainer: Trainer, version: int, *, named: int | None = None, pause_mode: str = "Retract"
) -> dict[str, Any]:
    arguments = f"{folder(space, version)!r}, version={named or version}, pause_mode={pause_mode!r}, timeout=120"
    result: dict[str, Any] = trainer(f"fleet.update_weights({arguments})")
    return result


def tokens(trainer: Trainer) -> list[list[int]]:
    return [group["samples"][0]["response_tokens"] for group in trainer(GREEDY)]


def worker_log(space: Kubectl, pod: str) -> str:
    return space("logs", pod, "--container=rolloutfleet-worker")


def test_each_engine_has_a_worker_beside_it(space: Kubectl, trainer: Trainer) -> None:
    weights = {**VOLUME, "localCopy": {"sizeLimit": "64Mi"}}
    space.apply(rollout_server("qwen", replicas=2, service_accounts=("trainer",), weights=weights))
    await_routable(space, "qwen", 2)
    for engine in engines(space, GROUP):
        status = space.json("get", "pod", engine["pod"])["status"]
        assert {c["name"]: c["ready"] for c in status["initContainerStatuses"]} == {"rolloutfleet-worker": True}
        assert status["initContainerStatuses"][0]["restartCount"] == 0


def test_deltas_reach_every_engine_under_load_and_samples_equal_those_of_the_full_checkpoint(
    space: Kubectl, trainer: Trainer
) -> None:
    written = space(
        "exec", "trainer", "--container=trainer", "--", "python3", "-c", WRITE, f"/weights/{space.namespace}"
    )
    saved = json.loads(written.splitlines()[-1])
    assert [[version, full] for version, full, *_ in saved] == [[v, v in (1, 5)] for v in (1, 2, 3, 4, 5)]
    assert saved[1][3] < saved[0][3] / 5, "a delta is small"
    trainer("fleet.wait_ready(engines=2, timeout=60)")
    before = tokens(trainer)
    for version, mode in enumerate(("InPlace", "Retract", "Abort"), start=1):
        by_delta = partial(update, space, trainer, version, pause_mode=mode)
        result = updated_under_load(space, trainer, GROUP, by_delta, pause_mode=mode)
        assert {verdict["outcome"] for verdict in result["engines"]} == {"Committed"}
        assert result["seconds"].keys() >= {"copy", "paused"}
    assert [label_of(space, engine["pod"]) for engine in engines(space, GROUP)] == [label_for(space, "qwen", 3)] * 2
    for engine in engines(space, GROUP):
        assert worker_log(space, engine["pod"]).count(": 1 deltas") == 2, "each was applied to the one before"
    weights = space.json("get", "ros", "qwen")["status"]["training"]["weights"]
    assert (weights["transport"], weights["path"]) == ("delta", folder(space, 3))
    after = tokens(trainer)

    fresh = rollout_server("fresh", model=folder(space, 100), service_accounts=("trainer",), weights=VOLUME)
    space.apply(fresh, trainer_pod("other", "actor=fresh"))
    await_routable(space, "fresh", 1)
    space("wait", "pod/other", "--for=condition=Ready", "--timeout=60s")
    reference = Trainer(space, "other")
    reference("fleet.wait_ready(timeout=60)")
    assert after == tokens(reference)
    assert after != before
    space("delete", "ros", "fresh")
    space("delete", "pod", "other", "--wait=false")


def test_an_engine_that_comes_back_catches_up_along_the_chain(space: Kubectl, trainer: Trainer) -> None:
    expected = tokens(trainer)
    killed = engines(space, GROUP)[0]["pod"]
    space("delete", "pod", killed, "--grace-period=0", "--force")
    await_routable(space, "qwen", 1, seconds=60)
    await_routable(space, "qwen", 2)
    new = next(engine["pod"] for engine in engines(space, GROUP) if engine["index"] == 0)
    assert new != killed
    assert ": 2 deltas" in worker_log(space, new), "the full version and both deltas"
    assert label_of(space, new) == label_for(space, "qwen", 3)
    assert tokens(trainer) == tokens(trainer) == expected


def test_an_engine_that_is_killed_while_its_worker_copies_catches_up_alone(space: Kubectl, trainer: Trainer) -> None:
    survivor, victim = engines(space, GROUP)
    stopped = faults.stopped(faults.processes(victim["podUid"], part=faults.WORKER_PROCESS))
    with ThreadPoolExecutor() as pool, stopped:
        updating = pool.submit(update, space, trainer, 4)
        copied = f"{folder(space, 4)} is at"
        eventually(lambda: copied in worker_log(space, survivor["pod"]), 60, "the other worker has its copy")
        assert "targetVersion" not in space.json("get", "ros", "qwen")["status"]["training"]["weights"]
        faults.send(victim["podUid"], signal.SIGKILL)
        outcomes = {verdict["pod"]: verdict["outcome"] for verdict in updating.result()["engines"]}
    assert outcomes == {survivor["pod"]: "Committed", victim["pod"]: "Unreachable"}
    expected = tokens(trainer)
    await_routable(space, "qwen", 2)
    back = engines(space, GROUP)[1]
    assert back["pod"] != victim["pod"]
    assert ": 3 deltas" in worker_log(space, back["pod"])
    assert label_of(space, back["pod"]) == label_for(space, "qwen", 4)
    assert tokens(trainer) == tokens(trainer) == expected


def test_a_chain_that_is_gone_costs_no_life_and_the_next_full_version_heals(space: Kubectl, trainer: Trainer) -> None:
    space("exec", "trainer", "--container=trainer", "--", "rm", "-rf", folder(space, 1))
    space("delete", "pod", engines(space, GROUP)[0]["pod"], "--grace-period=0", "--force")
    await_routable(space, "qwen", 1, seconds=60)

    def waiting() -> dict[str, Any]:
        return next(engine for engine in engines(space, GROUP) if engine["index"] == 0)

    engine = eventually(
        waiting, 180, "it says what it waits for", accept=lambda engine: engine.get("reason") == "CatchUpFailed"
    )
    assert "waits for the version after 4" in engine["message"]
    with pytest.raises(TrainerError, match="rests on: no such folder"):
        update(space, trainer, 2, named=5)
    result = update(space, trainer, 5)
    assert {verdict["outcome"] for verdict in result["engines"]} == {"Committed"}
    await_routable(space, "qwen", 2, seconds=90)
    healed = waiting()
    assert (healed["pod"], healed["restarts"]) == (engine["pod"], engine["restarts"]), "the same life"
    assert label_of(space, healed["pod"]) == label_for(space, "qwen", 5)
