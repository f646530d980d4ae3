"""Samples as a run makes them, the same ones each time."""

from __future__ import annotations

import math
import random

from rolloutfleet.agent.observing.observations import Observations
from rolloutfleet.api.samples import PrefixCacheInfo, Sample, SampleStatus, SpecInfo, VersionSpan

WORDS = ("so", "we", "add", "both", "sides", "and", "find", "that", "x", "is", "even", "because", "two", "the", "sum")


def sample(
    group: int,
    index: int = 0,
    *,
    versions: tuple[int, ...] = (7,),
    tokens: int = 60,
    status: SampleStatus = SampleStatus.COMPLETED,
    reward: float | None = None,
    **fields: object,
) -> Sample:
    """Its tokens are shared out between the versions in equal parts."""
    dice = random.Random(f"{group}/{index}")
    edges = [tokens * number // len(versions) for number in range(len(versions) + 1)]
    return Sample.model_validate(
        {
            "group_index": group,
            "index": index,
            "prompt": f"What is {group} plus {index + 2}? Think step by step.",
            "prompt_tokens": [dice.randrange(150_000) for _ in range(14)],
            "response": " ".join(dice.choice(WORDS) for _ in range(tokens * 3 // 4)),
            "response_tokens": [dice.randrange(150_000) for _ in range(tokens)],
            "rollout_log_probs": [round(-(dice.random() ** 4) * 7, 4) for _ in range(tokens)],
            "weight_versions": [
                VersionSpan(version=version, start=edges[number], end=edges[number + 1])
                for number, version in enumerate(versions)
            ],
            "status": status,
            "reward": reward,
            "engine": f"qwen-main-{group % 3}-e1",
            "attempts": 1,
            "seconds": 1.5 + dice.random() * 6,
            "prefix_cache_info": PrefixCacheInfo(cached_tokens=9, total_prompt_tokens=14),
            **fields,
        }
    )


def tell_a_step(seen: Observations, step: int, *, groups: int = 8, n: int = 4) -> None:
    """A whole step of a run whose rewards rise."""
    dice = random.Random(step)
    batch = []
    for number in range(groups):
        chance = 0.25 + 0.65 * (1 - math.exp(-step / 14)) + dice.uniform(-0.12, 0.12)
        members = []
        for index in range(n):
            group = step * groups + number
            cut = dice.random() < 0.1
            versions = (step - 1, step) if dice.random() < 0.3 else (step,)
            made = sample(
                group,
                index,
                versions=versions,
                tokens=dice.randrange(30, 160),
                status=SampleStatus.TRUNCATED if cut else SampleStatus.COMPLETED,
                spec_info=SpecInfo(
                    spec_accept_token_num=60, spec_draft_token_num=90, spec_verify_ct=30, completion_token_num=90
                ),
            )
            seen.sample_ended(made)
            members.append(made.changed(reward=float(dice.random() < chance)))
        if len({member.reward for member in members}) == 1 and dice.random() < 0.6:
            seen.group_dropped(members, f"zero_std_{members[0].reward}")
        else:
            seen.group_finished(members)
            batch.append(members)
    if dice.random() < 0.2:
        failed = sample(
            step * groups, n, tokens=0, status=SampleStatus.FAILED, error="400: input is longer than the context"
        )
        seen.sample_ended(failed)
        seen.group_dropped([failed], "failed")
    seen.step_leased(step, batch, step + 1)
    seen.step_trained(step - 2)
    seen.queue(open=16, finished=5, running=61)
