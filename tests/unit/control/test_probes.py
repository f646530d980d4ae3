"""Engines and routers are looked at when something happens to them, and the fleet is told when a look differs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rolloutfleet.api.names import COMPONENT_ENGINE, COMPONENT_ROUTER, LABEL_COMPONENT, LABEL_SERVER
from rolloutfleet.control.probes import Prober
from rolloutfleet.control.store import FleetKey, FleetStore, Registration
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.engine.sglang import EncoderClient, EncoderTable, EngineClient
from unit.engine.stand_in import Answer, Asked, HangUp, StandIn

KEY = FleetKey("rl", "qwen")
ANSWERS: dict[str, tuple[int, Any]] = {
    "/ready": (200, {}),
    "/ping": (200, {}),
    "/model_info": (200, {"model_path": "/models/m", "weight_version": "0"}),
    "/server_info": (200, {"disaggregation_mode": "null", "tp_size": 1, "pp_size": 1}),
    "/v1/loads?include=core": (200, {"loads": []}),
    "/workers": (200, {"workers": []}),
}


class Scene:
    """A store, a prober and the machines that it looks at; `asked` is what it asked them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers = dict(ANSWERS)
        self.told: list[FleetKey] = []
        self.meanwhile: Callable[[], None] = lambda: None
        """What others do while a look waits for an answer."""
        self.store = FleetStore(clock=lambda: datetime.now(UTC))
        self._version = 0

    async def _answer(self, asked: Asked) -> Answer:
        self.asked.append(asked.path)
        self.meanwhile()
        if asked.path not in self.answers:
            raise HangUp
        return self.answers[asked.path]

    def pod(self, name: str, component: str = COMPONENT_ENGINE, *, ready: bool = True) -> dict[str, Any]:
        self._version += 1
        return {
            "metadata": {
                "name": name,
                "namespace": KEY.namespace,
                "uid": f"uid-{name}",
                "resourceVersion": str(self._version),
                "labels": {LABEL_SERVER: KEY.name, LABEL_COMPONENT: component},
            },
            "status": {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "conditions": [{"type": "ContainersReady", "status": str(ready)}],
            },
        }

    def play(self, script: Callable[[Scene, Prober], Awaitable[None]]) -> None:
        async def scenario() -> None:
            async with StandIn(self._answer) as machine, Http(max_connections=4) as http:
                prober = Prober(
                    store=self.store,
                    enqueue=self.told.append,
                    enqueue_soon=self.told.append,
                    engine=lambda _: EngineClient(machine.url, http=http),
                    router=lambda _: RouterClient(machine.url, http=http),
                    encoder=lambda _: EncoderClient(machine.url, http=http),
                    encoder_table=lambda _: EncoderTable(machine.url, http=http),
                    monotonic=time.monotonic,
                    jitter=lambda: 0.5,
                )
                task = asyncio.create_task(prober.run())
                await asyncio.sleep(0)
                async with asyncio.timeout(5):
                    await script(self, prober)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

        asyncio.run(scenario())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


def test_a_pod_that_starts_is_looked_at_at_once_and_its_fleet_is_told() -> None:
    async def script(scene: Scene, _: Prober) -> None:
        scene.store.upsert("Pod", scene.pod("a"))
        await until(lambda: bool(scene.told))
        assert scene.store.probes["uid-a"].answering
        assert scene.store.probes["uid-a"].label == "0"
        assert scene.told == [KEY]

    Scene().play(script)


def test_a_settled_engine_is_asked_two_things() -> None:
    async def script(scene: Scene, prober: Prober) -> None:
        scene.store.upsert("Pod", scene.pod("a"))
        await until(lambda: bool(scene.told))
        scene.asked.clear()
        prober.look_soon("uid-a")
        await until(lambda: len(scene.asked) >= 2)
        await asyncio.sleep(0)
        assert scene.asked == ["/ready", "/model_info"]

    Scene().play(script)


def test_news_of_the_kubelets_readiness_probe_are_followed_up() -> None:
    async def script(scene: Scene, _: Prober) -> None:
        scene.store.upsert("Pod", scene.pod("a"))
        await until(lambda: bool(scene.told))
        del scene.answers["/ready"]
        scene.store.upsert("Pod", scene.pod("a", ready=False))
        await until(lambda: not scene.store.probes["uid-a"].answering)

    Scene().play(script)


def test_other_news_of_a_pod_are_no_reason_to_look() -> None:
    async def script(scene: Scene, _: Prober) -> None:
        scene.store.upsert("Pod", scene.pod("a"))
        await until(lambda: bool(scene.told))
        scene.asked.clear()
        scene.store.upsert("Pod", scene.pod("a"))
        scene.store.upsert("Pod", scene.pod("b"))  # once this one was looked at, the other would have been as well
        await until(lambda: "uid-b" in scene.store.probes)
        assert scene.asked.count("/ready") == 1

    Scene().play(script)


