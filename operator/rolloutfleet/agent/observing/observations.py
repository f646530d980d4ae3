"""What happened to the samples of one role, as far as somebody who watches wants to know it.

The collection loop tells, in the event loop's thread; nothing here waits, fails for what a sample looks like, or grows
with the run.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, pstdev

from rolloutfleet.agent.collection.observer import Evaluation, Observer
from rolloutfleet.agent.observing.measures import Histogram, all_equal, bars, repetition, rewards_of
from rolloutfleet.agent.observing.recent import MAX_SAMPLES, Recent, RecentSample
from rolloutfleet.agent.observing.throughput import Meter
from rolloutfleet.api.samples import Sample, SampleStatus
from rolloutfleet.api.samples_view import EvaluationView, QueueView, Rates, SamplesView, StepView
from rolloutfleet.plan.stitching import staleness

MAX_STEPS = 400
MAX_EVALUATIONS = 64
REMEMBERED = 2048
"""Samples and rewards that rates and histograms are of."""
REASONS = 32
OTHER = "other"
"""In place of a reason, once REASONS different ones were met: a filter may make them of rewards."""
REPETITIVE = 0.5
TO_BE_CONTINUED = frozenset({SampleStatus.PENDING, SampleStatus.ABORTED})

TOKEN_BUCKETS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
SECONDS_BUCKETS = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
REWARD_BUCKETS = (-10, -5, -2, -1, -0.5, -0.1, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 2, 5, 10)


@dataclass
class Counts:
    """Since the agent began."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    trained_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    repetitive: int = 0
    groups: int = 0
    zero_variance: int = 0
    passed: int = 0
    judged: int = 0


@dataclass(frozen=True)
class _Ended:
    """What the rates need of a sample."""

    truncated: bool
    failed: bool
    repetitive: bool
    cached: int
    prompt: int
    accepted: int
    drafted: int
    verified: int
    completed: int


