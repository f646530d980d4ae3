"""A sample: what engines made of a prompt, and all that training needs to know of it.

Names are slime's where they mean the same (`Sample` in slime/utils/types.py); `tokens` is prompt and response there and
here. Samples do not change: what continues, masks or rewards one makes a new one, and each is checked when it is made.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, JsonValue, model_validator


class SampleStatus(StrEnum):
    PENDING = "pending"
    """Nothing was generated yet, or its engine has gone: the tokens so far are kept."""
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    """It reached max_new_tokens."""
    ABORTED = "aborted"
    """Stopped before its end, by an update or for lack of time: it may be continued."""
    FAILED = "failed"
    """The engine refused it, or the code that makes or judges it raised."""


FINISHED = frozenset({SampleStatus.COMPLETED, SampleStatus.TRUNCATED})
"""What may have a reward."""


def as_text(value: str) -> str:
    """Half a surrogate pair, which UTF-8 cannot say, becomes U+FFFD: what users' code or an engine says is shown."""
    return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


Text = Annotated[str, AfterValidator(as_text)]


class Part(BaseModel):
    """Unknown fields are ignored: the trainer's library may be older than the agent beside it."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class VersionSpan(Part):
    """Response tokens [start, end) were sampled by this weight version."""

    version: int
    start: int
    end: int


class SpecInfo(Part):
    """Counters of speculative decoding, as slime names them."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0


class PrefixCacheInfo(Part):
    cached_tokens: int = 0
    """Prompt tokens that an engine had in its prefix cache."""
    total_prompt_tokens: int = 0


class Timings(Part):
    """Seconds; of a sample that was continued, of all its parts together."""

    generation: float = 0.0
    """In engines and their queues, as engines tell it."""
    queue: float = 0.0
    """The part of it in engines' queues."""
    non_generation_time: float = 0.0
    """In tools, environments and judges."""


class Sample(Part):
    epoch: int = 0
    group_index: int = 0
    """Number of the prompt in its epoch, from 0. (slime: in the run.)"""
    index: int = 0
    """Number of the sample in its group, from 0. (slime: in the run.)"""
    rollout_id: int | None = None
    """Samples of a group with the same one are parts of one trajectory and share its reward; None: alone in it."""
    session_id: str = ""
    """Requests with the same one go to the same engine where the router's policy allows it."""

    prompt: str | list[dict[str, JsonValue]] | None = None
    """As the data set has it: text or messages; None where it has token ids."""
    label: JsonValue = None
    metadata: dict[str, JsonValue] = {}
    train_metadata: dict[str, JsonValue] = {}

    prompt_tokens: list[int] = []
    response_tokens: list[int] = []
    response: Text = ""
    """Text of the response, where somebody decoded it."""
    rollout_log_probs: list[float] = []
    """Natural logarithm of each response token's probability under the version that sampled it; 0 for tokens that no
    engine sampled, such as a tool's output."""
    loss_mask: list[int] = []
    """For each response token 1: trained, or 0. Default: all are trained."""
    weight_versions: list[VersionSpan] = []
    """In order, without overlap. They cover at least all tokens that are trained."""

    reward: float | dict[str, float] | None = None
    status: SampleStatus = SampleStatus.PENDING
    error: Text = ""
    remove_sample: bool = False
    """Filtered out: it stays in its group for the statistics, and none of its tokens is trained."""

    engine: str = ""
    """Who answered last, where that is known."""
    attempts: int = 0
    """Requests that were made for it."""
    seconds: float = 0.0
    """From its first request to its end, waiting included."""
    timings: Timings = Timings()
    spec_info: SpecInfo = SpecInfo()
    prefix_cache_info: PrefixCacheInfo = PrefixCacheInfo()

    @property
    def tokens(self) -> list[int]:
        """Prompt and response."""
        return self.prompt_tokens + self.response_tokens

    @property
    def response_length(self) -> int:
        return len(self.response_tokens)

    @property
    def effective_response_length(self) -> int:
        """Response tokens that are trained."""
        return 0 if self.remove_sample else sum(self.loss_mask)

    @property
    def finished(self) -> bool:
        return self.status in FINISHED

    def reward_value(self, key: str = "") -> float | None:
        """One number of the reward. Raises ValueError where the reward has parts and `key` names none of them."""
        if not isinstance(self.reward, dict):
            return self.reward
        if key not in self.reward:
            raise ValueError(f"reward_key: {key!r}; the reward has {', '.join(sorted(self.reward)) or 'no parts'}")
        return self.reward[key]

    def changed(self, **fields: Any) -> Sample:
        """The same sample with other fields, checked again. Raises ValueError."""
        unknown = fields.keys() - Sample.model_fields.keys()
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: a sample has no such field")
        kept = {name: getattr(self, name) for name in Sample.model_fields}
        return Sample.model_validate(kept | fields)

    @model_validator(mode="before")
    @classmethod
    def _all_tokens_are_trained_by_default(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("loss_mask") is None:
            return values | {"loss_mask": [1] * len(values.get("response_tokens") or ())}
        return values

    @model_validator(mode="after")
    def _parts_fit(self) -> Sample:
        length = len(self.response_tokens)
        for name, found in (("rollout_log_probs", self.rollout_log_probs), ("loss_mask", self.loss_mask)):
            if len(found) != length:
                raise ValueError(f"{name}: {len(found)} for {length} response tokens")
        if not all(map(math.isfinite, self.rollout_log_probs)):
            raise ValueError("rollout_log_probs: one is not finite")
        if self.loss_mask.count(0) + self.loss_mask.count(1) != length:
            raise ValueError("loss_mask: only 0 and 1 are known")
        end = 0
        for span in [*self.weight_versions, VersionSpan(version=0, start=length, end=length)]:
            if not end <= span.start <= span.end <= length:
                raise ValueError(f"weight_versions: {span.start} to {span.end} after {end}, of {length} tokens")
            if any(self.loss_mask[end : span.start]):
                raise ValueError(f"weight_versions: tokens {end} to {span.start} are trained and nobody sampled them")
            end = span.end
        return self

    @model_validator(mode="after")
    def _only_what_ended_is_judged(self) -> Sample:
        if self.reward is None:
            return self
        if not self.finished:
            raise ValueError(f"reward: the sample is {self.status.value}; only a finished one is judged")
        values = self.reward.values() if isinstance(self.reward, dict) else (self.reward,)
        if not all(map(math.isfinite, values)):
            raise ValueError(f"reward: {self.reward} is not finite")
        return self


class SampleGroup(Part):
    """All samples of one prompt."""

    prompt: list[int]
    samples: list[Sample]
