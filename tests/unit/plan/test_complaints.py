"""What users of other operators complain about, where no other test shows it; numbers of docs/peers-complaints.md."""

from __future__ import annotations

import copy
import itertools
from datetime import timedelta
from typing import Any

import pytest

from rolloutfleet.api.common import RollingUpdate
from rolloutfleet.api.server_group import ServerGroupSpec
from rolloutfleet.plan.actions import Apply, ApplyStatus, CreatePod, CreatePodGroup, DeletePod, PairCheck, Register
from rolloutfleet.plan.gang import VOLCANO
from rolloutfleet.plan.observed import LeaseView
from rolloutfleet.plan.revision import group_revision
from unit.plan.test_spec_changes import BASES
from unit.plan.world import Crash, World, crashed_behind_each_action, rollout_server

Body = dict[str, Any]


def serving(replicas: int = 2, *, routers: int = 1, **group: Any) -> World:
    whole = {"name": "main", "replicas": replicas, "engine": {"image": "engine:1"}, **group}
    world = World(rollout_server(groups=[whole]), routers=routers)
    world.settle()
    return world


def step(world: World, seconds: float = 0) -> None:
    world.now += timedelta(seconds=seconds)
    for action in world.plan():
        world.perform(action)


def records(world: World, group: str = "main") -> list[Body]:
    engines: list[Body] = world.group_status(group)["engines"]
    return engines


def condition(world: World, kind: str) -> tuple[str, str]:
    found = next(c for c in world.server["status"]["conditions"] if c["type"] == kind)
    return found["status"], found["reason"]


def images(world: World) -> set[str]:
    return {pod["spec"]["containers"][0]["image"] for pod in world.pods.values()}


class SlowWorld(World):
    """Pods that are deleted end one by one, when the test says so."""

    def delete_pod(self, name: str, uid: str = "", *, force: bool = False) -> None:
        if name in self.pods and uid in ("", self.pods[name]["metadata"]["uid"]):
            self.pods[name]["metadata"].setdefault("deletionTimestamp", "2026-01-01T00:00:00Z")

    def ends(self, name: str) -> None:
        assert "deletionTimestamp" in self.pods[name]["metadata"], f"nobody has deleted {name}"
        super().delete_pod(name)


# Recovery and restart storms


def test_1_a_pod_that_took_the_name_of_another_unseen_ends_the_life() -> None:
    world = serving()
    name = world.engine_names()[0]
    before = world.uid(name)
    world.pods[name]["metadata"]["uid"] = "uid-1000"
    world.weights["uid-1000"] = world.weights.pop(before)
    world.settle()
    assert name not in world.pods
    assert (records(world)[0]["restarts"], records(world)[0]["lastFailure"]["reason"]) == (1, "PodDeleted")
    assert len(world.listed()) == 2


def test_3_what_the_operator_itself_deletes_of_an_engine_is_no_second_failure() -> None:
    engine = {"image": "engine:1", "nodes": 4, "tensorParallel": 8}
    world = SlowWorld(rollout_server(groups=[{"name": "main", "replicas": 1, "engine": engine}]))
    world.settle()
    first = world.engine_names()
    world.delete_pod(first[2])
    for name in (first[2], first[0], first[3], first[1]):
        step(world, 1)
        world.ends(name)
        step(world, 1)
        world.run_pods()
    world.settle()
    assert world.created == first + world.engine_names(), "one failure, one recreation"
    assert records(world)[0]["restarts"] == 1


@pytest.mark.parametrize(
    "status",
    [
        {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/9"}]},
        {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "g"}]},
        {
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "ContainerCreating"}}}],
        },
        {
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "ImagePullBackOff"}}}],
        },
    ],
    ids=["no node", "gate", "slow pull", "no image"],
)
def test_4_a_pod_that_has_not_started_is_waited_for_however_long(status: Body) -> None:
    world = World(rollout_server(groups=[{"name": "main", "replicas": 2, "engine": {"image": "engine:1", "nodes": 2}}]))
    world.spec()["engine"]["tensorParallel"] = 2
    for _ in range(3):
        step(world)
    for pod in world.pods.values():
        pod["status"] = {"phase": "Pending", **copy.deepcopy(status)}
    for _ in range(48):
        step(world, 3600)
    assert len(world.created) == 4
    assert [engine["restarts"] for engine in records(world)] == [0, 0]
    world.run_pods()
    world.settle()
    assert len(world.listed()) == 2


