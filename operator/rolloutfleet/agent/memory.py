"""Offload and onload: SGLang's memory release and resume, made safe to repeat.

Neither call of SGLang is idempotent: a second one kills the scheduler. So the intent is recorded, then the call is
made, then the result is recorded, for each life of each engine; after an ambiguous failure only that engine is lost.

Released weights come back as garbage (unless the engine keeps a copy): every proof about them is void from the release
on, and an engine generates again only when its checksum is the fleet's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from rolloutfleet.agent.errors import conflict, unavailable
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import APART, Fleet
from rolloutfleet.api.agent import MemoryRequest, MemoryResult, MemoryTag
from rolloutfleet.api.common import EnginePhase
from rolloutfleet.api.rollout_server import TrainingMemory, TrainingWeights, WeightsPhase
from rolloutfleet.api.server_group import EngineStatus
from rolloutfleet.engine.errors import EngineError
from rolloutfleet.engine.sglang import EngineClient

RESUME_ORDER: tuple[MemoryTag, ...] = ("weights", "kv_cache", "cuda_graph")


class Memory:
    """Memory of one fleet's engines, one operation at a time."""

    def __init__(self, *, fleet: Fleet, leadership: Leadership, engine: Callable[[str], EngineClient]) -> None:
        self._fleet = fleet
        self._leadership = leadership
        self._engine = engine

    async def offload(self, request: MemoryRequest) -> MemoryResult:
        """Pause, wait until idle, release. Tags that are released already are left alone."""
        return await self._leadership.alone(self._offload(request))

    async def onload(self, request: MemoryRequest) -> MemoryResult:
        """Resume tags; generation continues when all are resident. Tags that are resident are left alone."""
        return await self._leadership.alone(self._onload(request))

    async def _offload(self, request: MemoryRequest) -> MemoryResult:
        started = time.monotonic()
        self._leadership.require()
        await self._fleet.refresh()
        self._refuse_without_saver()
        before = self._memory()
        tags = [tag for tag in RESUME_ORDER if tag in request.tags and tag not in before.tags]
        engines = self._engines(before) if before.tags else self._serving()
        if not tags:
            return self._result(before, {}, started)
        released = [tag for tag in RESUME_ORDER if tag in before.tags or tag in tags]
        weights = self._voided() if "weights" in tags else self._fleet.training.weights
        await self._write("Releasing", released, engines, weights)

        async def release(engine: EngineClient) -> None:
            await engine.require_fleet(self._fleet.id)
            if not before.tags:
                await engine.pause("abort", seconds=request.timeout_seconds)
                await engine.flush_cache(wait_seconds=int(request.timeout_seconds))
            await engine.release_memory(tags, seconds=request.timeout_seconds)

        failed = await self._everywhere(engines, release)
        after = await self._write("Released", released, [e for e in engines if e.pod not in failed], weights)
        return self._result(after, failed, started)

    async def _onload(self, request: MemoryRequest) -> MemoryResult:
        started = time.monotonic()
        self._leadership.require()
        await self._fleet.refresh()
        before = self._memory()
        tags = [tag for tag in RESUME_ORDER if tag in request.tags and tag in before.tags]
        if not tags:
            return self._result(before, {}, started)
        engines = self._engines(before)
        left = [tag for tag in before.tags if tag not in tags]
        weights = self._fleet.training.weights
        await self._write("Resuming", before.tags, engines, weights)
        expected = self._expected_checksums()

        async def resume(engine: EngineClient) -> None:
            await engine.require_fleet(self._fleet.id)
            await engine.resume_memory(tags, seconds=request.timeout_seconds)
            if left:
                return
            if await engine.checksum() != expected.get(engine.url):
                raise EngineError(
                    f"its weights are not those of version {self._fleet.committed_version}; it stays paused until the "
                    "operator has loaded them. Update weights before the last tag is onloaded"
                )
            await engine.continue_generation()

        failed = await self._everywhere(engines, resume)
        kept = [e for e in engines if e.pod not in failed] if left else []
        after = await self._write("Released" if left else "Resident", left, kept, weights)
        return self._result(after, failed, started)

    def _refuse_without_saver(self) -> None:
        """SGLang without its memory saver would answer and release nothing."""
        for group in self._fleet.connected().spec.groups:
            if group.role not in APART and not group.offload:
                raise conflict("OffloadNotEnabled", f"spec.groups[{group.name}].offload is false; set it")
        for _, engine in self._fleet.trained_engines():
            if engine.facts is not None and not engine.facts.memory_saver:
                raise conflict(
                    "OffloadNotEnabled",
                    f"external engine {engine.url} was started without --enable-memory-saver; start it with it",
                )

    def _memory(self) -> TrainingMemory:
        """What is released. An operation that was interrupted (nobody runs one now) left engines that nobody can know:
        the operator replaces them, and their successors have released nothing."""
        memory = self._fleet.training.memory
        if memory is None or memory.phase in ("Releasing", "Resuming"):
            return TrainingMemory(phase="Resident")
        return memory

    def _engines(self, memory: TrainingMemory) -> list[EngineStatus]:
        held = set(memory.uids)
        return [engine for _, engine in self._fleet.trained_engines() if engine.pod_uid in held and engine.url]

    def _serving(self) -> list[EngineStatus]:
        found = [
            engine
            for _, engine in self._fleet.trained_engines()
            if engine.phase in (EnginePhase.SERVING, EnginePhase.HELD) and engine.url
        ]
        if not found:
            raise unavailable("NoEngines", f"RolloutServer {self._fleet.name} has no serving engine")
        return found

    async def _everywhere(
        self, engines: Sequence[EngineStatus], step: Callable[[EngineClient], Awaitable[None]]
    ) -> dict[str, str]:
        self._leadership.require()
        failed: dict[str, str] = {}

        async def one(engine: EngineStatus) -> None:
            try:
                await step(self._engine(engine.url))
            except EngineError as error:
                failed[engine.pod] = str(error)

        await asyncio.gather(*(one(engine) for engine in engines))
        return failed

    def _voided(self) -> TrainingWeights:
        """The committed weights under a new transaction number: whatever was proved about an engine before is void."""
        weights = self._fleet.training.weights or TrainingWeights(phase=WeightsPhase.COMMITTED, version=0)
        return weights.model_copy(update={"transaction": weights.transaction + 1, "engines": ()})

    def _expected_checksums(self) -> dict[str, str]:
        """By URL of the engine."""
        known = {(entry.group, entry.revision): entry.checksum for entry in self._fleet.committed_checksums()}
        return {
            engine.url: known.get((group.name, engine.revision), "") for group, engine in self._fleet.trained_engines()
        }

    async def _write(
        self,
        phase: str,
        tags: Sequence[str],
        engines: Sequence[EngineStatus],
        weights: TrainingWeights | None,
    ) -> TrainingMemory:
        memory = TrainingMemory.model_validate(
            {
                "phase": phase,
                "tags": list(tags),
                "engines": sorted(engine.pod for engine in engines),
                "uids": sorted(engine.pod_uid for engine in engines),
            }
        )
        training = self._fleet.training.model_copy(update={"memory": memory, "weights": weights})
        await self._leadership.write(training)
        return memory

    def _result(self, memory: TrainingMemory, failed: dict[str, str], started: float) -> MemoryResult:
        return MemoryResult(
            released=list(memory.tags),
            engines=list(memory.engines),
            failed=failed,
            seconds=round(time.monotonic() - started, 4),
        )
