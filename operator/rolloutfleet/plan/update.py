"""What an update has come to, from what each engine said afterwards. Pure; the agent acts on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rolloutfleet.api.common import Role
from rolloutfleet.api.rollout_server import EngineVerdict, GroupChecksum
from rolloutfleet.api.weight_labels import claims, weight_label


@dataclass(frozen=True)
class Participant:
    """An engine that an update touches."""

    pod: str
    uid: str
    url: str
    group: str
    revision: str
    role: Role = "Regular"
    ranks: int = 1
    """Tensor parallel size: how many of its processes each tensor goes to."""
    pipeline_stages: int = 1
    releasable: bool = False
    """It was started so that its memory can be released."""


@dataclass(frozen=True)
class Aftermath:
    """One participant when the update has ended, whatever happened to it."""

    participant: Participant
    error: str = ""
    """What went wrong with its pause or load."""
    reachable: bool = True
    label: str = ""
    checksum: str = ""


@dataclass(frozen=True)
class Outcome:
    version: int
    committed: bool
    verdicts: tuple[EngineVerdict, ...]
    checksums: tuple[GroupChecksum, ...]
    survivors: tuple[Participant, ...]
    """Engines that provably hold `version`: these continue, the others stay paused for the operator."""


def outcome_of(
    aftermath: Sequence[Aftermath],
    *,
    fleet: str,
    target: int,
    previous: int,
    previous_checksums: Sequence[GroupChecksum],
) -> Outcome:
    """The target is committed if at least one engine holds it; a group's engines must agree on the checksum.

    If none does, the previous version stays, and engines that provably still hold it are survivors.
    """
    label = weight_label(target, fleet)
    loaded = [entry for entry in aftermath if not entry.error and entry.label == label and entry.checksum]
    agreed = _majorities(loaded)
    holding = [entry for entry in loaded if entry.checksum == agreed[_layout(entry)]]
    if holding:
        checksums = tuple(
            GroupChecksum(group=group, revision=revision, checksum=checksum)
            for (group, revision), checksum in sorted(agreed.items())
        )
        return _outcome(aftermath, holding, target, committed=True, checksums=checksums)
    known = {(entry.group, entry.revision): entry.checksum for entry in previous_checksums}
    kept = [
        entry
        for entry in aftermath
        if claims(entry.label, previous, fleet) and entry.checksum and entry.checksum == known.get(_layout(entry))
    ]
    return _outcome(aftermath, kept, previous, committed=False, checksums=tuple(previous_checksums))


def resuming_order(roles: Iterable[Role]) -> list[frozenset[Role]]:
    """In which order engines go on: a decode engine asks a prefill engine anew for the requests that it holds, so that
    one must be running by then."""
    present = frozenset(roles)
    waves = [present - {"Decode"}, present & {"Decode"}]
    return [wave for wave in waves if wave]


def _layout(entry: Aftermath) -> tuple[str, str]:
    return entry.participant.group, entry.participant.revision


def _majorities(loaded: Sequence[Aftermath]) -> dict[tuple[str, str], str]:
    """The checksum that most engines of a layout report."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for entry in loaded:
        counts.setdefault(_layout(entry), Counter())[entry.checksum] += 1
    return {
        layout: min(counter, key=lambda checksum: (-counter[checksum], checksum)) for layout, counter in counts.items()
    }


def _outcome(
    aftermath: Sequence[Aftermath],
    holding: Sequence[Aftermath],
    version: int,
    *,
    committed: bool,
    checksums: tuple[GroupChecksum, ...],
) -> Outcome:
    survivors = {entry.participant.pod for entry in holding}
    return Outcome(
        version=version,
        committed=committed,
        verdicts=tuple(_verdict(entry, survivors, version) for entry in aftermath),
        checksums=checksums,
        survivors=tuple(entry.participant for entry in holding),
    )


def _verdict(entry: Aftermath, survivors: set[str], version: int) -> EngineVerdict:
    pod = entry.participant.pod
    if pod in survivors:
        return EngineVerdict(pod=pod, uid=entry.participant.uid, outcome="Committed", message=entry.error[:512])
    if not entry.reachable:
        return EngineVerdict(pod=pod, uid=entry.participant.uid, outcome="Unreachable", message=entry.error[:512])
    found = (
        f"holds label {entry.label or 'unknown'} and checksum {entry.checksum[:12] or 'unknown'}, not version {version}"
    )
    return EngineVerdict(pod=pod, uid=entry.participant.uid, outcome="Failed", message=(entry.error or found)[:512])
