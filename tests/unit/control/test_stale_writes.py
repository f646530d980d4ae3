"""What an operator planned from an older world does not land in a newer one."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from rolloutfleet.control.freshness import Stop
from rolloutfleet.control.object_writer import without_what_is_empty
from rolloutfleet.control.operator import Operator
from rolloutfleet.control.store import FleetKey
from rolloutfleet.kube import client as kube
from rolloutfleet.plan.actions import ApplyStatus
from rolloutfleet.plan.fleet import plan_fleet
from unit.plan.test_fleet import serving_world
from unit.plan.world import DEFAULTS, World

KEY = FleetKey("rl", "qwen")


class OneGroup(kube.KubeApi):
    """Holds a ServerGroup and lets its status be written as the API server does: with `resourceVersion` only if that is
    still its own, whatever is in it; with a UID of another object as well (measured on 1.34)."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group

    async def get(
        self, resource: kube.Resource, name: str, *, namespace: str | None = None, cached: bool = False
    ) -> kube.Object:
        if not self.group:
            raise kube.NotFound(name, status=404, reason="NotFound")
        return copy.deepcopy(self.group)

    async def apply(self, resource: kube.Resource, manifest: kube.Object, **options: Any) -> kube.Object:
        assert options["subresource"] == "status"
        held = await self.get(resource, manifest["metadata"]["name"])
        wanted = manifest["metadata"].get("resourceVersion")
        if wanted is not None and wanted != held["metadata"]["resourceVersion"]:
            raise kube.Conflict("the object has been modified", status=409, reason="Conflict")
        self.written(manifest["status"])
        return copy.deepcopy(self.group)

    def written(self, status: dict[str, Any]) -> None:
        metadata = self.group["metadata"]
        version = str(int(metadata["resourceVersion"]) + 1)
        self.group = {**self.group, "metadata": {**metadata, "resourceVersion": version}, "status": dict(status)}


def world_with_versions() -> World:
    world = serving_world()
    group = world.children["ServerGroup/qwen-main"]
    group["metadata"] |= {"resourceVersion": "7", "ownerReferences": [{"uid": "uid-qwen"}]}
    world.delete_pod(world.engine_names()[0])
    return world


def group_status(world: World) -> ApplyStatus:
    plan = plan_fleet(world.fleet(), defaults=DEFAULTS, applied_versions={}, now=world.now)
    return next(action for action in plan if isinstance(action, ApplyStatus) and action.kind == "ServerGroup")


class Scene:
    """Two operators, and a plan of the first one that raises an epoch."""

    def __init__(self) -> None:
        world = world_with_versions()
        self.plan = group_status(world)
        self.api = OneGroup(copy.deepcopy(world.children["ServerGroup/qwen-main"]))
        self.operator = Operator(api=self.api, defaults=DEFAULTS, namespace=None)
        self.term = self.operator.begin_term()
        self.operator.store.upsert("RolloutServer", copy.deepcopy(world.server))
        self.operator.store.upsert("ServerGroup", copy.deepcopy(self.api.group))

    async def perform(self) -> None:
        await self.term.executor.perform(KEY, self.plan)

    def known(self) -> str:
        held = self.operator.store.object(KEY, "ServerGroup", "qwen-main")
        assert held is not None
        return str(held["metadata"]["resourceVersion"])


def test_a_groups_status_is_written_to_the_version_that_the_plan_was_made_from() -> None:
    async def scenario() -> None:
        scene = Scene()
        assert scene.plan.version == "7"
        await scene.perform()
        assert (scene.api.group["status"], scene.known()) == (without_what_is_empty(scene.plan.status), "8")

    asyncio.run(scenario())


def test_a_late_write_takes_no_epoch_back_and_the_next_plan_starts_from_what_stands_there() -> None:
    async def scenario() -> None:
        scene = Scene()
        raised = {**scene.plan.status, "lastEpoch": 40}
        scene.api.written(raised)  # by the operator that leads now
        with pytest.raises(Stop):
            await scene.perform()
        assert scene.api.group["status"] == raised
        assert scene.known() == "8", "no watch has told yet; a plan from version 7 would be refused again"

    asyncio.run(scenario())


def test_a_group_that_is_gone_ends_the_plan() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.api.group = {}
        with pytest.raises(Stop):
            await scene.perform()

    asyncio.run(scenario())


def test_what_is_empty_in_the_record_of_an_engine_is_not_written() -> None:
    engine = {"index": 0, "epoch": 1, "phase": "Serving", "reason": "", "restarts": 0, "started": False}
    status = {"selector": "", "conditions": [{"message": ""}], "engines": [{**engine, "recoveries": []}]}
    kept = {"index": 0, "epoch": 1, "phase": "Serving", "restarts": 0, "started": False}
    assert without_what_is_empty(status) == {**status, "engines": [kept]}
    counts = {"engines": {"desired": 2, "failed": 0}}
    assert without_what_is_empty(counts) == counts
