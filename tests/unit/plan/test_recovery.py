"""Ends of engines: what counts as one, what counts against the engine, and when its next life begins."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from rolloutfleet.plan.actions import Requeue
from rolloutfleet.plan.observed import LeaseView, engine_pod
from unit.plan.world import World, rollout_server


def world_with(replicas: int = 3, **recovery: Any) -> World:
    server = rollout_server(replicas=replicas)
    server["spec"]["groups"][0]["recovery"] = recovery
    world = World(server)
    world.nodes = {f"node-{index}": True for index in range(replicas)}
    world.settle()
    assert len(world.listed()) == replicas
    return world


def step(world: World, seconds: float = 0) -> None:
    world.now += timedelta(seconds=seconds)
    for action in world.plan():
        world.perform(action)


def record(world: World, index: int = 0) -> dict[str, Any]:
    return next(engine for engine in world.group_status()["engines"] if engine["index"] == index)


def pod_of(world: World, index: int = 0) -> str:
    return str(record(world, index)["pod"])


def ask(world: World, verb: str, lives: str) -> None:
    group = next(child for key, child in world.children.items() if key.startswith("ServerGroup/"))
    group["metadata"].setdefault("annotations", {})[f"rolloutfleet.dev/{verb}"] = lives


def die(world: World, times: int) -> None:
    """Engine 0 crashes so often, each time as soon as it runs."""
    for _ in range(times):
        for _ in range(700):
            step(world, 1)
            world.run_pods()
            running = [
                pod
                for pod in world.pods
                if pod.startswith("qwen-main-0-") and world.pods[pod]["status"]["phase"] == "Running"
            ]
            if running:
                world.crash_pod(running[0])
                break
        step(world)


# Ends that only show from outside


def test_an_engine_that_hangs_is_replaced_after_as_many_failed_checks_as_the_spec_says() -> None:
    world = world_with(healthCheck={"failureThreshold": 2})
    hanging = pod_of(world)
    world.unhealthy[world.uid(hanging)] = 1
    step(world)
    assert record(world)["phase"] == "Serving"
    world.unhealthy[world.uid(hanging)] = 2
    step(world)
    assert hanging not in world.pods
    assert record(world)["lastFailure"]["reason"] == "Hung"
    world.settle()
    assert len(world.listed()) == 3


def test_an_engine_that_answers_nobody_is_replaced_after_the_same_checks() -> None:
    world = world_with()
    silent = world.uid(pod_of(world))
    world.silent.add(silent)
    step(world)
    step(world, 1000)
    assert record(world)["reason"] == "NotAnswering", "silence alone is not judged: this operator may be cut off"
    world.unhealthy[silent] = 3
    step(world)
    assert record(world)["lastFailure"]["reason"] == "NotAnswering"


def test_what_the_trainer_holds_is_never_judged_from_outside() -> None:
    world = world_with()
    world.begin_update(1, seconds=3600)
    world.lease = LeaseView(holder="trainer", fence=1, expires_at=world.now + timedelta(hours=1))
    uid = world.uid(pod_of(world))
    world.silent.add(uid)
    world.unhealthy[uid] = 99
    assert world.nodes is not None
    world.nodes["node-0"] = False
    for _ in range(5):
        step(world, 30)
    assert record(world)["restarts"] == 0
    world.now += timedelta(hours=1)
    step(world, 30)
    assert record(world)["restarts"] == 1, "the window is bounded"


def test_when_most_engines_look_dead_together_none_is_replaced_and_status_says_why() -> None:
    world = world_with(replicas=4)
    uids = [world.uid(pod_of(world, index)) for index in range(3)]
    for uid, failures in zip(uids, (3, 2, 1), strict=True):  # they are not asked at the same moment
        world.silent.add(uid)
        world.unhealthy[uid] = failures
    for _ in range(5):
        step(world, 600)
    assert [engine["restarts"] for engine in world.group_status()["engines"]] == [0] * 4
    assert record(world)["reason"] == "MassFailure"
    assert "3 of 4 engines" in record(world)["message"]
    assert any(event.reason == "MassFailure" for event in world.events)
    ask(world, "restart", f"0-e{record(world)['epoch']}")
    step(world)
    assert record(world)["restarts"] == 1, "somebody may ask for it all the same"
    world.silent.clear()
    world.unhealthy.clear()
    world.settle()
    assert [engine["restarts"] for engine in world.group_status()["engines"]] == [1, 0, 0, 0]
    assert len(world.listed()) == 4


def test_schedulers_that_stand_in_the_broadcast_of_a_dead_trainer_are_replaced_however_many_they_are() -> None:
    world = world_with(replicas=3)
    before = {pod_of(world, index) for index in range(3)}
    world.deaf = {world.uid(pod): 1 for pod in before}
    step(world)
    assert before <= world.pods.keys()
    world.deaf = dict.fromkeys(world.deaf, 2)
    step(world)
    assert {engine["lastFailure"]["reason"] for engine in world.group_status()["engines"]} == {"Hung"}
    world.settle()
    assert before.isdisjoint(world.pods)
    assert len(world.listed()) == 3


def test_one_of_two_engines_that_hangs_is_no_mass_failure() -> None:
    world = world_with(replicas=2)
    world.unhealthy[world.uid(pod_of(world))] = 3
    step(world)
    assert record(world)["restarts"] == 1


def test_processes_that_end_together_are_all_started_again() -> None:
    world = world_with(replicas=3)
    for index in range(3):
        world.crash_pod(pod_of(world, index))
    world.settle()
    assert [engine["restarts"] for engine in world.group_status()["engines"]] == [1, 1, 1]
    assert len(world.listed()) == 3


# Ends that a connection tells before the kubelet does


def test_a_server_that_has_ended_leaves_the_routers_and_is_replaced_before_its_kubelet_says_so() -> None:
    world = world_with()
    dead, lives = pod_of(world), len(world.created)
    url = world.url(world.uid(dead))
    world.closed.add(world.uid(dead))
    step(world)
    assert url not in world.listed()
    assert len(world.created) == lives + 1
    assert record(world)["lastFailure"]["reason"] == "ServerEnded"
    assert dead in world.pods, "its kubelet is about to tell how"
    world.crash_pod(dead)
    step(world)
    failure = record(world)["lastFailure"]
    assert (failure["reason"], failure["pod"], failure["log"]) == ("EngineExited", dead, "ValueError: boom")
    assert record(world)["recoveries"][-1]["reason"] == "EngineExited"
    assert dead not in world.pods
    assert [event.reason for event in world.events if event.reason in ("ServerEnded", "EngineExited")] == [
        "ServerEnded",
        "EngineExited",
    ]
    world.settle()
    assert (record(world)["restarts"], record(world)["failuresInRow"]) == (1, 1)
    assert len(world.created) == lives + 1, "one end, one life"


@pytest.mark.parametrize("node_ready", [True, False])
def test_a_kubelet_that_does_not_tell_how_a_server_ended_is_not_waited_for_long(node_ready: bool) -> None:
    world = world_with()
    dead = pod_of(world)
    world.closed.add(world.uid(dead))
    step(world)
    assert world.nodes is not None
    world.nodes["node-0"] = node_ready
    (requeue,) = [action for action in world.plan() if isinstance(action, Requeue)]
    assert requeue.seconds < 11
    step(world, 9)
    assert (dead in world.pods) is True or not node_ready
    step(world, 2)
    assert dead not in world.pods or world.pods[dead]["metadata"].get("deletionTimestamp")
    assert record(world)["lastFailure"]["reason"] == "ServerEnded"


def test_an_engine_that_has_not_answered_yet_has_no_server_to_end() -> None:
    world = World(rollout_server(replicas=1))
    while not world.pods:
        step(world)
    (pod,) = world.pods
    world.closed.add(world.uid(pod))
    step(world, 1)
    step(world, 1)
    assert len(world.created) == 1


# Nodes


def test_an_engine_whose_node_is_lost_is_replaced_at_once_and_its_pod_does_not_stand_in_the_way() -> None:
    world = world_with()
    lost = pod_of(world)
    assert world.nodes is not None
    world.nodes["node-0"] = False
    world.silent.add(world.uid(lost))
    step(world)
    assert record(world)["restarts"] == 0, "one missed look is not enough"
    step(world, 11)
    assert (record(world)["restarts"], record(world)["lastFailure"]["reason"]) == (1, "NodeNotReady")
    assert lost in world.pods, "its kubelet does not answer"
    world.nodes["node-0"] = True
    world.pods[lost]["spec"]["nodeName"] = "node-9"
    world.nodes["node-9"] = False
    world.settle()
    assert len(world.listed()) == 3
    assert record(world)["failuresInRow"] == 0


def given_a_node_that_is_not_ready() -> World:
    """One engine, just scheduled, that has not answered yet."""
    world = World(rollout_server(replicas=1))
    world.nodes = {"node-0": False}
    while not world.pods:
        step(world)
    world.run_pods()
    (pod,) = world.pods
    world.silent.add(world.uid(pod))
    return world


def test_an_engine_that_was_just_given_a_node_is_not_taken_from_it_by_late_news_of_the_node() -> None:
    world = given_a_node_that_is_not_ready()
    step(world, 5)
    assert len(world.created) == 1, "who scheduled it knew better"
    world.nodes = {"node-0": True}
    step(world, 100)
    world.nodes = {"node-0": False}
    step(world)
    assert len(world.created) == 2
    assert record(world)["lastFailure"]["reason"] == "NodeNotReady"


def test_an_engine_that_never_answered_on_a_node_that_is_lost_is_replaced_when_its_silence_is_long_enough() -> None:
    world = given_a_node_that_is_not_ready()
    (requeue,) = [action for action in world.plan() if isinstance(action, Requeue)]
    assert requeue.seconds < 11
    step(world, 11)
    assert record(world)["lastFailure"]["reason"] == "NodeNotReady"


def test_routers_give_up_what_they_asked_of_a_lost_machine_within_a_minute() -> None:
    world = world_with()
    pod = world.router_set()["spec"]["template"]["spec"]
    sysctls = {entry["name"]: int(entry["value"]) for entry in pod["securityContext"]["sysctls"]}
    asks, again = sysctls["net.ipv4.tcp_keepalive_probes"], sysctls["net.ipv4.tcp_keepalive_intvl"]
    assert 30 + asks * again < 60, "sglang-router's own idle time is 30 s"


def test_a_kubelet_that_is_down_alone_takes_no_engine_with_it() -> None:
    world = world_with()
    assert world.nodes is not None
    world.nodes["node-0"] = False
    step(world, 3600)
    assert len(world.listed()) == 3
    assert record(world)["restarts"] == 0


def test_a_node_that_is_removed_from_the_cluster_takes_its_engines_out_of_the_routers() -> None:
    world = world_with()
    gone = world.url(world.uid(pod_of(world)))
    assert world.nodes is not None
    world.nodes["node-0"] = None
    step(world)
    assert gone not in world.listed()
    assert record(world)["lastFailure"]["reason"] == "NodeGone"


def test_a_pod_on_a_lost_node_is_forced_away_only_where_the_spec_allows_it_and_after_its_time() -> None:
    for allowed in (False, True):
        world = world_with(**({"forceDeleteAfterSeconds": 60} if allowed else {}))
        lost = pod_of(world)
        assert world.nodes is not None
        world.nodes["node-0"] = False
        world.silent.add(world.uid(lost))
        step(world)
        step(world, 11)
        step(world, 50)
        assert lost in world.pods
        step(world, 30)
        assert (lost not in world.pods) is allowed
        assert world.forced == ([lost] if allowed else [])


@pytest.mark.parametrize("reason", ["EvictionByEvictionAPI", "PreemptionByScheduler", "DeletionByTaintManager"])
def test_an_engine_that_kubernetes_ends_leaves_the_routers_at_once_and_nothing_counts_against_it(reason: str) -> None:
    world = world_with()
    pod = pod_of(world)
    url = world.url(world.uid(pod))
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "Eviction API: evicting"}
    world.pods[pod]["status"]["conditions"].append(condition)
    step(world)
    assert url not in world.listed()
    assert record(world)["lastFailure"]["reason"] == reason
    assert (record(world)["failuresInRow"], record(world)["retryAt"]) == (0, "")


# Bounds


def test_after_max_restarts_an_engine_stays_failed_until_somebody_resumes_it() -> None:
    world = world_with(replicas=1, maxRestarts=3, backoff={"initialSeconds": 2, "maxSeconds": 8})
    die(world, 4)
    lives = len(world.created)
    step(world, 100_000)
    assert (record(world)["phase"], record(world)["reason"], record(world)["restarts"]) == (
        "Failed",
        "RestartsExhausted",
        3,
    )
    assert lives == 4
    assert "ValueError: boom" in record(world)["message"]
    assert [pod["status"]["phase"] for pod in world.pods.values()] == ["Failed"], "the last one stays for diagnosis"
    assert world.ready()[1] == "RestartsExhausted"
    ask(world, "resume", f"0-e{record(world)['epoch']}")
    world.settle()
    assert len(world.listed()) == 1
    die(world, 2)
    assert record(world)["phase"] == "Failed"
    assert record(world)["reason"] != "RestartsExhausted", "the request meant another life: it is counted anew"


def test_a_corrected_spec_starts_an_engine_that_was_given_up() -> None:
    world = world_with(replicas=1, maxRestarts=0)
    die(world, 1)
    assert record(world)["reason"] == "RestartsExhausted"
    world.server["spec"]["groups"][0]["engine"]["args"] = {"log-level": "info"}
    world.settle()
    assert len(world.listed()) == 1


def test_an_engine_that_has_served_long_enough_is_cleared_of_its_failures() -> None:
    for served, failures in ((299, 3), (301, 1)):
        world = world_with(replicas=1, backoff={"initialSeconds": 1, "maxSeconds": 8, "resetAfterSeconds": 300})
        die(world, 2)
        world.settle()
        world.now = datetime.fromisoformat(record(world)["servingSince"]) + timedelta(seconds=served)
        world.crash_pod(pod_of(world))
        step(world)
        assert record(world)["failuresInRow"] == failures


def test_an_engine_that_fell_silent_before_it_failed_is_cleared_of_its_failures_as_well() -> None:
    for served, failures in ((299, 3), (301, 1)):
        backoff = {"initialSeconds": 1, "maxSeconds": 8, "resetAfterSeconds": 300}
        world = world_with(replicas=1, backoff=backoff, healthCheck={"failureThreshold": 2})
        die(world, 2)
        world.settle()
        world.now = datetime.fromisoformat(record(world)["servingSince"]) + timedelta(seconds=served)
        uid = world.uid(pod_of(world))
        world.silent.add(uid)
        step(world)
        assert (record(world)["phase"], record(world)["servingSince"]) == ("Starting", ""), "it does not serve"
        world.unhealthy[uid] = 2
        step(world)
        assert record(world)["lastFailure"]["reason"] == "NotAnswering"
        assert record(world)["failuresInRow"] == failures


@pytest.mark.parametrize("served", [0, 1000])
def test_the_first_failure_in_a_row_begins_the_next_life_in_the_same_step(served: int) -> None:
    world = world_with(backoff={"initialSeconds": 100, "maxSeconds": 300})
    world.now += timedelta(seconds=served)
    lives = len(world.created)
    world.crash_pod(pod_of(world))
    step(world)
    assert len(world.created) == lives + 1
    assert (record(world)["failuresInRow"], record(world)["retryAt"]) == (1, "")
    assert record(world)["phase"] == "Pending"
    world.settle()
    world.crash_pod(pod_of(world))
    step(world)
    assert len(world.created) == lives + 1, "twice in a row"
    assert record(world)["phase"] == "Failed"
    world.settle()
    world.now += timedelta(seconds=301)
    world.crash_pod(pod_of(world))
    step(world)
    assert len(world.created) == lives + 3, "it has served for long enough: the row begins anew"


def test_a_first_failure_that_nothing_allows_does_not_begin_another_life() -> None:
    world = world_with(maxRestarts=0)
    lives = len(world.created)
    world.crash_pod(pod_of(world))
    step(world, 1000)
    assert len(world.created) == lives
    assert record(world)["reason"] == "RestartsExhausted"


def test_engines_that_fail_together_do_not_come_back_together() -> None:
    world = world_with(replicas=8, backoff={"initialSeconds": 100, "maxSeconds": 300})
    for _ in range(2):
        world.settle()
        for index in range(8):
            world.crash_pod(pod_of(world, index))
        step(world)
    waits = {
        (datetime.fromisoformat(engine["retryAt"]) - world.now).total_seconds()
        for engine in world.group_status()["engines"]
    }
    assert len(waits) == 8
    assert all(75 <= wait <= 100 for wait in waits)


# Requests


def test_an_engine_that_is_restarted_on_request_finishes_its_requests_first_and_once() -> None:
    world = world_with()
    before = pod_of(world)
    world.running[world.uid(before)] = 5
    ask(world, "restart", f"0-e{record(world)['epoch']}, 7-e1")
    for _ in range(3):
        step(world, 1)
    assert before in world.pods
    assert world.url(world.uid(before)) not in world.listed()
    world.running.clear()
    world.settle()
    assert (record(world)["restarts"], record(world)["lastFailure"]["reason"]) == (1, "RestartRequested")
    for _ in range(5):
        step(world, 60)
    assert record(world)["restarts"] == 1
    assert [engine["restarts"] for engine in world.group_status()["engines"]] == [1, 0, 0]


def test_a_restart_of_all_engines_goes_one_by_one() -> None:
    world = world_with(replicas=3)
    ask(
        world,
        "restart",
        ",".join(f"{engine['index']}-e{engine['epoch']}" for engine in world.group_status()["engines"]),
    )
    fewest = []

    def count() -> None:
        fewest.append(len(world.listed()))

    world.settle(between=count)
    assert [engine["restarts"] for engine in world.group_status()["engines"]] == [1, 1, 1]
    assert min(fewest) == 2


def test_a_request_that_nobody_can_read_is_said() -> None:
    world = world_with()
    ask(world, "restart", "qwen-main-0")
    step(world)
    refused = [c for c in world.group_status()["conditions"] if c["type"] == "RequestRefused"]
    assert "INDEX-eEPOCH" in refused[0]["message"]
    ask(world, "restart", "")
    step(world)
    assert not [c for c in world.group_status()["conditions"] if c["type"] == "RequestRefused"]


# What status keeps


def test_a_recovery_is_told_stage_by_stage_and_a_settled_one_is_left_alone() -> None:
    world = world_with()
    world.commit(1, "/weights/v1", "sum-1")
    world.settle()
    world.delete_pod(pod_of(world))
    while record(world)["phase"] != "Serving" or record(world)["restarts"] == 0:
        step(world, 1)
        world.run_pods()
    (recovery,) = record(world)["recoveries"]
    assert recovery["reason"] == "PodDeleted"
    assert recovery["epoch"] == record(world)["epoch"]
    stages = [recovery[stage] for stage in ("detected", "replaced", "loaded", "caughtUp", "routable")]
    assert stages == sorted(stages)
    assert len(set(stages)) >= 4, stages
    before = world.writes
    for _ in range(10):
        step(world, 60)
    assert world.writes == before


def test_only_the_last_recoveries_and_logs_are_kept() -> None:
    world = world_with(replicas=1, backoff={"initialSeconds": 1, "maxSeconds": 1})
    die(world, 8)
    assert len(record(world)["recoveries"]) == 5
    assert record(world)["lastFailure"]["log"] == "ValueError: boom"
    assert not record(world)["recoveries"][0]["routable"]


def test_weights_that_changed_behind_everybodys_back_are_found_when_they_are_due_and_loaded_anew() -> None:
    world = world_with()
    world.commit(1, "/weights/v1", "sum-1")
    world.settle()
    uid = world.uid(pod_of(world))
    world.weights[uid] = (world.label(1), "of somebody else")
    world.settle()
    assert world.url(uid) in world.listed(), "nothing says so yet"
    world.rechecks.add(uid)
    step(world)
    step(world)
    assert world.url(uid) not in world.listed()
    assert record(world)["reason"] == "WrongWeights"
    world.settle()
    assert world.weights[uid] == (world.label(1), "sum-1")
    assert len(world.listed()) == 3


def test_an_eviction_may_take_one_engine_and_none_while_the_trainer_holds_the_fleet() -> None:
    world = world_with(replicas=4)

    def budget() -> dict[str, Any]:
        spec: dict[str, Any] = world.children["PodDisruptionBudget/qwen-main"]["spec"]
        return spec

    assert (budget()["minAvailable"], budget()["unhealthyPodEvictionPolicy"]) == (3, "AlwaysAllow")
    world.begin_update(1)
    step(world)
    assert (budget()["minAvailable"], budget()["unhealthyPodEvictionPolicy"]) == (4, "IfHealthyBudget")
    world.now += timedelta(hours=1)
    world.settle()
    assert budget()["minAvailable"] == 3
    world.spec()["replicas"] = 1
    world.settle()
    assert budget()["minAvailable"] == 0, "a node with a single engine can be drained"


def test_a_budget_is_made_when_an_engine_has_served_and_stays_while_none_does() -> None:
    world, budget, too_early = World(rollout_server(replicas=2)), "PodDisruptionBudget/qwen-main", 0

    def look() -> None:
        nonlocal too_early
        too_early += budget in world.children and not any(engine_pod(pod).gate for pod in world.pods.values())

    world.settle(between=look)
    assert budget in world.children
    assert too_early == 0, "it would protect nobody"
    for name in world.engine_names():
        world.delete_pod(name)
    step(world)
    assert budget in world.children


def test_routers_that_wait_for_the_first_engine_keep_no_node_from_being_drained() -> None:
    world = World(rollout_server(router={"replicas": 2}), routers=2)
    world.settle()
    assert world.children["PodDisruptionBudget/qwen-router"]["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
