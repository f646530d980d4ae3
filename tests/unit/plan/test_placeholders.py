"""Placeholders hold GPUs, run no engine, and never make a fleet look ill."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from rolloutfleet.plan.actions import Requeue
from unit.plan.world import World, rollout_server

MAIN = {"name": "main", "replicas": 1, "engine": {"image": "engine:1"}}


def held(replicas: int = 2, **engine: Any) -> dict[str, Any]:
    return {"name": "held", "role": "Placeholder", "replicas": replicas, "engine": engine}


def placeholders(world: World) -> list[dict[str, Any]]:
    return [pod for name, pod in sorted(world.pods.items()) if name.startswith("qwen-held-")]


def test_a_placeholder_asks_for_gpus_and_nothing_else_and_goes_first() -> None:
    world = World(rollout_server(groups=[MAIN, held(tensorParallel=8)]))
    world.settle()
    assert len(placeholders(world)) == 2
    for pod in placeholders(world):
        (container,) = pod["spec"]["containers"]
        assert container["image"] == "pause:1"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert not {"command", "args", "readinessProbe"} & set(container)
        assert pod["spec"]["priorityClassName"] == "rolloutfleet-placeholder"
        assert pod["spec"]["terminationGracePeriodSeconds"] == 0
        assert "readinessGates" not in pod["spec"]


def test_it_counts_as_no_engine_and_its_group_says_that_it_is_reserved() -> None:
    world = World(rollout_server(groups=[MAIN, held()]))
    world.settle()
    assert len(world.listed()) == 1
    assert world.server["status"]["engines"] == {"desired": 1, "ready": 1, "routable": 1, "stale": 0, "failed": 0}
    status = world.group_status("held")
    assert {engine["phase"] for engine in status["engines"]} == {"Reserved"}
    (ready,) = status["conditions"]
    assert (ready["status"], ready["reason"]) == ("True", "Reserved")
    assert (status["replicas"], status["ready"], status["routable"]) == (2, 2, 0)


def test_one_that_is_pushed_out_waits_for_its_place_while_the_fleet_stays_ready() -> None:
    world = World(rollout_server(groups=[MAIN, held(1)]))
    world.settle()
    world.delete_pod(placeholders(world)[0]["metadata"]["name"])
    for _ in range(5):
        for action in world.plan():
            world.perform(action)
        for pod in placeholders(world):
            pod["status"] |= {
                "phase": "Pending",
                "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
            }
    (ready,) = world.group_status("held")["conditions"]
    assert (ready["status"], ready["reason"]) == ("False", "Unschedulable")
    conditions = {c["type"]: c["status"] for c in world.server["status"]["conditions"]}
    assert (conditions["Ready"], conditions["Degraded"], conditions["Progressing"]) == ("True", "False", "False")


def test_it_is_left_alone_however_long_it_holds() -> None:
    world = World(rollout_server(groups=[MAIN, held()]))
    world.settle()
    for _ in range(4):
        world.now += timedelta(hours=3)
        assert [action for action in world.plan() if not isinstance(action, Requeue)] == []


def test_a_server_of_placeholders_alone_waits_for_engines() -> None:
    world = World(rollout_server(groups=[held(1)]))
    world.settle()
    assert world.ready() == ("False", "ScaledToZero")
    assert len(placeholders(world)) == 1


def test_its_shape_may_be_several_pods_and_its_image_the_users() -> None:
    world = World(rollout_server(groups=[held(1, nodes=2, tensorParallel=16, image="mine:1")]))
    world.settle()
    assert [pod["spec"]["containers"][0]["image"] for pod in placeholders(world)] == ["mine:1"] * 2
    world.spec("held")["replicas"] = 0
    world.settle()
    assert not placeholders(world)
