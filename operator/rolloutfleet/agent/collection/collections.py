"""What one role collects: at most one run at a time, and evaluations beside it."""

from __future__ import annotations

import asyncio
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from rolloutfleet.agent.collection.collector import Collector
from rolloutfleet.agent.collection.engines import Engines, read_turn
from rolloutfleet.agent.collection.group import Making, finish_group
from rolloutfleet.agent.collection.judging import Judge
from rolloutfleet.agent.collection.observer import Evaluation, Observer
from rolloutfleet.agent.collection.prompts import WorkSource
from rolloutfleet.agent.collection.run import CollectionRun
from rolloutfleet.agent.data.errors import DataError
from rolloutfleet.agent.data.source import Prompts
from rolloutfleet.agent.errors import AgentError, invalid
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.plugins.errors import PluginError
from rolloutfleet.agent.plugins.kinds import Kind
from rolloutfleet.agent.sampling import Asking, Sampler
from rolloutfleet.agent.store.address import open_store
from rolloutfleet.agent.store.database import Database
from rolloutfleet.agent.store.handover import Handover
from rolloutfleet.agent.store.ledger import Claim, Ledger, PromptId, Run
from rolloutfleet.agent.store.worker import LedgerWorker
from rolloutfleet.api.collection import Collection, CollectionView, Evaluate, Evaluated
from rolloutfleet.api.data import DataSource
from rolloutfleet.api.sample_codec import DamagedSample, encode
from rolloutfleet.api.samples import Sample, SampleGroup, SampleStatus
from rolloutfleet.engine.http import Http
from rolloutfleet.plan.advantages import NEEDS_GROUPS, check
from rolloutfleet.plan.collecting import to_continue


