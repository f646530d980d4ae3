"""What changes an engine is sent by the leader alone, however long ago the work began; and nobody is judged unasked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from rolloutfleet.control.freshness import NotLeading
from rolloutfleet.control.leadership import Leadership
from rolloutfleet.control.operator import Operator
from rolloutfleet.control.probes import Prober
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.engine.errors import EngineUnreachable
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.engine.sglang import EncoderClient, EncoderTable, EngineClient
from rolloutfleet.plan.actions import Action, CatchUp, Register
from rolloutfleet.plan.observed import WorkerKind
from unit.control.cluster import Client, Cluster
from unit.engine.stand_in import Answer, Asked, StandIn
from unit.plan.test_fleet import serving_world
from unit.plan.world import DEFAULTS, START, World, rollout_server

KEY = FleetKey("rl", "qwen")
LIMIT = 10.0
"""Seconds after which a test has hung."""


class Says(Leadership):
    """Leads for certain as long as the test says so."""

    leads = True

    @property
    def certain(self) -> bool:
        return self.leads


class Scene:
    def __init__(self) -> None:
        self.cluster = Cluster()
        self.client = Client(self.cluster, "a")
        self.leadership = Says()
        self.operator = Operator(api=self.client, defaults=DEFAULTS, namespace=None, leadership=self.leadership)
        self.operator.store.upsert("RolloutServer", self.cluster.put("RolloutServer", rollout_server()))
        self.term = self.operator.begin_term()

    async def perform(self, action: Action) -> None:
        """With the work on an engine or a table that it may begin."""
        await self.term.executor.perform(KEY, action)
        begun = [task for task in asyncio.all_tasks() if task.get_name().startswith(("catch-up", "Register"))]
        await asyncio.wait_for(asyncio.gather(*begun), LIMIT)


def test_a_catch_up_that_outlives_its_term_loads_nothing_into_the_engine() -> None:
    async def scenario() -> None:
        scene = Scene()

        async def answer(asked: Asked) -> Answer:
            if asked.path == "/pause_generation":
                scene.leadership.leads = False
            return 200, {"success": True}

        async with StandIn(answer) as engine:
            action = CatchUp(
                pod_uid="u",
                url=engine.url,
                path="/w/2",
                version=2,
                fleet="rl/qwen",
                expected="",
                training_key="0/0/free",
            )
            await scene.perform(action)
            assert [asked.path for asked in engine.asked if asked.method == "POST"] == ["/pause_generation"]
            assert not scene.operator.store.catch_up_failures, "the engine is not to blame"
            asked_so_far = len(engine.asked)
            with pytest.raises(NotLeading):
                await scene.perform(action)
            assert len(engine.asked) == asked_so_far
        await scene.operator.stop()

    asyncio.run(scenario())


def test_a_registration_is_not_sent_when_the_lease_ended_while_the_trainers_state_was_read() -> None:
    async def scenario() -> None:
        scene = Scene()

        def lose(verb: str, kind: str, name: str) -> None:
            scene.leadership.leads = False

        scene.client.before = lose
        async with StandIn.always(202, {}) as router:
            action = Register(
                router="r",
                router_uid="r",
                router_url=router.url,
                url="http://10.0.0.1:30000",
                kind=WorkerKind(),
                training_key="0/0/free",
            )
            await scene.perform(action)
            assert not scene.leadership.leads
            assert router.asked == []
            assert not scene.operator.store.registering
        await scene.operator.stop()

    asyncio.run(scenario())


def test_a_registration_that_was_planned_before_an_update_is_not_sent_after_it() -> None:
    """Neither when the watch is late, nor when it has brought the news while the plan was being performed."""

    async def scenario() -> None:
        for told in (False, True):
            scene = Scene()
            updated = rollout_server()
            weights = {"phase": "Committed", "version": 1, "transaction": 1, "path": "/weights/m1"}
            updated["status"] = {"training": {"weights": weights}}
            fresh = scene.cluster.put("RolloutServer", updated)
            if told:
                scene.operator.store.upsert("RolloutServer", fresh)
            async with StandIn.always(202, {}) as router:
                url = "http://10.0.0.1:30000"
                action = Register(
                    router="r",
                    router_uid="r",
                    router_url=router.url,
                    url=url,
                    kind=WorkerKind(),
                    training_key="0/0/free",
                )
                await scene.perform(action)
                assert router.asked == []
                assert scene.term.queue.depth() == 1, "planned again"
                assert not scene.operator.store.registering
            await scene.operator.stop()

    asyncio.run(scenario())


def test_a_standby_may_look_at_engines() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.leadership.leads = False
        async with StandIn.always(200, {}) as engine:
            assert await EngineClient(engine.url, http=scene.operator._http).ping()
        await scene.operator.stop()

    asyncio.run(scenario())


# Nobody is judged before he was asked


class Engines:
    """Engines of which none answers before `answers` is set, and all refuse then."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()

    def __call__(self, url: str) -> Engines:
        return self

    async def ready(self) -> bool:
        await self.answers.wait()
        raise EngineUnreachable("refused")

    async def list_workers(self) -> list[Any]:
        raise EngineUnreachable("refused")


