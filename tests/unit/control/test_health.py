"""Health checks: who is asked, when, and what is counted. Engines are an HTTP stand-in's worth of functions."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any, cast

from rolloutfleet.control.health import HealthChecker, checks
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.engine.errors import EngineError
from rolloutfleet.engine.sglang import EncoderClient, EngineClient
from rolloutfleet.plan.observed import EngineProbe

KEY = FleetKey("rl", "qwen")
UID = "uid-0"


class Engine:
    """Answers what the test says."""

    def __init__(self) -> None:
        self.asked = 0
        self.seconds = 0.0
        self.answer: bool | type[BaseException] = True
        self.release = asyncio.Event()
        self.release.set()

    async def generates(self, *, seconds: float) -> bool:
        self.asked += 1
        self.seconds = seconds
        await self.release.wait()
        if isinstance(self.answer, bool):
            return self.answer
        raise self.answer("no answer")

    async def healthy(self) -> bool:
        return await self.generates(seconds=0)


class Fixture:
    def __init__(self, **spec: Any) -> None:
        self.store = FleetStore(clock=lambda: datetime(2026, 1, 1, tzinfo=UTC))
        self.enqueued: list[FleetKey] = []
        self.engine = Engine()
        self.now = 0.0
        self.checker = HealthChecker(
            store=self.store,
            enqueue=self.enqueued.append,
            engine=lambda url: cast(EngineClient, self.engine),
            encoder=lambda url: cast(EncoderClient, self.engine),
            monotonic=lambda: self.now,
            chance=lambda: 0.0,
        )
        self._version = 0
        self.spec = spec
        self.engine_is(phase="Serving")
        self.store.probes[UID] = EngineProbe(answering=True)

    def engine_is(self, **record: Any) -> None:
        self._version += 1
        group = {
            "metadata": {
                "name": "qwen-main",
                "namespace": "rl",
                "uid": "g",
                "resourceVersion": str(self._version),
                "labels": {"rolloutfleet.dev/server": "qwen"},
            },
            "spec": {"role": "Regular", **self.spec},
            "status": {"engines": [{"podUid": UID, "url": "http://10.0.0.1:30000", "started": True, **record}]},
        }
        self.store.upsert("ServerGroup", group)

    @property
    def probe(self) -> EngineProbe:
        return self.store.probes[UID]

    async def tick(self, seconds: float = 0.0) -> None:
        """Some time later, until nothing that was asked is still under way."""
        self.now += seconds
        self.checker.tick()
        await self.answered()

    async def answered(self) -> None:
        if self.checker.asking:
            await asyncio.wait(list(self.checker.asking.values()))


def run(fixture_of: Any) -> None:
    asyncio.run(fixture_of())


def test_an_engine_is_asked_every_period_and_not_more_often() -> None:
    async def scenario() -> None:
        fixture = Fixture(recovery={"healthCheck": {"periodSeconds": 7, "timeoutSeconds": 5}})
        await fixture.tick()
        await fixture.tick(6.9)
        assert fixture.engine.asked == 1
        await fixture.tick(0.2)
        assert (fixture.engine.asked, fixture.engine.seconds) == (2, 5)
        assert fixture.enqueued == [], "what goes well wakes nobody"

    run(scenario)


def test_failures_in_a_row_are_counted_and_told_and_one_answer_clears_them() -> None:
    async def scenario() -> None:
        fixture = Fixture()
        for answer in (False, EngineError, TimeoutError):
            fixture.engine.answer = answer
            await fixture.tick(30)
        assert (fixture.probe.unhealthy, len(fixture.enqueued)) == (3, 3)
        fixture.engine.answer = True
        await fixture.tick(30)
        assert fixture.probe.unhealthy == 0

    run(scenario)


def test_no_answer_within_the_timeout_is_a_failure() -> None:
    async def scenario() -> None:
        fixture = Fixture(recovery={"healthCheck": {"timeoutSeconds": 2}})
        fixture.engine.release.clear()
        loop = asyncio.get_running_loop()
        started = loop.time()
        fixture.checker.tick()
        await fixture.answered()
        assert loop.time() - started >= 2
        assert fixture.probe.unhealthy == 1

    run(scenario)


def test_an_engine_that_the_trainer_takes_while_it_is_asked_has_not_failed() -> None:
    async def scenario() -> None:
        fixture = Fixture()
        fixture.engine.answer = EngineError
        fixture.engine.release.clear()
        fixture.checker.tick()
        fixture.engine_is(phase="Held", reason="TrainerHolds")
        fixture.engine.release.set()
        await fixture.tick()
        assert fixture.probe.unhealthy == 0
        await fixture.tick(100)
        assert fixture.engine.asked == 1, "nor is it asked again while it is held"

    run(scenario)


def test_failures_before_a_hold_do_not_count_after_it() -> None:
    async def scenario() -> None:
        fixture = Fixture()
        fixture.engine.answer = False
        await fixture.tick()
        assert fixture.probe.unhealthy == 1
        fixture.engine_is(phase="Held")
        await fixture.tick()
        assert fixture.probe.unhealthy == 0

    run(scenario)


def test_who_is_asked() -> None:
    fixture = Fixture()

    def asked() -> bool:
        return any(check.uid == UID for check in checks(fixture.store))

    assert asked()
    fixture.engine_is(phase="Starting", reason="NotAnswering")
    assert asked(), "its silence is what is to be found out"
    for phase, reason in (("Starting", "Loading"), ("Stale", "WeightsBehind"), ("Draining", "Draining"), ("Held", "")):
        fixture.engine_is(phase=phase, reason=reason)
        assert not asked(), phase
    fixture.engine_is(phase="Serving")
    fixture.store.probes[UID] = EngineProbe(answering=True, paused=True)
    assert not asked(), "somebody has paused it"
    external = Fixture(external={"engines": []})
    assert not list(checks(external.store)), "nobody could replace it"


def test_weights_are_due_every_period_and_only_of_engines_that_serve() -> None:
    async def scenario() -> None:
        fixture = Fixture(recovery={"healthCheck": {"weightsPeriodSeconds": 100}})
        await fixture.tick()
        assert not fixture.probe.recheck
        await fixture.tick(101)
        assert fixture.probe.recheck
        assert fixture.enqueued == [KEY]
        never = Fixture(recovery={"healthCheck": {"weightsPeriodSeconds": 0}})
        await never.tick()
        await never.tick(1e6)
        assert not never.probe.recheck

    run(scenario)