def test_paused_is_not_ready_and_yet_answering() -> None:
    async def script(scene: Scene, _: Prober) -> None:
        scene.answers["/ready"] = (503, {})
        scene.store.upsert("Pod", scene.pod("a"))
        await until(lambda: bool(scene.told))
        assert scene.store.probes["uid-a"].answering
        assert scene.store.probes["uid-a"].paused

    Scene().play(script)


def test_one_that_answers_neither_is_not_answering() -> None:
    async def script(scene: Scene, _: Prober) -> None:
        scene.answers |= {"/ready": (503, {}), "/ping": (503, {})}
        scene.store.upsert("Pod", scene.pod("a"))
        await until(lambda: bool(scene.told))
        assert not scene.store.probes["uid-a"].answering
        assert "/model_info" not in scene.asked

    Scene().play(script)


@pytest.mark.parametrize("answers", [True, False])
def test_what_others_found_while_a_look_waits_is_kept(answers: bool) -> None:
    """A health check that failed, an end that the wire heard, a proof that is due, a drain that is over."""

    async def script(scene: Scene, prober: Prober) -> None:
        scene.store.upsert("Pod", scene.pod("a"))
        await until(lambda: bool(scene.told))
        found: dict[str, Any] = {
            "unhealthy": 2,
            "deaf": 1,
            "closed": True,
            "recheck": True,
            "drained": "2026-01-01T00:00:00Z",
        }

        def others() -> None:
            scene.store.probes["uid-a"] = replace(scene.store.probes["uid-a"], **found)

        scene.meanwhile = others
        if not answers:
            scene.answers = {}
        scene.told.clear()
        prober.look_soon("uid-a")
        await until(lambda: bool(scene.told))
        after = scene.store.probes["uid-a"]
        assert after.answering is answers
        assert {name: getattr(after, name) for name in found} == found

    Scene().play(script)


def test_a_pod_that_is_gone_is_looked_at_no_more() -> None:
    async def script(scene: Scene, prober: Prober) -> None:
        pod = scene.pod("a")
        scene.store.upsert("Pod", pod)
        await until(lambda: bool(scene.told))
        scene.store.remove("Pod", pod)
        scene.asked.clear()
        prober.look_soon("uid-a")
        scene.store.upsert("Pod", scene.pod("b"))
        await until(lambda: "uid-b" in scene.store.probes)
        assert scene.asked.count("/ready") == 1
        assert "uid-a" not in scene.store.probes

    Scene().play(script)


def test_a_look_at_a_router_forgets_registrations_that_it_lists() -> None:
    url = "http://10.0.0.9:30000"

    async def script(scene: Scene, prober: Prober) -> None:
        scene.store.upsert("Pod", scene.pod("r", COMPONENT_ROUTER))
        await until(lambda: "uid-r" in scene.store.tables)
        until_then = datetime.now(UTC) + timedelta(minutes=1)
        scene.store.registering["uid-r"] = {url: Registration(worker_id="1", until=until_then)}
        worker = {"id": "1", "url": url, "worker_type": "regular", "is_healthy": True}
        scene.answers["/workers"] = (200, {"workers": [worker]})
        prober.look_soon("uid-r")
        await until(lambda: "uid-r" not in scene.store.registering)
        assert set(scene.store.tables["uid-r"] or ()) == {url}

    Scene().play(script)


def test_a_router_that_does_not_answer_has_no_table() -> None:
    async def script(scene: Scene, _: Prober) -> None:
        del scene.answers["/workers"]
        scene.store.upsert("Pod", scene.pod("r", COMPONENT_ROUTER))
        await until(lambda: "uid-r" in scene.store.tables)
        assert scene.store.tables["uid-r"] is None

    Scene().play(script)


def test_an_external_engine_of_two_fleets_is_one_target_and_goes_with_the_last_of_them() -> None:
    def server(scene: Scene, name: str) -> dict[str, Any]:
        pod = scene.pod(name)
        return {**pod, "spec": {"external": {"engines": [{"url": "http://outside:1/"}]}}}

    async def script(scene: Scene, _: Prober) -> None:
        first, second = server(scene, "one"), server(scene, "two")
        scene.store.upsert("RolloutServer", first)
        scene.store.upsert("RolloutServer", second)
        await until(lambda: len(scene.told) >= 2)
        uid = "external:http://outside:1"
        assert {target.uid for target in scene.store.targets} == set(scene.store.probes) == {uid}
        target = scene.store.targets.get(uid)
        assert target is not None
        assert {key.name for key in target.fleets} == {"one", "two"}
        scene.store.remove("RolloutServer", first)
        assert uid in scene.store.targets
        scene.store.remove("RolloutServer", second)
        assert len(scene.store.targets) == 0
        assert scene.store.probes == {}

    Scene().play(script)
