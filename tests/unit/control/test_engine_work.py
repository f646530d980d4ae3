"""Work on engines, done by the operator's own code against stand-ins of SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from rolloutfleet.control import engine_work
from rolloutfleet.control.engine_work import EngineWork, Work
from rolloutfleet.control.probes import Prober
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.engine import sglang
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.engine.worker import WorkerClient
from rolloutfleet.kube import client as kube
from rolloutfleet.plan.actions import Adopt, CatchUp, Verify
from rolloutfleet.plan.observed import EngineProbe
from unit.agent.world import Engine
from unit.plan.world import rollout_server

KEY = FleetKey("rl", "qwen")
FLEET = "5e1f0a27"


class Unchanged(kube.KubeApi):
    """The trainer has done nothing since the store last looked."""

    def __init__(self) -> None:
        pass

    async def get(
        self, resource: kube.Resource, name: str, *, namespace: str | None = None, cached: bool = False
    ) -> kube.Object:
        return rollout_server(name)


class Inattentive:
    """In place of the prober: nobody looks again."""

    def look_soon(self, pod_uid: str) -> None:
        pass


Perform = Callable[[Work], Awaitable[None]]


def scene(story: Callable[[Engine, FleetStore, Perform], Awaitable[None]]) -> None:
    async def scenario() -> None:
        store = FleetStore(clock=lambda: datetime.now(UTC))
        store.upsert("RolloutServer", rollout_server())
        engine = Engine("qwen-main-0-e1-r0")
        told = asyncio.Event()
        async with Http(max_connections=4) as http, engine.stand_in, asyncio.timeout(10):
            work = EngineWork(
                api=Unchanged(),
                store=store,
                prober=cast(Prober, Inattentive()),
                engine=lambda url: EngineClient(url, http=http),
                worker=lambda url: WorkerClient(url, http=http),
                enqueue=lambda _: told.set(),
                enqueue_soon=lambda _: told.set(),
            )

            async def perform(action: Work) -> None:
                """Until the fleet is looked at again: the work has ended, or failed and waits for its next attempt."""
                work.start(KEY, action)
                await told.wait()
                told.clear()

            try:
                await story(engine, store, perform)
            finally:
                await work.close()

    asyncio.run(scenario())


def load(engine: Engine, **changed: Any) -> CatchUp:
    return CatchUp(
        **{
            "pod_uid": "pod",
            "url": engine.stand_in.url,
            "path": "/weights/w1",
            "version": 1,
            "fleet": FLEET,
            "expected": "sum-of-w1",
            "training_key": "0/0/free",
            **changed,
        }
    )


def test_a_catch_up_labels_what_it_loads_with_version_and_fleet() -> None:
    async def story(engine: Engine, store: FleetStore, perform: Perform) -> None:
        await perform(load(engine))
        assert (engine.label, engine.checksum, engine.paused) == ("1@5e1f0a27", "sum-of-w1", False)
        assert store.probes["pod"].label == "1@5e1f0a27"

    scene(story)


def test_what_the_worker_copies_is_loaded_from_the_pod_and_the_engine_waits_for_it_unpaused() -> None:
    async def story(engine: Engine, store: FleetStore, perform: Perform) -> None:
        await perform(load(engine, copied=True))
        assert engine.asked[:4] == ["model_info", "v1/copies", "pause_generation", "update_weights_from_disk"]
        loaded = engine.stand_in.asked[3].body
        assert (loaded["model_path"], loaded["weight_version"]) == ("/copies/w1", "1@5e1f0a27")
        assert engine.checksum == "sum-of-w1"

    scene(story)


@pytest.mark.parametrize(
    ("status", "text"),
    [(404, "no such folder; waits for the version after 1"), (507, "/copies: ENOSPC: No space left on device")],
)
def test_an_engine_whose_worker_cannot_copy_is_not_touched_and_says_why(status: int, text: str) -> None:
    async def story(engine: Engine, store: FleetStore, perform: Perform) -> None:
        engine.refuses["v1/copies"] = status, {"error": {"message": text.partition(";")[0]}}
        await perform(load(engine, copied=True))
        assert engine.asked == ["model_info", "v1/copies"]
        assert text in store.catch_up_failures["pod"]
        assert "pod" not in store.probes, "nothing is held against the engine"

    scene(story)


def test_nothing_is_loaded_into_an_engine_of_another_fleet_that_has_taken_the_address() -> None:
    async def story(engine: Engine, store: FleetStore, perform: Perform) -> None:
        engine.label = "0@beef0000"
        await perform(load(engine))
        assert engine.asked == ["model_info"]
        assert "an engine of another fleet answers" in store.catch_up_failures["pod"]

    scene(story)


def test_an_adoption_changes_the_label_alone_and_what_was_proved_of_the_weights_stands() -> None:
    async def story(engine: Engine, store: FleetStore, perform: Perform) -> None:
        engine.label = "0"
        store.probes["pod"] = EngineProbe(answering=True, label="0", checksum="sum-of-m0", read_under="0/0/free")
        await perform(Adopt(pod_uid="pod", url=engine.stand_in.url, version=0, fleet=FLEET, training_key="0/0/free"))
        assert engine.asked == ["update_weight_version"]
        assert engine.stand_in.asked[0].body == {"new_version": "0@5e1f0a27", "abort_all_requests": False}
        probe = store.probes["pod"]
        assert (probe.label, probe.checksum, probe.read_under) == ("0@5e1f0a27", "sum-of-m0", "0/0/free")

    scene(story)


def test_it_is_counted_how_often_a_scheduler_did_not_say_what_its_weights_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be stuck in a broadcast of a trainer that died: paused, it is asked for no token. An answer that was lost
    at once, by a network, counts for nothing."""
    monkeypatch.setattr(sglang.EngineClient.checksum, "__kwdefaults__", {"seconds": 0.1})
    monkeypatch.setattr(engine_work, "SILENCE_SECONDS", 10.0)
    monkeypatch.setattr(engine_work, "RETRY_PAUSE_SECONDS", 0.0)

    async def story(engine: Engine, store: FleetStore, perform: Perform) -> None:
        store.probes["pod"] = EngineProbe(answering=True, label=f"0@{FLEET}", deaf=1)
        freed = asyncio.Event()

        async def stuck() -> None:
            await freed.wait()

        engine.before["weights_checker"] = stuck
        ask = Verify(pod_uid="pod", url=engine.stand_in.url, training_key="0/0/free")
        await perform(ask)
        assert store.probes["pod"].deaf == 1
        monkeypatch.setattr(engine_work, "SILENCE_SECONDS", 0.05)
        await perform(ask)
        assert store.probes["pod"].deaf == 2
        freed.set()
        await perform(ask)
        assert store.probes["pod"].deaf == 0

    scene(story)
