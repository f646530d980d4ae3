"""Samples through the router: bounded, retried, and checked for who answered.

Which engine answers is the router's choice, and a router may list an address that belongs to another fleet's engine
by now. What this agent guarantees is that no sample of another fleet gets through and none of a weight version that was
never committed, that each sample is delivered once, and that one bad prompt costs its own samples only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from rolloutfleet.agent.answers import NotFinite, NotOurs, sample_of
from rolloutfleet.agent.errors import AgentError, unavailable
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.slots import Slots, Stop
from rolloutfleet.api.agent import Generate, Generated, SamplingParams
from rolloutfleet.api.samples import Sample, SampleGroup, SampleStatus
from rolloutfleet.engine.errors import EngineError, EngineRefused
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.plan.concurrency import FIRST_PER_ENGINE, per_engine
from rolloutfleet.plan.stitching import restarted, stitch, tokens_left

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
LAST_PAUSE_SECONDS = 5.0
LOOK_AT_LOADS_SECONDS = 1.0
ABORT_AGAIN_SECONDS = 0.5
BAD_REQUEST = frozenset({400, 404, 405, 413, 422})
"""The request itself is wrong: the next engine would refuse it too, or die of it."""


@dataclass(frozen=True)
class Asking:
    """How samples are asked for."""

    params: SamplingParams
    stop: Stop = field(default_factory=Stop)
    to_continue: Callable[[Sample], Sample] = restarted
    """What a sample that was aborted goes on with."""
    seconds: float = math.inf
    """For the sample, all attempts together; after them it is aborted."""
    request_seconds: float = 3600.0
    """Of silence, until an attempt is given up."""
    attempts: int | None = None
    """That may fail while engines are routable; the sample has failed with the last of them. None: any number."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request, for example image_data."""
    keep_meta: tuple[str, ...] = ()
    """Fields of meta_info that are kept."""
    direct: bool = False
    """Ask engines and not the router, which drops some fields of requests and answers."""


