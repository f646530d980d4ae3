"""What routers list against what they should: ghosts, routers that forget or do not answer, engines that are lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rolloutfleet.plan.actions import Action, ApplyStatus, DeletePod, Deregister, Register, SetGate
from rolloutfleet.plan.fleet import plan_fleet
from rolloutfleet.plan.observed import RouterPod, Worker, WorkerKind
from unit.plan.test_pairs import pods_of, serving_pairs
from unit.plan.test_ranks import serving as serving_ranks
from unit.plan.world import DEFAULTS, World, rollout_server


def serving(replicas: int = 2, *, routers: int = 1) -> World:
    world = World(rollout_server(replicas=replicas), routers=routers)
    world.settle()
    return world


def plan_with(world: World, *routers: RouterPod) -> list[Action]:
    """The plan if these routers were seen so, and the others as they are."""
    fleet = world.fleet()
    seen = {router.name: router for router in (*fleet.router_pods, *routers)}
    return plan_fleet(
        replace(fleet, router_pods=tuple(seen.values())), defaults=DEFAULTS, applied_versions={}, now=world.now
    )


def router(world: World, name: str = "router-0") -> RouterPod:
    return next(router for router in world.fleet().router_pods if router.name == name)


def changes(plan: Sequence[Action]) -> list[tuple[str, str, str]]:
    return [(type(a).__name__, a.router, a.url) for a in plan if isinstance(a, Register | Deregister)]


# Ghosts


@pytest.mark.parametrize("seen_as", [WorkerKind("decode"), WorkerKind("prefill", 8998)], ids=["decode", "prefill"])
def test_an_address_that_a_table_has_in_another_role_is_removed_first_and_then_added_as_what_it_is(
    seen_as: WorkerKind,
) -> None:
    world = serving()
    url = world.address(world.engine_names()[0])
    world.tables["router-0"][url] = Worker(healthy=True, kind=seen_as, id="old")
    plan = world.plan()
    assert changes(plan) == [("Deregister", "router-0", url)], "a second registration of a listed URL is refused"
    assert next(a for a in plan if isinstance(a, Deregister)).worker_id == "old"
    world.settle()
    assert world.tables["router-0"][url].kind == WorkerKind()


def test_a_prefill_engine_that_is_listed_with_another_bootstrap_port_is_added_anew() -> None:
    world = serving_pairs()
    url = world.address(pods_of(world, "prefill")[0])
    world.tables["router-0"][url] = Worker(healthy=True, kind=WorkerKind("prefill", 9999), id="old")
    world.settle()
    assert world.tables["router-0"][url].kind == WorkerKind("prefill", 8998)


def test_an_engine_of_another_fleet_is_removed_from_every_table_that_lists_it() -> None:
    world = serving(routers=2)
    foreign = "http://10.7.7.7:30000"
    for table in world.tables.values():
        table[foreign] = Worker(healthy=True, id="foreign")
    assert changes(world.plan()) == [("Deregister", "router-0", foreign), ("Deregister", "router-1", foreign)]


def test_an_entry_that_was_made_anew_since_the_look_is_not_removed_by_its_old_name() -> None:
    world = serving()
    url = world.address(world.engine_names()[0])
    world.tables["router-0"][url] = Worker(healthy=True, kind=WorkerKind("decode"), id="old")
    (removal,) = [action for action in world.plan() if isinstance(action, Deregister)]
    world.tables["router-0"][url] = Worker(healthy=True, id="new")
    world.perform(removal)
    assert world.tables["router-0"][url].id == "new"


def test_a_removal_that_was_lost_is_asked_for_again() -> None:
    world = serving()
    world.tables["router-0"]["http://10.7.7.7:30000"] = Worker(healthy=True, id="ghost")
    first = [action for action in world.plan() if isinstance(action, Deregister)]
    second = [action for action in world.plan() if isinstance(action, Deregister)]
    assert first == second != []


# Routers


def test_a_router_that_has_lost_its_table_takes_no_traffic_until_it_is_complete_again() -> None:
    world = serving(replicas=3, routers=2)
    world.tables["router-1"].clear()
    plan = world.plan()
    assert {url for _, name, url in changes(plan) if name == "router-1"} == world.listed_by("router-0")
    assert [(a.pod, a.routable) for a in plan if isinstance(a, SetGate)] == [("router-1", False)]
    for action in plan:
        if not isinstance(action, Register):
            world.perform(action)
    one = next(action for action in plan if isinstance(action, Register))
    world.perform(one)
    assert not [a for a in world.plan() if isinstance(a, SetGate)], "one engine of three would bear all of its traffic"
    world.settle()
    assert world.router_gates["router-1"] is True


def test_a_router_that_does_not_answer_keeps_nobody_from_being_removed_elsewhere() -> None:
    world = serving(routers=2)
    lost = world.engine_names()[0]
    url = world.address(lost)
    world.crash_pod(lost)
    plan = plan_with(world, replace(router(world, "router-0"), workers=None))
    assert changes(plan) == [("Deregister", "router-1", url)]
    assert not [action for action in plan if isinstance(action, SetGate) and action.pod == "router-0"]


def test_a_registration_that_a_router_works_on_is_not_asked_for_twice() -> None:
    world = serving()
    url = world.address(world.engine_names()[0])
    del world.tables["router-0"][url]
    assert changes(world.plan()) == [("Register", "router-0", url)]
    assert changes(plan_with(world, replace(router(world), registering=frozenset({url})))) == []


def test_an_engine_that_dies_while_a_router_registers_it_is_removed_when_it_is_listed_after_all() -> None:
    world = serving()
    lost = world.engine_names()[0]
    url = world.address(lost)
    entry = world.tables["router-0"].pop(url)
    world.crash_pod(lost)
    assert changes(plan_with(world, replace(router(world), registering=frozenset({url})))) == []
    world.tables["router-0"][url] = entry
    assert changes(world.plan()) == [("Deregister", "router-0", url)]


# Engines that are lost


@pytest.mark.parametrize("how", ["crashed", "deleted", "evicted"])
def test_an_engine_that_is_lost_leaves_every_table_before_anything_else_is_done(how: str) -> None:
    world = serving(routers=2)
    lost = world.engine_names()[0]
    url, pod = world.address(lost), world.pods[lost]
    if how == "crashed":
        world.crash_pod(lost)
    elif how == "deleted":
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    else:
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "drain",
        }
        pod["status"].setdefault("conditions", []).append(condition)
    plan = world.plan()
    assert changes(plan) == [("Deregister", "router-0", url), ("Deregister", "router-1", url)]
    first = next(index for index, a in enumerate(plan) if isinstance(a, ApplyStatus | DeletePod))
    assert first == 2


def test_an_engine_of_two_pods_leaves_when_its_second_pod_does() -> None:
    world = serving_ranks()
    leader, follower = world.engine_names()
    url = world.address(leader)
    assert url in world.listed()
    world.pods[follower]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert changes(world.plan()) == [("Deregister", "router-0", url)]


def test_a_silent_prefill_engine_on_a_silent_node_leaves_at_once_and_not_when_its_life_is_judged() -> None:
    world = serving_pairs()
    world.nodes = {pod["spec"].get("nodeName", ""): True for pod in world.pods.values()}
    lost = pods_of(world, "prefill")[0]
    url, node = world.address(lost), world.pods[lost]["spec"]["nodeName"]
    world.nodes[node] = False
    assert changes(world.plan()) == [], "a kubelet that is down takes no engine with it"
    world.silent.add(world.uid(lost))
    assert changes(world.plan()) == [("Deregister", "router-0", url)]
    world.silent.clear()
    world.nodes[node] = True
    world.settle()
    assert url in world.listed()
