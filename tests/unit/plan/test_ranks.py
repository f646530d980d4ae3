"""Engines of several pods: one identity, one life, one answer."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest

from rolloutfleet.plan.actions import CreatePod
from unit.plan.world import World, crashed_behind_each_action, rollout_server


def ranks_server(replicas: int = 1, **engine: Any) -> dict[str, Any]:
    shape = {"image": "engine:1", "nodes": 2, "tensorParallel": 16, **engine}
    return rollout_server(groups=[{"name": "main", "replicas": replicas, "engine": shape}])


def serving(replicas: int = 1, **engine: Any) -> World:
    world = World(ranks_server(replicas, **engine))
    world.settle()
    return world


def flags(pod: dict[str, Any]) -> dict[str, str]:
    words = pod["spec"]["containers"][0]["args"]
    return dict(zip(words, [*words[1:], ""], strict=True))


def test_every_rank_has_a_pod_with_its_share_of_gpus_and_knows_rank_0_by_name() -> None:
    world = serving()
    leader, follower = (world.pods[name] for name in ("qwen-main-0-e1-r0", "qwen-main-0-e1-r1"))
    address = "qwen-main-0-e1-r0.qwen-main-ranks.rl.svc:20000"
    for rank, pod in enumerate((leader, follower)):
        assert pod["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        assert (flags(pod)["--nnodes"], flags(pod)["--node-rank"]) == ("2", str(rank))
        assert flags(pod)["--dist-init-addr"] == address
        assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == (pod["metadata"]["name"], "qwen-main-ranks")
    service = world.children["Service/qwen-main-ranks"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["selector"].items() <= leader["metadata"]["labels"].items()


def test_only_rank_0_is_listed_and_all_pods_say_the_same_of_their_engine() -> None:
    world = serving(replicas=2)
    assert world.listed() == {world.address("qwen-main-0-e1-r0"), world.address("qwen-main-1-e2-r0")}
    gates = {
        condition["status"]
        for pod in world.pods.values()
        for condition in pod["status"]["conditions"]
        if condition["type"] == "rolloutfleet.dev/Routable"
    }
    assert gates == {"True"}
    assert world.server["status"]["engines"]["desired"] == 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["deleted", "crashed", "terminating"])
def test_whichever_pod_is_lost_all_of_them_are_made_anew_in_one_pass(rank: int, how: str) -> None:
    world = serving(replicas=2)
    lost = f"qwen-main-0-e1-r{rank}"
    if how == "deleted":
        world.delete_pod(lost)
    elif how == "crashed":
        world.crash_pod(lost)
    else:
        world.pods[lost]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.settle()
    running = {name for name, pod in world.pods.items() if not pod["metadata"].get("deletionTimestamp")}
    assert {"qwen-main-0-e3-r0", "qwen-main-0-e3-r1"} < running
    assert not {"qwen-main-0-e1-r0", "qwen-main-0-e1-r1"} & running
    assert {"qwen-main-1-e2-r0", "qwen-main-1-e2-r1"} < running, "the other engine is left alone"
    assert len(world.listed()) == 2
    record = world.group_status()["engines"][0]
    assert (record["restarts"], record["epoch"]) == (1, 3)
    if how != "deleted":
        assert record["lastFailure"]["pod"] == lost


def test_an_engine_is_not_up_before_its_last_rank_is() -> None:
    world = World(ranks_server())
    for _ in range(2):
        for action in world.plan():
            if isinstance(action, CreatePod) and action.manifest["metadata"]["name"].endswith("r1"):
                continue
            world.perform(action)
    world.run_pods()
    assert not world.weights
    assert not world.listed()
    world.settle()
    assert len(world.listed()) == 1
    assert set(world.pods) == {"qwen-main-0-e1-r0", "qwen-main-0-e1-r1"}, "the missing one only is created"


def test_when_a_rank_hangs_before_the_first_answer_all_are_replaced_at_the_startup_deadline() -> None:
    world = World(ranks_server())
    world.spec()["recovery"] = {"startupDeadlineSeconds": 600}
    for _ in range(2):
        for action in world.plan():
            world.perform(action)
    world.silent.add(world.uid("qwen-main-0-e1-r0"))  # rank 0 waits for the other, whose own /health is a dummy
    world.run_pods()
    first = {"qwen-main-0-e1-r0", "qwen-main-0-e1-r1"}
    assert {name for name, pod in world.pods.items() if pod["status"]["phase"] == "Running"} == first
    world.now += timedelta(seconds=590)
    world.settle(patient=False)
    assert set(world.pods) == first
    assert not world.listed()
    world.now += timedelta(seconds=20)
    world.settle()
    assert set(world.pods) == {"qwen-main-0-e2-r0", "qwen-main-0-e2-r1"}
    assert world.group_status()["engines"][0]["lastFailure"]["reason"] == "StartupDeadlineExceeded"
    assert len(world.listed()) == 1


def test_a_crash_behind_any_action_never_leaves_half_an_engine() -> None:
    whole = serving()
    for disturbance in ("start", "follower lost"):
        start = World(ranks_server()) if disturbance == "start" else copy.deepcopy(whole)
        if disturbance == "follower lost":
            start.delete_pod("qwen-main-0-e1-r1")
        for where, world in crashed_behind_each_action(start):
            assert (len(world.pods), len(world.listed())) == (2, 1), f"{disturbance}: {where}"


def test_a_change_of_the_number_of_nodes_rolls_like_any_other() -> None:
    world = serving(replicas=2)
    world.spec()["engine"] |= {"nodes": 1, "tensorParallel": 8}

    def one_serves() -> None:
        assert world.listed()

    world.settle(limit=120, between=one_serves)
    assert sorted(name.rsplit("-", 1)[1] for name in world.pods) == ["r0", "r0"]
    assert "Service/qwen-main-ranks" not in world.children


def test_a_topology_key_keeps_the_pods_of_one_life_together() -> None:
    world = serving(topologyKey="topology.kubernetes.io/rack")
    (term,) = world.pods["qwen-main-0-e1-r1"]["spec"]["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["topologyKey"] == "topology.kubernetes.io/rack"
    labels = term["labelSelector"]["matchLabels"]
    assert labels.items() <= world.pods["qwen-main-0-e1-r0"]["metadata"]["labels"].items()
    assert labels["rolloutfleet.dev/epoch"] == "1"
    assert "affinity" not in serving().pods["qwen-main-0-e1-r0"]["spec"]
