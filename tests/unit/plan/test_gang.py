"""Gang scheduling: which engines get a PodGroup, when it is there, and what it says."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from rolloutfleet.kube.resources import POD_GROUPS, by_kind
from rolloutfleet.plan.actions import CreatePod, CreatePodGroup
from rolloutfleet.plan.failures import Trouble
from rolloutfleet.plan.fleet import plan_fleet
from rolloutfleet.plan.gang import COSCHEDULING, VOLCANO
from unit.plan.world import DEFAULTS, START, World, crashed_behind_each_action, rollout_server

BOTH = frozenset({COSCHEDULING, VOLCANO})


def gang_world(
    scheduler: str | None = "gpu-scheduler",
    *,
    apis: frozenset[str] = BOTH,
    replicas: int = 1,
    nodes: int = 2,
    settled: bool = True,
    **template: Any,
) -> World:
    """`template`: what else its metadata and spec have."""
    spec = ({"schedulerName": scheduler} if scheduler is not None else {}) | template.pop("spec", {})
    group = {
        "name": "main",
        "replicas": replicas,
        "engine": {"image": "engine:1", "nodes": nodes, "tensorParallel": 8 * nodes},
        "template": {"spec": spec, **template},
    }
    world = World(rollout_server(groups=[group]))
    world.gang_apis = apis
    if settled:
        world.settle()
    return world


def step(world: World) -> None:
    """One plan, performed; nothing is scheduled."""
    for action in world.plan():
        world.perform(action)


def reason(world: World, index: int = 0) -> tuple[str, str, str]:
    record = world.group_status()["engines"][index]
    return record["phase"], record["reason"], record["message"]


# Which engines


@pytest.mark.parametrize(
    ("scheduler", "apis", "expected"),
    [
        (None, BOTH, None),
        ("default-scheduler", BOTH, None),
        ("volcano", BOTH, VOLCANO),
        ("volcano", {VOLCANO}, VOLCANO),
        ("volcano", {COSCHEDULING}, None),
        ("volcano", set(), None),
        ("gpu-scheduler", BOTH, COSCHEDULING),
        ("gpu-scheduler", {COSCHEDULING}, COSCHEDULING),
        ("gpu-scheduler", {VOLCANO}, None),
        ("gpu-scheduler", set(), None),
    ],
)
def test_the_scheduler_of_the_template_and_what_the_cluster_has_decide(
    scheduler: str | None, apis: frozenset[str], expected: str | None
) -> None:
    world = gang_world(scheduler, apis=frozenset(apis))
    assert {body["apiVersion"] for body in world.pod_groups.values()} == ({expected} if expected else set())
    assert len(world.listed()) == 1, "with or without: it serves"


def test_an_engine_of_one_pod_needs_no_gang() -> None:
    assert not gang_world("volcano", nodes=1).pod_groups


def test_a_template_that_names_a_pod_group_keeps_it() -> None:
    world = gang_world("volcano", metadata={"annotations": {"scheduling.k8s.io/group-name": "theirs"}})
    assert not world.pod_groups
    pod = world.pods["qwen-main-0-e1-r0"]
    assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "theirs"


def test_both_layers_call_the_apis_the_same() -> None:
    assert {resource.api_version for resource in POD_GROUPS} == BOTH
    assert {by_kind("PodGroup", api).group for api in BOTH} == {"scheduling.x-k8s.io", "scheduling.volcano.sh"}


# What it is


@pytest.mark.parametrize(
    ("scheduler", "api", "part", "key"),
    [
        ("gpu-scheduler", COSCHEDULING, "labels", "scheduling.x-k8s.io/pod-group"),
        ("volcano", VOLCANO, "annotations", "scheduling.k8s.io/group-name"),
    ],
)
def test_one_pod_group_a_life_names_all_pods_and_its_pods_name_it(
    scheduler: str, api: str, part: str, key: str
) -> None:
    world = gang_world(scheduler, replicas=2, nodes=3)
    assert sorted(world.pod_groups) == ["qwen-main-0-e1", "qwen-main-1-e2"]
    body = world.pod_groups["qwen-main-1-e2"]
    assert (body["apiVersion"], body["kind"], body["spec"]) == (api, "PodGroup", {"minMember": 3})
    pods = [pod for name, pod in world.pods.items() if name.startswith("qwen-main-1-e2-")]
    assert [pod["metadata"][part][key] for pod in pods] == ["qwen-main-1-e2"] * 3
    (owner,) = body["metadata"]["ownerReferences"]
    group = world.children["ServerGroup/qwen-main"]["metadata"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("ServerGroup", group["uid"], True)
    labels = body["metadata"]["labels"]
    assert labels.items() <= pods[0]["metadata"]["labels"].items()
    assert {name.rpartition("/")[2] for name in labels} == {
        "server",
        "group",
        "group-uid",
        "engine-index",
        "epoch",
        "managed-by",
    }
    assert body["metadata"]["namespace"] == "rl"


def test_volcano_is_told_the_queue_and_the_priority_which_it_reads_from_pod_groups_alone() -> None:
    world = gang_world(
        "volcano",
        metadata={"annotations": {"scheduling.volcano.sh/queue-name": "research"}},
        spec={"priorityClassName": "high"},
    )
    spec = world.pod_groups["qwen-main-0-e1"]["spec"]
    assert spec == {"minMember": 2, "queue": "research", "priorityClassName": "high"}


# Its life


def test_it_is_there_before_the_first_pod_of_its_life() -> None:
    world = gang_world(settled=False)
    order: list[str] = []
    for _ in range(3):
        for action in world.plan():
            if isinstance(action, CreatePod | CreatePodGroup):
                order.append(action.manifest["metadata"]["name"])
            world.perform(action)
    assert order == ["qwen-main-0-e1", "qwen-main-0-e1-r0", "qwen-main-0-e1-r1"]


def test_without_it_there_are_no_pods_and_the_refusal_is_told() -> None:
    world = gang_world(settled=False)
    step(world)
    world.pod_groups.clear()  # refused
    refused = Trouble("PodGroupForbidden", "podgroups is forbidden")
    fleet = replace(world.fleet(), create_failures={"qwen-main-0-e1": refused})
    plan = plan_fleet(fleet, defaults=DEFAULTS, applied_versions={}, now=START)
    assert not [action for action in plan if isinstance(action, CreatePod)]
    assert [action for action in plan if isinstance(action, CreatePodGroup)], "it is tried again"
    for action in plan:
        world.perform(action)
    assert reason(world) == ("Pending", "PodGroupForbidden", "podgroups is forbidden")


@pytest.mark.parametrize("how", ["deleted", "crashed"])
def test_it_goes_after_the_last_pod_of_its_life(how: str) -> None:
    world = gang_world(replicas=2)

    def kept_for_its_pods() -> None:
        gangs = {name.rpartition("-")[0] for name in world.pods}
        assert gangs <= set(world.pod_groups)

    if how == "deleted":
        world.delete_pod("qwen-main-0-e1-r1")
    else:
        world.crash_pod("qwen-main-0-e1-r1")
    world.settle(between=kept_for_its_pods)
    assert sorted(world.pod_groups) == ["qwen-main-0-e3", "qwen-main-1-e2"]


def test_a_pod_that_terminates_slowly_keeps_it() -> None:
    world = gang_world()
    slow = copy.deepcopy(world.pods["qwen-main-0-e1-r1"])
    slow["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.pods["qwen-main-0-e1-r1"] = slow
    world.settle()
    assert sorted(world.pod_groups) == ["qwen-main-0-e1", "qwen-main-0-e2"]
    world.delete_pod("qwen-main-0-e1-r1")
    world.settle()
    assert sorted(world.pod_groups) == ["qwen-main-0-e2"]


def test_scaled_away_engines_leave_none() -> None:
    world = gang_world(replicas=2)
    world.spec()["replicas"] = 0
    world.settle()
    assert not world.pods
    assert not world.pod_groups


def test_another_scheduler_is_a_change_like_any_other() -> None:
    world = gang_world("volcano")
    world.spec()["template"]["spec"]["schedulerName"] = "gpu-scheduler"
    world.settle(limit=120)
    ((name, body),) = world.pod_groups.items()
    assert (name, body["apiVersion"]) == ("qwen-main-0-e2", COSCHEDULING)


def test_what_somebody_deletes_comes_again() -> None:
    world = gang_world()
    world.pod_groups.clear()
    world.settle()
    assert set(world.pod_groups) == {"qwen-main-0-e1"}
    assert world.created == ["qwen-main-0-e1-r0", "qwen-main-0-e1-r1"], "pods that run are left alone"


def test_a_scheduler_that_is_installed_or_removed_later_changes_no_engine_that_there_is() -> None:
    world = gang_world(apis=frozenset())
    world.gang_apis = BOTH
    assert not world.plan()
    world = gang_world()
    world.gang_apis = frozenset()
    world.pod_groups.clear()
    assert not world.plan()


@pytest.mark.parametrize(("before", "after"), [(frozenset(), BOTH), (BOTH, frozenset())])
def test_half_a_gang_is_completed_as_it_was_begun(before: frozenset[str], after: frozenset[str]) -> None:
    world = gang_world(apis=before, settled=False)
    while not world.pods:
        for action in world.plan():
            if not (isinstance(action, CreatePod) and action.manifest["metadata"]["name"].endswith("r1")):
                world.perform(action)
    world.gang_apis = after
    step(world)
    labels = [pod["metadata"]["labels"].get("scheduling.x-k8s.io/pod-group") for pod in world.pods.values()]
    assert labels == (["qwen-main-0-e1"] * 2 if before else [None, None])
    world.settle()
    assert len(world.listed()) == 1


def test_a_crash_behind_any_action_leaves_neither_a_gang_without_pods_nor_pods_without_a_gang() -> None:
    whole = gang_world(replicas=2)
    for disturbance in ("start", "pod lost", "scaled"):
        start = gang_world(replicas=2, settled=False) if disturbance == "start" else copy.deepcopy(whole)
        if disturbance == "pod lost":
            start.delete_pod("qwen-main-0-e1-r1")
        elif disturbance == "scaled":
            start.spec()["replicas"] = 1
        for where, world in crashed_behind_each_action(start):
            gangs = {name.rpartition("-")[0] for name in world.pods}
            assert set(world.pod_groups) == gangs, f"{disturbance}: {where}"
            assert len(world.listed()) == len(gangs) == (1 if disturbance == "scaled" else 2)


# What is said


def test_pods_that_wait_for_their_gang_say_so_unless_the_scheduler_says_more() -> None:
    world = gang_world(settled=False)
    while len(world.pods) < 2:
        step(world)
    leader, follower = (world.pods[name]["status"]["conditions"] for name in world.engine_names())
    step(world)
    assert reason(world) == ("Pending", "GangPending", "0 of 2 pods are scheduled; the scheduler places all or none")
    degraded = next(c for c in world.server["status"]["conditions"] if c["type"] == "Degraded")
    assert degraded["status"] == "False", "no news"
    leader.append({"type": "PodScheduled", "status": "True"})
    step(world)
    assert reason(world)[2].startswith("1 of 2 pods are scheduled")
    follower.append({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"})
    step(world)
    assert reason(world) == ("Pending", "Unschedulable", "qwen-main-0-e1-r1: 0/3 nodes")


def test_without_a_gang_waiting_pods_are_not_scheduled() -> None:
    world = gang_world(None, settled=False)
    while len(world.pods) < 2:
        step(world)
    step(world)
    assert reason(world)[:2] == ("Pending", "NotScheduled")
