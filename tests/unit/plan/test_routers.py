"""A change of the routers' template, seen from a plan: who makes the new ones, and when the old ones go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rolloutfleet.plan.actions import Action, Apply, DeleteObject
from rolloutfleet.plan.fleet import plan_fleet
from unit.plan.world import DEFAULTS, World, rollout_server


def serving(*, replicas: int = 1) -> World:
    world = World(rollout_server(router={"replicas": replicas}), routers=replicas)
    world.settle()
    return world


def plan_of(world: World, made_by: Mapping[str, str]) -> list[Action]:
    """The plan if routers were made by these ReplicaSets."""
    fleet = world.fleet()
    routers = [replace(router, made_by=made_by[router.name]) for router in fleet.router_pods if router.name in made_by]
    return plan_fleet(replace(fleet, router_pods=tuple(routers)), defaults=DEFAULTS, applied_versions={}, now=world.now)


def sets(world: World) -> list[str]:
    return sorted(key.removeprefix("ReplicaSet/") for key in world.children if key.startswith("ReplicaSet/"))


def applied(actions: Sequence[Action]) -> list[dict[str, Any]]:
    return [dict(a.manifest) for a in actions if isinstance(a, Apply) and a.manifest["kind"] == "ReplicaSet"]


def retired(actions: Sequence[Action]) -> list[str]:
    return [a.name for a in actions if isinstance(a, DeleteObject) and a.kind == "ReplicaSet"]


def change_image(world: World, image: str) -> None:
    world.server["spec"]["router"]["image"] = image
    world.server["metadata"]["generation"] += 1


def start_beside(world: World, *, gates: Sequence[bool | None]) -> tuple[str, str, dict[str, str]]:
    """A new template is applied, and its routers have come as far as their gates say; the old set, the new one, and
    who made which router."""
    (old,) = sets(world)
    made_by = dict.fromkeys(world.tables, old)
    change_image(world, "router:2")
    (new,) = applied(plan_of(world, made_by))
    world.perform(Apply(new))
    for number, gate in enumerate(gates):
        name = f"new-{number}"
        world.tables[name] = dict(world.tables["router-0"]) if gate else {}
        world.router_gates[name] = gate
        made_by[name] = new["metadata"]["name"]
    return old, new["metadata"]["name"], made_by


def test_a_set_of_routers_is_named_by_its_template_and_selects_its_own_pods_alone() -> None:
    world = serving()
    (old,) = sets(world)
    change_image(world, "router:2")
    (new,) = applied(plan_of(world, {"router-0": old}))
    assert new["metadata"]["name"] != old
    selectors = [manifest["spec"]["selector"]["matchLabels"] for manifest in (world.children[f"ReplicaSet/{old}"], new)]
    assert selectors[0] != selectors[1]
    assert selectors[1].items() <= new["spec"]["template"]["metadata"]["labels"].items()
    service = world.children["Service/qwen-router"]["spec"]["selector"]
    assert all(service.items() <= selector.items() for selector in selectors), "the Service sends requests to both"


def test_a_change_of_the_number_of_routers_makes_no_new_set() -> None:
    world = serving()
    (old,) = sets(world)
    world.server["spec"]["router"]["replicas"] = 3
    (changed,) = applied(plan_of(world, {"router-0": old}))
    assert (changed["metadata"]["name"], changed["spec"]["replicas"]) == (old, 3)


def test_old_routers_stay_until_all_new_ones_take_traffic() -> None:
    for gates in ((), (None,), (True, None), (True, False)):
        world = serving(replicas=2)
        _, _, made_by = start_beside(world, gates=gates)
        assert retired(plan_of(world, made_by)) == [], f"new gates: {gates}"
    world = serving(replicas=2)
    old, _, made_by = start_beside(world, gates=(True, True))
    assert retired(plan_of(world, made_by)) == [old]


def test_old_routers_that_take_no_traffic_go_at_once() -> None:
    world = serving()
    old, _, made_by = start_beside(world, gates=(None,))
    world.router_gates["router-0"] = False
    world.tables["router-0"] = {}
    assert retired(plan_of(world, made_by)) == [old]


def test_a_change_that_is_taken_back_lets_the_old_routers_serve_on() -> None:
    world = serving()
    _, new, made_by = start_beside(world, gates=(None,))
    del world.server["spec"]["router"]["image"]
    plan = plan_of(world, made_by)
    assert (applied(plan), retired(plan)) == ([], [new])