def test_6_pods_seen_as_they_were_before_a_recreation_make_no_second_one() -> None:
    world = serving()
    stale = copy.deepcopy(world.pods)
    world.crash_pod(world.engine_names()[0])
    while "qwen-main-0-e3-r0" not in world.pods:
        world.now += timedelta(seconds=30)
        for action in world.plan():
            world.perform(action)
            if "qwen-main-0-e3-r0" in world.pods:
                break
    fresh, world.pods = world.pods, stale
    for action in world.plan():
        if isinstance(action, ApplyStatus) and action.kind == "ServerGroup":
            assert [engine["epoch"] for engine in action.status["engines"]] == [3, 2]
        assert not isinstance(action, CreatePod) or action.manifest["metadata"]["name"] == "qwen-main-0-e3-r0"
        assert not isinstance(action, DeletePod) or action.uid == stale["qwen-main-0-e1-r0"]["metadata"]["uid"]
    world.pods = fresh
    world.settle()
    assert records(world)[0]["restarts"] == 1


def test_7_the_operator_writes_neither_the_trainers_part_of_a_status_nor_a_condition_of_somebody_else() -> None:
    world = serving()
    kinds: dict[str, set[str]] = {}

    def note() -> None:
        for action in world.plan():
            if isinstance(action, ApplyStatus):
                assert "training" not in action.status
                kinds.setdefault(action.kind, set()).update(c["type"] for c in action.status["conditions"])

    for disturbance in ("update", "commit", "crash"):
        if disturbance == "update":
            world.begin_update(1)
        elif disturbance == "commit":
            world.commit(1, "/weights/v1", "sum-1")
        else:
            world.crash_pod(world.engine_names()[0])
        note()
        world.settle(between=note)
    assert kinds == {
        "RolloutServer": {"Ready", "Progressing", "Degraded", "WeightsCurrent"},
        "ServerGroup": {"Ready"},
    }


def test_9_an_evicted_pod_that_stays_is_in_nobodys_way_and_is_removed() -> None:
    world = serving(1)
    evicted = world.engine_names()[0]
    world.weights.pop(world.uid(evicted))
    world.pods[evicted]["status"] = {"phase": "Failed", "reason": "Evicted", "message": "disk pressure"}
    before = world.now
    world.settle()
    assert world.engine_names() == ["qwen-main-0-e2-r0"]
    assert (world.now - before).total_seconds() < 30
    assert records(world)[0]["lastFailure"]["reason"] == "Evicted"


def test_10_a_group_scaled_to_nothing_and_back_serves_again_wherever_the_operator_dies() -> None:
    world = serving(2)
    for replicas in (0, 3):
        world.spec()["replicas"] = replicas
        for where, crashed in crashed_behind_each_action(world):
            assert len(crashed.pods) == len(crashed.listed()) == replicas, where
        world.settle()
        ready = ("True", "Serving") if replicas else ("False", "ScaledToZero")
        assert world.ready() == ready


def test_12_nothing_that_the_operator_makes_has_a_finalizer() -> None:
    kinds = set()
    for base in BASES.values():
        world = World(rollout_server(**{**base, "router": {"replicas": 2}}))
        world.gang_apis = frozenset({VOLCANO})
        for group in world.server["spec"]["groups"]:
            group.setdefault("template", {}).setdefault("spec", {})["schedulerName"] = "volcano"
        for _ in range(8):
            for action in world.plan():
                if isinstance(action, CreatePod | CreatePodGroup | Apply):
                    assert "finalizers" not in action.manifest["metadata"]
                    kinds.add(action.manifest["kind"])
                world.perform(action)
            world.run_pods()
    assert kinds >= {"Pod", "PodGroup", "ServerGroup", "ReplicaSet", "Service", "Lease", "PodDisruptionBudget"}


