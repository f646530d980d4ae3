"""Changes to routers' tables: beside the reconciles, each on its own, followed until the router says what became of it.

The routers are stand-ins on loopback that keep a table as sglang-router 0.3.2 does; the clients are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rolloutfleet.control.probes import Prober
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.control.tables import ADDED_AT_ONCE, REGISTRATION_PATIENCE, RETRY_PAUSE_SECONDS, TableChange, Tables
from rolloutfleet.engine import router as router_client
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.engine.sglang import EncoderClient, EncoderTable, EngineClient
from rolloutfleet.kube import client as kube
from rolloutfleet.plan.actions import Deregister, Register
from rolloutfleet.plan.observed import WorkerKind
from unit.engine.stand_in import Answer, Asked, HangUp, StandIn
from unit.plan.world import rollout_server

KEY = FleetKey("rl", "qwen")
URL = "http://10.0.0.1:30000"


class Router:
    """Its table, and what is wrong with it."""

    def __init__(self) -> None:
        self.table: dict[str, dict[str, Any]] = {}
        """By id."""
        self.jobs: dict[str, dict[str, Any]] = {}
        """Registrations that have not led to a worker, by id."""
        self.stuck = False
        """Registrations are accepted and come to nothing."""
        self.lost = 0
        """So many removals are answered 500."""
        self.hangs_up = False
        """Connections for changes break."""
        self.hangs = asyncio.Event()
        self.hangs.set()
        self.stand_in = StandIn(self._answer)

    def lists(self, *urls: str) -> None:
        self.table |= {f"id-{url}": {"url": url, "worker_type": "regular", "is_healthy": True} for url in urls}

    def asked(self, method: str) -> list[str]:
        return [asked.path for asked in self.stand_in.asked if asked.method == method]

    async def _answer(self, asked: Asked) -> Answer:
        if asked.method != "GET":
            await self.hangs.wait()
            if self.hangs_up:
                raise HangUp
        uid = asked.path.removeprefix("/workers").strip("/")
        if asked.method == "POST":
            uid = f"id-{asked.body['url']}"
            if self.stuck:
                self.jobs[uid] = {"status": "processing"}
            else:
                self.table[uid] = {**asked.body, "is_healthy": True}
            return 202, {"status": "accepted", "worker_id": uid}
        if asked.method == "DELETE":
            if self.lost:
                self.lost -= 1
                return 500, {"error": "job queue full"}
            return (202, {}) if self.table.pop(uid, None) else (404, {"error": "not found"})
        if not uid:
            return 200, {"workers": [{"id": uid, **worker} for uid, worker in self.table.items()]}
        if uid in self.table:
            return 200, {"id": uid, **self.table[uid]}
        return (200, {"job_status": self.jobs[uid]}) if uid in self.jobs else (404, {"error": "not found"})


class Api(kube.KubeApi):
    """Has the RolloutServer."""

    def __init__(self) -> None:
        self.server = rollout_server()
        self.reads = 0

    async def get(
        self, resource: kube.Resource, name: str, *, namespace: str | None = None, cached: bool = False
    ) -> kube.Object:
        self.reads += 1
        return self.server


class Scene:
    """A fleet with two routers, of which the operator knows the pods."""

    def __init__(self, http: Http) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.routers = (Router(), Router())
        self.again: list[FleetKey] = []
        self.later: list[float] = []
        self.api = Api()
        self.store = FleetStore(clock=lambda: self.now)
        self.store.upsert("RolloutServer", self.api.server)

        def client(url: str) -> RouterClient:
            number = int(url.rpartition(":")[0].rpartition(".")[2])
            return RouterClient(self.routers[number].stand_in.url, http=http)

        self.prober = Prober(
            store=self.store,
            enqueue=self.again.append,
            enqueue_soon=self.again.append,
            engine=lambda url: EngineClient(url, http=http),
            router=client,
            encoder=lambda url: EncoderClient(url, http=http),
            encoder_table=lambda url: EncoderTable(url, http=http),
            monotonic=asyncio.get_running_loop().time,
        )
        self.tables = Tables(
            api=self.api,
            store=self.store,
            prober=self.prober,
            router=client,
            encoder_table=lambda url: EncoderTable(url, http=http),
            enqueue=self.again.append,
            enqueue_after=lambda _, seconds: self.later.append(seconds),
        )
        for number in range(2):
            labels = {"rolloutfleet.dev/component": "router", "rolloutfleet.dev/server": KEY.name}
            name = f"router-{number}"
            metadata = {"name": name, "namespace": KEY.namespace, "uid": name, "labels": labels, "resourceVersion": "1"}
            status = {"phase": "Running", "podIP": f"10.1.0.{number}"}
            self.store.upsert("Pod", {"metadata": metadata, "status": status})

    def start(self, *actions: TableChange) -> None:
        for action in actions:
            self.tables.start(KEY, action)

    def waiting(self, router: int = 0) -> set[str]:
        return set(self.store.registering.get(f"router-{router}", {}))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - what is awaited has no event
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with Http(max_connections=64) as http:
        made = Scene(http)
        async with made.routers[0].stand_in, made.routers[1].stand_in:
            looking = asyncio.create_task(made.prober.run())
            try:
                await made.until(lambda: len(made.store.tables) == 2)
                yield made
            finally:
                for router in made.routers:
                    router.hangs.set()
                looking.cancel()
                await asyncio.gather(looking, return_exceptions=True)
                await made.tables.close()


def run(scenario: Callable[[Scene], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with scene() as made:
            await scenario(made)

    asyncio.run(inside())


def add(router: int, url: str = URL) -> Register:
    return Register(
        router=f"router-{router}",
        router_uid=f"router-{router}",
        router_url=f"http://10.1.0.{router}:30000",
        url=url,
        kind=WorkerKind(),
        training_key="0/0/free",
    )


def remove(router: int, url: str = URL, worker_id: str = "") -> Deregister:
    return Deregister(
        router=f"router-{router}",
        router_uid=f"router-{router}",
        router_url=f"http://10.1.0.{router}:30000",
        url=url,
        worker_id=worker_id or f"id-{url}",
    )


def test_a_router_that_hangs_delays_no_other_one_and_no_reconcile() -> None:
    async def scenario(scene: Scene) -> None:
        hanging, well = scene.routers
        hanging.lists(URL)
        well.lists(URL)
        hanging.hangs.clear()
        scene.start(remove(0), remove(1))  # not awaited: a reconcile goes on
        await scene.until(lambda: not well.table)
        assert hanging.table

    run(scenario)


def test_a_removal_names_the_entry_that_was_seen_and_the_table_is_read_again_at_once() -> None:
    async def scenario(scene: Scene) -> None:
        router = scene.routers[0]
        router.lists(URL)
        scene.prober.look_soon("router-0")
        await scene.until(lambda: URL in (scene.store.tables["router-0"] or {}))
        scene.start(remove(0))
        await scene.until(lambda: router.asked("DELETE") != [])
        assert router.asked("DELETE") == [f"/workers/id-{URL}"]
        await scene.until(lambda: scene.store.tables["router-0"] == {})
        assert KEY in scene.again

    run(scenario)


def test_a_worker_is_asked_for_once_although_a_plan_from_before_asks_for_it_again() -> None:
    async def scenario(scene: Scene) -> None:
        router = scene.routers[0]
        router.stuck = True
        scene.start(add(0))
        await scene.until(lambda: scene.waiting() == {URL})
        scene.start(add(0))
        router.stuck = False
        router.lists(URL)
        scene.prober.look_soon("router-0")
        await scene.until(lambda: URL in (scene.store.tables["router-0"] or {}))
        scene.start(add(0))
        await asyncio.sleep(0)
        await scene.until(lambda: not scene.store.table_changes)
        assert len(router.asked("POST")) == 1

    run(scenario)


@pytest.mark.parametrize("how", ["refused", "hangs"])
def test_a_removal_that_is_lost_is_planned_again_soon(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_client, "TABLE_SECONDS", 0.2)

    async def scenario(scene: Scene) -> None:
        router = scene.routers[0]
        router.lists(URL)
        if how == "hangs":
            router.hangs.clear()
        else:
            router.lost = 1
        scene.start(remove(0))
        await scene.until(lambda: scene.later == [RETRY_PAUSE_SECONDS])
        router.hangs.set()
        scene.start(remove(0))
        await scene.until(lambda: not router.table)

    run(scenario)


def test_an_entry_that_the_router_has_made_anew_is_left_alone_and_looked_at() -> None:
    async def scenario(scene: Scene) -> None:
        router = scene.routers[0]
        router.lists(URL)
        scene.start(remove(0, worker_id="an-older-one"))
        await scene.until(lambda: URL in (scene.store.tables["router-0"] or {}))
        assert router.table
        assert not scene.later, "a worker that is gone already is no failure"

    run(scenario)


def test_an_addition_waits_for_the_removal_of_its_url() -> None:
    async def scenario(scene: Scene) -> None:
        router = scene.routers[0]
        router.lists(URL)
        router.hangs.clear()
        scene.start(remove(0), add(0))
        await scene.until(lambda: router.asked("DELETE") != [])
        router.hangs.set()
        await scene.until(lambda: KEY in scene.again)
        assert not router.asked("POST"), "the router might have taken it first, and refused it"
        scene.start(add(0))
        await scene.until(lambda: list(router.table) == [f"id-{URL}"])

    run(scenario)


def test_one_look_at_the_trainer_serves_all_registrations_that_are_sent_together_and_none_of_the_next() -> None:
    async def scenario(scene: Scene) -> None:
        urls = [f"http://10.0.0.{number}:30000" for number in range(ADDED_AT_ONCE)]
        scene.start(*(add(router, url) for url in urls for router in range(2)))
        await scene.until(lambda: all(len(router.table) == len(urls) for router in scene.routers))
        assert scene.api.reads == 1
        scene.start(add(0, "http://10.0.1.1:30000"))
        await scene.until(lambda: len(scene.routers[0].table) == len(urls) + 1)
        assert scene.api.reads == 2

    run(scenario)


def test_nothing_is_registered_when_the_trainer_has_begun_something_since() -> None:
    async def scenario(scene: Scene) -> None:
        updating = {"training": {"holder": "trainer", "fence": 1, "weights": {"phase": "Updating"}}}
        scene.api.server = {**scene.api.server, "status": updating}
        scene.start(add(0), add(1))
        await scene.until(lambda: len(scene.again) >= 2)
        assert not [router.asked("POST") for router in scene.routers if router.asked("POST")]
        assert not scene.store.registering

    run(scenario)


def test_registrations_that_wait_for_a_slow_router_are_dropped_when_the_trainer_begins_meanwhile() -> None:
    async def scenario(scene: Scene) -> None:
        router = scene.routers[0]
        router.hangs.clear()
        scene.start(*(add(0, f"http://10.0.0.{number}:30000") for number in range(ADDED_AT_ONCE + 4)))
        await scene.until(lambda: len(router.asked("POST")) == ADDED_AT_ONCE)
        updating = {"training": {"weights": {"phase": "Committed", "version": 1, "transaction": 1, "path": "/w/1"}}}
        server = {**scene.api.server, "status": updating}
        server["metadata"] = {**server["metadata"], "resourceVersion": "2"}
        scene.store.upsert("RolloutServer", server)
        router.hangs.set()
        await scene.until(lambda: scene.again.count(KEY) >= 4)
        assert len(router.asked("POST")) == ADDED_AT_ONCE

    run(scenario)


def test_a_registration_is_waited_for_while_the_router_works_on_it_and_forgotten_when_it_is_listed() -> None:
    async def scenario(scene: Scene) -> None:
        router = scene.routers[0]
        router.stuck = True
        scene.start(add(0))
        await scene.until(lambda: scene.waiting() == {URL})
        scene.now += REGISTRATION_PATIENCE - timedelta(seconds=1)
        await scene.until(lambda: f"/workers/id-{URL}" in router.asked("GET"))
        assert scene.waiting() == {URL}
        router.lists(URL)
        await scene.until(lambda: not scene.waiting())
        assert KEY in scene.again

    run(scenario)


@pytest.mark.parametrize("what", ["failed", "restarted"])
def test_a_registration_that_came_to_nothing_is_asked_for_again_after_a_pause(what: str) -> None:
    async def scenario(scene: Scene) -> None:
        router = scene.routers[0]
        router.stuck = True
        scene.start(add(0))
        await scene.until(lambda: scene.waiting() == {URL})
        patience = scene.store.registering["router-0"][URL].until
        if what == "failed":
            router.jobs[f"id-{URL}"] = {"status": "failed", "message": "no HTTP at this address"}
        else:
            router.jobs.clear()
        await scene.until(lambda: scene.store.registering["router-0"][URL].until < patience)
        before = len(scene.again)
        scene.now += timedelta(seconds=3)
        await scene.until(lambda: not scene.waiting())
        assert len(scene.again) > before

    run(scenario)


def test_a_registration_that_a_router_never_finishes_is_asked_for_again_in_the_end() -> None:
    async def scenario(scene: Scene) -> None:
        scene.routers[0].stuck = True
        scene.start(add(0))
        await scene.until(lambda: scene.waiting() == {URL})
        scene.now += REGISTRATION_PATIENCE
        await scene.until(lambda: not scene.waiting())
        assert KEY in scene.again

    run(scenario)


def test_a_registration_whose_answer_is_lost_is_planned_again() -> None:
    async def scenario(scene: Scene) -> None:
        scene.routers[0].hangs_up = True
        scene.start(add(0))
        await scene.until(lambda: scene.later == [RETRY_PAUSE_SECONDS])
        assert not scene.waiting()

    run(scenario)
