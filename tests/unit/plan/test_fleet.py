"""The plan of a whole fleet, run against a world in memory."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutfleet.plan.actions import (
    Action,
    Adopt,
    CatchUp,
    CreatePod,
    DeletePod,
    Deregister,
    Register,
    Requeue,
    Verify,
)
from rolloutfleet.plan.failures import Trouble
from rolloutfleet.plan.observed import LeaseView, Worker
from unit.plan.world import World, crashed_behind_each_action, rollout_server


def serving_world(*, replicas: int = 2, routers: int = 1) -> World:
    world = World(rollout_server(replicas=replicas), routers=routers)
    world.settle()
    return world


def test_an_applied_server_ends_with_all_engines_routed_and_status_that_says_so() -> None:
    world = serving_world(replicas=3, routers=2)
    assert len(world.listed()) == 3
    status = world.server["status"]
    ready = next(c for c in status["conditions"] if c["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("True", "Serving")
    assert status["engines"] == {"desired": 3, "ready": 3, "routable": 3, "stale": 0, "failed": 0}
    assert status["weights"]["version"] == 0
    assert {e["phase"] for e in world.group_status()["engines"]} == {"Serving"}


def test_engines_are_started_with_a_label_that_names_their_fleet() -> None:
    world = serving_world(replicas=1)
    (pod,) = world.pods.values()
    words = pod["spec"]["containers"][0]["args"]
    assert words[words.index("--weight-version") + 1] == world.label(0) == "0@uid-qwen"


def test_a_settled_fleet_is_left_alone() -> None:
    world = serving_world()
    for _ in range(5):
        world.now += timedelta(minutes=7)
        assert [a for a in world.plan() if not isinstance(a, Requeue)] == []


def test_an_epoch_stands_in_status_before_its_pod_is_created() -> None:
    world = World(rollout_server())
    for _ in range(3):
        for action in world.plan():
            if isinstance(action, CreatePod):
                name = action.manifest["metadata"]["name"]
                known = {f"qwen-main-{e['index']}-e{e['epoch']}-r0" for e in world.group_status().get("engines", [])}
                assert name in known
            world.perform(action)


def test_a_deleted_pod_leaves_the_routers_at_once_and_is_replaced_under_a_new_epoch() -> None:
    world = serving_world()
    victim = world.engine_names()[0]
    gone = world.url(world.pods[victim]["metadata"]["uid"])
    world.delete_pod(victim)
    first = world.plan()[0]
    world.perform(first)
    assert gone not in world.listed(), "deregistration is the first action"
    world.settle()
    assert len(world.listed()) == 2
    assert victim not in world.pods
    record = next(e for e in world.group_status()["engines"] if e["index"] == 0)
    assert (record["restarts"], record["lastFailure"]["reason"]) == (1, "PodDeleted")


def test_a_pod_stuck_terminating_does_not_block_its_replacement() -> None:
    world = serving_world()
    stuck = world.engine_names()[0]
    world.pods[stuck]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.settle()
    assert stuck in world.pods
    assert len(world.listed()) == 2


def test_a_restarted_engine_catches_up_before_any_router_lists_it() -> None:
    world = serving_world()
    world.commit(2, "/weights/v2", "sum-2")
    world.settle()
    world.delete_pod(world.engine_names()[0])
    world.settle()  # World.perform refuses a registration with other weights than the committed ones
    assert {label for label, _ in world.weights.values()} == {world.label(2)}
    assert len(world.listed()) == 2


def test_a_label_without_its_checksum_is_not_believed() -> None:
    world = serving_world()
    world.commit(2, "/weights/v2", "sum-2")
    world.settle()
    name = world.engine_names()[0]
    world.delete_pod(name)
    world.settle(limit=60)
    liar = max(world.pods)
    uid = world.pods[liar]["metadata"]["uid"]
    world.weights[uid] = (world.label(2), "sum-wrong")
    world.proofs.clear()
    world.commit(2, "/weights/v2", "sum-2", outcomes={liar: "Failed"})
    world.weights[uid] = (world.label(2), "sum-wrong")
    world.settle()
    assert world.weights[uid] == (world.label(2), "sum-2")


@pytest.mark.parametrize("committed", [False, True])
def test_an_address_at_which_another_fleets_engine_answers_leaves_the_routers_and_nothing_is_loaded_there(
    committed: bool,
) -> None:
    world = serving_world(replicas=2)
    version = 0
    if committed:  # a verdict about the pod is none about who has its address by now
        version = 1
        world.commit(1, "/weights/v1", "sum-1")
        world.settle()
    name = world.engine_names()[0]
    stranger = (f"{version}@beef0000", f"sum-{version}")
    world.weights[world.uid(name)] = stranger
    for _ in range(6):
        for action in world.plan():
            assert not isinstance(action, Adopt | CatchUp | Verify | Register), action
            world.perform(action)
    assert world.address(name) not in world.listed()
    assert len(world.listed()) == 1
    record = world.group_status()["engines"][0]
    assert (record["phase"], record["reason"]) == ("Stale", "OtherFleet")
    assert "beef0000" in record["message"]
    assert "weightVersion" not in record
    assert world.weights[world.uid(name)] == stranger


@pytest.mark.parametrize("version", [0, 2])
def test_engines_labelled_by_an_older_operator_are_labelled_anew_and_neither_reloaded_nor_unlisted(
    version: int,
) -> None:
    world = serving_world()
    if version:
        world.commit(version, "/weights/v2", "sum-2")
        world.settle()
    pods, checksum = list(world.created), f"sum-{version}"
    world.weights = {uid: (str(version), checksum) for uid in world.weights}
    world.proofs.clear()  # another operator process has just begun
    adopted = set()
    for _ in range(8):
        for action in world.plan():
            assert not isinstance(action, CatchUp | Deregister | DeletePod | CreatePod), action
            adopted |= {action.pod_uid} if isinstance(action, Adopt) else set()
            world.perform(action)
            assert len(world.listed()) == 2
    assert adopted == set(world.weights)
    assert set(world.weights.values()) == {(world.label(version), checksum)}
    assert world.created == pods
    assert world.settle() == 0


def test_a_plain_number_with_other_weights_is_loaded_anew_and_not_adopted() -> None:
    world = serving_world()
    uid = world.uid(world.engine_names()[0])
    world.weights[uid] = ("0", "sum-of-another")
    world.proofs.clear()
    adopted = []
    for _ in range(8):
        for action in world.plan():
            adopted += [action.pod_uid] if isinstance(action, Adopt) else []
            world.perform(action)
    assert uid not in adopted
    assert world.weights[uid] == (world.label(0), "sum-0")
    assert len(world.listed()) == 2


def test_an_engine_that_fell_out_of_an_update_leaves_the_routers_and_is_brought_up_to_date() -> None:
    world = serving_world(replicas=3)
    casualty = world.engine_names()[1]
    uid = world.pods[casualty]["metadata"]["uid"]
    world.begin_update(1)
    world.settle(patient=False)
    world.commit(1, "/weights/v1", "sum-1", outcomes={casualty: "Failed"})
    plan = world.plan()
    world.perform(plan[0])
    assert world.url(uid) not in world.listed()
    world.settle()
    assert world.weights[uid] == (world.label(1), "sum-1")
    assert len(world.listed()) == 3
    assert not world.paused


def test_without_a_checkpoint_of_the_version_that_the_trainer_sent_a_new_life_waits_for_the_next_update() -> None:
    world = serving_world(replicas=2)
    world.commit(1, "", "sum-1")
    world.settle()
    world.delete_pod(world.engine_names()[0])
    world.settle()
    newcomer = world.created[-1]
    assert world.weights[world.uid(newcomer)] == (world.label(0), "sum-0"), "nothing is loaded that is not version 1"
    assert len(world.listed()) == 1
    waiting = next(engine for engine in world.group_status()["engines"] if engine["pod"] == newcomer)
    assert (waiting["phase"], waiting["reason"]) == ("Stale", "AwaitingUpdate")
    assert "version 1 and named no checkpoint" in waiting["message"]
    assert world.settle() == 0

    world.commit(2, "", "sum-2")
    world.settle()
    assert len(world.listed()) == 2


def test_a_group_that_took_no_part_in_an_update_measures_the_version_on_its_first_engine() -> None:
    world = serving_world(replicas=2)
    names = world.engine_names()
    world.commit(1, "/weights/v1", "sum-1", outcomes=dict.fromkeys(names, "Unreachable"), measured=False)
    world.settle()
    assert set(world.weights.values()) == {(world.label(1), "sum-1")}
    assert len(world.listed()) == 2
    assert [entry["checksum"] for entry in world.group_status()["measured"]] == ["sum-1"]


def test_while_the_trainer_updates_nothing_is_registered_loaded_or_resumed() -> None:
    world = serving_world()
    world.delete_pod(world.engine_names()[0])
    world.begin_update(1)
    world.lease = world.lease.__class__(holder="trainer", fence=1, expires_at=world.now + timedelta(hours=1))
    world.server["status"]["training"]["weights"]["deadline"] = ""
    for _ in range(10):
        for action in world.plan():
            assert not isinstance(action, Register | CatchUp | Verify)
            world.perform(action)
        world.run_pods()
    assert len(world.pods) == 2, "a lost engine is replaced meanwhile"
    assert world.paused


def test_when_the_trainer_dies_in_an_update_the_fleet_is_restored_and_resumed() -> None:
    world = serving_world(replicas=3)
    world.commit(1, "/weights/v1", "sum-1")
    world.settle()
    world.begin_update(2)
    touched = world.pods[world.engine_names()[0]]["metadata"]["uid"]
    world.weights[touched] = (world.label(2), "sum-2")
    half = world.pods[world.engine_names()[1]]["metadata"]["uid"]
    world.weights[half] = (world.label(1), "half of each")
    world.settle(patient=False)
    assert world.paused, "held until the lease runs out"
    wake_up = [action for action in world.plan() if isinstance(action, Requeue)]
    assert wake_up, "the end of the lease is a moment to look again"
    world.now += timedelta(seconds=20)
    world.settle()
    assert set(world.weights.values()) == {(world.label(1), "sum-1")}
    assert len(world.listed()) == 3
    assert not world.paused


def test_an_update_of_a_dead_leader_is_not_held_by_the_next_one() -> None:
    world = serving_world(replicas=2)
    world.begin_update(1)
    world.settle(patient=False)
    assert world.paused
    world.lease = LeaseView(holder="other", fence=2, expires_at=world.now + timedelta(hours=1))
    world.settle(patient=False)
    assert not world.paused
    assert {e["phase"] for e in world.group_status()["engines"]} == {"Serving"}


def offloading_world() -> World:
    world = World(rollout_server(replicas=2))
    world.server["spec"]["groups"][0]["offload"] = True
    world.settle()
    return world


def entry(world: World, pod: str, **memory: Any) -> dict[str, Any]:
    return {"pod": pod, "uid": world.uid(pod), **memory}


def test_an_engine_whose_memory_nobody_knows_is_replaced_while_the_trainer_has_the_others() -> None:
    world = offloading_world()
    lost, released = world.engine_names()
    engines = [entry(world, lost, state="Unknown"), entry(world, released, released=["weights"])]
    memory = {"fence": 1, "phase": "Released", "tags": ["weights"], "engines": engines}
    world.server["status"]["training"] = {"holder": "trainer", "fence": 1, "memory": memory}
    world.lease = LeaseView(holder="trainer", fence=1, expires_at=world.now + timedelta(hours=9))
    world.settle(patient=False)
    assert lost not in world.pods
    assert released in world.pods
    reasons = {e["pod"]: e["reason"] for e in world.group_status()["engines"]}
    assert reasons[released] == "MemoryReleased"
    assert [reason for pod, reason in reasons.items() if pod != released] == ["TrainerHolds"]


def test_engines_that_were_only_drained_go_on_when_their_trainer_has_died() -> None:
    world = offloading_world()
    memory = {"fence": 1, "phase": "Releasing", "engines": [entry(world, pod) for pod in world.engine_names()]}
    world.server["status"]["training"] = {"holder": "trainer", "fence": 1, "memory": memory}
    world.lease = LeaseView(holder="trainer", fence=1, expires_at=world.now + timedelta(seconds=15))
    pods = world.engine_names()
    world.paused.update(world.uid(pod) for pod in pods)
    world.settle(patient=False)
    assert len(world.paused) == 2, "its trainer lives: hands off"
    world.now += timedelta(seconds=20)
    world.settle()
    assert not world.paused
    assert world.engine_names() == pods, "nothing was lost by a drain"
    assert {e["phase"] for e in world.group_status()["engines"]} == {"Serving"}


def test_a_group_without_offload_serves_on_while_the_others_memory_is_released() -> None:
    world = World(rollout_server(replicas=1))
    world.server["spec"]["groups"][0] |= {"offload": True}
    world.server["spec"]["groups"].append({"name": "more", "replicas": 1, "engine": {"image": "engine:1"}})
    world.settle()
    main, more = world.engine_names()
    released = entry(world, main, released=["kv_cache"])
    memory = {"fence": 1, "phase": "Released", "tags": ["kv_cache"], "engines": [released]}
    world.server["status"]["training"] = {"holder": "trainer", "fence": 1, "memory": memory}
    world.lease = LeaseView(holder="trainer", fence=1, expires_at=world.now + timedelta(hours=1))
    world.settle(patient=False)
    assert set(world.listed()) == {world.address(more)}, "a request to the other one would wait for the trainer"
    world.crash_pod(more)
    world.settle(patient=False)
    assert len(world.listed()) == 1
    assert world.address(main) not in world.listed()
    assert main in world.pods


def test_engines_whose_memory_a_dead_trainer_left_half_released_are_replaced() -> None:
    world = offloading_world()
    half, whole = world.engine_names()
    memory = {"fence": 1, "phase": "Resuming", "tags": ["weights"], "engines": [entry(world, half, state="Changing")]}
    world.server["status"]["training"] = {"holder": "trainer", "fence": 1, "memory": memory}
    world.lease = LeaseView(holder="trainer", fence=1, expires_at=world.now + timedelta(hours=1))
    world.settle(patient=False)
    assert world.engine_names() == [half, whole], "its trainer lives: hands off"
    world.lease = LeaseView(holder="other", fence=2, expires_at=world.now + timedelta(hours=1))
    world.settle()
    assert half not in world.pods
    assert whole in world.pods
    assert len(world.listed()) == 2


def test_engines_that_die_at_start_wait_longer_each_time_and_heal_when_the_spec_is_corrected() -> None:
    world = World(rollout_server(replicas=1))
    pauses = []
    for _ in range(5):
        _until_pod(world)
        world.crash_pod(next(name for name, pod in world.pods.items() if pod["status"]["phase"] == "Running"))
        before = world.now
        _until_created(world)
        pauses.append((world.now - before).total_seconds())
    assert pauses == sorted(pauses)
    assert pauses[0] < 1, "once is no row"
    assert pauses[-1] >= 4 * pauses[1] / 2 >= 15
    record = world.group_status()["engines"][0]
    assert record["restarts"] == 5
    assert "ValueError: boom" in record["lastFailure"]["message"]
    _until_pod(world)
    world.crash_pod(next(name for name, pod in world.pods.items() if pod["status"]["phase"] == "Running"))
    for action in world.plan():
        world.perform(action)
    world.server["spec"]["groups"][0]["engine"]["args"] = {"log-level": "info"}
    world.server["metadata"]["generation"] = 2
    before = world.now
    world.settle()
    assert (world.now - before).total_seconds() < 30, "a corrected spec does not wait for the backoff"
    assert len(world.listed()) == 1


def _until_pod(world: World) -> None:
    for _ in range(400):
        for action in world.plan():
            world.perform(action)
        world.run_pods()
        if any(pod["status"]["phase"] == "Running" for pod in world.pods.values()):
            return
        world.now += timedelta(seconds=1)
    raise AssertionError("no pod came")


def _until_created(world: World) -> None:
    count = len(world.created)
    for _ in range(400):
        for action in world.plan():
            world.perform(action)
        assert sum(pod["status"]["phase"] == "Failed" for pod in world.pods.values()) <= 1, "failed pods pile up"
        if len(world.created) > count:
            return
        world.now += timedelta(seconds=1)
    raise AssertionError("no replacement came")


def test_an_engine_that_never_answers_is_replaced_after_its_deadline_and_not_before() -> None:
    world = World(rollout_server(replicas=1))
    world.spec()["recovery"] = {"startupDeadlineSeconds": 100}
    _until_pod(world)
    first = world.engine_names()[0]
    world.weights.clear()
    for seconds, there in ((90, True), (20, False)):
        world.now += timedelta(seconds=seconds)
        for action in world.plan():
            world.perform(action)
        assert (first in world.pods) is there
    failure = world.group_status()["engines"][0]["lastFailure"]
    assert (failure["reason"], failure["pod"]) == ("StartupDeadlineExceeded", first)


def test_one_missed_answer_ends_no_life_however_old_the_engine_is() -> None:
    world = serving_world()
    uid = world.uid(world.engine_names()[0])
    world.now += timedelta(days=2)
    world.silent.add(uid)
    for _ in range(3):
        for action in world.plan():
            world.perform(action)
        world.now += timedelta(seconds=3)
    assert world.group_status()["engines"][0]["reason"] == "NotAnswering"
    world.silent.clear()
    world.settle()
    assert world.group_status()["engines"][0]["restarts"] == 0
    assert len(world.listed()) == 2


def test_an_engine_that_joins_takes_no_router_out_of_its_service() -> None:
    world = serving_world(routers=2)
    world.spec()["replicas"] = 4

    def routers_stay() -> None:
        assert set(world.router_gates.values()) == {True}
        assert world.ready()[0] == "True"

    world.settle(between=routers_stay)
    assert len(world.listed()) == 4


@pytest.mark.parametrize(
    "template",
    [
        {"spec": {"restartPolicy": "Always"}},
        {"spec": {"containers": None}},
        {"spec": {"terminationGracePeriodSeconds": None}, "metadata": {"labels": 5}},
    ],
)
def test_a_template_that_cannot_be_applied_takes_no_engine_down(template: dict[str, Any]) -> None:
    world = serving_world(replicas=3)
    before = world.engine_names()
    world.spec()["template"] = template
    world.settle()
    assert world.engine_names() == before
    assert len(world.listed()) == 3
    assert world.ready() == ("True", "InvalidTemplate")
    condition = world.group_status()["conditions"][0]
    assert (condition["status"], condition["reason"]) == ("True", "InvalidTemplate")


def test_a_hand_edit_of_a_child_is_put_back_with_an_event() -> None:
    world = serving_world()
    world.children["ServerGroup/qwen-main"]["spec"]["replicas"] = 5
    world.children["ServerGroup/qwen-main"]["metadata"]["generation"] += 1
    world.events.clear()
    world.settle()
    assert world.children["ServerGroup/qwen-main"]["spec"]["replicas"] == 2
    (event,) = [event for event in world.events if event.reason == "HandEditPutBack"]
    assert "ServerGroup/qwen-main" in event.message
    world.events.clear()
    world.spec()["replicas"] = 3
    world.settle()
    assert not [event for event in world.events if event.reason == "HandEditPutBack"]


def test_a_name_that_somebody_else_has_is_said_until_it_is_not_wanted_any_more() -> None:
    world = World(rollout_server(replicas=1))
    trouble = Trouble("NameTaken", "ServerGroup/qwen-main exists and is not of this RolloutServer")
    world.create_failures["ServerGroup/qwen-main"] = trouble
    world.settle()
    assert world.ready()[1] == "NameTaken"
    world.spec()["name"] = "other"
    world.settle()
    assert world.ready() == ("True", "Serving")


def test_as_many_groups_as_the_schema_allows_fit_into_status() -> None:
    groups = [{"name": f"g{index}", "replicas": 0, "engine": {"image": "engine:1"}} for index in range(16)]
    world = World(rollout_server(groups=groups, external={"engines": [{"url": "http://10.9.0.1:30000"}]}))
    world.settle()
    assert len(world.server["status"]["groups"]) == 17


def test_a_group_that_is_made_anew_inherits_no_verdict_from_pods_of_the_same_names() -> None:
    world = serving_world()
    world.commit(1, "/weights/v1", "sum-1")
    world.settle()
    names = world.engine_names()
    del world.children["ServerGroup/qwen-main"]
    for name in names:
        world.delete_pod(name)
    world.created.clear()
    world.recorded.clear()
    world.settle()  # World.perform refuses to list an engine with other weights than the committed ones
    assert world.engine_names() == names
    assert {label for label, _ in world.weights.values()} == {world.label(1)}


def test_scaling_down_takes_engines_out_of_the_routers_before_their_pods_go() -> None:
    world = serving_world(replicas=3)
    world.server["spec"]["groups"][0]["replicas"] = 1

    def no_listed_engine_is_missing() -> None:
        alive = {world.url(pod["metadata"]["uid"]) for pod in world.pods.values()}
        assert world.listed() <= alive

    world.settle(between=no_listed_engine_is_missing)
    assert len(world.pods) == 1
    world.server["spec"]["groups"][0]["replicas"] = 3
    world.settle()
    assert len(world.listed()) == 3


def test_a_changed_spec_replaces_engines_one_at_a_time() -> None:
    world = serving_world(replicas=3)
    world.server["spec"]["groups"][0]["engine"]["image"] = "engine:2"

    def at_most_one_is_out() -> None:
        assert len(world.listed()) >= 2

    world.settle(limit=120, between=at_most_one_is_out)
    images = {pod["spec"]["containers"][0]["image"] for pod in world.pods.values()}
    assert images == {"engine:2"}


def test_a_ghost_in_a_router_table_is_removed() -> None:
    world = serving_world()
    world.tables["router-0"]["http://10.9.9.9:30000"] = Worker(healthy=True)
    world.settle()
    assert "http://10.9.9.9:30000" not in world.tables["router-0"]


def test_a_restarted_router_gets_its_table_and_traffic_only_then() -> None:
    world = serving_world(replicas=2, routers=2)
    world.tables["router-1"] = {}
    world.router_gates["router-1"] = None
    events = len(world.events)
    world.settle()
    assert len(world.tables["router-1"]) == 2
    assert world.router_gates["router-1"] is True
    assert len(world.events) == events, "engines kept serving through the other replica: no transition"


def test_omitted_replicas_are_left_to_whoever_scales() -> None:
    world = World(rollout_server(replicas=None))
    world.settle()
    assert len(world.pods) == 1
    world.children["ServerGroup/qwen-main"]["spec"]["replicas"] = 4
    world.settle()
    assert len(world.listed()) == 4


def test_an_overlay_that_cannot_be_applied_is_reported_with_its_field() -> None:
    world = World(rollout_server())
    world.server["spec"]["groups"][0]["template"] = {"spec": {"restartPolicy": "Always"}}
    world.settle()
    ready = next(c for c in world.server["status"]["conditions"] if c["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "InvalidTemplate")
    assert "template.spec.restartPolicy" in ready["message"]
    assert not world.pods
    del world.server["spec"]["groups"][0]["template"]
    world.settle()
    assert len(world.listed()) == 2


SCENARIOS = ("apply", "pod deleted", "pod crashed", "scale", "casualty", "trainer died", "new image")


def disturb(world: World, scenario: str) -> None:
    if scenario == "pod deleted":
        world.delete_pod(world.engine_names()[0])
    elif scenario == "pod crashed":
        world.crash_pod(world.engine_names()[0])
    elif scenario == "scale":
        world.server["spec"]["groups"][0]["replicas"] = 3
    elif scenario == "casualty":
        world.begin_update(1)
        world.commit(1, "/weights/v1", "sum-1", outcomes={world.engine_names()[0]: "Unreachable"})
    elif scenario == "trainer died":
        world.begin_update(1)
        world.now += timedelta(seconds=30)
    elif scenario == "new image":
        world.server["spec"]["groups"][0]["engine"]["image"] = "engine:2"


def shape(world: World) -> object:
    """What must be the same however often the operator crashed on the way."""
    return (
        len(world.pods),
        len(world.listed()),
        sorted(set(world.weights.values())),
        sorted({pod["spec"]["containers"][0]["image"] for pod in world.pods.values()}),
        world.server["status"]["engines"],
        sorted((c["type"], c["status"], c["reason"]) for c in world.server["status"]["conditions"]),
    )


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_crash_after_any_action_converges_to_the_same_state(scenario: str) -> None:
    start = World(rollout_server(replicas=2), routers=2)
    if scenario != "apply":
        start.settle()
    disturb(start, scenario)
    undisturbed = copy.deepcopy(start)
    undisturbed.settle(limit=120)
    for where, world in crashed_behind_each_action(start, limit=120):
        assert shape(world) == shape(undisturbed), where


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(SCENARIOS[1:]), min_size=1, max_size=5), st.integers(1, 2), st.data())
def test_any_history_of_disturbances_ends_with_every_engine_right(
    history: list[str], routers: int, data: st.DataObject
) -> None:
    world = World(rollout_server(replicas=2), routers=routers)
    world.settle()
    for scenario in history:
        if scenario in ("pod deleted", "pod crashed", "casualty") and not world.pods:
            continue
        if scenario == "casualty" and world.server.get("status", {}).get("training"):
            continue  # versions only grow; the world's commit writes version 1
        disturb(world, scenario)
        for action in _some(world.plan(), data):
            world.perform(action)
        world.run_pods()
    world.now += timedelta(hours=1)
    world.settle(limit=200)
    wanted = world.server["spec"]["groups"][0]["replicas"]
    assert len(world.listed()) == wanted == len([p for p in world.pods.values() if p["status"]["phase"] == "Running"])
    assert not world.paused


def _some(actions: list[Action], data: st.DataObject) -> list[Action]:
    return actions[: data.draw(st.integers(0, len(actions)), label="actions before the crash")]
