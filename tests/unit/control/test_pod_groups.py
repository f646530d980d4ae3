"""PodGroups in a cluster that may not know them: what is looked for, and what each answer of the API leads to."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest

from rolloutfleet.control.operator import Operator
from rolloutfleet.control.store import FleetKey
from rolloutfleet.kube import client as kube
from rolloutfleet.kube.resources import COSCHEDULING_POD_GROUP, VOLCANO_POD_GROUP
from rolloutfleet.plan.actions import Action, CreatePodGroup, DeleteObject
from rolloutfleet.plan.gang import COSCHEDULING, VOLCANO
from unit.plan.test_gang import gang_world
from unit.plan.world import DEFAULTS, rollout_server

KEY = FleetKey("rl", "qwen")
NAME = "qwen-main-0-e1"


class Cluster(kube.KubeApi):
    """Holds PodGroups of the APIs that it serves, by resource and name."""

    def __init__(self, *served: kube.Resource) -> None:
        self.served = set(served)
        self.held: dict[tuple[kube.Resource, str], dict[str, Any]] = {}
        self.error: kube.ApiError | None = None
        self._serial = 0

    async def close(self) -> None:
        pass

    async def serves(self, group: str, version: str, plural: str) -> bool:
        self._fail()
        return (group, version, plural) in {(r.group, r.version, r.plural) for r in self.served}

    async def list(self, resource: kube.Resource, **_: Any) -> kube.Listed:
        self._fail()
        return kube.Listed([body for (held, _), body in self.held.items() if held is resource], "1")

    async def get(
        self, resource: kube.Resource, name: str, *, namespace: str | None = None, cached: bool = False
    ) -> kube.Object:
        if (resource, name) not in self.held:
            raise kube.NotFound("gone", status=404, reason="NotFound")
        return self.held[resource, name]

    async def create(self, resource: kube.Resource, manifest: kube.Object) -> kube.Object:
        self._fail()
        name = manifest["metadata"]["name"]
        if (resource, name) in self.held:
            raise kube.AlreadyExists("exists", status=409, reason="AlreadyExists")
        self._serial += 1
        marks = {"uid": f"pg-{self._serial}", "resourceVersion": str(self._serial)}
        self.held[resource, name] = {**manifest, "metadata": {**manifest["metadata"], **marks}}
        return self.held[resource, name]

    async def delete(self, resource: kube.Resource, name: str, **_: Any) -> None:
        self._fail()
        del self.held[resource, name]

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


class Scene:
    """An operator that knows one fleet, performs actions and looks what the cluster has."""

    def __init__(self, *served: kube.Resource) -> None:
        self.api = Cluster(*served)
        self.operator = Operator(api=self.api, defaults=DEFAULTS, namespace=None)
        self.term = self.operator.begin_term()
        self.store = self.operator.store
        world = gang_world(settled=False)
        for action in world.plan():
            world.perform(action)
        self.store.upsert("RolloutServer", rollout_server())
        group = copy.deepcopy(world.children["ServerGroup/qwen-main"])
        group["metadata"]["ownerReferences"] = [{"uid": "uid-qwen"}]
        self.store.upsert("ServerGroup", group)
        self.manifest = next(action.manifest for action in world.plan() if isinstance(action, CreatePodGroup))

    async def look(self) -> None:
        await self.operator._look_for_gangs()

    async def perform(self, action: Action) -> None:
        await self.term.executor.perform(KEY, action)

    @property
    def known(self) -> set[str]:
        fleet = self.store.fleet(KEY)
        assert fleet is not None
        return set(fleet.pod_groups)

    @property
    def refused(self) -> str:
        trouble = self.store.create_failures.get(KEY, {}).get(NAME)
        return trouble.reason if trouble is not None else ""


def test_what_the_cluster_has_is_looked_for_and_never_required() -> None:
    async def scenario() -> None:
        scene = Scene()
        await scene.look()
        assert scene.store.gang_apis == frozenset()
        scene.api.served = {COSCHEDULING_POD_GROUP, VOLCANO_POD_GROUP}
        await scene.look()
        assert scene.store.gang_apis == {COSCHEDULING, VOLCANO}
        scene.api.error = kube.Forbidden("no", status=403, reason="Forbidden")
        await scene.look()
        assert scene.store.gang_apis == {COSCHEDULING, VOLCANO}, "what was known counts on"

    asyncio.run(scenario())


def test_an_api_that_may_not_be_listed_is_not_used() -> None:
    async def scenario() -> None:
        scene = Scene(VOLCANO_POD_GROUP)

        async def forbidden(*_: Any, **__: Any) -> kube.Listed:
            raise kube.Forbidden("no", status=403, reason="Forbidden")

        scene.api.list = forbidden  # type: ignore[method-assign]
        await scene.look()
        assert scene.store.gang_apis == frozenset()

    asyncio.run(scenario())


def test_our_own_writes_and_lists_tell_what_there_is() -> None:
    async def scenario() -> None:
        scene = Scene(COSCHEDULING_POD_GROUP)
        await scene.look()
        await scene.perform(CreatePodGroup(scene.manifest))
        assert scene.known == {NAME}
        assert scene.term.queue.depth() == 1, "its pods are made by the next plan"
        again = Scene(COSCHEDULING_POD_GROUP)
        again.api.held = scene.api.held
        await again.look()
        assert again.known == {NAME}, "after a restart"
        again.api.held = {}
        await again.look()
        assert again.known == set(), "deleted by somebody"

    asyncio.run(scenario())


def test_a_second_creation_is_harmless() -> None:
    async def scenario() -> None:
        scene = Scene(COSCHEDULING_POD_GROUP)
        await scene.perform(CreatePodGroup(scene.manifest))
        scene.store.replace("PodGroup", [])
        await scene.perform(CreatePodGroup(scene.manifest))
        assert (scene.known, scene.refused, len(scene.api.held)) == ({NAME}, "", 1)

    asyncio.run(scenario())


def test_a_name_of_somebody_else_is_not_taken() -> None:
    async def scenario() -> None:
        scene = Scene(COSCHEDULING_POD_GROUP)
        theirs = copy.deepcopy(dict(scene.manifest))
        theirs["metadata"]["ownerReferences"] = [{"uid": "other"}]
        await scene.api.create(COSCHEDULING_POD_GROUP, theirs)
        await scene.perform(CreatePodGroup(scene.manifest))
        assert (scene.known, scene.refused) == (set(), "NameTaken")
        await scene.look()
        assert scene.known == set(), "nor is it deleted: no plan sees it"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (kube.Forbidden("no right", status=403, reason="Forbidden"), "PodGroupForbidden"),
        (kube.Invalid("bad", status=422, reason="Invalid"), "PodGroupInvalid"),
        (kube.NotFound("the API is gone", status=404, reason="NotFound"), "PodGroupNotFound"),
        (kube.ApiError("webhook is down", status=500, reason="InternalError"), "PodGroupInternalError"),
        (kube.ApiError("a proxy's page", status=502), "PodGroupRefused"),
        (kube.Forbidden("namespace rl is being terminated", status=403, reason="Forbidden"), ""),
    ],
)
def test_a_refusal_is_recorded_and_ends_with_the_first_success(error: kube.ApiError, reason: str) -> None:
    async def scenario() -> None:
        scene = Scene(COSCHEDULING_POD_GROUP)
        scene.api.error = error
        await scene.perform(CreatePodGroup(scene.manifest))
        assert (scene.known, scene.refused) == (set(), reason)
        scene.api.error = None
        await scene.perform(CreatePodGroup(scene.manifest))
        assert (scene.known, scene.refused) == ({NAME}, "")

    asyncio.run(scenario())


def test_no_answer_ends_the_plan() -> None:
    async def scenario() -> None:
        scene = Scene(COSCHEDULING_POD_GROUP)
        scene.api.error = kube.Unreachable("no answer")
        with pytest.raises(kube.Unreachable):
            await scene.perform(CreatePodGroup(scene.manifest))

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [None, kube.NotFound("gone"), kube.Conflict("another one")])
def test_what_was_deleted_is_forgotten_although_no_watch_tells(error: kube.ApiError | None) -> None:
    async def scenario() -> None:
        scene = Scene(COSCHEDULING_POD_GROUP)
        await scene.perform(CreatePodGroup(scene.manifest))
        held = scene.api.held[COSCHEDULING_POD_GROUP, NAME]
        scene.api.error = error
        uid = held["metadata"]["uid"]
        await scene.perform(DeleteObject(kind="PodGroup", name=NAME, uid=uid, api_version=COSCHEDULING))
        assert scene.known == set()

    asyncio.run(scenario())
