"""What watches, lists and our own writes tell, in whatever order they come."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from rolloutfleet.api.rollout_server import RolloutServer
from rolloutfleet.control.operator import Operator
from rolloutfleet.control.reading import Reading
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.plan.actions import Apply
from rolloutfleet.plan.objects import wanted_children
from unit.control.cluster import Client, Cluster
from unit.plan.world import DEFAULTS, START, rollout_server

KEY = FleetKey("rl", "qwen")


def pod(name: str, version: int) -> dict[str, Any]:
    labels = {"rolloutfleet.dev/server": "qwen"}
    metadata = {"name": name, "namespace": "rl", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": labels}}


def test_a_list_removes_what_it_lacks_and_not_what_was_made_after_it() -> None:
    store = FleetStore(clock=lambda: START)
    store.upsert("Pod", pod("gone", 5))
    store.upsert("Pod", pod("fresh", 12))
    assert store.replace("Pod", [pod("held", 9)], "10") == {KEY}
    assert [name for name in ("gone", "held", "fresh") if store.object(KEY, "Pod", name)] == ["held", "fresh"]


def test_what_is_gone_is_not_brought_back_by_a_list_an_event_or_an_answer_that_was_under_way() -> None:
    store = FleetStore(clock=lambda: START)
    store.upsert("Pod", pod("ended", 5))
    store.remove("Pod", pod("ended", 8))
    assert store.upsert("Pod", pod("ended", 7)) is None
    assert store.replace("Pod", [pod("ended", 6)], "6") == set()
    assert not store.is_news("Pod", pod("ended", 7))
    store.upsert("Pod", pod("lost", 5))
    store.replace("Pod", [], "10")
    assert store.upsert("Pod", pod("lost", 9)) is None


def test_an_object_that_was_made_anew_is_not_replaced_by_late_news_of_its_predecessor() -> None:
    store = FleetStore(clock=lambda: START)
    late, new = pod("same", 5), pod("same", 9)
    new["metadata"] = {**new["metadata"], "uid": "another"}
    store.upsert("Pod", new)
    assert store.upsert("Pod", late) is None
    assert store.upsert("Pod", pod("same", 8)) is None


def test_what_is_applied_is_planned_for_although_its_watch_event_is_no_news() -> None:
    async def scenario() -> None:
        cluster = Cluster()
        operator = Operator(api=Client(cluster, "a"), defaults=DEFAULTS, namespace=None)
        term = operator.begin_term()
        server = RolloutServer.model_validate(rollout_server())
        group = next(
            child for child in wanted_children(server, DEFAULTS, pairs=False) if child["kind"] == "ServerGroup"
        )
        await term.executor.perform(KEY, Apply(group))
        assert term.queue.depth() == 1
        await operator.stop()

    asyncio.run(scenario())


def test_what_plans_do_not_read_of_an_object_is_kept_and_is_no_news() -> None:
    store = FleetStore(clock=lambda: START)
    engine, routers = pod("engine", 5), pod("router", 5)
    engine["metadata"]["labels"]["rolloutfleet.dev/component"] = "engine"
    assert store.upsert("Pod", {**engine, "status": {"conditions": []}}) == KEY
    assert store.upsert("ReplicaSet", {**routers, "spec": {"replicas": 1}, "status": {}}) == KEY

    def later(body: dict[str, Any], **changed: Any) -> dict[str, Any]:
        return {**body, "metadata": {**body["metadata"], "resourceVersion": "6"}, **changed}

    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    assert store.upsert("Pod", later(engine, status=ready)) is None
    assert (store.object(KEY, "Pod", "engine") or {})["status"] == ready
    assert store.upsert("ReplicaSet", later(routers, spec={"replicas": 1}, status={"replicas": 1})) is None
    assert (store.object(KEY, "ReplicaSet", "router") or {})["metadata"]["resourceVersion"] == "6"


def test_what_plans_read_is_news() -> None:
    store = FleetStore(clock=lambda: START)
    engine, routers = pod("engine", 5), pod("router", 5)
    engine["metadata"]["labels"]["rolloutfleet.dev/component"] = "engine"
    store.upsert("Pod", {**engine, "status": {}})
    store.upsert("ReplicaSet", {**routers, "spec": {"replicas": 1}})
    gated = {"conditions": [{"type": "rolloutfleet.dev/Routable", "status": "True"}]}
    metadata = {"metadata": {**engine["metadata"], "resourceVersion": "6"}}
    assert store.upsert("Pod", {**metadata, "status": gated}) == KEY
    metadata = {"metadata": {**routers["metadata"], "resourceVersion": "6"}}
    assert store.upsert("ReplicaSet", {**metadata, "spec": {"replicas": 2}}) == KEY


def test_each_version_of_an_object_is_read_once() -> None:
    read: list[str] = []

    def read_it(body: Mapping[str, Any]) -> str:
        read.append(body["metadata"]["resourceVersion"])
        return str(body["value"])

    reading = Reading(read_it)
    first = {"metadata": {"uid": "u", "resourceVersion": "1"}, "value": "a"}
    second = {"metadata": {"uid": "u", "resourceVersion": "2"}, "value": "b"}
    assert [reading(body) for body in (first, first, second, second)] == ["a", "a", "b", "b"]
    assert read == ["1", "2"]
    reading.forget("u")
    reading(second)
    assert read == ["1", "2", "2"]
