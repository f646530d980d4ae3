"""Prefill and decode: who may pair with whom, proof by a real request, and engines that are stuck."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from rolloutfleet.plan.actions import CreatePod, PairCheck, Register
from rolloutfleet.plan.observed import WorkerKind
from rolloutfleet.plan.pairing import bootstrap_host
from unit.plan.world import World, rollout_server


def group(name: str, role: str, replicas: int, image: str = "engine:1") -> dict[str, Any]:
    return {"name": name, "role": role, "replicas": replicas, "engine": {"image": image}}


def pair_server(prefill: int = 2, decode: int = 2) -> dict[str, Any]:
    return rollout_server(groups=[group("prefill", "Prefill", prefill), group("decode", "Decode", decode)])


def serving_pairs(prefill: int = 2, decode: int = 2, *, routers: int = 1) -> World:
    world = World(pair_server(prefill, decode), routers=routers)
    world.settle()
    return world


def pods_of(world: World, name: str) -> list[str]:
    return [pod for pod in sorted(world.pods) if pod.startswith(f"qwen-{name}-")]


def test_routers_list_prefill_with_its_bootstrap_port_and_decode_as_decode() -> None:
    world = serving_pairs(routers=2)
    for table in world.tables.values():
        kinds = sorted((worker.kind.type, worker.kind.bootstrap_port) for worker in table.values())
        assert kinds == [("decode", None), ("decode", None), ("prefill", 8998), ("prefill", 8998)]
    assert world.ready() == ("True", "Serving")


def test_no_engine_is_listed_before_a_request_went_through_it_and_a_peer() -> None:
    world = World(pair_server(1, 1))
    tried = False
    for _ in range(30):
        for action in world.plan():
            tried = tried or isinstance(action, PairCheck)
            assert tried or not isinstance(action, Register)
            world.perform(action)
        world.run_pods()
    assert tried
    assert len(world.listed()) == 2


def test_a_prefill_without_a_decode_is_not_listed_and_says_why() -> None:
    world = World(pair_server(1, 0))
    world.settle()
    assert not world.listed()
    assert world.group_status("prefill")["engines"][0]["reason"] == "NoPeer"


def test_a_fleet_whose_only_decode_is_gone_is_not_ready_although_prefill_is_up() -> None:
    world = serving_pairs(2, 1)
    world.delete_pod(pods_of(world, "decode")[0])
    for action in world.plan():
        world.perform(action)
    assert world.ready()[0] == "False"


def test_who_lost_a_peer_is_not_routable_until_a_request_went_through_it_again() -> None:
    world = serving_pairs(2, 2)
    world.delete_pod(pods_of(world, "decode")[0])
    checks: list[PairCheck] = []
    world.perform(world.plan()[0])
    for action in world.plan():
        world.perform(action)
        if isinstance(action, PairCheck):
            checks.append(action)
    assert len(checks) == 1, "one decode is left, and an engine is in one check at a time"
    unproved = [e for e in world.group_status("prefill")["engines"] if e["reason"] == "PairUnproved"]
    assert len(unproved) == 2
    world.settle()
    assert world.ready() == ("True", "Serving")
    assert len(world.listed()) == 4


def test_a_prefill_whose_only_peer_is_gone_does_not_say_that_it_serves() -> None:
    world = serving_pairs(1, 1)
    world.spec("decode")["replicas"] = 0
    world.settle()
    (engine,) = world.group_status("prefill")["engines"]
    assert (engine["phase"], engine["reason"]) == ("Stale", "NoPeer")
    assert world.group_status("prefill")["routable"] == 0


def test_a_peer_that_left_as_planned_makes_nobody_doubtful() -> None:
    world = serving_pairs(2, 3)
    world.spec("decode")["replicas"] = 2

    def all_prefills_serve() -> None:
        assert world.group_status("prefill")["routable"] == 2

    world.settle(between=all_prefills_serve)
    world.spec("decode")["engine"]["image"] = "engine:2"
    world.settle(limit=120, between=all_prefills_serve)


def test_an_external_prefill_goes_on_beside_a_change_of_our_own_decodes() -> None:
    url = "http://10.9.0.1:30000"
    server = rollout_server(groups=pair_server(1, 2)["spec"]["groups"], external={"engines": [{"url": url}]})
    world = World(server)
    world.start_outside(url, role="Prefill", bootstrap_port=8998)
    world.settle()
    world.spec("decode")["engine"]["image"] = "engine:2"

    def stays() -> None:
        assert url in world.listed()

    world.settle(limit=120, between=stays)
    assert len(world.listed()) == 4


def test_a_prefill_that_stays_stuck_after_its_peer_died_is_replaced_with_a_reason() -> None:
    world = serving_pairs(1, 1)
    prefill = pods_of(world, "prefill")[0]
    world.stuck.add(world.uid(prefill))
    world.delete_pod(pods_of(world, "decode")[0])
    world.settle(limit=120)
    assert prefill not in world.pods
    record = world.group_status("prefill")["engines"][0]
    assert (record["lastFailure"]["reason"], record["lastFailure"]["pod"]) == ("PairStuck", prefill)
    assert world.group_status("decode")["engines"][0]["restarts"] == 1, "the fresh one is not blamed"
    assert world.ready() == ("True", "Serving")


def test_of_several_the_one_that_works_with_nobody_is_replaced() -> None:
    world = serving_pairs(3, 2)
    sick = pods_of(world, "prefill")[1]
    world.stuck.add(world.uid(sick))
    world.delete_pod(pods_of(world, "decode")[0])
    world.settle(limit=120)
    restarts = [e["restarts"] for e in world.group_status("prefill")["engines"]]
    assert restarts == [0, 1, 0]
    assert len(world.listed()) == 5


def test_an_entry_with_the_wrong_role_is_taken_out_and_listed_anew() -> None:
    world = serving_pairs(1, 1)
    url = world.address(pods_of(world, "prefill")[0])
    table = world.tables["router-0"]
    table[url] = table[url].__class__(healthy=True, kind=WorkerKind(type="decode"))
    world.settle()
    assert table[url].kind == WorkerKind(type="prefill", bootstrap_port=8998)


def test_while_the_trainer_holds_the_fleet_no_pair_is_tried() -> None:
    world = serving_pairs(2, 2)
    world.begin_update(1)
    world.delete_pod(pods_of(world, "decode")[0])
    for _ in range(5):
        for action in world.plan():
            assert not isinstance(action, PairCheck)
            world.perform(action)
        world.run_pods()


@pytest.mark.parametrize("changed", [("prefill",), ("decode",), ("prefill", "decode")])
@pytest.mark.parametrize("size", [(1, 1), (2, 3)])
def test_a_change_never_pairs_two_revisions_that_were_not_meant_for_each_other(
    changed: tuple[str, ...], size: tuple[int, int]
) -> None:
    world = serving_pairs(*size)
    for name in changed:
        world.spec(name)["engine"]["image"] = "engine:2"
    world.settle(limit=200)  # World.perform refuses a table with a pair that was never meant
    for name in ("prefill", "decode"):
        images = {world.pods[pod]["spec"]["containers"][0]["image"] for pod in pods_of(world, name)}
        assert images == {"engine:2" if name in changed else "engine:1"}
    assert len(world.listed()) == sum(size)


def test_a_change_of_both_roles_keeps_the_old_pairs_until_a_new_pair_is_proved() -> None:
    world = serving_pairs(2, 2)
    for name in ("prefill", "decode"):
        world.spec(name)["engine"]["image"] = "engine:2"

    for _ in range(40):
        for action in world.plan():
            world.perform(action)
        world.run_pods()
        world.now += timedelta(seconds=1)
        kinds = {worker.kind.type for worker in world.tables["router-0"].values()}
        assert kinds == {"prefill", "decode"}, "after a whole plan some pair is listed"
    assert len(world.listed()) == 4


def test_a_bad_revision_of_both_roles_stops_at_one_engine_each_and_heals_on_revert() -> None:
    world = serving_pairs(2, 2)
    for name in ("prefill", "decode"):
        world.spec(name)["engine"]["image"] = "broken"

    def broken_images_never_start() -> None:
        for name, pod in list(world.pods.items()):
            if pod["spec"]["containers"][0]["image"] == "broken" and pod["status"]["phase"] == "Running":
                world.crash_pod(name)

    for _ in range(40):
        for action in world.plan():
            world.perform(action)
        world.run_pods()
        broken_images_never_start()
        world.now += timedelta(seconds=5)
    assert {worker.kind.type for worker in world.tables["router-0"].values()} == {"prefill", "decode"}
    assert len(world.listed()) == 2
    for name in ("prefill", "decode"):
        world.spec(name)["engine"]["image"] = "engine:1"
    world.settle(limit=200)
    assert len(world.listed()) == 4


def test_prefill_and_decode_pods_know_whom_they_were_made_for() -> None:
    world = World(pair_server(1, 1))
    made = []
    for _ in range(3):
        for action in world.plan():
            if isinstance(action, CreatePod):
                made.append(action.manifest["metadata"]["annotations"])
            world.perform(action)
    first, second = made
    assert first["rolloutfleet.dev/peer-revisions"] == second["rolloutfleet.dev/revision"]
    assert second["rolloutfleet.dev/peer-revisions"] == first["rolloutfleet.dev/revision"]


@pytest.mark.parametrize(
    ("url", "host"), [("http://10.0.0.1:30000", "10.0.0.1"), ("http://[fd00::5]:30000", "[fd00::5]")]
)
def test_the_bootstrap_host_is_the_urls_as_the_router_would_say_it(url: str, host: str) -> None:
    assert bootstrap_host(url) == host