class Sampler:
    def __init__(
        self, *, fleet: Fleet, router: Callable[[str], RouterClient], engine: Callable[[str], EngineClient]
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._engine = engine
        self._last_router: RouterClient | None = None
        self._committed: list[int] = []
        """Versions in the order in which they were committed, as far as this agent has seen it."""
        self._not_ours = 0
        self._noise = ""
        """Weights of which it was told that they make noise."""
        self._slots = Slots()
        self._per_engine = FIRST_PER_ENGINE
        self._open_on: dict[str, int] = {}
        """Requests that go to engines directly, by URL."""

    @property
    def open_requests(self) -> int:
        return self._slots.open

    async def watch(self) -> None:
        """Keeps the bound on open requests at what engines bear. For ever; cancelled with the process."""
        while True:
            if self._slots.open:
                await self._look_at_loads()
            self._bound()
            await asyncio.sleep(LOOK_AT_LOADS_SECONDS)

    async def _look_at_loads(self) -> None:
        engines = [self._engine(url) for url in self._fleet.routable_urls()]
        loads = await asyncio.gather(*(engine.load() for engine in engines), return_exceptions=True)
        waiting = [load.waiting for load in loads if not isinstance(load, BaseException)]
        self._per_engine = per_engine(
            self._per_engine, open_requests=self._slots.open, engines=self._fleet.routable, waiting=waiting
        )

    def _bound(self) -> None:
        self._slots.limit = max(self._fleet.routable, 1) * self._per_engine
        self._slots.admit()

    async def generate(self, request: Generate) -> Generated:
        """Groups in the order of the prompts. Raises AgentError while the server does not exist."""
        started = time.monotonic()
        await self.ready()
        prompts = [Sample(group_index=number, prompt_tokens=prompt) for number, prompt in enumerate(request.prompts)]
        asking = Asking(request.sampling_params, seconds=request.timeout_seconds)
        tasks = [
            [asyncio.ensure_future(self.complete(prompt.changed(index=i), asking)) for i in range(request.n)]
            for prompt in prompts
        ]
        try:
            groups = [
                SampleGroup(prompt=prompt, samples=list(await asyncio.gather(*group)))
                for prompt, group in zip(request.prompts, tasks, strict=True)
            ]
        finally:
            for group in tasks:
                for task in group:
                    task.cancel()  # a client that hung up: closing the connection makes the engine abort
        return Generated(groups=groups, seconds=round(time.monotonic() - started, 4))

    async def ready(self) -> None:
        """Raises AgentError while there is nobody to ask."""
        await self._fleet.refresh()
        self._current_router()

    def _current_router(self) -> RouterClient:
        server = self._fleet.connected()
        if server.status.router is None:
            raise unavailable("NoRouter", f"RolloutServer {server.name} has no router yet")
        url = server.status.router.url
        if self._last_router is None or self._last_router.url != url:
            self._last_router = self._router(url)
        return self._last_router

    async def complete(self, sample: Sample, asking: Asking) -> Sample:
        """The sample at its end: finished, failed, or aborted, with all of its tokens, where it was stopped or ran out
        of time. It may have tokens already."""
        started, pause, error, failures, attempts = time.monotonic(), FIRST_PAUSE_SECONDS, "", 0, sample.attempts
        before, deadline = sample.seconds, started + asking.seconds
        self._bound()  # engines may have come since the last look

        def ended(status: SampleStatus, why: str) -> Sample:
            spent = round(before + time.monotonic() - started, 4)
            return sample.changed(status=status, error=why, attempts=attempts, seconds=spent)

        while not asking.stop.said and (left := deadline - time.monotonic()) > 0:
            if tokens_left(sample, asking.params.max_new_tokens) == 0:
                return ended(SampleStatus.TRUNCATED, "")
            if not await self._slots.take(asking.stop, None if left == math.inf else left):
                break
            try:
                left = deadline - time.monotonic()  # anew: the slot may have been waited for
                if left <= 0:
                    break
                attempts += 1
                asked_at = self._commits()
                part = await self._ask(sample, asking, min(left, asking.request_seconds))
            except EngineRefused as refused:
                if refused.status in BAD_REQUEST:
                    return ended(SampleStatus.FAILED, str(refused))
                error = str(refused)
            except NotFinite as noise:
                if await self._rightful(noise.versions, asked_at):
                    await self._tell(noise)
                    return ended(SampleStatus.FAILED, str(noise))  # all engines have these weights
                error = str(noise)
            except NotOurs as stranger:
                error = str(stranger)
                self._count(stranger)
            except (EngineError, AgentError, ValueError) as problem:
                # That our own time ran out tells less than what went wrong before.
                if not error or time.monotonic() < deadline:
                    error = str(problem)
            else:
                if not await self._rightful({span.version for span in part.weight_versions}, asked_at):
                    error = "sampled by weights that were never committed, or had been replaced before it was asked for"
                elif part.status is not SampleStatus.ABORTED:
                    sample = stitch(sample, part)
                    return ended(sample.status, sample.error)
                else:
                    failures, pause = (0, FIRST_PAUSE_SECONDS) if part.response_tokens else (failures, pause)
                    error = part.error or "aborted"
                    sample = stitch(sample, part)
                    if asking.stop.said:
                        break
                    sample = asking.to_continue(sample)
            finally:
                self._slots.give_back()
            failures += self._fleet.routable > 0
            if asking.attempts is not None and failures >= asking.attempts:
                return ended(SampleStatus.FAILED, f"{failures} attempts failed: {error}")
            await asking.stop.pause(min(pause, max(deadline - time.monotonic(), 0)))
            pause = min(pause * 2, LAST_PAUSE_SECONDS)
        if asking.stop.said:
            return ended(SampleStatus.ABORTED, "stopped")
        return ended(SampleStatus.ABORTED, f"not finished in {asking.seconds:g} s: {error or 'no attempt was made'}")

    async def _ask(self, sample: Sample, asking: Asking, seconds: float) -> Sample:
        """One request: the part of the response that it gave."""
        params = asking.params.model_dump(exclude_none=True, exclude_defaults=True)
        done = sample.response_length
        if "min_new_tokens" in params:
            params["min_new_tokens"] = max(asking.params.min_new_tokens - done, 0)
        payload = {
            # Fresh and of one length: its scheduler aborts by prefix, and SGLang refuses an id that still runs.
            "rid": asking.stop.prefix + uuid.uuid4().hex[:20],
            "input_ids": sample.tokens,
            "sampling_params": params | {"max_new_tokens": asking.params.max_new_tokens - done},
            "return_logprob": True,
            # Engines keep the cache of a prefix through an update in place: what the old weights made of it is
            # nothing for the new ones.
            "extra_key": self._fleet.weights_key,
            **asking.inputs,
        }
        started = time.monotonic()
        if asking.direct:
            url = self._engine_for(sample)
            self._open_on[url] = self._open_on.get(url, 0) + 1
            try:
                answer = await self._engine(url).generate(payload, seconds=seconds)
            finally:
                self._open_on[url] -= 1
        else:
            router = self._current_router()
            answer = await router.generate(payload, seconds=seconds, routing_key=sample.session_id or None)
        empty = Sample(
            epoch=sample.epoch,
            group_index=sample.group_index,
            index=sample.index,
            prompt_tokens=payload["input_ids"],
            attempts=1,
            seconds=round(time.monotonic() - started, 4),
        )
        return sample_of(answer, empty, fleet=self._fleet.id, keep_meta=asking.keep_meta)

    def _engine_for(self, sample: Sample) -> str:
        """The one with the fewest requests of ours; with a session the same one as long as it is routable."""
        urls = self._fleet.routable_urls()
        if not urls:
            raise EngineRefused(f"RolloutServer {self._fleet.name}: no engine is routable", status=503)
        if sample.session_id:
            return max(urls, key=lambda url: zlib.crc32(f"{sample.session_id} {url}".encode()))  # rendezvous hashing
        return min(urls, key=lambda url: self._open_on.get(url, 0))

    async def abort(self, stop: Stop, ended: asyncio.Future[Any]) -> None:
        """Make engines end all requests that `stop` concerns, until `ended` is done: those that were on their way when
        it was said come late."""

        async def tell(engine: EngineClient, paired: bool) -> None:
            while not ended.done():  # bounded by the collector, which cancels what does not end
                with contextlib.suppress(EngineError):
                    await engine.abort(stop.prefix, paired=paired)
                await asyncio.wait([ended], timeout=ABORT_AGAIN_SECONDS)

        async with asyncio.TaskGroup() as tasks:  # an engine that hangs keeps the others from nothing
            for group, engine in self._fleet.trained_engines():
                if engine.url:
                    tasks.create_task(tell(self._engine(engine.url), group.spec.role in ("Prefill", "Decode")))

    def _count(self, stranger: NotOurs) -> None:
        """Told ever more rarely: a router that cannot be reached may send us strangers for hours."""
        self._not_ours += 1
        if self._not_ours.bit_count() == 1:
            logger.warning("%s: answer %d that is dropped: %s", self._fleet.name, self._not_ours, stranger)

    async def _tell(self, noise: NotFinite) -> None:
        """Once for each update: an event on the RolloutServer."""
        if self._noise != self._fleet.weights_key:
            self._noise = self._fleet.weights_key
            await self._fleet.warn_on_server("NonFiniteSamples", str(noise))

    def _commits(self) -> int:
        """Where in the history of commits we are."""
        version = self._fleet.committed_version if self._fleet.server else 0
        if not self._committed or (self._fleet.server and self._committed[-1] != version):
            self._committed.append(version)
        return len(self._committed) - 1

    async def _rightful(self, versions: Set[int], asked_at: int) -> bool:
        """Whether they are those of the weights that were committed when it was asked for, or of later ones. An engine
        that an update has left behind may be routed to until every router knows of it."""
        self._commits()
        if not versions <= {*self._committed[asked_at:]}:
            await self._fleet.refresh()  # committed by another agent, or a moment ago
            self._commits()
        return versions <= {*self._committed[asked_at:]}