@pytest.mark.parametrize("how", ["evicted", "deleted", "preempted"])
def test_12_an_engine_that_is_ended_as_soon_as_it_runs_is_not_made_again_every_second(how: str) -> None:
    world = serving(2)
    before = len(world.created)
    for _ in range(600):
        step(world, 1)
        world.run_pods()
        step(world)
        for name, pod in list(world.pods.items()):
            if not name.startswith("qwen-main-0-") or pod["status"]["phase"] != "Running":
                continue
            if how == "deleted":
                world.delete_pod(name)
            elif how == "evicted":
                world.weights.pop(world.uid(name), None)
                pod["status"] = {"phase": "Failed", "reason": "Evicted", "message": "ephemeral storage"}
            else:
                reason = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
                pod["status"]["conditions"].append(reason)
    assert len(world.created) - before <= 20, "in ten minutes"


def test_13_no_probe_of_the_kubelet_restarts_an_engine() -> None:
    for base in BASES.values():
        world = World(rollout_server(**base))
        world.settle()
        for pod in world.pods.values():
            containers = pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
            assert not [c["name"] for c in containers if {"livenessProbe", "startupProbe"} & c.keys()]
            assert pod["spec"]["restartPolicy"] == "Never"


# Pairs


def pair_world(prefill: int = 1, decode: int = 1) -> World:
    engine = {"image": "engine:1"}
    world = World(
        rollout_server(
            groups=[
                {"name": "prefill", "role": "Prefill", "replicas": prefill, "engine": engine},
                {"name": "decode", "role": "Decode", "replicas": decode, "engine": engine},
            ]
        )
    )
    world.settle()
    return world


def test_15_a_prefill_at_the_address_of_its_predecessor_is_proved_anew_and_so_are_its_peers() -> None:
    world = pair_world(1, 2)
    before = next(name for name in world.pods if name.startswith("qwen-prefill-"))
    address, uid = world.pods[before]["status"]["podIP"], world.uid(before)
    world.delete_pod(before)
    checks: list[PairCheck] = []
    for _ in range(20):
        for action in world.plan():
            if isinstance(action, Register) and action.kind.type == "prefill":
                assert checks, "listed before a request went through it"
            if isinstance(action, PairCheck):
                checks.append(action)
            world.perform(action)
        world.run_pods()
        for name, pod in world.pods.items():
            if name.startswith("qwen-prefill-") and "podIP" in pod["status"]:
                pod["status"]["podIP"] = address
        world.now += timedelta(seconds=1)
    assert len({check.decode_uid for check in checks}) == 2
    assert uid not in {check.prefill_uid for check in checks}
    assert {check.prefill_url for check in checks} == {f"http://{address}:30000"}
    assert len(world.listed()) == 3


def test_17_a_decode_that_stays_stuck_after_its_peer_was_replaced_is_replaced_itself() -> None:
    world = pair_world(2, 2)
    stuck = next(name for name in sorted(world.pods) if name.startswith("qwen-decode-"))
    world.stuck.add(world.uid(stuck))
    world.delete_pod(next(name for name in sorted(world.pods) if name.startswith("qwen-prefill-")))
    world.settle(limit=120)
    assert [engine["restarts"] for engine in records(world, "decode")] == [1, 0]
    assert records(world, "decode")[0]["lastFailure"]["reason"] == "PairStuck"
    assert [engine["restarts"] for engine in records(world, "prefill")] == [1, 0]
    assert len(world.listed()) == 4


# Status


@pytest.mark.parametrize("field", ["image", "replicas"])
def test_21_a_generation_is_observed_as_a_change_that_is_under_way_until_it_is_done(field: str) -> None:
    world = serving(3)
    if field == "image":
        world.spec()["engine"]["image"] = "engine:2"
    else:
        world.spec()["replicas"] = 4
    world.server["metadata"]["generation"] = 2

    def done() -> bool:
        return (len(world.listed()) == len(world.pods) and images(world) == {"engine:2"}) or len(world.listed()) == 4

    rounds = 0
    while not done():
        for action in world.plan():
            world.perform(action)
            if world.server["status"]["observedGeneration"] == 2 and not done():
                assert condition(world, "Progressing")[0] == "True", f"said to be done in round {rounds}"
        world.run_pods()
        world.now += timedelta(seconds=1)
        rounds += 1
        assert rounds < 100
    world.settle()
    assert world.server["status"]["observedGeneration"] == 2
    assert condition(world, "Progressing")[0] == "False"


def test_21_a_change_that_waits_for_the_trainer_is_under_way() -> None:
    world = serving(2)
    world.begin_update(1, seconds=3600)
    world.lease = LeaseView(holder="trainer", fence=1, expires_at=world.now + timedelta(hours=1))
    world.spec()["engine"]["image"] = "engine:2"
    world.settle(patient=False)
    assert images(world) == {"engine:1"}
    assert condition(world, "Progressing")[0] == "True"


