"""Engines that somebody else runs: used, trained on, never restarted; and what does not fit is said."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutfleet.plan.actions import Adopt, CatchUp, CreatePod, DeletePod, Register, SetGate
from rolloutfleet.plan.observed import canonical_url
from unit.plan.world import World, rollout_server

ONE, TWO = "http://10.9.0.1:30000", "http://10.9.0.2:30000"


def external_server(*urls: str, groups: list[dict[str, Any]] | None = None, **engine: Any) -> dict[str, Any]:
    return rollout_server(groups=groups or [], external={"engines": [{"url": url, **engine} for url in urls]})


def serving(*urls: str, **facts: Any) -> World:
    world = World(external_server(*urls))
    for url in urls:
        world.start_outside(url, **facts)
    world.settle()
    return world


def engine(world: World, index: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = world.group_status("external")["engines"][index]
    return found


def test_external_engines_are_listed_with_their_weights_proved_and_have_no_pods() -> None:
    world = serving(ONE, TWO, tensor_parallel=4)
    assert world.listed() == {ONE, TWO}
    assert not world.pods
    assert world.ready() == ("True", "Serving")
    first = engine(world)
    assert (first["phase"], first["url"], first["weightVersion"]) == ("Serving", ONE, 0)
    assert first["facts"]["tensorParallel"] == 4
    assert world.server["status"]["engines"]["desired"] == 2


def test_an_engine_that_is_not_up_yet_is_waited_for_and_nothing_is_done_to_it() -> None:
    world = World(external_server(ONE))
    world.settle()
    assert (engine(world)["phase"], engine(world)["reason"]) == ("Starting", "NotAnswering")
    assert world.ready() == ("False", "NotAnswering")
    world.start_outside(ONE)
    world.settle()
    assert world.listed() == {ONE}


def test_one_that_dies_leaves_the_routers_and_comes_back_proved_anew_as_another_life() -> None:
    world = serving(ONE, TWO)
    world.commit(3, "/weights/v3", "sum-3")
    world.settle()
    before = engine(world)["epoch"]
    world.stop_outside(ONE)
    world.settle()
    assert world.listed() == {TWO}
    record = engine(world)
    assert (record["restarts"], record["lastFailure"]["reason"]) == (1, "NotAnswering")
    assert record["epoch"] > before
    world.start_outside(ONE)  # as its owner starts it: with the first model
    world.settle()  # World.perform refuses to list it with other weights than the committed ones
    assert world.listed() == {ONE, TWO}
    assert world.weights[f"external:{ONE}"] == (world.label(3), "sum-3")


def test_a_committed_verdict_says_nothing_of_a_process_that_took_its_place_unseen() -> None:
    world = serving(ONE)
    names = [e["pod"] for e in world.group_status("external")["engines"]]
    world.commit(1, "/weights/v1", "sum-1")
    world.server["status"]["training"]["weights"]["engines"] = [{"pod": name, "outcome": "Committed"} for name in names]
    world.weights[f"external:{ONE}"] = (world.label(1), "sum-of-another")
    world.settle()
    assert world.weights[f"external:{ONE}"] == (world.label(1), "sum-1")


def test_no_pod_action_and_no_gate_is_ever_planned_for_one() -> None:
    world = serving(ONE)
    for running in (False, True):
        if running:
            world.start_outside(ONE)
        else:
            world.stop_outside(ONE)
        for _ in range(10):
            for action in world.plan():
                assert not isinstance(action, CreatePod | DeletePod)
                if isinstance(action, SetGate):
                    assert action.pod.startswith("router")
                world.perform(action)


def test_beside_groups_of_our_own_they_share_router_and_weights() -> None:
    world = World(external_server(ONE, groups=[{"name": "main", "replicas": 1, "engine": {"image": "engine:1"}}]))
    world.start_outside(ONE)
    world.settle()
    assert len(world.listed()) == 2
    assert world.server["status"]["engines"]["desired"] == 2
    world.commit(1, "/weights/v1", "sum-1")
    world.settle()
    assert {label for label, _ in world.weights.values()} == {world.label(1)}


def test_engines_of_several_layouts_are_each_measured() -> None:
    world = World(external_server(ONE, TWO))
    world.start_outside(ONE, tensor_parallel=1)
    world.start_outside(TWO, tensor_parallel=2)
    world.settle()
    assert [entry["revision"] for entry in world.group_status("external")["measured"]] == ["tp1-pp1", "tp2-pp1"]


def test_one_with_another_model_is_named_and_left_alone() -> None:
    world = World(external_server(ONE))
    world.start_outside(ONE, model="/models/other")
    world.settle()
    assert not world.listed()
    assert world.ready() == ("False", "ModelMismatch")
    assert "/models/other" in engine(world)["message"]
    assert world.weights[f"external:{ONE}"][0] == "default"
    world.server["spec"]["external"]["engines"][0]["modelPath"] = "/models/other"
    world.checkpoints["/models/m0"] = "sum-other"
    world.settle()
    assert world.listed() == {ONE}


def test_one_that_loaded_our_checkpoint_is_not_taken_for_one_with_another_model() -> None:
    world = serving(ONE)
    world.commit(1, "/weights/v1", "sum-1")
    facts, _ = world.outside[f"external:{ONE}"]
    world.outside[f"external:{ONE}"] = (facts, "/weights/v1")  # what /model_info says from then on
    world.weights[f"external:{ONE}"] = (world.label(1), "sum-1")
    world.settle()
    assert world.listed() == {ONE}


def test_one_that_another_fleet_has_labelled_is_named_and_left_alone() -> None:
    world = World(external_server(ONE))
    world.start_outside(ONE)
    world.weights[f"external:{ONE}"] = ("0@beef0000", world.checkpoints["/models/m0"])
    world.settle()
    assert not world.listed()
    assert world.ready() == ("False", "OtherFleet")
    assert "labelled 0@beef0000: it belongs to another fleet" in engine(world)["message"]
    assert world.weights[f"external:{ONE}"][0] == "0@beef0000"
    world.start_outside(ONE)  # its owner gives it away
    world.settle()
    assert world.listed() == {ONE}


def test_one_that_another_fleet_takes_over_leaves_the_routers_and_is_not_taken_back() -> None:
    world = serving(ONE, TWO)
    world.weights[f"external:{ONE}"] = ("0@beef0000", world.checkpoints["/models/m0"])
    for _ in range(6):
        for action in world.plan():
            assert not isinstance(action, Adopt | CatchUp | Register)
            world.perform(action)
    assert world.listed() == {TWO}


@pytest.mark.parametrize("version", ["0", "7"])
def test_one_with_a_number_for_a_label_is_used_and_gets_the_fleets_label(version: str) -> None:
    world = World(external_server(ONE))
    world.start_outside(ONE)
    world.weights[f"external:{ONE}"] = (version, world.checkpoints["/models/m0"])
    world.settle()
    assert world.listed() == {ONE}
    assert world.weights[f"external:{ONE}"] == (world.label(0), "sum-0")


@pytest.mark.parametrize("role", ["Prefill", "Decode"])
def test_one_whose_role_the_router_does_not_use_is_named_and_left_alone(role: Any) -> None:
    world = World(external_server(ONE, groups=[{"name": "main", "replicas": 1, "engine": {"image": "engine:1"}}]))
    world.start_outside(ONE, role=role, bootstrap_port=8998)
    world.settle()
    assert len(world.listed()) == 1
    assert engine(world)["reason"] == "RoleMismatch"
    degraded = next(c for c in world.server["status"]["conditions"] if c["type"] == "Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "RoleMismatch")


def test_external_engines_alone_can_be_a_pair() -> None:
    world = World(external_server(ONE, TWO))
    world.start_outside(ONE, role="Prefill", bootstrap_port=9998)
    world.start_outside(TWO, role="Decode")
    world.settle()
    (table,) = world.tables.values()
    assert {url: (w.kind.type, w.kind.bootstrap_port) for url, w in table.items()} == {
        ONE: ("prefill", 9998),
        TWO: ("decode", None),
    }
    words = world.router_set()["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--pd-disaggregation" in words


def test_a_removed_url_leaves_the_routers_and_status() -> None:
    world = serving(ONE, TWO)
    world.server["spec"]["external"]["engines"].pop(0)
    world.settle()
    assert world.listed() == {TWO}
    assert [e["url"] for e in world.group_status("external")["engines"]] == [TWO]
    assert f"external:{ONE}" in world.weights, "it runs on"


def test_removing_all_of_them_removes_the_group() -> None:
    world = World(external_server(ONE, groups=[{"name": "main", "replicas": 1, "engine": {"image": "engine:1"}}]))
    world.start_outside(ONE)
    world.settle()
    del world.server["spec"]["external"]
    world.settle()
    assert "ServerGroup/qwen-external" not in world.children
    assert ONE not in world.listed()
    assert len(world.listed()) == 1


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("http://[FD00::5]:30000/", "http://[fd00::5]:30000"),
        ("http://[fd00::5]:30000", "http://[fd00::5]:30000"),
        ("http://GPU-1.Lab:30000/", "http://gpu-1.lab:30000"),
    ],
)
def test_case_and_a_slash_make_no_second_engine(written: str, canonical: str) -> None:
    assert canonical_url(written) == canonical
    world = World(external_server(written, canonical) if written != canonical else external_server(written))
    world.start_outside(canonical)
    world.settle()
    assert world.listed() == {canonical}
    assert world.server["status"]["engines"]["desired"] == 1


def test_version_0_is_loaded_anew_from_where_that_engine_has_it() -> None:
    world = World(external_server(ONE, modelPath="/mnt/model"))
    world.checkpoints["/mnt/model"] = "sum-0"
    world.start_outside(ONE, model="/mnt/model")
    world.settle()
    world.weights[f"external:{ONE}"] = (world.label(7), "sum-of-another-run")
    world.proofs.clear()
    loads = []
    for _ in range(6):
        for action in world.plan():
            loads += [action.path] if isinstance(action, CatchUp) else []
            world.perform(action)
    assert loads == ["/mnt/model"]


def test_an_engine_that_is_behind_is_brought_up_to_date_only_out_of_the_routers() -> None:
    world = serving(ONE)
    world.begin_update(1)
    names = [e["pod"] for e in world.group_status("external")["engines"]]
    world.commit(1, "/weights/v1", "sum-1")
    weights = world.server["status"]["training"]["weights"]
    weights["engines"] = [{"pod": names[0], "outcome": "Failed"}]
    world.weights[f"external:{ONE}"] = (world.label(1), "sum-torn")
    loads = []
    for _ in range(8):
        for action in world.plan():
            loads += [action] if isinstance(action, CatchUp) else []
            world.perform(action)  # asserts that no router lists it then
    assert loads
    assert world.listed() == {ONE}
