"""Engines that keep a copy of the weights: the worker beside them, and what becomes of an engine without one."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutfleet.control.store import trimmed
from rolloutfleet.plan.actions import CatchUp
from rolloutfleet.plan.failures import pod_trouble
from rolloutfleet.plan.observed import engine_pod
from unit.plan.world import World, rollout_server

COPY = {"weights": {"volume": {"emptyDir": {}}, "mountPath": "/weights", "localCopy": {"sizeLimit": "40Gi"}}}


def serving(**spec: Any) -> World:
    world = World(rollout_server(**{**COPY, **spec}))
    world.settle()
    return world


def worker_of(pod: dict[str, Any]) -> dict[str, Any]:
    (worker,) = pod["spec"]["initContainers"]
    return dict(worker)


def test_the_worker_reads_the_weights_and_writes_the_copy_that_the_engine_reads() -> None:
    pod = next(iter(serving().pods.values()))
    worker, engine = worker_of(pod), pod["spec"]["containers"][0]
    assert (worker["name"], worker["image"], worker["restartPolicy"]) == ("rolloutfleet-worker", "agent:1", "Always")
    mounts = {mount["name"]: mount for mount in worker["volumeMounts"]}
    assert mounts["rolloutfleet-weights"] == {"name": "rolloutfleet-weights", "mountPath": "/weights", "readOnly": True}
    assert "readOnly" not in mounts["rolloutfleet-local-copy"]
    assert {**mounts["rolloutfleet-local-copy"], "readOnly": True} in engine["volumeMounts"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["rolloutfleet-local-copy"]["emptyDir"] == {"sizeLimit": "40Gi"}
    env = {entry["name"]: entry["value"] for entry in worker["env"]}
    assert env["ROLLOUTFLEET_COPY_LIMIT_BYTES"] == str(40 << 30)
    assert env["ROLLOUTFLEET_COPY_PATH"] == mounts["rolloutfleet-local-copy"]["mountPath"]


def test_the_worker_fits_a_restricted_namespace_with_a_quota() -> None:
    worker = worker_of(next(iter(serving().pods.values())))
    security = worker["securityContext"]
    assert security["runAsNonRoot"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security["runAsUser"] > 0
    assert worker["resources"]["requests"].keys() == worker["resources"]["limits"].keys() == {"cpu", "memory"}


def test_where_the_template_says_as_whom_the_pod_runs_the_worker_runs_so_too() -> None:
    template = {"spec": {"securityContext": {"runAsUser": 1000650000, "runAsGroup": 0}}}
    group = {"name": "main", "replicas": 1, "engine": {"image": "engine:1"}, "template": template}
    pod = next(iter(serving(groups=[group]).pods.values()))
    assert "runAsUser" not in worker_of(pod)["securityContext"]


def test_the_template_chooses_another_volume_and_other_resources() -> None:
    claim = {"volumeClaimTemplate": {"spec": {"storageClassName": "nvme"}}}
    template = {
        "spec": {
            "initContainers": [{"name": "rolloutfleet-worker", "resources": {"limits": {"cpu": "16"}}}],
            "volumes": [{"name": "rolloutfleet-local-copy", "emptyDir": None, "ephemeral": claim}],
        }
    }
    group = {"name": "main", "replicas": 1, "engine": {"image": "engine:1"}, "template": template}
    pod = next(iter(serving(groups=[group]).pods.values()))
    assert worker_of(pod)["resources"]["limits"]["cpu"] == "16"
    assert {"name": "rolloutfleet-local-copy", "ephemeral": claim} in pod["spec"]["volumes"]


@pytest.mark.parametrize("role", ["Encoder", "Placeholder"])
def test_engines_that_take_no_weights_have_no_worker(role: str) -> None:
    groups = [
        {"name": "main", "replicas": 1, "engine": {"image": "engine:1"}},
        {"name": "other", "role": role, "replicas": 1, "engine": {"image": "engine:1"}},
    ]
    world = serving(groups=groups)
    workers = {name: "initContainers" in pod["spec"] for name, pod in world.pods.items()}
    assert workers == {name: "main" in name for name in world.pods if "router" not in name}


def test_what_the_operator_keeps_of_a_pod_still_tells_of_its_worker() -> None:
    pod = next(iter(serving().pods.values()))
    assert engine_pod(pod).worker
    assert engine_pod(trimmed("Pod", pod)) == engine_pod(pod)


def commit_a_delta(world: World) -> None:
    world.commit(1, "/weights/v000001", "sum-1")
    world.server["status"]["training"]["weights"]["transport"] = "delta"


def test_an_engine_that_comes_back_loads_a_copy() -> None:
    world = serving(groups=[{"name": "main", "replicas": 1, "engine": {"image": "engine:1"}}])
    commit_a_delta(world)
    world.crash_pod("qwen-main-0-e1-r0")
    loads: list[CatchUp] = []
    world.settle(between=lambda: loads.extend(a for a in world.plan() if isinstance(a, CatchUp)))
    assert {(load.path, load.copied) for load in loads} == {("/weights/v000001", True)}
    assert world.ready()[0] == "True"


def test_an_engine_without_a_worker_is_never_given_a_delta_and_says_so() -> None:
    world = World(rollout_server(replicas=1))
    world.settle()
    commit_a_delta(world)
    world.crash_pod("qwen-main-0-e1-r0")

    def nothing_is_loaded() -> None:
        assert not any(isinstance(action, CatchUp) for action in world.plan())

    world.settle(between=nothing_is_loaded)
    (engine,) = world.group_status()["engines"]
    assert (engine["phase"], engine["reason"]) == ("Stale", "NoLocalCopy")
    assert "spec.weights.localCopy" in engine["message"]


def test_a_worker_that_fails_is_no_trouble_of_an_engine_that_runs() -> None:
    waiting = {"name": "rolloutfleet-worker", "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "again"}}}
    running = {"name": "engine", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    pod = {"status": {"phase": "Running", "initContainerStatuses": [waiting], "containerStatuses": [running]}}
    assert pod_trouble(pod) is None
    pod["status"]["containerStatuses"] = []
    trouble = pod_trouble(pod)
    assert trouble is not None
    assert trouble.reason == "CrashLoopBackOff"
