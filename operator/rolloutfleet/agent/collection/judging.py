"""Plug-ins of a collection: loaded before the first request, asked with time-outs, and their failures kept to the
samples that they were about."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rolloutfleet.agent.errors import AgentError, invalid
from rolloutfleet.agent.plugins.errors import PluginError
from rolloutfleet.agent.plugins.kinds import Kind, Verdict
from rolloutfleet.agent.plugins.remote import RemoteReward
from rolloutfleet.agent.plugins.runner import Plugin, PluginRunner
from rolloutfleet.api.collection import Judging
from rolloutfleet.api.samples import Sample
from rolloutfleet.engine.http import Http
from rolloutfleet.plan.advantages import same
from rolloutfleet.plan.collecting import failed, trajectories

logger = logging.getLogger(__name__)

ZERO_VARIANCE = "zero_variance"
TOKENIZE = "rolloutfleet.agent.plugins.tokenizing:tokenize"
DETOKENIZE = "rolloutfleet.agent.plugins.tokenizing:detokenize"
TOKENIZE_SECONDS = 120.0


@dataclass(frozen=True)
class Judged:
    samples: list[Sample]
    verdict: Verdict


class Judge:
    def __init__(self, judging: Judging, *, tokenizer: str, generate_seconds: float, http: Http) -> None:
        self._judging = judging
        self._tokenizer = tokenizer
        self._generate_seconds = generate_seconds
        self._runner = PluginRunner(folders=judging.plugin_folders)
        url = judging.reward if judging.reward and judging.reward.startswith(("http://", "https://")) else None
        self._remote = RemoteReward(url, http=http, timeout_seconds=judging.plugin_seconds) if url else None

    @property
    def generates(self) -> bool:
        return self._judging.generate is not None

    @property
    def judges(self) -> bool:
        return self._judging.reward is not None

    async def load(self, *others: Plugin) -> None:
        """All of them, so that a wrong name is told now and not in the middle of the run. Raises AgentError."""
        for plugin in [*self._plugins(), *others]:
            try:
                await self._runner.load(plugin)
            except PluginError as error:
                raise invalid("PluginNotFound", str(error), [error.details] if error.details else None) from error

    def _plugins(self) -> list[Plugin]:
        judging = self._judging
        named: list[tuple[Kind, str | None]] = [
            (Kind.GENERATE, judging.generate),
            (Kind.REWARD, judging.reward if self._remote is None else None),
            (Kind.GROUP_REWARD, judging.group_reward),
            *((Kind.SAMPLE_HOOK, hook) for hook in judging.sample_hooks),
            *((Kind.FILTER, name) for name in judging.filters if name != ZERO_VARIANCE),
        ]
        if self._tokenizer:
            named += [(Kind.TOKENIZE, TOKENIZE), (Kind.DETOKENIZE, DETOKENIZE)]
        return [self.plugin(kind, reference) for kind, reference in named if reference]

    def plugin(self, kind: Kind, reference: str) -> Plugin:
        seconds = {Kind.GENERATE: self._generate_seconds, Kind.TOKENIZE: TOKENIZE_SECONDS}
        return Plugin(kind, reference, seconds.get(kind, self._judging.plugin_seconds))

    async def call(self, kind: Kind, reference: str, *arguments: Any) -> Any:
        """Raises PluginError."""
        return await self._runner.call(self.plugin(kind, reference), *arguments)

    async def close(self) -> None:
        await self._runner.close()

    async def tokenize(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Raises AgentError, PluginError."""
        if not self._tokenizer:
            raise AgentError(
                "NoTokenizer",
                "data: its prompts are texts or messages; set `tokenizer`, or give token ids",
                status=422,
            )
        tokens: list[list[int]] = await self.call(Kind.TOKENIZE, TOKENIZE, self._tokenizer, list(prompts))
        return tokens

    async def generate(self, sample: Sample, params: dict[str, Any], engines: object) -> list[Sample]:
        """All parts of what the user's function made of the sample; failed where it raised."""
        assert self._judging.generate is not None
        try:
            made: list[Sample] = await self.call(Kind.GENERATE, self._judging.generate, sample, params, engines)
        except PluginError as error:
            return [failed(sample, str(error))]
        return made

    async def trajectory(self, parts: list[Sample]) -> list[Sample]:
        """Of one sample, or of the parts that were made of it: with text, hooks and reward; failed, all of it, where
        one of these raised. The last part is judged, and all have its reward."""
        try:
            parts = [await self._hooked(await self._with_text(part)) for part in parts]
            last = parts[-1]
            if not self.judges or not last.finished or last.reward is not None:
                return parts
            assert self._judging.reward is not None
            ask = self._remote or (lambda sample: self.call(Kind.REWARD, str(self._judging.reward), sample))
            reward = await ask(last)
            return [part.changed(reward=reward) if part.finished else part for part in parts]
        except (PluginError, ValueError) as error:
            return [failed(part, str(error)) for part in parts]

    async def _with_text(self, sample: Sample) -> Sample:
        if not self._tokenizer or sample.response or not sample.response_tokens:
            return sample
        (text,) = await self.call(Kind.DETOKENIZE, DETOKENIZE, self._tokenizer, [sample.response_tokens])
        return sample.changed(response=text)

    async def _hooked(self, sample: Sample) -> Sample:
        for hook in self._judging.sample_hooks:
            sample = await self.call(Kind.SAMPLE_HOOK, hook, sample)
        return sample

    async def group(self, samples: list[Sample]) -> Judged:
        """A finished group with the rewards that need all of it, and whether it is kept."""
        if self._judging.group_reward is not None:
            samples = await self._group_reward(samples, self._judging.group_reward)
        for name in self._judging.filters:
            try:
                verdict = self._zero_variance(samples) if name == ZERO_VARIANCE else await self._filter(name, samples)
            except (PluginError, ValueError) as error:
                logger.warning("filter %s: %s", name, error)
                verdict = Verdict(False, "filter_failed")
            if not verdict.keep:
                return Judged(samples, Verdict(False, verdict.reason or name))
        return Judged(samples, Verdict(True))

    async def _filter(self, name: str, samples: list[Sample]) -> Verdict:
        verdict: Verdict = await self.call(Kind.FILTER, name, samples)
        return verdict

    async def _group_reward(self, samples: list[Sample], reference: str) -> list[Sample]:
        """One a trajectory: its last part is judged, and all have its reward."""
        judged = [parts for parts in trajectories(samples) if samples[parts[-1]].finished]
        try:
            rewards = await self.call(Kind.GROUP_REWARD, reference, [samples[parts[-1]] for parts in judged])
        except PluginError as error:
            return [failed(sample, str(error)) if sample.finished else sample for sample in samples]
        samples = list(samples)
        for parts, reward in zip(judged, rewards, strict=True):
            for position in parts:
                if samples[position].finished:
                    samples[position] = samples[position].changed(reward=reward)
        return samples

    def _zero_variance(self, samples: list[Sample]) -> Verdict:
        """One reward a trajectory, as advantages see it."""
        key = self._judging.reward_key
        rewards = [samples[parts[-1]].reward_value(key) for parts in trajectories(samples)]
        return Verdict(not same(rewards), ZERO_VARIANCE)
