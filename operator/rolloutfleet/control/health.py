"""Asks engines that serve for a token, and now and then for their weights: what hangs still answers a flag.

Everything is asked in parallel and judged by the plan; here is only counted. An engine that the trainer holds is not
asked: it may be paused, and its silence says nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rolloutfleet.api.common import EnginePhase, HealthCheckSpec
from rolloutfleet.control.freshness import NotLeading
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.engine.errors import EngineError
from rolloutfleet.engine.sglang import EncoderClient, EngineClient

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
CONCURRENCY = 256

ASKED_WHILE = frozenset({"NotAnswering", "MassFailure", "NotRegistered"})
"""Reasons of engines that do not serve and are asked all the same: their silence is what is to be found out."""


@dataclass(frozen=True)
class Check:
    """An engine that should generate."""

    uid: str
    url: str
    fleet: FleetKey
    encoder: bool
    spec: HealthCheckSpec
    serving: bool


class HealthChecker:
    def __init__(
        self,
        *,
        store: FleetStore,
        enqueue: Callable[[FleetKey], None],
        engine: Callable[[str], EngineClient],
        encoder: Callable[[str], EncoderClient],
        monotonic: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        self._store = store
        self._enqueue = enqueue
        self._engine = engine
        self._encoder = encoder
        self._monotonic = monotonic
        self._chance = chance
        self._due: dict[str, float] = {}
        self._weights_due: dict[str, float] = {}
        self.asking: dict[str, asyncio.Task[None]] = {}
        """Checks under way, by pod UID."""
        self._slots = asyncio.Semaphore(CONCURRENCY)

    async def run(self) -> None:
        """For ever; cancelled when the term ends."""
        try:
            while True:
                self.tick()
                await asyncio.sleep(TICK_SECONDS)
        finally:
            for task in self.asking.values():
                task.cancel()

    def tick(self) -> None:
        """Begin the checks that are due, and forget engines that are not asked any more."""
        now = self._monotonic()
        wanted = {check.uid: check for check in checks(self._store)}
        for uid in [uid for uid in self._due if uid not in wanted]:
            del self._due[uid]
            self._weights_due.pop(uid, None)
            self._count(uid, None)
        for uid, check in wanted.items():
            # Spread at first, so that engines that came up together are not asked together for ever.
            due = self._due.setdefault(uid, now + check.spec.period_seconds * self._chance())
            if due <= now and uid not in self.asking:
                self.asking[uid] = asyncio.create_task(self._ask(check), name=f"health {uid}")
            if check.serving and check.spec.weights_period_seconds:
                self._look_at_weights(check, now)

    def _look_at_weights(self, check: Check, now: float) -> None:
        period = check.spec.weights_period_seconds
        due = self._weights_due.setdefault(check.uid, now + period * (0.5 + self._chance() / 2))
        probe = self._store.probes.get(check.uid)
        if due <= now and probe is not None:
            self._weights_due[check.uid] = now + period
            self._store.probes[check.uid] = replace(probe, recheck=True)
            self._enqueue(check.fleet)

    async def _ask(self, check: Check) -> None:
        try:
            await self._judge(check)
        finally:
            self.asking.pop(check.uid, None)

    async def _judge(self, check: Check) -> None:
        seconds = float(check.spec.timeout_seconds)
        try:
            async with self._slots, asyncio.timeout(seconds):
                if check.encoder:
                    healthy = await self._encoder(check.url).healthy()
                else:
                    healthy = await self._engine(check.url).generates(seconds=seconds)
        except NotLeading:
            return
        except (EngineError, TimeoutError):
            healthy = False
        if check.uid in self._due:
            self._due[check.uid] = self._monotonic() + check.spec.period_seconds
        probe = self._store.probes.get(check.uid)
        if probe is None or (healthy and not probe.unhealthy):
            return
        if not healthy and not any(other.uid == check.uid for other in checks(self._store)):
            return  # somebody has paused it, or taken it over, while we waited
        if not healthy:
            logger.warning("engine at %s generated no token within %.0f s", check.url, seconds)
        self._count(check.uid, None if healthy else check)

    def _count(self, uid: str, failed: Check | None) -> None:
        probe = self._store.probes.get(uid)
        if probe is None:
            return
        unhealthy = probe.unhealthy + 1 if failed is not None else 0
        if unhealthy != probe.unhealthy:
            self._store.probes[uid] = replace(probe, unhealthy=unhealthy)
        if failed is not None:
            self._enqueue(failed.fleet)


def checks(store: FleetStore) -> Iterator[Check]:
    """Engines of ours that should generate now: nobody could replace another one."""
    for key, spec, engines in store.own_engines():
        found: HealthCheckSpec | None = None
        for record, probe in engines:
            if probe.paused or not _should_generate(record):
                continue
            found = found or HealthCheckSpec.model_validate(spec.get("recovery", {}).get("healthCheck", {}))
            yield Check(
                uid=record["podUid"],
                url=record["url"],
                fleet=key,
                encoder=spec.get("role") == "Encoder",
                spec=found,
                serving=record.get("phase") == EnginePhase.SERVING,
            )


def _should_generate(record: Mapping[str, Any]) -> bool:
    if not record.get("url"):
        return False
    if record.get("phase") == EnginePhase.SERVING:
        return True
    return bool(record.get("started")) and record.get("reason") in ASKED_WHILE
