"""What there is to plug in: what each kind is given, and what it must return.

All may be plain functions or coroutine functions. Samples are rolloutfleet.api.samples.Sample and do not change: to
change one, return `sample.changed(...)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real
from typing import Any

from rolloutfleet.agent.plugins.errors import WrongAnswer
from rolloutfleet.api.samples import Sample, as_text


class Kind(StrEnum):
    GENERATE = "generate"
    """(sample to begin or to continue, sampling parameters, engines) -> the sample, or several from one prompt"""
    REWARD = "reward"
    """(sample) -> number, or numbers by name"""
    GROUP_REWARD = "group_reward"
    """(samples of one prompt; of a trajectory in several parts the last one) -> a reward for each, in their order"""
    FILTER = "filter"
    """(samples of one prompt) -> whether to keep them: a bool, or Verdict"""
    SAMPLE_HOOK = "sample_hook"
    """(sample) -> the sample, changed or not; None: as it was"""
    BUFFER_FILTER = "buffer_filter"
    """(finished groups that no step has yet, as store.handover.Offer, oldest first; how many the step takes) -> the
    positions of those that may be taken, the best first"""
    TOKENIZE = "tokenize"
    """(folder, prompts: each a text or messages) -> token ids for each"""
    DETOKENIZE = "detokenize"
    """(folder, lists of token ids) -> a text for each"""
    POST_PROCESS = "post_process"
    """(groups of samples) -> for each group an advantage for each sample"""


@dataclass(frozen=True)
class Verdict:
    keep: bool
    reason: str = ""
    """Counted by it in metrics and in the ledger."""


def checked(kind: Kind, result: Any, arguments: Sequence[Any]) -> Any:
    """The result in plain types. Raises WrongAnswer."""
    return _CHECKS[kind](result, *arguments)


def _generate(result: Any, sample: Sample, *_: Any) -> list[Sample]:
    made = list(result) if isinstance(result, list | tuple) else [result]
    if not made or not all(isinstance(each, Sample) for each in made):
        raise WrongAnswer(f"a Sample or a list of at least one is needed: {_shown(result)}")
    if any((each.epoch, each.group_index) != (sample.epoch, sample.group_index) for each in made):
        raise WrongAnswer("it returned samples of another prompt than it was given")
    return made


def _reward(result: Any, *_: Any) -> float | dict[str, float]:
    if isinstance(result, dict):
        if not result or not all(isinstance(name, str) for name in result):
            raise WrongAnswer(f"a reward of parts has names for them: {_shown(result)}")
        return {name: _number(value) for name, value in result.items()}
    return _number(result)


def _group_reward(result: Any, samples: Sequence[Sample]) -> list[float | dict[str, float]]:
    if not isinstance(result, list | tuple) or len(result) != len(samples):
        raise WrongAnswer(f"a list of {len(samples)} rewards is needed, one a sample: {_shown(result)}")
    return [_reward(reward) for reward in result]


def _filter(result: Any, *_: Any) -> Verdict:
    if isinstance(result, bool):
        return Verdict(result, "" if result else "filtered")
    if not isinstance(result, Verdict):
        raise WrongAnswer(f"True, False or a Verdict is needed: {_shown(result)}")
    return Verdict(result.keep, as_text(result.reason))


def _buffer_filter(result: Any, offers: Sequence[Any], *_: Any) -> list[int]:
    good = isinstance(result, list | tuple) and all(type(each) is int and 0 <= each < len(offers) for each in result)
    if not good or len({*result}) != len(result):
        raise WrongAnswer(f"different positions below {len(offers)} are needed: {_shown(result)}")
    return list(result)


def _tokenize(result: Any, _: str, prompts: Sequence[Any]) -> list[list[int]]:
    if not isinstance(result, list | tuple) or len(result) != len(prompts):
        raise WrongAnswer(f"a list of {len(prompts)} lists of token ids is needed: {_shown(result)}")
    return [[int(token) for token in tokens] for tokens in result]


def _detokenize(result: Any, _: str, responses: Sequence[Any]) -> list[str]:
    if not isinstance(result, list | tuple) or len(result) != len(responses):
        raise WrongAnswer(f"a list of {len(responses)} texts is needed: {_shown(result)}")
    return [str(text) for text in result]


def _sample_hook(result: Any, sample: Sample) -> Sample:
    if result is None:
        return sample
    if not isinstance(result, Sample):
        raise WrongAnswer(f"a Sample or None is needed: {_shown(result)}")
    if (result.epoch, result.group_index, result.index) != (sample.epoch, sample.group_index, sample.index):
        raise WrongAnswer("it returned another sample than it was given")
    return result


def _post_process(result: Any, groups: Sequence[Sequence[Sample]]) -> list[list[float]]:
    if not isinstance(result, list | tuple) or len(result) != len(groups):
        raise WrongAnswer(f"a list of {len(groups)} lists is needed, one a group: {_shown(result)}")
    for number, (values, group) in enumerate(zip(result, groups, strict=True)):
        if not isinstance(values, list | tuple) or len(values) != len(group):
            raise WrongAnswer(f"group {number}: {len(group)} numbers are needed, one a sample: {_shown(values)}")
    return [[_number(value) for value in values] for values in result]


def _number(value: Any) -> float:
    if not isinstance(value, Real) and not hasattr(value, "__float__"):
        raise WrongAnswer(f"a number is needed: {_shown(value)}")
    number = float(value)
    if not math.isfinite(number):
        raise WrongAnswer(f"a finite number is needed: {number}")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 100 else text[:100] + '...'}"


_CHECKS: dict[Kind, Callable[..., Any]] = {
    Kind.GENERATE: _generate,
    Kind.REWARD: _reward,
    Kind.GROUP_REWARD: _group_reward,
    Kind.FILTER: _filter,
    Kind.SAMPLE_HOOK: _sample_hook,
    Kind.BUFFER_FILTER: _buffer_filter,
    Kind.TOKENIZE: _tokenize,
    Kind.DETOKENIZE: _detokenize,
    Kind.POST_PROCESS: _post_process,
}
ARGUMENTS = dict.fromkeys(Kind, 1) | {
    Kind.GENERATE: 3,
    Kind.BUFFER_FILTER: 2,
    Kind.TOKENIZE: 2,
    Kind.DETOKENIZE: 2,
}
"""How much a function of each kind is called with."""