def test_23_ready_is_taken_back_while_the_only_engine_crashes_again_and_again() -> None:
    world = serving(1)
    world.crash_pod(world.engine_names()[0])
    for _ in range(60):
        step(world, 10)
        world.run_pods()
        for name, pod in list(world.pods.items()):
            if pod["status"]["phase"] == "Running":
                world.crash_pod(name)
        step(world)
        assert world.ready()[0] == "False"
        assert world.server["status"]["engines"]["routable"] == 0
    assert records(world)[0]["restarts"] > 2
    assert condition(world, "Degraded") == ("True", "EngineExited")


def test_25_no_weights_are_said_of_an_engine_before_its_checksum_was_read() -> None:
    world = World(rollout_server(replicas=1))
    said = []
    for _ in range(10):
        plan = world.plan()
        for action in plan:
            if isinstance(action, ApplyStatus) and action.kind == "ServerGroup":
                proved = set(world.proofs) & {pod["metadata"]["uid"] for pod in world.pods.values()}
                versions = [engine.get("weightVersion") for engine in action.status["engines"]]
                said += [version for version in versions if version is not None]
                assert proved or versions == [None], "named without a proof"
                assert proved or "weightVersion" not in action.status
            world.perform(action)
        if not world.proofs:
            assert condition(world, "WeightsCurrent")[0] != "True"
        world.run_pods()
    assert said, "in the end it is said"
    assert condition(world, "WeightsCurrent") == ("True", "Verified")


# Deletion


def test_28_what_is_taken_out_of_a_spec_is_removed_with_all_that_belongs_to_it() -> None:
    engine = {"image": "engine:1", "nodes": 2, "tensorParallel": 2}
    groups = [{"name": name, "replicas": 1, "engine": engine} for name in ("main", "other")]
    trainers = {"serviceAccounts": ["trainer"]}
    world = World(rollout_server(groups=groups, trainers=trainers, router={"replicas": 2}))
    world.settle()
    made = set(world.children)
    gone = {f"{kind}/qwen-other" for kind in ("ServerGroup", "PodDisruptionBudget")} | {"Service/qwen-other-ranks"}
    assert gone < made
    world.server["spec"]["groups"].pop()
    del world.server["spec"]["trainers"]
    world.server["spec"]["router"]["replicas"] = 1
    world.settle()
    rights = {"Role/qwen-trainer", "RoleBinding/qwen-trainer"}
    assert made - set(world.children) == gone | rights | {"PodDisruptionBudget/qwen-router"}
    assert {name.rsplit("-", 3)[0] for name in world.pods} == {"qwen-main"}
    assert len(world.listed()) == 1


