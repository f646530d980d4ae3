"""One prompt: its samples through the engines and the judges, side by side, to the end of the group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rolloutfleet.agent.collection.engines import Engines
from rolloutfleet.agent.collection.judging import Judge
from rolloutfleet.agent.collection.observer import Observer
from rolloutfleet.agent.sampling import Asking, Sampler
from rolloutfleet.api.data import Prompt
from rolloutfleet.api.samples import Sample, SampleStatus
from rolloutfleet.plan.collecting import Ended, failed, group_end, sampling_seed

Tell = Callable[[Sample], None]


@dataclass(frozen=True)
class Making:
    """How samples of a collection, or of an evaluation, are made."""

    asking: Asking
    engines: Engines
    sampler: Sampler
    judge: Judge
    observer: Observer
    seed: int | None = None


@dataclass(frozen=True)
class GroupResult:
    samples: list[Sample]
    ended: Ended


async def finish_group(begun: Sequence[Sample], prompt: Prompt, making: Making, tell: Tell) -> GroupResult:
    """`begun`: the samples, each new, stopped, or kept from an earlier life. `tell`: called with each that has come to
    its end alone, so that it can be kept although others of its group still run."""

    async def one(sample: Sample) -> list[Sample]:
        parts = await _trajectory(sample, prompt, making)
        for part in parts:
            # One that had ended before its group was stopped has been told of.
            if part is not sample and part.status is not SampleStatus.ABORTED:
                making.observer.sample_ended(part)
        if len(parts) == 1 and parts[0].status not in (SampleStatus.ABORTED, SampleStatus.PENDING):
            tell(parts[0])
        return parts

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(sample)) for sample in begun]
    made = [task.result() for task in running]
    ended = group_end([part for parts in made for part in parts])
    if ended.outcome == "stopped":
        # Parts of a trajectory in several pieces cannot be gone on with: it begins again.
        return GroupResult([parts[0] for parts in made if len(parts) == 1], ended)
    samples = _numbered(made)
    if ended.outcome == "finished":
        judged = await making.judge.group(samples)
        samples = judged.samples
        ended = group_end(samples) if judged.verdict.keep else Ended("dropped", judged.verdict.reason)
    return GroupResult(samples, ended)


async def _trajectory(sample: Sample, prompt: Prompt, making: Making) -> list[Sample]:
    if sample.status is SampleStatus.FAILED or (sample.finished and sample.reward is not None):
        return [sample]
    if sample.finished:
        parts = [sample]
    else:
        asking = making.asking
        if prompt.multimodal_inputs:
            asking = replace(asking, inputs={**asking.inputs, **prompt.multimodal_inputs})
        if making.seed is not None:
            seed = sampling_seed(making.seed, epoch=sample.epoch, prompt=sample.group_index, index=sample.index)
            asking = replace(asking, params=asking.params.model_copy(update={"sampling_seed": seed}))
        if making.judge.generates:
            params = asking.params.model_dump(exclude_unset=True)
            engines = replace(making.engines, inputs=prompt.multimodal_inputs)
            parts = await making.judge.generate(sample, params, engines)
        else:
            parts = [await making.sampler.complete(sample, asking)]
    if any(part.status in (SampleStatus.ABORTED, SampleStatus.PENDING) for part in parts):
        return parts
    if any(part.status is SampleStatus.FAILED for part in parts):
        why = next(part.error for part in parts if part.status is SampleStatus.FAILED)
        return [failed(part, why) for part in parts]
    return await making.judge.trajectory(parts)


def _numbered(made: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Parts of one trajectory share its number as rollout_id, and every sample has an index of its own."""
    flat = [
        part if len(parts) == 1 else part.changed(rollout_id=number)
        for number, parts in enumerate(made)
        for part in parts
    ]
    return [sample if sample.index == index else sample.changed(index=index) for index, sample in enumerate(flat)]
