"""The samples that ended last: few, and of long ones only the head and the tail are shown."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rolloutfleet.agent.observing.measures import reward_of
from rolloutfleet.api.samples import Sample
from rolloutfleet.api.samples_view import SampleView, TokensView

MAX_SAMPLES = 64
MAX_TOKENS = 1 << 18
"""Prompts and responses of all that are kept; the newest is kept however long it is."""
HEAD, TAIL = 600, 300
"""Tokens that are shown of a longer response."""
CHARACTERS = 4000
"""That are shown of a prompt, and of a response."""

Key = tuple[int, int, int]


@dataclass(frozen=True)
class RecentSample:
    sample: Sample
    ended_at: float
    repetition: float
    dropped: str = ""
    number: int = 0

    @property
    def tokens(self) -> int:
        return len(self.sample.prompt_tokens) + self.sample.response_length


class Recent:
    def __init__(self) -> None:
        self.number = 0
        self._kept: OrderedDict[Key, RecentSample] = OrderedDict()
        self._tokens = 0

    def add(self, recent: RecentSample) -> None:
        """In place of what was known of the same sample: a part of it, or an earlier delivery."""
        key = _key(recent.sample)
        before = self._kept.pop(key, None)
        self.number += 1
        self._kept[key] = replace(recent, number=self.number)
        self._tokens += recent.tokens - (before.tokens if before else 0)
        while len(self._kept) > 1 and (len(self._kept) > MAX_SAMPLES or self._tokens > MAX_TOKENS):
            _, oldest = self._kept.popitem(last=False)
            self._tokens -= oldest.tokens

    def judged(self, group: Sequence[Sample], *, dropped: str = "") -> None:
        """Those of the group that are still kept have rewards now, or were dropped with it."""
        for sample in group:
            recent = self._kept.get(_key(sample))
            if recent is not None:
                self.add(replace(recent, sample=sample, dropped=dropped))

    def views(self, now: float, *, after: int, reward_key: str) -> Iterator[SampleView]:
        """The newest first."""
        for recent in reversed(self._kept.values()):
            if recent.number <= after:
                return
            yield _view(recent, now, reward_key)


def _key(sample: Sample) -> Key:
    return sample.epoch, sample.group_index, sample.index


def _view(recent: RecentSample, now: float, reward_key: str) -> SampleView:
    sample = recent.sample
    prompt = sample.prompt or ""
    if not isinstance(prompt, str):
        prompt = json.dumps(prompt, ensure_ascii=False)
    return SampleView(
        id="/".join(map(str, _key(sample))),
        number=recent.number,
        ago=round(now - recent.ended_at, 1),
        status=sample.status,
        error=sample.error[:CHARACTERS],
        dropped=recent.dropped,
        removed=sample.remove_sample,
        reward=reward_of(sample, reward_key),
        prompt=_clipped(prompt),
        prompt_ids=[] if prompt else sample.prompt_tokens[:HEAD],
        prompt_length=len(sample.prompt_tokens),
        response=_clipped(sample.response),
        response_length=sample.response_length,
        trained_tokens=sample.effective_response_length,
        tokens=_pieces(sample),
        weight_versions=[span for span in sample.weight_versions if span.start < span.end],
        engine=sample.engine,
        attempts=sample.attempts,
        seconds=sample.seconds,
        repetition=round(recent.repetition, 3),
    )


def _pieces(sample: Sample) -> list[TokensView]:
    length = sample.response_length
    ranges = [(0, length)] if length <= HEAD + TAIL else [(0, HEAD), (length - TAIL, length)]
    return [
        TokensView(
            start=start,
            ids=sample.response_tokens[start:end],
            log_probs=[round(value, 3) for value in sample.rollout_log_probs[start:end]],
            mask=sample.loss_mask[start:end],
        )
        for start, end in ranges
        if start < end
    ]


def _clipped(text: str) -> str:
    left_out = len(text) - CHARACTERS
    if left_out <= 0:
        return text
    head = CHARACTERS * 2 // 3
    return f"{text[:head]}\n[… {left_out} characters …]\n{text[head + left_out :]}"
