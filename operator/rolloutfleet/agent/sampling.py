"""Groups of samples through the router: bounded, retried, and checked for who answered.

Which engine answers is the router's choice, and a router may list an address that belongs to another fleet's engine
by now. What this agent guarantees is that no sample of another fleet gets through and none of a weight version that was
never committed, that each sample is delivered once, and that one bad prompt costs its own samples only.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

from rolloutfleet.agent.errors import unavailable
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.api.agent import Generate, Generated
from rolloutfleet.api.samples import PrefixCacheInfo, Sample, SampleGroup, SampleStatus, SpecInfo, Timings, VersionSpan
from rolloutfleet.api.weight_labels import parse_label
from rolloutfleet.engine.errors import EngineError, EngineRefused
from rolloutfleet.engine.router import RouterClient

logger = logging.getLogger(__name__)

CONCURRENCY_PER_ENGINE = 64
FIRST_PAUSE_SECONDS = 0.1
LAST_PAUSE_SECONDS = 5.0
BAD_REQUEST = frozenset({400, 404, 405, 413, 422})
"""The request itself is wrong: the next engine would refuse it too, or die of it."""
STATUSES = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}
"""By SGLang's finish reason."""


class Sampler:
    def __init__(self, *, fleet: Fleet, router: Callable[[str], RouterClient]) -> None:
        self._fleet = fleet
        self._router = router
        self._committed: set[int] = {0}
        self._not_ours = 0
        self._running = 0
        self._freed = asyncio.Condition()

    async def generate(self, request: Generate) -> Generated:
        """Groups in the order of the prompts. Raises AgentError while the server does not exist."""
        started = time.monotonic()
        await self._fleet.refresh()
        server = self._fleet.connected()
        if server.status.router is None:
            raise unavailable("NoRouter", f"RolloutServer {server.name} has no router yet")
        router = self._router(server.status.router.url)
        deadline = started + request.timeout_seconds
        prompts = [Sample(group_index=number, prompt_tokens=prompt) for number, prompt in enumerate(request.prompts)]
        tasks = [
            [
                asyncio.ensure_future(self._sample(router, prompt.changed(index=index), request, deadline))
                for index in range(request.n)
            ]
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

    async def _sample(self, router: RouterClient, empty: Sample, request: Generate, deadline: float) -> Sample:
        started, attempts, pause, error = time.monotonic(), 0, FIRST_PAUSE_SECONDS, ""

        def ended(status: SampleStatus, why: str) -> Sample:
            spent = round(time.monotonic() - started, 4)
            return empty.changed(status=status, error=why, attempts=attempts, seconds=spent)

        while (left := deadline - time.monotonic()) > 0:
            payload = {
                # Fresh and of one length: SGLang aborts by prefix, and refuses an id that still runs.
                "rid": uuid.uuid4().hex,
                "input_ids": empty.prompt_tokens,
                "sampling_params": request.sampling_params.model_dump(exclude_none=True, exclude_defaults=True)
                | {"max_new_tokens": request.sampling_params.max_new_tokens},
                "return_logprob": True,
                # Engines keep the cache of a prefix through an update in place: what the old weights made of it is
                # nothing for the new ones.
                "extra_key": self._fleet.weights_key,
            }
            try:
                await self._take_slot()
                try:
                    left = deadline - time.monotonic()  # anew: the slot may have been waited for
                    if left <= 0:
                        break
                    attempts += 1
                    answer = await router.generate(payload, seconds=left)
                finally:
                    await self._free_slot()
                spent = round(time.monotonic() - started, 4)
                sample = sample_of(answer, empty.changed(attempts=attempts, seconds=spent), fleet=self._fleet.id)
            except EngineRefused as refused:
                if refused.status in BAD_REQUEST:
                    return ended(SampleStatus.FAILED, str(refused))
                error = str(refused)
            except NotOurs as stranger:
                error = str(stranger)
                self._count(stranger)
            except (EngineError, ValueError) as problem:
                # That our own time ran out tells less than what went wrong before.
                if not error or time.monotonic() < deadline:
                    error = str(problem)
            else:
                if sample.status != "aborted" and await self._all_committed(sample):
                    return sample
                error = sample.error or "sampled by weights that were never committed"
            await asyncio.sleep(min(pause, max(deadline - time.monotonic(), 0)))
            pause = min(pause * 2, LAST_PAUSE_SECONDS)
        error = error or "no attempt was made"
        return ended(SampleStatus.ABORTED, f"not finished in {request.timeout_seconds:g} s: {error}")

    def _count(self, stranger: NotOurs) -> None:
        """Told ever more rarely: a router that cannot be reached may send us strangers for hours."""
        self._not_ours += 1
        if self._not_ours.bit_count() == 1:
            logger.warning("%s: answer %d that is dropped: %s", self._fleet.name, self._not_ours, stranger)

    async def _all_committed(self, sample: Sample) -> bool:
        versions = {span.version for span in sample.weight_versions}
        self._committed.add(self._fleet.committed_version if self._fleet.server else 0)
        if not versions <= self._committed:
            await self._fleet.refresh()  # committed by another agent, or a moment ago
            if self._fleet.server is not None:
                self._committed.add(self._fleet.committed_version)
        return versions <= self._committed

    async def _take_slot(self) -> None:
        """As many at once as the routable engines bear, as that number changes."""
        async with self._freed:
            await self._freed.wait_for(lambda: self._running < max(self._fleet.routable, 1) * CONCURRENCY_PER_ENGINE)
            self._running += 1

    async def _free_slot(self) -> None:
        async with self._freed:
            self._running -= 1
            self._freed.notify_all()


class NotOurs(ValueError):
    """The answer is not signed with a version of this fleet's weights."""


def sample_of(answer: dict[str, Any], asked: Sample, *, fleet: str) -> Sample:
    """`asked` with what SGLang answered to its prompt. Raises NotOurs, or another ValueError when that is no usable
    answer at all."""
    try:
        return _sample_of(answer, asked, fleet)
    except (TypeError, AttributeError, KeyError, IndexError) as error:
        raise ValueError(f"not an answer of SGLang: {type(error).__name__} {error}") from error


def _sample_of(answer: dict[str, Any], asked: Sample, fleet: str) -> Sample:
    meta = answer.get("meta_info") or {}
    entries = meta.get("output_token_logprobs") or []
    tokens = [int(entry[1]) for entry in entries]
    if not tokens and meta.get("completion_tokens"):
        raise ValueError(f"{meta['completion_tokens']} tokens without log probabilities")
    finish = meta.get("finish_reason") or {}
    kind = finish.get("type")
    status = STATUSES.get(str(kind))
    if status is None:
        raise ValueError(f"unknown finish reason {kind!r}")
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": len(tokens)}]
    versions = []
    for span in spans:
        label = parse_label(str(span.get("version")))
        if label is None or not fleet or label.fleet != fleet:
            said = span.get("version")
            raise NotOurs(f"not ours: answered by an engine whose weight version is {said!r}, not one of @{fleet}")
        versions.append(VersionSpan(version=label.version, start=int(span["start"]), end=int(span["end"])))
    return asked.changed(
        response_tokens=tokens,
        response=answer.get("text") or "",
        rollout_log_probs=[float(entry[0]) for entry in entries],
        loss_mask=None,
        weight_versions=versions,
        status=status,
        error=str(finish.get("message") or "") if status is SampleStatus.ABORTED else "",
        timings=Timings(generation=meta.get("e2e_latency") or 0.0, queue=meta.get("queue_time") or 0.0),
        spec_info=SpecInfo(
            **{name: meta.get(name) or 0 for name in SpecInfo.model_fields if name != "completion_token_num"},
            completion_token_num=meta.get("completion_tokens") or 0,
        ),
        prefix_cache_info=PrefixCacheInfo(
            cached_tokens=meta.get("cached_tokens") or 0, total_prompt_tokens=meta.get("prompt_tokens") or 0
        ),
    )
