"""Offload and onload: SGLang's memory release and resume, made safe to repeat.

Neither call of SGLang is idempotent: a second one kills the scheduler, and no question tells what an engine has
released. So the books are kept here, by life of an engine: written before each call (Changing) and after it, as answers
come. A call of which nobody knows how it ended costs that engine, and no other (the operator replaces it); one that has
not begun costs nothing, so engines are drained before any is marked.

Released weights come back as garbage (unless the engine keeps a copy): every proof about them is void from the release
on, and an engine generates again only when its checksum is the fleet's.

Only groups with `offload` take part; the others go on serving. An engine that comes back while the fleet is offloaded
is brought there too, by `watch`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from rolloutfleet.agent.errors import AgentError, conflict, unavailable
from rolloutfleet.agent.gpu_memory import SharedGpus
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import APART, Fleet
from rolloutfleet.agent.memory_record import MemoryRecord, ordered
from rolloutfleet.agent.participants import participant_of, releasable
from rolloutfleet.api.agent import MemoryRequest, MemoryResult, MemoryTag
from rolloutfleet.api.common import EnginePhase, Role
from rolloutfleet.api.rollout_server import TrainingStatus, TrainingWeights, WeightsPhase
from rolloutfleet.api.server_group import EngineStatus, ServerGroup
from rolloutfleet.engine.errors import EngineError, EngineRefused
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.kube.errors import ApiError
from rolloutfleet.plan.update import resuming_order

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
LATE_SECONDS = 20.0
"""For an engine that has come back while the fleet is offloaded: an onload may be waiting behind it."""

RECOGNIZE_SECONDS = 10.0
CALL_SECONDS = 60.0
"""For a release, which takes tens of milliseconds: what is not answered by then costs the engine."""

Step = Callable[[EngineStatus, EngineClient], Awaitable[None]]
Failures = dict[str, str]
"""By pod: why the engine could not do its part."""


class Memory:
    """Memory of one fleet's engines, one operation at a time."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        leadership: Leadership,
        engine: Callable[[str], EngineClient],
        gpus: SharedGpus | None = None,
    ) -> None:
        self._fleet = fleet
        self._leadership = leadership
        self._engine = engine
        self._gpus = gpus or SharedGpus()
        self._record = MemoryRecord()
        self._training = TrainingStatus()
        """As this operation found it and has changed it since: what the fleet's watch reads meanwhile may be older."""
        self._members: list[tuple[ServerGroup, EngineStatus]] = []
        """Those with memory that can be released, as this operation found them."""

    async def offload(self, request: MemoryRequest) -> MemoryResult:
        """Pause, wait until idle, release. What is released already is left alone."""
        return await self._leadership.alone(self._offload(request))

    async def onload(self, request: MemoryRequest) -> MemoryResult:
        """Resume tags; generation continues when all are resident. What is resident is left alone."""
        return await self._leadership.alone(self._onload(request))

    async def watch(self) -> None:
        """For ever: engines that come back while the fleet is offloaded are offloaded too."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            server = self._fleet.server
            training = server.status.training if server is not None else None
            busy = self._leadership.operations.locked() or not self._leadership.lease.valid
            if busy or training is None or training.memory is None or training.memory.phase == "Resident":
                continue
            try:
                await self._leadership.alone(self.look(), unasked=True)
            except (AgentError, ApiError) as error:
                logger.warning("memory of %s: %s", self._fleet.name, error)

    async def look(self) -> None:
        """What `watch` does each time; alone on the fleet. Raises AgentError, ApiError."""
        await self._begin()
        if self._record.tags:
            failed = await self._release(self._missing(self._record.tags), LATE_SECONDS)
            for pod, problem in failed.items():
                logger.warning("%s came back and could not be offloaded: %s", pod, problem)
        if self._record.written() != self._training.memory:
            await self._write()

    async def _begin(self) -> None:
        self._leadership.require()
        await self._fleet.refresh()
        self._training = _without_dead_update(self._fleet.training)
        self._members = [
            (group, engine)
            for group, engine in self._fleet.trained_engines()
            if releasable(group, engine) and engine.url and engine.pod_uid
        ]
        self._record.load(self._training.memory, self._leadership.lease.fence)
        # A group that cannot be read now may still have its engines.
        known = {engine.pod_uid for _, engine in self._fleet.engines()}
        if len(self._fleet.groups) == len(self._fleet.connected().server_groups):
            self._record.forget(self._record.uids - known)

    # Offload

    async def _offload(self, request: MemoryRequest) -> MemoryResult:
        started = time.monotonic()
        await self._begin()
        if not self._serving():
            self._refuse_without_saver()
            raise unavailable("NoEngines", f"RolloutServer {self._fleet.name} has no serving engine to offload")
        failed = await self._release(self._missing(request.tags), request.timeout_seconds)
        return self._result(failed, started, await self._gpus.freed())

    def _missing(self, tags: Iterable[MemoryTag]) -> dict[str, tuple[MemoryTag, ...]]:
        """What is left to release, by UID of the engine."""
        wanted = set(tags)
        left = {e.pod_uid: ordered(wanted - set(self._record.released(e))) for e in self._serving()}
        return {uid: tags for uid, tags in left.items() if tags}

    async def _release(self, missing: dict[str, tuple[MemoryTag, ...]], seconds: float) -> Failures:
        engines = [engine for engine in self._serving() if engine.pod_uid in missing]
        if not engines:
            return {}
        fresh = {engine.pod_uid for engine in engines if not self._record.released(engine)}
        self._record.held(engines)
        await self._write("Releasing")

        end = time.monotonic() + seconds

        async def drain(engine: EngineStatus, client: EngineClient) -> None:
            await client.require_fleet(self._fleet.id, seconds=RECOGNIZE_SECONDS)
            if engine.pod_uid in fresh:
                await client.pause("abort", seconds=seconds)
                await client.flush_cache(wait_seconds=max(math.ceil(end - time.monotonic()), 1))

        failed = await self._everywhere(engines, drain)
        idle = [engine for engine in engines if engine.pod not in failed]
        if idle:
            await self._expect(idle, missing)
            going = {tag for engine in idle for tag in missing[engine.pod_uid]}
            await self._intend(
                idle,
                "Releasing",
                tags=ordered(going | set(self._record.tags)),
                weights=self._voided() if "weights" in going else None,
            )

            async def release(engine: EngineStatus, client: EngineClient) -> None:
                tags = missing[engine.pod_uid]
                await self._call(engine, client.release_memory(tags, seconds=CALL_SECONDS))
                self._record.now(engine, {*self._record.released(engine), *tags})

            failed |= await self._in_waves(idle, release, "Releasing")
        await self._write()
        return failed

    async def _expect(self, engines: Sequence[EngineStatus], missing: Mapping[str, Collection[MemoryTag]]) -> None:
        """Note what engines on the trainer's GPUs are about to free."""
        shared = {e.pod_uid: participant_of(g, e) for g, e in self._members if g.spec.colocation is not None}
        if not shared or not await self._gpus.look():
            return
        sizes: dict[str, list[int]] = {}

        async def ask(engine: EngineStatus, client: EngineClient) -> None:
            figures = await client.memory_figures()
            size = sum(getattr(figures, tag) for tag in missing[engine.pod_uid])
            sizes[engine.pod] = [size] * (shared[engine.pod_uid].ranks * shared[engine.pod_uid].pipeline_stages)

        unknown = await self._everywhere([engine for engine in engines if engine.pod_uid in shared], ask)
        for pod, problem in unknown.items():
            logger.warning("%s does not say what it holds, so its release is not confirmed: %s", pod, problem)
        self._gpus.expect(sizes)

    # Onload

    async def _onload(self, request: MemoryRequest) -> MemoryResult:
        started = time.monotonic()
        await self._begin()
        asked = set(request.tags)
        if "weights" in self._record.tags and "weights" not in asked and asked & set(self._record.tags):
            raise conflict(
                "WeightsFirst",
                f"tags {', '.join(ordered(asked))}: the weights are released, and come back before anything else. "
                "Onload the tag weights, update the weights, then onload the rest: what an update needs of the GPU may "
                "not fit beside the KV cache",
            )
        engines = [e for e in self._record.with_released(self._known()) if asked & set(self._record.released(e))]
        if not engines and not asked & set(self._record.tags):
            return self._result({}, started)
        self._gpus.expect({})
        failed = await self._resume(engines, asked, request.timeout_seconds)
        if not self._record.tags:
            failed |= await self._continue()
        await self._write()
        return self._result(failed, started)

    async def _resume(self, engines: Sequence[EngineStatus], asked: set[MemoryTag], seconds: float) -> Failures:
        async def recognize(_: EngineStatus, client: EngineClient) -> None:
            await client.require_fleet(self._fleet.id, seconds=RECOGNIZE_SECONDS)

        failed = await self._everywhere(engines, recognize)
        ours = [engine for engine in engines if engine.pod not in failed]
        await self._intend(ours, "Resuming", tags=ordered(set(self._record.tags) - asked))

        async def resume(engine: EngineStatus, client: EngineClient) -> None:
            released = set(self._record.released(engine))
            await self._call(engine, client.resume_memory(ordered(released & asked), seconds=seconds))
            self._record.now(engine, released - asked)

        failed |= await self._in_waves(ours, resume, "Resuming")
        await self._write("Resuming")
        return failed

    async def _continue(self) -> Failures:
        """All is resident: whoever holds the fleet's weights goes on, whoever does not is left to the operator."""
        expected = self._expected_checksums()
        resident = [e for e in self._known() if self._record.takes_part(e) and not self._record.released(e)]

        async def go_on(engine: EngineStatus, client: EngineClient) -> None:
            await client.require_fleet(self._fleet.id, seconds=RECOGNIZE_SECONDS)
            if await client.checksum() != expected.get(engine.pod_uid):
                raise EngineError(
                    f"its weights are not those of version {self._fleet.committed_version}; it stays paused until the "
                    "operator has loaded them. Update weights before the last tag is onloaded"
                )
            await client.continue_generation()

        failed: Failures = {}
        for wave in self._waves(resident):
            failed |= await self._everywhere(wave, go_on)
        self._record.forget(engine.pod_uid for engine in resident)
        return failed

    # Engines

    def _refuse_without_saver(self) -> None:
        """SGLang without its memory saver would answer and release nothing."""
        if any(releasable(group, engine) for group, engine in self._fleet.trained_engines()):
            return
        if any(group.offload for group in self._fleet.connected().spec.groups):
            return  # its engines are not there yet
        names = [f"spec.groups[{g.name}].offload" for g in self._fleet.connected().spec.groups if g.role not in APART]
        urls = [engine.url for group, engine in self._fleet.trained_engines() if group.spec.external is not None]
        text = f"{', '.join(names)}: false in every group; set it where memory is to be released" if names else ""
        if urls:
            text += f"{'; ' if text else ''}external engines {', '.join(urls)}: started without --enable-memory-saver"
        raise conflict("OffloadNotEnabled", text)

    def _serving(self) -> list[EngineStatus]:
        """Engines whose memory can be released, or is: those that answer."""
        up = (EnginePhase.SERVING, EnginePhase.HELD)
        return [engine for _, engine in self._members if engine.phase in up and self._record.knows(engine)]

    def _known(self) -> list[EngineStatus]:
        return [engine for _, engine in self._members if self._record.knows(engine)]

    def _waves(self, engines: Sequence[EngineStatus]) -> list[list[EngineStatus]]:
        """Prefill engines first: decode engines connect to what these have registered."""
        roles: dict[str, Role] = {
            engine.pod_uid: engine.facts.role if engine.facts is not None else group.spec.role
            for group, engine in self._members
        }
        waves = resuming_order(roles[engine.pod_uid] for engine in engines)
        return [[engine for engine in engines if roles[engine.pod_uid] in wave] for wave in waves]

    async def _call(self, engine: EngineStatus, call: Awaitable[None]) -> None:
        """A release or resume; afterwards nothing is known of an engine that did not say whether it did it."""
        try:
            await call
        except EngineRefused as refusal:
            if 400 <= refusal.status < 500:
                self._record.unchanged(engine)
            else:
                self._record.unknown(engine)
            raise
        except BaseException:  # also a fault of ours
            self._record.unknown(engine)
            raise

    async def _in_waves(self, engines: Sequence[EngineStatus], step: Step, phase: str) -> Failures:
        """Releases or resumes. What has been answered is written while others still run: if this agent dies now, only
        those are lost."""
        failed: Failures = {}
        waves = self._waves(engines)
        try:
            while waves:
                self._leadership.require()
                tasks = {asyncio.create_task(self._one(engine, step, failed)) for engine in waves.pop(0)}
                try:
                    while tasks:
                        _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                        if tasks or waves:
                            await self._write(phase)
                finally:
                    await asyncio.gather(*tasks)
        finally:
            for engine in (engine for wave in waves for engine in wave):
                self._record.unchanged(engine)  # its turn has not come
        return failed

    async def _everywhere(self, engines: Sequence[EngineStatus], step: Step) -> Failures:
        self._leadership.require()
        failed: Failures = {}
        await asyncio.gather(*(self._one(engine, step, failed) for engine in engines))
        return failed

    async def _one(self, engine: EngineStatus, step: Step, failed: Failures) -> None:
        try:
            await step(engine, self._engine(engine.url))
        except EngineError as error:
            failed[engine.pod] = str(error)

    # What is written

    def _voided(self) -> TrainingWeights:
        """The committed weights under a new transaction number: whatever was proved about an engine before is void."""
        weights = self._training.weights or TrainingWeights(phase=WeightsPhase.COMMITTED, version=0)
        return weights.model_copy(update={"transaction": weights.transaction + 1, "engines": ()})

    def _expected_checksums(self) -> dict[str, str]:
        """By UID of the engine."""
        known = {(entry.group, entry.revision): entry.checksum for entry in self._fleet.committed_checksums()}
        return {
            engine.pod_uid: known.get((group.name, engine.revision), "")
            for group, engine in self._fleet.trained_engines()
        }

    async def _write(self, phase: str = "", *, weights: TrainingWeights | None = None) -> None:
        update: dict[str, object] = {"memory": self._record.written(phase)}
        if weights is not None:
            update["weights"] = weights
        self._training = self._training.model_copy(update=update)
        await self._leadership.write(self._training)

    async def _intend(
        self,
        engines: Sequence[EngineStatus],
        phase: str,
        *,
        tags: tuple[MemoryTag, ...],
        weights: TrainingWeights | None = None,
    ) -> None:
        """Write that calls about these engines' memory are about to be made. If that cannot be written none is made."""
        before, self._record.tags = self._record.tags, tags
        self._record.changing(engines)
        try:
            await self._write(phase, weights=weights)
        except (AgentError, ApiError):
            self._record.tags = before
            for engine in engines:
                self._record.unchanged(engine)
            raise

    def _result(self, failed: Failures, started: float, freed: Mapping[str, int] | None = None) -> MemoryResult:
        tags = self._record.tags
        done = [
            e.pod for e in self._known() if self._record.takes_part(e) and set(tags) <= set(self._record.released(e))
        ]
        return MemoryResult(
            released=list(tags),
            engines=sorted(done) if tags else [],
            failed=failed,
            freed_bytes=dict(freed or {}),
            seconds=round(time.monotonic() - started, 4),
        )


def _without_dead_update(training: TrainingStatus) -> TrainingStatus:
    """We lead, and no update of ours runs: one that is written there has died with its leader. Written again in our
    name it would hold the fleet until its deadline."""
    weights = training.weights
    if weights is None or weights.phase != WeightsPhase.UPDATING:
        return training
    ended = {"phase": WeightsPhase.COMMITTED, "target_version": None, "target_path": "", "deadline": "", "engines": ()}
    return training.model_copy(update={"weights": weights.model_copy(update=ended)})
