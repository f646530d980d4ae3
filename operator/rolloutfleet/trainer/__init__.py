"""What a training loop needs of its rollout fleet.

    from rolloutfleet.trainer import connect, save_checkpoint

    fleet = connect("actor")
    fleet.wait_ready()
    groups = fleet.generate(prompts, n=8, max_new_tokens=16)
    path = save_checkpoint(model, "/weights", version=1, base="/models/m0")
    fleet.update_weights(path, version=1)

Samples of a whole run, each prompt of the data set once, whoever dies meanwhile:

    run = fleet.collect(run="grpo-1", store="/runs/grpo-1.sqlite", data={"path": "/data/train.jsonl"}, step=step,
                        groups_per_step=32, n=8, reward="judges:score", sampling_params={"max_new_tokens": 1024})
    for batch in run.batches(step + 1):
        ...                        # train on batch.packed(), update weights, save a checkpoint
        run.acknowledge(batch.step)

or, where engines keep a copy (spec.weights.localCopy), with what has changed alone:

    writer = DeltaWriter("/weights", base="/models/m0")
    fleet.update_weights(writer.save(model, version=1), version=1)

The pod needs the annotation `rolloutfleet.dev/rollout-servers: "actor=NAME"`. Only `save_checkpoint` and
`DeltaWriter` need torch and numpy.
"""

from rolloutfleet.api.agent import (
    FleetView,
    Generated,
    MemoryResult,
    SamplingParams,
    UpdateResult,
)
from rolloutfleet.api.samples import Sample, SampleGroup, SampleStatus, VersionSpan
from rolloutfleet.api.samples_view import SamplesView
from rolloutfleet.plan.stitching import observe
from rolloutfleet.trainer.checkpoints import prune_checkpoints, save_checkpoint
from rolloutfleet.trainer.client import Fleet, connect
from rolloutfleet.trainer.collecting import SampleCollection, StepBatch
from rolloutfleet.trainer.deltas import DeltaWriter, SavedVersion
from rolloutfleet.trainer.errors import AgentUnreachable, FleetError, NonFiniteWeights, NotReady, Refused, ZeroWeights
from rolloutfleet.trainer.groups import GroupError
from rolloutfleet.trainer.progress import progress_line
from rolloutfleet.trainer.saved_batches import load_batch, save_batch, saved_steps
from rolloutfleet.trainer.sending import gather

__all__ = [
    "AgentUnreachable",
    "DeltaWriter",
    "Fleet",
    "FleetError",
    "FleetView",
    "Generated",
    "GroupError",
    "MemoryResult",
    "NonFiniteWeights",
    "NotReady",
    "Refused",
    "Sample",
    "SampleCollection",
    "SampleGroup",
    "SampleStatus",
    "SamplesView",
    "SamplingParams",
    "SavedVersion",
    "StepBatch",
    "UpdateResult",
    "VersionSpan",
    "ZeroWeights",
    "connect",
    "gather",
    "load_batch",
    "observe",
    "progress_line",
    "prune_checkpoints",
    "save_batch",
    "save_checkpoint",
    "saved_steps",
]