class Observations(Observer):
    """Of one role. Not for several threads."""

    def __init__(self, *, pass_reward: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`pass_reward`: from which reward on a sample passes. `clock`: seconds that do not go back."""
        self._reward_key = ""
        self._trainer = ""
        self._pass_reward = pass_reward
        self._clock = clock
        self._began = clock()
        self._run = uuid.uuid4().hex
        self._recent = Recent()
        self._meter = Meter()
        self._last: deque[_Ended] = deque(maxlen=REMEMBERED)
        self._last_rewards: deque[float] = deque(maxlen=REMEMBERED)
        self._last_equal: deque[bool] = deque(maxlen=REMEMBERED)
        self._steps: dict[int, StepView] = {}
        self._staleness: dict[int, Counter[int]] = {}
        """By step, as long as the step is kept."""

        self.ended: Counter[SampleStatus] = Counter()
        self.dropped: Counter[str] = Counter()
        self.counts = Counts()
        self.response_tokens = Histogram(*TOKEN_BUCKETS)
        self.seconds = Histogram(*SECONDS_BUCKETS)
        self.rewards = Histogram(*REWARD_BUCKETS)
        self.staleness = Histogram(*STALENESS_BUCKETS)
        self._queue: tuple[int, int, int] | None = None
        self._evaluations: deque[tuple[float, EvaluationView]] = deque(maxlen=MAX_EVALUATIONS)
        """With the moment when it ended."""

    @property
    def last_evaluations(self) -> dict[str, EvaluationView]:
        """By name."""
        return {evaluation.name: evaluation for _, evaluation in self._evaluations}

    @property
    def last_step(self) -> StepView | None:
        return self._steps[max(self._steps)] if self._steps else None

    @property
    def last_trained(self) -> int | None:
        return max((step for step, view in self._steps.items() if view.trained), default=None)

    # What the collection loop tells

    def collection_began(self, *, trainer: str, step: int, reward_key: str) -> None:
        """`step`: the last one in the checkpoint that a new life of the trainer starts from; what came after it is
        handed out again. `reward_key`: which part of a reward that has parts is shown."""
        self._reward_key = reward_key
        if trainer != self._trainer:
            self._trainer = trainer
            for later in [known for known in self._steps if known > step]:
                del self._steps[later], self._staleness[later]
            self.step_trained(step)

    def sample_ended(self, sample: Sample) -> None:
        """It ended, or was stopped and may be continued: then its tokens and times count later, once and all."""
        now = self._clock()
        repeated = repetition(sample.response_tokens)
        self.ended[sample.status] += 1
        self._recent.add(RecentSample(sample, ended_at=now, repetition=repeated))
        if sample.status in TO_BE_CONTINUED:
            return
        spec, cache, counts = sample.spec_info, sample.prefix_cache_info, self.counts
        repetitive = repeated > REPETITIVE
        self._meter.add(now, tokens=sample.response_length)
        self.response_tokens.observe(sample.response_length)
        self.seconds.observe(sample.seconds)
        counts.prompt_tokens += cache.total_prompt_tokens
        counts.cached_tokens += cache.cached_tokens
        counts.draft_tokens += spec.spec_draft_token_num
        counts.accepted_tokens += spec.spec_accept_token_num
        counts.repetitive += repetitive
        self._last.append(
            _Ended(
                truncated=sample.status is SampleStatus.TRUNCATED,
                failed=sample.status is SampleStatus.FAILED,
                repetitive=repetitive,
                cached=cache.cached_tokens,
                prompt=cache.total_prompt_tokens,
                accepted=spec.spec_accept_token_num,
                drafted=spec.spec_draft_token_num,
                verified=spec.spec_verify_ct,
                completed=spec.completion_token_num,
            )
        )

    def group_finished(self, group: Sequence[Sample]) -> None:
        """All its samples have ended and have their rewards, and no filter has dropped it."""
        rewards = self._rewards(group)
        equal = all_equal(rewards)
        self.counts.groups += 1
        self.counts.zero_variance += equal
        self.counts.judged += len(rewards)
        self.counts.passed += sum(reward >= self._pass_reward for reward in rewards)
        self._last_equal.append(equal)
        self._last_rewards.extend(rewards)
        for reward in rewards:
            self.rewards.observe(reward)
        self._recent.judged(group)

    def group_dropped(self, group: Sequence[Sample], reason: str) -> None:
        """It is not trained: by a filter, for its age, or since nobody could generate it."""
        known = reason in self.dropped or len(self.dropped) < REASONS
        self.dropped[reason if known else OTHER] += 1
        self._recent.judged(group, dropped=reason)

    def step_leased(self, step: int, groups: Sequence[Sequence[Sample]], version: int) -> None:
        """A step has this batch and starts from the weights `version`. The same step again replaces the first."""
        samples = [sample for group in groups for sample in group]
        rewards = [self._rewards(group) for group in groups]
        flat = [reward for of_group in rewards for reward in of_group]
        stale = Counter(staleness(sample, version) for sample in samples)
        trained_tokens = sum(sample.effective_response_length for sample in samples)
        if step not in self._steps:
            self.counts.trained_tokens += trained_tokens
            for versions in stale.elements():
                self.staleness.observe(versions)
        self._staleness[step] = stale
        self._steps[step] = StepView(
            step=step,
            version=version,
            groups=len(groups),
            samples=len(samples),
            trained_tokens=trained_tokens,
            reward_mean=fmean(flat) if flat else None,
            reward_std=pstdev(flat) if flat else None,
            pass_rate=self._passed(flat),
            pass_at_n=self._passed([max(of_group) for of_group in rewards if of_group]),
            zero_variance=sum(map(all_equal, rewards)),
            response_length=_mean(sample.response_length for sample in samples),
            truncated=_mean(sample.status is SampleStatus.TRUNCATED for sample in samples),
            staleness_mean=_mean(stale.elements()),
            staleness_max=max(stale, default=0),
        )
        while len(self._steps) > MAX_STEPS:
            oldest = min(self._steps)
            del self._steps[oldest], self._staleness[oldest]

    def step_trained(self, step: int) -> None:
        """A checkpoint has all steps up to this one."""
        for known, view in self._steps.items():
            if known <= step and not view.trained:
                self._steps[known] = view.model_copy(update={"trained": True})

    def evaluation_ended(self, evaluation: Evaluation) -> None:
        """Nothing of it counts among the samples of training."""
        groups = [[sample for sample in group if sample.finished] for group in evaluation.groups]
        samples = [sample for group in groups for sample in group]
        rewards = [rewards_of(group, evaluation.reward_key) for group in groups]
        flat = [reward for of_group in rewards for reward in of_group]
        view = EvaluationView(
            name=evaluation.name,
            version=evaluation.version,
            ago=0.0,
            seconds=evaluation.seconds,
            prompts=len(evaluation.groups),
            samples=len(samples),
            failed=evaluation.failed,
            reward_mean=fmean(flat) if flat else None,
            pass_rate=self._passed(flat),
            pass_at_n=self._passed([max(of_group) for of_group in rewards if of_group]),
            response_length=_mean(sample.response_length for sample in samples),
            truncated=_mean(sample.status is SampleStatus.TRUNCATED for sample in samples),
        )
        self._evaluations.append((self._clock(), view))

    def queue(self, *, open: int, finished: int, running: int) -> None:
        """How many groups stand where at this moment, and how many requests run."""
        self._queue = (open, finished, running)

    @property
    def queue_lengths(self) -> QueueView | None:
        if self._queue is None:
            return None
        open, finished, running = self._queue
        leased = sum(step.groups for step in self._steps.values() if not step.trained)
        return QueueView(open=open, running=running, finished=finished, leased=leased)

    # What is shown

    def view(self, *, role: str, server: str, after: int = 0, limit: int = MAX_SAMPLES) -> SamplesView:
        """`after`, `limit`: of the samples, those that have changed since that number, and how many at most."""
        now = self._clock()
        return SamplesView(
            role=role,
            server=server,
            run=self._run,
            number=self._recent.number,
            since=now - self._began,
            ended=dict(self.ended),
            groups=self.counts.groups,
            dropped=dict(self.dropped),
            throughput=self._meter.view(now),
            rates=self._rates(),
            rewards=bars(self._last_rewards),
            staleness=dict(sorted(sum(self._staleness.values(), Counter()).items())),
            pass_reward=self._pass_reward,
            steps=[self._steps[step] for step in sorted(self._steps)],
            evaluations=[
                view.model_copy(update={"ago": round(now - ended_at, 1)}) for ended_at, view in self._evaluations
            ],
            queue=self.queue_lengths,
            samples=list(islice(self._recent.views(now, after=after, reward_key=self._reward_key), limit)),
        )

    def _rates(self) -> Rates:
        last = self._last
        return Rates(
            samples=len(last),
            truncated=_share([ended.truncated for ended in last]),
            failed=_share([ended.failed for ended in last]),
            repetitive=_share([ended.repetitive for ended in last]),
            prefix_cache_hit=_ratio(sum(e.cached for e in last), sum(e.prompt for e in last)),
            spec_accepted=_ratio(sum(e.accepted for e in last), sum(e.drafted for e in last)),
            spec_accept_length=_ratio(
                sum(e.completed for e in last if e.verified), sum(e.verified for e in last if e.verified)
            ),
            zero_variance=_share(self._last_equal),
        )

    def _rewards(self, group: Sequence[Sample]) -> list[float]:
        return rewards_of(group, self._reward_key)

    def _passed(self, rewards: Sequence[float]) -> float | None:
        return _share([reward >= self._pass_reward for reward in rewards])


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0