def prober_of(store: FleetStore, engines: Engines, enqueue: Callable[[FleetKey], None]) -> Prober:
    return Prober(
        store=store,
        enqueue=enqueue,
        enqueue_soon=enqueue,
        engine=cast("Callable[[str], EngineClient]", engines),
        router=cast("Callable[[str], RouterClient]", engines),
        encoder=cast("Callable[[str], EncoderClient]", engines),
        encoder_table=cast("Callable[[str], EncoderTable]", engines),
        monotonic=asyncio.get_running_loop().time,
    )


def store_of(world: World) -> FleetStore:
    store = FleetStore(clock=lambda: START)
    for version, pod in enumerate(world.pods.values()):
        labels = {**pod["metadata"]["labels"], "rolloutfleet.dev/server": "qwen"}
        metadata = {**pod["metadata"], "namespace": "rl", "labels": labels, "resourceVersion": str(version + 1)}
        store.upsert("Pod", {**pod, "metadata": metadata})
    return store


def test_a_fleet_is_known_when_each_engine_that_was_there_has_been_asked_and_is_then_planned_for() -> None:
    async def scenario() -> None:
        engines, enqueued = Engines(), asyncio.Event()
        prober = prober_of(store_of(serving_world()), engines, lambda _: enqueued.set())
        prober.expect_all()
        looking = asyncio.create_task(prober.run())
        await asyncio.sleep(0.05)
        assert not prober.knows(KEY)
        assert prober.knows(FleetKey("rl", "other"))
        engines.answers.set()
        async with asyncio.timeout(LIMIT):
            while not prober.knows(KEY):
                await enqueued.wait()
                await asyncio.sleep(0)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)

    asyncio.run(scenario())


def test_nobody_waits_for_an_engine_that_goes_or_is_gone() -> None:
    async def scenario() -> None:
        world = serving_world()
        leaving, gone = world.engine_names()
        world.pods[leaving]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        store = store_of(world)
        enqueued = asyncio.Event()
        prober = prober_of(store, Engines(), lambda _: enqueued.set())
        prober.expect_all()
        looking = asyncio.create_task(prober.run())
        await asyncio.sleep(0.05)
        assert not prober.knows(KEY)
        held = store.object(KEY, "Pod", gone)
        assert held is not None
        store.remove("Pod", held)
        async with asyncio.timeout(LIMIT):
            await enqueued.wait()
        assert prober.knows(KEY)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)

    asyncio.run(scenario())


def test_an_operator_that_begins_in_a_rolling_change_deletes_no_engine_that_nobody_has_asked_yet() -> None:
    async def scenario() -> None:
        world = serving_world()
        scene = Scene()
        group = world.children["ServerGroup/qwen-main"]
        group["metadata"]["ownerReferences"] = [{"uid": "uid-qwen"}]
        group["spec"]["engine"]["image"] = "engine:2"
        scene.operator.store.upsert("ServerGroup", scene.cluster.put("ServerGroup", group))
        for pod in world.pods.values():
            pod["metadata"]["labels"]["rolloutfleet.dev/server"] = "qwen"
            scene.operator.store.upsert("Pod", scene.cluster.put("Pod", pod))
        scene.term.prober.expect_all()
        await scene.term.reconcile(KEY)
        assert scene.cluster.writes("a") == []
        await scene.operator.stop()

    asyncio.run(scenario())
