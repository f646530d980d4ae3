"""What a training loop needs of its rollout fleet.

    from rolloutfleet.trainer import connect, save_checkpoint

    fleet = connect("actor")
    fleet.wait_ready()
    groups = fleet.generate(prompts, n=8, max_new_tokens=16)
    path = save_checkpoint(model, "/weights", version=1, base="/models/m0")
    fleet.update_weights(path, version=1)

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
from rolloutfleet.trainer.checkpoints import prune_checkpoints, save_checkpoint
from rolloutfleet.trainer.client import Fleet, connect
from rolloutfleet.trainer.deltas import DeltaWriter, SavedVersion
from rolloutfleet.trainer.errors import AgentUnreachable, FleetError, NonFiniteWeights, NotReady, Refused
from rolloutfleet.trainer.groups import GroupError
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
    "SampleGroup",
    "SampleStatus",
    "SamplingParams",
    "SavedVersion",
    "UpdateResult",
    "VersionSpan",
    "connect",
    "gather",
    "prune_checkpoints",
    "save_checkpoint",
]
