"""What is known of the engines' memory: the books of the agent that leads. `status.training.memory` is the copy that
survives it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rolloutfleet.api.agent import MemoryTag
from rolloutfleet.api.memory import EngineMemory, TrainingMemory
from rolloutfleet.api.server_group import EngineStatus

TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache", "cuda_graph")
"""In the order in which they come back."""

RESIDENT = TrainingMemory(phase="Resident")


def ordered(tags: Collection[MemoryTag]) -> tuple[MemoryTag, ...]:
    return tuple(tag for tag in TAGS if tag in tags)


class MemoryRecord:
    def __init__(self) -> None:
        self._fence = 0
        self._entries: dict[str, EngineMemory] = {}
        self.tags: tuple[MemoryTag, ...] = ()
        """What the trainer wants to be released."""

    def load(self, written: TrainingMemory | None, fence: int) -> None:
        """Take over what the leader before wrote, if our term under `fence` has just begun: where it was in the middle
        of a call nobody can know how that ended, and what it had only drained is the operator's again. In our own term
        these books are ahead of what is written."""
        if self._fence == fence:
            return
        memory = written or RESIDENT
        self._fence, self.tags = fence, ordered(memory.tags)
        self._entries = {
            entry.uid: entry if entry.state == "Known" else entry.model_copy(update={"state": "Unknown"})
            for entry in memory.engines
            if entry.released or entry.state != "Known"
        }

    def forget(self, gone: Iterable[str]) -> None:
        for uid in gone:
            self._entries.pop(uid, None)

    @property
    def uids(self) -> frozenset[str]:
        return frozenset(self._entries)

    def knows(self, engine: EngineStatus) -> bool:
        """Whether a call can be made that SGLang survives."""
        entry = self._entries.get(engine.pod_uid)
        return entry is None or entry.state == "Known"

    def takes_part(self, engine: EngineStatus) -> bool:
        return engine.pod_uid in self._entries and self.knows(engine)

    def released(self, engine: EngineStatus) -> tuple[MemoryTag, ...]:
        entry = self._entries.get(engine.pod_uid)
        return entry.released if entry is not None else ()

    def held(self, engines: Iterable[EngineStatus]) -> None:
        """These are about to be paused, or are; what they have released stays as it is."""
        for engine in engines:
            self._entries.setdefault(engine.pod_uid, EngineMemory(pod=engine.pod, uid=engine.pod_uid))

    def changing(self, engines: Iterable[EngineStatus]) -> None:
        self._set(engines, state="Changing")

    def unknown(self, engine: EngineStatus) -> None:
        self._set([engine], state="Unknown")

    def unchanged(self, engine: EngineStatus) -> None:
        """The call was refused before it did anything."""
        self._set([engine], state="Known")

    def now(self, engine: EngineStatus, released: Collection[MemoryTag]) -> None:
        """The call was answered."""
        self._set([engine], state="Known", released=ordered(released))

    def _set(self, engines: Iterable[EngineStatus], **update: object) -> None:
        for engine in engines:
            self._entries[engine.pod_uid] = self._entries[engine.pod_uid].model_copy(update=update)

    def written(self, phase: str = "") -> TrainingMemory:
        """As status.training.memory; `phase` while an operation runs."""
        return TrainingMemory.model_validate(
            {
                "fence": self._fence,
                "phase": phase or ("Released" if self.tags else "Resident"),
                "tags": self.tags,
                "engines": sorted(self._entries.values(), key=lambda entry: (entry.pod, entry.uid)),
            }
        )

    def with_released(self, engines: Sequence[EngineStatus]) -> list[EngineStatus]:
        return [engine for engine in engines if self.takes_part(engine) and self.released(engine)]