class Collections:
    def __init__(
        self,
        *,
        fleet: Fleet,
        leadership: Leadership,
        sampler: Sampler,
        http: Http,
        agent: str,
        url: str,
        observer: Observer,
    ) -> None:
        """`agent`: its name among those that share a run. `url`: of this role in the agent's API."""
        self._fleet, self._leadership, self._sampler, self._http = fleet, leadership, sampler, http
        self._agent, self._url, self._observer = agent, url, observer
        self._current: CollectionRun | None = None
        self._changing = asyncio.Lock()
        self._tickets: dict[str, Callable[[], Asking]] = {}
        """How `generate` plug-ins ask, who come back through the agent's API."""

    @property
    def current(self) -> CollectionRun:
        """Raises AgentError (404): the agent is new, and is to be told again what to collect."""
        if self._current is None:
            text = f"nothing is collected for role {self._fleet.role}: PUT .../collection first"
            raise AgentError("NoCollection", text, status=404)
        return self._current

    async def begin(self, asked: Collection) -> CollectionView:
        """Raises AgentError, and nothing is collected then; StoreError."""
        async with self._changing:
            if self._current is not None and self._current.collection == asked:
                return await self._current.view()
            await self._fleet.refresh()
            fence = self._may_collect(asked)
            await self._end()
            self._current = await self._opened(asked, fence)
            return await self._current.view()

    async def end(self) -> None:
        async with self._changing:
            await self._end()

    async def _end(self) -> None:
        ending, self._current = self._current, None
        if ending is not None:
            await ending.close()
            self._tickets.pop(ending.ticket, None)

    def _may_collect(self, asked: Collection) -> int:
        """The fencing number under which this agent writes to the store. Raises AgentError."""
        server = self._fleet.connected()
        if asked.direct and any(group.spec.role in ("Prefill", "Decode") for group in self._fleet.groups):
            raise invalid("BadRequest", "direct: prefill and decode engines answer only as pairs, through the router")
        if asked.post_process is None:
            try:
                check(asked.estimator, asked.n)
            except ValueError as error:
                raise invalid("BadRequest", f"n: {error}") from error
            _require_different_samples(asked)
        if asked.shared or not server.spec.update_weights:
            return 0
        self._leadership.require()
        return self._leadership.lease.fence

    async def _opened(self, asked: Collection, fence: int) -> CollectionRun:
        prompts = await self._data(asked.data)
        judge = Judge(asked, tokenizer=asked.tokenizer, generate_seconds=asked.request_seconds, http=self._http)
        try:
            named = ((Kind.BUFFER_FILTER, asked.buffer_filter), (Kind.POST_PROCESS, asked.post_process))
            await judge.load(*(judge.plugin(kind, reference) for kind, reference in named if reference))
            database, ledger, handover = await asyncio.to_thread(self._store, asked, prompts, fence)
        except BaseException:
            await judge.close()
            prompts.close()
            raise

        def resume(sample: Sample) -> Sample:
            return to_continue(
                sample,
                version=self._fleet.committed_version,
                partial=asked.partial_rollout,
                max_staleness=asked.max_staleness,
                stale=asked.stale,
            )

        asking = Asking(
            asked.sampling_params,
            # What a user's function has in hands may not be taken back from it.
            to_continue=_as_it_is if judge.generates else resume,
            request_seconds=asked.request_seconds,
            attempts=asked.attempts,
            inputs=asked.request_fields,
            keep_meta=tuple(asked.keep_meta),
            direct=asked.direct,
        )
        worker = LedgerWorker(ledger)
        engines = Engines(url=self._url, ticket=uuid.uuid4().hex)
        collector = Collector(
            asked,
            ledger=worker,
            source=WorkSource(prompts, judge=judge, n=asked.n, max_prompt_tokens=asked.max_prompt_tokens),
            making=Making(asking, engines, self._sampler, judge, self._observer, asked.seed),
            resume=resume,
        )
        self._tickets[engines.ticket] = collector.asking
        self._observer.collection_began(trainer=asked.trainer, step=asked.step, reward_key=asked.reward_key)
        return CollectionRun(
            asked,
            fleet=self._fleet,
            database=database,
            ledger=worker,
            handover=handover,
            judge=judge,
            collector=collector,
            observer=self._observer,
            prompts=prompts,
            ticket=engines.ticket,
        )

    def _store(self, asked: Collection, prompts: Prompts, fence: int) -> tuple[Database, Ledger, Handover]:
        database = open_store(asked.store)
        try:
            run = Run(asked.run, source=prompts.fingerprint, epoch_size=len(prompts), epochs=asked.epochs)
            ledger = Ledger(database, run, agent=self._agent, fence=fence, shared=asked.shared)
            handover = Handover(database, run.name, trainer=asked.trainer, step=asked.step, consumer=asked.consumer)
        except BaseException:
            database.close()
            raise
        return database, ledger, handover

    async def _data(self, source: DataSource) -> Prompts:
        try:
            return await asyncio.to_thread(Prompts, source)
        except DataError as error:
            raise invalid("BadData", str(error), error.problems) from error

    async def complete(self, ticket: str, body: bytes) -> bytes:
        """One turn of a sample that a user's `generate` makes. Raises AgentError."""
        if ticket not in self._tickets:
            raise AgentError("NoCollection", "the collection that this sample belongs to has ended", status=404)
        try:
            turn, sample = read_turn(body)
        except (ValueError, struct.error, DamagedSample) as error:
            raise invalid("BadRequest", str(error)) from error
        asking = self._tickets[ticket]()
        asking = replace(asking, params=turn.sampling_params, inputs={**asking.inputs, **turn.inputs})
        sample = sample.changed(status=SampleStatus.PENDING, reward=None, error="")
        return encode(await self._sampler.complete(sample, asking))

    async def evaluate(self, asked: Evaluate) -> Evaluated:
        """Raises AgentError."""
        started = time.monotonic()
        await self._sampler.ready()
        version = self._fleet.committed_version
        prompts = await self._data(asked.data.model_copy(update={"shuffle": False}))
        judge = Judge(asked, tokenizer=asked.tokenizer, generate_seconds=asked.timeout_seconds, http=self._http)
        engines = Engines(url=self._url, ticket=uuid.uuid4().hex)
        asking = Asking(asked.sampling_params, seconds=asked.timeout_seconds)
        self._tickets[engines.ticket] = lambda: asking
        making = Making(asking, engines, self._sampler, judge, Observer(), asked.seed)
        try:
            await judge.load()
            source = WorkSource(prompts, judge=judge, n=asked.n, max_prompt_tokens=asked.max_prompt_tokens)
            claims = [Claim(PromptId(0, number), 0) for number in range(len(prompts))]
            work = await source.work(claims, {})
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(finish_group(one.samples, one.prompt, making, _forget))
                    for one in work
                    if not one.dropped
                ]
            groups = [task.result().samples for task in running]
        except PluginError as error:
            raise AgentError("EvaluationFailed", str(error), status=500) from error
        finally:
            del self._tickets[engines.ticket]
            await judge.close()
            prompts.close()
        samples = [sample for group in groups for sample in group]
        try:
            rewards = [value for sample in samples if (value := sample.reward_value(asked.reward_key)) is not None]
        except ValueError as error:  # rewards of several parts, and none of them is the one
            raise invalid("BadRequest", str(error)) from error
        failed = len(prompts) * asked.n - sum(sample.finished for sample in samples)
        seconds = round(time.monotonic() - started, 4)
        self._observer.evaluation_ended(
            Evaluation(asked.shown_name, version, groups, failed, asked.reward_key, seconds)
        )
        return Evaluated(
            groups=[SampleGroup(prompt=group[0].prompt_tokens, samples=group) for group in groups if group],
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            truncated=sum(sample.status is SampleStatus.TRUNCATED for sample in samples),
            failed=failed,
            seconds=seconds,
        )


def _require_different_samples(asked: Collection) -> None:
    """Raises AgentError. What a user's `generate` does with the parameters nobody knows."""
    params = asked.sampling_params
    if asked.generate is None and asked.estimator in NEEDS_GROUPS:
        for name, value, greedy in (("temperature", params.temperature, 0), ("top_k", params.top_k, 1)):
            if value == greedy:
                text = f"{greedy} makes all samples of a prompt the same, and {asked.estimator.value} compares them"
                raise invalid("BadRequest", f"sampling_params.{name}: {text}")


def _forget(_: Sample) -> None:
    """Nothing of an evaluation is kept."""


def _as_it_is(sample: Sample) -> Sample:
    return sample