def test_29_a_server_that_is_being_deleted_is_left_to_the_garbage_collector() -> None:
    world = serving()
    world.server["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.delete_pod(world.engine_names()[0])
    assert world.plan() == []
    for child in world.children.values():
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("uid-qwen", True, True)
    groups = {child["metadata"]["uid"] for key, child in world.children.items() if key.startswith("ServerGroup/")}
    for pod in world.pods.values():
        assert {owner["uid"] for owner in pod["metadata"]["ownerReferences"]} <= groups


# Changes

BUDGETS = [budget for budget in itertools.product((0, 1, 2), repeat=2) if sum(budget)]


def settle_dying(world: World) -> None:
    """As settle, with an operator that dies again and again on the way and takes what it knew with it."""
    for lifetime in itertools.chain(range(1, 16), [100_000]):
        left = lifetime

        def count() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise Crash

        try:
            world.settle(limit=120, between=count)
        except Crash:
            world.proofs.clear()


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(("unavailable", "surge"), BUDGETS)
def test_30_a_small_group_changes_with_any_budget_although_the_operator_dies_again_and_again(
    replicas: int, unavailable: int, surge: int
) -> None:
    world = serving(replicas, rollingUpdate={"maxUnavailable": unavailable, "maxSurge": surge})
    world.spec()["engine"]["image"] = "engine:2"
    settle_dying(world)
    assert images(world) == {"engine:2"}
    assert len(world.listed()) == len(world.pods) == replicas


def test_32_edits_that_overtake_each_other_never_take_more_engines_than_one_change_may() -> None:
    world = serving(4)

    def enough() -> None:
        assert len(world.listed()) >= 3

    for revision in range(2, 20):
        world.spec()["engine"]["image"] = f"engine:{revision}"
        for _ in range(revision % 3 + 1):
            for action in world.plan():
                world.perform(action)
                enough()
            world.run_pods()
            world.now += timedelta(seconds=1)
    world.settle(limit=120, between=enough)
    assert images(world) == {"engine:19"}
    assert len(world.listed()) == 4


def test_33_pods_as_an_older_operator_made_them_are_left_alone() -> None:
    world = serving()
    for pod in world.pods.values():
        container = pod["spec"]["containers"][0]
        container["args"] = [word for word in container["args"] if word != "--skip-server-warmup"]
        container["env"] = container["env"][:1]
        pod["spec"]["terminationGracePeriodSeconds"] = 5
        pod["spec"]["priorityClassName"] = "of-admission"
    assert world.settle() == 0


def test_33_what_counts_as_a_change_is_the_same_in_every_release() -> None:
    """Another digest here recycles every engine of every user when the operator is upgraded."""
    intent = {
        "server": "qwen",
        "model": {"path": "/models/m0"},
        "engine": {"image": "engine:1", "tensorParallel": 8, "args": {"mem-fraction-static": "0.8"}},
        "template": {"spec": {"nodeSelector": {"gpu": "h200"}}},
    }
    assert group_revision(ServerGroupSpec.model_validate(intent)) == "a4084e26f7"
    defaults = {"role": "Regular", "offload": False, "rollingUpdate": {"maxUnavailable": 1}, "replicas": 3}
    assert group_revision(ServerGroupSpec.model_validate({**intent, **defaults})) == "a4084e26f7"


def test_33_a_change_needs_no_spare_gpus_unless_the_user_allows_it() -> None:
    assert (RollingUpdate().max_unavailable, RollingUpdate().max_surge) == (1, 0)
    world = serving(3)
    world.spec()["engine"]["image"] = "engine:2"

    def never_more() -> None:
        assert len(world.pods) <= 3

    world.settle(limit=120, between=never_more)


@pytest.mark.parametrize(("replicas", "listed"), [(2, 2), (5, 3)])
def test_34_scaling_goes_on_in_the_middle_of_a_change_that_is_stuck(replicas: int, listed: int) -> None:
    world = serving(3, rollingUpdate={"maxUnavailable": 0, "maxSurge": 1})
    world.spec()["engine"]["image"] = "broken"

    def some_time() -> None:
        for _ in range(30):
            step(world, 5)
            world.run_pods()
            for name, pod in list(world.pods.items()):
                if pod["spec"]["containers"][0]["image"] == "broken" and pod["status"]["phase"] == "Running":
                    world.crash_pod(name)

    some_time()
    assert (len(records(world)), len(world.listed())) == (4, 3)
    world.spec()["replicas"] = replicas
    some_time()
    assert (len(records(world)), len(world.listed())) == (replicas + 1, listed)
    world.spec()["engine"]["image"] = "engine:1"
    world.settle(limit=120)
    assert len(world.listed()) == len(world.pods) == replicas


# Addresses and gates


def test_35_a_failed_pod_whose_address_was_cleared_leaves_every_router() -> None:
    world = serving(2, routers=3)
    name = world.engine_names()[0]
    address = world.address(name)
    assert all(address in table for table in world.tables.values())
    world.weights.pop(world.uid(name))
    world.pods[name]["status"] = {"phase": "Failed", "reason": "Evicted", "message": "memory"}
    step(world)
    assert not [router for router, table in world.tables.items() if address in table]


def test_36_a_pod_behind_a_scheduling_gate_is_named_in_status_and_in_an_event() -> None:
    world = World(rollout_server(replicas=1))
    for _ in range(3):
        step(world)
    (name,) = world.pods
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "gates: quota.io/held"}
    world.pods[name]["status"]["conditions"] = [gated]
    step(world)
    assert records(world)[0]["reason"] == "SchedulingGated"
    assert world.ready() == ("False", "SchedulingGated")
    (event,) = [event for event in world.events if event.reason == "SchedulingGated" and event.kind == "ServerGroup"]
    assert "quota.io/held" in event.message
