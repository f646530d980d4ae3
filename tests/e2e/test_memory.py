"""Offload and onload of real engines. The CPU engine frees nothing, but its scheduler keeps the real books: a second
release or resume would kill it."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.fleets import (
    START_SECONDS,
    Trainer,
    TrainerError,
    await_routable,
    engines,
    paused,
    rollout_server,
    trainer_pod,
)
from e2e.support import Kubectl, eventually

EVERYTHING = ["weights", "kv_cache", "cuda_graph"]


def offloading_server() -> dict[str, Any]:
    manifest = rollout_server("mem", replicas=1, service_accounts=("trainer",))
    manifest["spec"]["groups"][0]["offload"] = True
    return manifest


def test_memory_is_released_and_resumed_once_however_often_it_is_asked_for(
    kubectl: Kubectl, operator: None, namespace: str
) -> None:
    space = kubectl.within(namespace)
    space("create", "serviceaccount", "trainer")
    space.apply(offloading_server(), trainer_pod("trainer", "actor=mem"))
    await_routable(space, "mem", 1)
    space("wait", "pod/trainer", "--for=condition=Ready", "--timeout=60s")
    trainer = Trainer(space, "trainer")
    trainer("fleet.wait_ready(timeout=60)")
    (before,) = engines(space, "mem-main")

    released = trainer("fleet.offload()")
    assert released["released"] == ["weights", "kv_cache", "cuda_graph"]
    assert (released["engines"], released["failed"]) == ([before["pod"]], {})
    assert trainer("fleet.offload('kv_cache')")["released"] == ["weights", "kv_cache", "cuda_graph"]
    held = eventually(
        lambda: engines(space, "mem-main")[0], 20, "the engine is Held", accept=lambda e: e["phase"] == "Held"
    )
    assert held["reason"] == "MemoryReleased"
    assert paused(space, before["pod"])
    with pytest.raises(TrainerError, match="onload the tag weights first"):
        trainer("fleet.update_weights('/weights/m1')")

    assert trainer("fleet.onload('weights', 'cuda_graph')")["released"] == ["kv_cache"]
    assert trainer("fleet.onload('weights')")["released"] == ["kv_cache"]
    assert trainer("fleet.update_weights('/weights/m1', version=1)")["version"] == 1
    assert trainer("fleet.onload()")["released"] == []
    assert trainer("fleet.onload()")["released"] == []
    (group,) = trainer("fleet.generate([[1, 2, 3]], n=1, temperature=0.0, max_new_tokens=4, ignore_eos=True)")
    assert group["samples"][0]["weight_versions"] == [{"version": 1, "start": 0, "end": 4}]
    (after,) = engines(space, "mem-main")
    assert (after["pod"], after["restarts"]) == (before["pod"], 0), "the engine lived through all of it"
    await_routable(space, "mem", 1, seconds=30)

    trainer("fleet.offload()")
    space("delete", "pod", after["pod"], "--force", "--grace-period=0")
    memory = eventually(
        lambda: space.json("get", "ros", "mem")["status"]["training"]["memory"]["engines"],
        START_SECONDS,
        "the engine that came back is offloaded too",
        accept=lambda entries: (
            [entry["pod"] != after["pod"] and entry["released"] for entry in entries] == [EVERYTHING]
        ),
    )
    assert memory[0]["state"] == "Known"
    assert trainer("fleet.onload('weights')")["failed"] == {}
    assert trainer("fleet.update_weights('/weights/m1', version=2)")["version"] == 2
    assert trainer("fleet.onload()")["failed"] == {}
    await_routable(space, "mem", 1, seconds=30)
    space("delete", "ros", "mem")
    space("delete", "pods", "--all", "--force", "--grace-period=0")
