"""Scaling and rolling changes: who goes, in which order, and never without finishing its requests."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from rolloutfleet.plan.actions import Drain
from unit.plan.world import World, rollout_server


def server(replicas: int | None, **group: Any) -> dict[str, Any]:
    whole = {"name": "main", "engine": {"image": "engine:1"}, **group}
    return rollout_server(groups=[whole if replicas is None else {**whole, "replicas": replicas}])


def serving(replicas: int, **group: Any) -> World:
    world = World(server(replicas, **group))
    world.settle()
    return world


def steps(world: World, rounds: int, *, check: Callable[[], None] = lambda: None, seconds: float = 1) -> None:
    for _ in range(rounds):
        for action in world.plan():
            world.perform(action)
            check()
        world.run_pods()
        world.now += timedelta(seconds=seconds)


def indexes(world: World) -> list[int]:
    return [engine["index"] for engine in world.group_status()["engines"]]


def test_no_status_passes_for_an_answer_to_a_spec_that_the_groups_do_not_know_yet() -> None:
    world = serving(2)
    world.server["metadata"]["generation"] = 2
    world.spec()["engine"]["image"] = "engine:2"
    seen = []
    for _ in range(40):
        for action in world.plan():
            world.perform(action)
            status = world.server["status"]
            progressing = next(c["status"] for c in status["conditions"] if c["type"] == "Progressing")
            seen.append((status["observedGeneration"], progressing, len(world.created)))
        world.run_pods()
        world.now += timedelta(seconds=1)
    assert seen[-1] == (2, "False", 4)
    assert {created for generation, progressing, created in seen if (generation, progressing) == (2, "False")} == {4}


def test_of_engines_that_serve_the_least_loaded_goes() -> None:
    world = serving(3)
    for name, load in (("qwen-main-0-e1-r0", 5), ("qwen-main-1-e2-r0", 0), ("qwen-main-2-e3-r0", 7)):
        world.running[world.uid(name)] = load
    world.spec()["replicas"] = 2
    world.settle()
    assert indexes(world) == [0, 2]
    assert not world.aborted


def test_an_engine_that_does_not_serve_goes_before_one_that_does() -> None:
    world = serving(3)
    world.running[world.uid("qwen-main-1-e2-r0")] = 0
    world.crash_pod("qwen-main-0-e1-r0")
    world.spec()["replicas"] = 2
    world.settle()
    assert indexes(world) == [1, 2]


def test_a_stale_engine_goes_before_a_current_one() -> None:
    world = serving(3)
    stale = "qwen-main-0-e1-r0"
    world.begin_update(1)
    world.commit(1, "/weights/v1", "sum-1", outcomes={stale: "Failed"})
    world.running[world.uid(stale)] = 9
    world.spec()["replicas"] = 2
    steps(world, 5)
    world.running[world.uid(stale)] = 0
    world.settle()
    assert indexes(world) == [1, 2]


def test_an_engine_that_goes_finishes_its_requests_outside_the_routers() -> None:
    world = serving(2)
    goes = "qwen-main-1-e2-r0"
    uid = world.uid(goes)
    world.running[uid] = 1
    world.running[world.uid("qwen-main-0-e1-r0")] = 2
    world.spec()["replicas"] = 1
    steps(world, 20)
    assert world.address(goes) not in world.listed()
    assert goes in world.pods, "its request still runs"
    draining = world.group_status()["engines"][1]
    assert (draining["phase"], draining["reason"]) == ("Draining", "Draining")
    world.running[uid] = 0
    world.settle()
    assert goes not in world.pods
    assert uid not in world.aborted


def test_when_its_time_is_up_what_still_runs_is_aborted() -> None:
    world = serving(2, drainTimeoutSeconds=60)
    uid = world.uid("qwen-main-1-e2-r0")
    world.running[uid] = 3
    world.running[world.uid("qwen-main-0-e1-r0")] = 9
    world.spec()["replicas"] = 1
    steps(world, 50)
    assert uid not in world.aborted
    steps(world, 20)
    assert uid in world.aborted
    assert list(world.pods) == ["qwen-main-0-e1-r0"]


def test_never_more_go_than_asked_however_their_load_changes_meanwhile() -> None:
    world = serving(4)
    for name in world.pods:
        world.running[world.uid(name)] = 1
    world.spec()["replicas"] = 2
    steps(world, 4)
    gone_first = {e["index"] for e in world.group_status()["engines"] if e["phase"] == "Draining"}
    assert len(gone_first) == 2
    for name in world.pods:
        world.running[world.uid(name)] = 5 if world.address(name) not in world.listed() else 0
    steps(world, 5)
    assert {e["index"] for e in world.group_status()["engines"] if e["phase"] == "Draining"} == gone_first
    assert len(world.listed()) == 2


def test_an_engine_that_is_wanted_again_while_it_drains_serves_again_and_drains_anew_later() -> None:
    world = serving(2)
    uid = world.uid("qwen-main-1-e2-r0")
    world.running |= {uid: 1, world.uid("qwen-main-0-e1-r0"): 2}
    world.spec()["replicas"] = 1
    steps(world, 5)
    world.spec()["replicas"] = 2
    world.settle()
    assert len(world.listed()) == 2
    assert indexes(world) == [0, 1]
    world.spec()["replicas"] = 1
    steps(world, 3)
    assert "qwen-main-1-e2-r0" in world.pods, "what an earlier drain has seen says nothing of this one"


def test_scaling_up_fills_the_lowest_free_index() -> None:
    world = serving(3)
    for name, load in (("qwen-main-0-e1-r0", 5), ("qwen-main-1-e2-r0", 0), ("qwen-main-2-e3-r0", 7)):
        world.running[world.uid(name)] = load
    world.spec()["replicas"] = 2
    world.settle()
    world.spec()["replicas"] = 3
    world.settle()
    assert indexes(world) == [0, 1, 2]
    assert "qwen-main-1-e4-r0" in world.pods, "a new life under a new epoch"


def test_scaling_waits_while_the_trainer_updates() -> None:
    world = serving(2)
    world.begin_update(1)
    world.spec()["replicas"] = 1
    steps(world, 5)
    assert len(world.pods) == 2
    world.commit(1, "/weights/v1", "sum-1")
    world.settle()
    assert len(world.pods) == 1


def test_an_engine_that_is_added_while_the_trainer_updates_starts_and_is_routed_at_the_committed_version() -> None:
    world = serving(2)
    world.begin_update(1)
    world.spec()["replicas"] = 4
    steps(world, 8)
    assert len(world.pods) == 4
    assert len(world.listed()) == 2, "with the weights that it was started with it is nobody's"
    world.commit(1, "/weights/v1", "sum-1")
    world.settle()
    assert len(world.listed()) == 4
    assert set(world.weights.values()) == {(world.label(1), "sum-1")}


@pytest.mark.parametrize(
    ("rolling", "least"),
    [
        ({"maxUnavailable": 1}, 3),
        ({"maxUnavailable": 2}, 2),
        ({"maxUnavailable": 0, "maxSurge": 1}, 4),
        ({"maxUnavailable": 1, "maxSurge": 2}, 3),
    ],
)
def test_a_change_keeps_what_may_not_be_missing_and_makes_no_more_than_it_may(
    rolling: dict[str, int], least: int
) -> None:
    world = serving(4, rollingUpdate=rolling)
    world.spec()["engine"]["image"] = "engine:2"
    most = 0

    def bounds() -> None:
        nonlocal most
        assert len(world.listed()) >= least
        most = max(most, len(world.pods))

    world.settle(limit=200, between=bounds)
    assert {pod["spec"]["containers"][0]["image"] for pod in world.pods.values()} == {"engine:2"}
    assert len(world.listed()) == len(world.pods) == 4
    assert most <= 4 + rolling.get("maxSurge", 0)


def test_a_change_lets_requests_finish() -> None:
    world = serving(2)
    uid = world.uid("qwen-main-0-e1-r0")
    world.running[uid] = 1
    world.spec()["engine"]["image"] = "engine:2"
    steps(world, 20)
    assert "qwen-main-0-e1-r0" in world.pods
    assert len(world.listed()) == 1, "the other one waits for it"
    world.running[uid] = 0
    world.settle(limit=120)
    assert {pod["spec"]["containers"][0]["image"] for pod in world.pods.values()} == {"engine:2"}
    assert not world.aborted


@pytest.mark.parametrize("rolling", [{"maxUnavailable": 1}, {"maxUnavailable": 0, "maxSurge": 1}])
def test_a_bad_revision_stops_after_the_first_engine_says_why_and_heals_on_revert(rolling: dict[str, int]) -> None:
    world = serving(3, rollingUpdate=rolling)
    world.spec()["engine"]["image"] = "broken"
    least = 3 - rolling["maxUnavailable"]

    def enough() -> None:
        assert len(world.listed()) >= least

    for _ in range(60):
        steps(world, 1, check=enough)
        for name, pod in list(world.pods.items()):
            if pod["spec"]["containers"][0]["image"] == "broken" and pod["status"]["phase"] == "Running":
                world.crash_pod(name, message="ValueError: no such backend")
        world.now += timedelta(seconds=20)
    assert len(world.listed()) == least
    degraded = next(c for c in world.server["status"]["conditions"] if c["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "EngineExited")
    assert "no such backend" in degraded["message"]
    world.spec()["engine"]["image"] = "engine:1"
    world.settle(limit=200)
    assert len(world.listed()) == len(world.pods) == 3


def test_a_reverted_change_touches_no_engine_that_it_had_not_reached() -> None:
    world = serving(3)
    world.running[world.uid("qwen-main-0-e1-r0")] = 1
    world.spec()["engine"]["image"] = "engine:2"
    steps(world, 5)
    world.spec()["engine"]["image"] = "engine:1"
    world.settle()
    assert sorted(world.pods) == ["qwen-main-0-e1-r0", "qwen-main-1-e2-r0", "qwen-main-2-e3-r0"]
    assert len(world.listed()) == 3


def test_only_groups_that_changed_roll() -> None:
    group = {"replicas": 1, "engine": {"image": "engine:1"}}
    world = World(rollout_server(groups=[{"name": "a", **group}, {"name": "b", **group}]))
    world.settle()
    before = {name for name in world.pods if name.startswith("qwen-b-")}
    world.spec("a")["engine"] = {"image": "engine:2"}
    world.settle()
    assert {name for name in world.pods if name.startswith("qwen-b-")} == before
    assert "qwen-a-0-e2-r0" in world.pods


def test_a_router_that_lost_its_table_does_not_let_a_change_replace_what_it_forgot() -> None:
    world = serving(4)
    world.spec()["engine"]["image"] = "engine:2"
    steps(world, 2)
    world.tables["router-0"].clear()
    gone = len([action for action in world.plan() if isinstance(action, Drain)])
    assert gone <= 1
    steps(world, 1)
    assert len(world.listed()) >= 3


def test_a_drain_is_kept_up_to_the_end_by_another_operator_process() -> None:
    world = serving(2, drainTimeoutSeconds=60)
    goes = world.uid("qwen-main-1-e2-r0")
    world.running |= {goes: 1, world.uid("qwen-main-0-e1-r0"): 2}
    world.spec()["replicas"] = 1
    steps(world, 10)
    world.proofs.clear()
    world.drained.clear()
    steps(world, 3)
    assert {e["index"] for e in world.group_status()["engines"] if e["phase"] == "Draining"} == {1}
    steps(world, 60)
    assert goes in world.aborted


@pytest.mark.parametrize("grace", [0, 30])
def test_a_grace_period_that_cuts_the_drain_is_refused_by_name(grace: int) -> None:
    world = World(server(1, template={"spec": {"terminationGracePeriodSeconds": grace}}))
    world.settle()
    assert world.ready() == ("False", "InvalidTemplate")
    assert not world.pods


def test_the_grace_period_covers_the_drain() -> None:
    world = serving(1, drainTimeoutSeconds=600)
    assert world.pods["qwen-main-0-e1-r0"]["spec"]["terminationGracePeriodSeconds"] == 660
