"""What a training loop needs of its rollout fleet.

    from rolloutfleet.trainer import connect, save_checkpoint

    fleet = connect("actor")
    fleet.wait_ready()
    groups = fleet.generate(prompts, n=8, max_new_tokens=16)
    path = save_checkpoint(model, "/weights", version=1, base="/models/m0")
    fleet.update_weights(path, version=1)

The pod needs the annotation `rolloutfleet.dev/rollout-servers: "actor=NAME"`. Only `save_checkpoint` needs torch.
"""

from rolloutfleet.api.agent import (
    FleetView,
    Generated,
    MemoryResult,
    SamplingParams,
    UpdateResult,
)
from rolloutfleet.api.samples import Sample, SampleGroup, SampleStatus, VersionSpan
from rolloutfleet.trainer.checkpoints import NonFiniteWeights, prune_checkpoints, save_checkpoint
from rolloutfleet.trainer.client import AgentUnreachable, Fleet, FleetError, NotReady, Refused, connect

__all__ = [
    "AgentUnreachable",
    "Fleet",
    "FleetError",
    "FleetView",
    "Generated",
    "MemoryResult",
    "NonFiniteWeights",
    "NotReady",
    "Refused",
    "Sample",
    "SampleGroup",
    "SampleStatus",
    "SamplingParams",
    "UpdateResult",
    "VersionSpan",
    "connect",
    "prune_checkpoints",
    "save_checkpoint",
]
