"""What a trainer has released of its engines' memory: part of a RolloutServer's status."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rolloutfleet.api.schema import Model

MemoryTags = Annotated[tuple[Literal["weights", "kv_cache", "cuda_graph"], ...], Field(max_length=3)]


class EngineMemory(Model):
    """Memory of one life of one engine. SGLang does not tell what it has released, and dies of a call too many."""

    pod: Annotated[str, Field(max_length=253)]
    """Pod of rank 0."""
    uid: Annotated[str, Field(max_length=64)]
    """Its UID: a later life of the engine has released nothing."""
    state: Literal["Known", "Changing", "Unknown"] = "Known"
    """Changing: a release or resume is under way; if the agent that began it has died nobody can know how it ended.
    Unknown: nobody knows. The operator replaces such an engine, and no other."""
    released: MemoryTags = ()
    """What is released; unless Known, what was before the call."""


class TrainingMemory(Model):
    """What the trainer has released on the engines."""

    phase: Literal["Resident", "Releasing", "Released", "Resuming"]
    fence: Annotated[int, Field(ge=0)] = 0
    """Transition count of the Lease when this was found to be so: a call that was under way in another leader's term
    has nobody who waits for its answer."""
    tags: MemoryTags = ()
    """What the trainer wants to be released: an engine that comes back meanwhile is brought there too."""
    engines: Annotated[tuple[EngineMemory, ...], Field(max_length=2048)] = ()
    """Those that take part. One list with one owner: an entry for each in managedFields would double its size."""

    @property
    def uids(self) -> list[str]:
        return [engine.uid for engine in self.engines]
