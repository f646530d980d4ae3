"""Encoders: known to every language engine that is up, under the address that they have now."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutfleet.plan.actions import CatchUp, Register, Verify
from unit.plan.world import World, rollout_server


def encoder_server(encoders: int = 1, *language: tuple[str, str]) -> dict[str, Any]:
    groups = [{"name": "vision", "role": "Encoder", "replicas": encoders, "engine": {"image": "engine:1"}}]
    for name, role in language or (("main", "Regular"),):
        groups.append({"name": name, "role": role, "replicas": 2, "engine": {"image": "engine:1"}})
    return rollout_server(groups=groups)


def serving(encoders: int = 1, *language: tuple[str, str]) -> World:
    world = World(encoder_server(encoders, *language))
    world.settle()
    return world


def pods_of(world: World, group: str) -> list[str]:
    return [name for name in sorted(world.pods) if name.startswith(f"qwen-{group}-")]


def addresses(world: World, group: str) -> set[str]:
    return {world.address(name) for name in pods_of(world, group)}


def words(world: World, pod: str) -> list[str]:
    found: list[str] = world.pods[pod]["spec"]["containers"][0]["args"]
    return found


def test_language_engines_know_every_encoder_and_routers_know_none() -> None:
    world = serving(2)
    assert world.listed() == addresses(world, "main")
    for pod in pods_of(world, "main"):
        assert world.encoders[world.uid(pod)] == addresses(world, "vision")
    assert world.ready() == ("True", "Serving")
    assert world.server["status"]["engines"]["routable"] == 4


def test_a_language_engine_is_not_listed_before_it_knows_an_encoder_that_is_up() -> None:
    world = World(encoder_server(0))
    world.settle()
    assert not world.listed()
    assert world.ready()[0] == "False"
    assert {engine["reason"] for engine in world.group_status()["engines"]} == {"NoEncoder"}
    world.spec("vision")["replicas"] = 1
    for _ in range(12):
        for action in world.plan():
            if isinstance(action, Register):
                uid = next(uid for uid in world.weights if world.url(uid) == action.url)
                assert world.encoders[uid]
            world.perform(action)
        world.run_pods()
    assert len(world.listed()) == 2


def test_an_encoder_that_comes_back_with_another_address_reaches_all_of_them() -> None:
    world = serving(2)
    old = world.address(pods_of(world, "vision")[0])
    world.delete_pod(pods_of(world, "vision")[0])
    world.settle()
    assert old not in addresses(world, "vision")
    for pod in pods_of(world, "main"):
        assert world.encoders[world.uid(pod)] == addresses(world, "vision")


def test_while_another_encoder_is_up_the_loss_of_one_takes_no_engine_out() -> None:
    world = serving(2)
    world.delete_pod(pods_of(world, "vision")[0])
    world.settle(between=lambda: None)
    assert len(world.listed()) == 2


def test_without_any_encoder_the_language_engines_leave_the_routers() -> None:
    world = serving(1)
    world.delete_pod(pods_of(world, "vision")[0])
    for _ in range(2):
        for action in world.plan():
            world.perform(action)
    assert not world.listed()
    world.run_pods()
    world.settle()
    assert len(world.listed()) == 2


def test_a_language_engine_that_starts_later_is_told_of_the_encoders() -> None:
    world = serving(1)
    world.spec()["replicas"] = 3
    world.settle()
    assert len(world.listed()) == 3


@pytest.mark.parametrize(
    ("group", "has", "lacks"),
    [
        ("vision", ["--encoder-only"], ["--language-only", "--disaggregation-mode"]),
        ("prefill", ["--language-only", "--encoder-bootstrap-port"], ["--encoder-only"]),
        ("decode", [], ["--language-only", "--encoder-only"]),
    ],
)
def test_flags_by_role(group: str, has: list[str], lacks: list[str]) -> None:
    world = serving(1, ("prefill", "Prefill"), ("decode", "Decode"))
    for pod in pods_of(world, group):
        assert set(has) <= set(words(world, pod))
        assert not set(lacks) & set(words(world, pod))
    assert len(world.listed()) == 4


@pytest.mark.parametrize("group", ["vision", "main"])
def test_embeddings_go_a_way_on_which_a_dead_encoder_kills_nobody_unless_the_user_chose_another(group: str) -> None:
    world = serving(1)
    for pod in pods_of(world, group):
        flags = dict(zip(words(world, pod), words(world, pod)[1:], strict=False))
        assert flags["--encoder-transfer-backend"] == "zmq_to_tokenizer"
    world.spec(group)["engine"]["args"] = {"encoder-transfer-backend": "mooncake"}
    world.settle(limit=120)
    for pod in pods_of(world, group):
        assert words(world, pod).count("--encoder-transfer-backend") == 1
        assert "mooncake" in words(world, pod)


def test_an_update_of_weights_does_not_touch_an_encoder() -> None:
    world = serving(1)
    world.commit(1, "/weights/v1", "sum-1")
    encoder = world.uid(pods_of(world, "vision")[0])
    world.weights[encoder] = ("", "sum-0")
    for _ in range(5):
        for action in world.plan():
            assert not (isinstance(action, CatchUp | Verify) and action.pod_uid == encoder)
            world.perform(action)
    assert len(world.listed()) == 2


def test_a_change_of_the_encoders_rolls_them_one_by_one_in_every_table() -> None:
    world = serving(2)
    world.spec("vision")["engine"]["image"] = "engine:2"

    def somebody_encodes() -> None:
        up = addresses(world, "vision")
        for pod in pods_of(world, "main"):
            assert world.encoders[world.uid(pod)] & up

    world.settle(limit=120, between=somebody_encodes)
    assert {world.pods[pod]["spec"]["containers"][0]["image"] for pod in pods_of(world, "vision")} == {"engine:2"}


def test_adding_an_encoder_group_changes_the_language_engines_and_removing_it_changes_them_back() -> None:
    world = World(rollout_server(replicas=2))
    world.settle()
    before = world.server["spec"]["groups"]
    revision = {engine["revision"] for engine in world.group_status()["engines"]}
    world.server["spec"]["groups"] = encoder_server(1)["spec"]["groups"]
    world.settle(limit=120)
    assert all("--language-only" in words(world, pod) for pod in pods_of(world, "main"))
    world.server["spec"]["groups"] = before
    world.settle(limit=120)
    assert not any("--language-only" in words(world, pod) for pod in pods_of(world, "main"))
    assert {engine["revision"] for engine in world.group_status()["engines"]} == revision
    assert len(world.listed()) == 2
