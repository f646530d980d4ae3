"""Weight updates that engines read by themselves, from a checkpoint on the shared volume.

The update runs in a task of its own: a trainer that hangs up does not leave a fleet paused.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from rolloutfleet.agent.copies import Copies
from rolloutfleet.agent.errors import AgentError, conflict, invalid
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.participants import participants_in
from rolloutfleet.agent.preflight import checkpoint_folder, compare_checkpoint, refuse_layouts, target_version
from rolloutfleet.agent.together import both
from rolloutfleet.agent.transaction import Check, Transaction, nothing_more
from rolloutfleet.agent.volume import Rights, looking, rights
from rolloutfleet.api.agent import UpdateResult, UpdateWeights
from rolloutfleet.engine.errors import CheckpointError, EngineUnreachable
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.engine.versions import Fingerprints
from rolloutfleet.engine.worker import WorkerClient
from rolloutfleet.plan.update import Participant

COPY_SHARE = 0.7
"""Of an update's time: what engines need after it is little, and must be left."""


Kind: TypeAlias = tuple[str, str]
"""Group and revision: engines of one run as the same user, on the same mounts."""


@dataclass(frozen=True)
class Checked:
    """What was seen of a version's folder before anybody stood still."""

    compared: bool
    """Its tensors are known to be the model's."""
    found: Fingerprints
    rights: frozenset[Rights]
    """Of what not everybody may read."""


class Updater:
    """Updates of one fleet from disk, one at a time."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        leadership: Leadership,
        engine: Callable[[str], EngineClient],
        worker: Callable[[str], WorkerClient],
    ) -> None:
        """`worker`: beside the engine at a URL."""
        self._fleet = fleet
        self._leadership = leadership
        self._engine = engine
        self._worker = worker
        self._committed = Fingerprints({})
        """Of the last version's folder."""
        self._read_by: defaultdict[Kind, frozenset[Rights]] = defaultdict(frozenset)
        """Files that engines of this kind have read although not everybody may."""

    async def update(self, request: UpdateWeights) -> UpdateResult:
        """Raises AgentError: nothing was paused, or the fleet was resumed and no version was committed."""
        refuse_beside_another(self._fleet, self._leadership)
        return await self._leadership.alone(self._from_disk(request))

    async def finish(self) -> None:
        """Wait for a running transaction: at shutdown a fleet must not be left paused."""
        async with self._leadership.operations:
            return

    async def _from_disk(self, request: UpdateWeights) -> UpdateResult:
        began = time.monotonic()
        await self._fleet.refresh()
        target = target_version(self._fleet, request)
        checked = await looking(request.path, lambda: self._checked(request.path), seconds=request.timeout_seconds)
        copies = await self._copied(request.path, deadline=began + COPY_SHARE * request.timeout_seconds)
        seconds = {"copy": time.monotonic() - began} if copies is not None else {}
        transaction = Transaction(
            fleet=self._fleet,
            leadership=self._leadership,
            engine=self._engine,
            options=request,
            target=target,
            transport="delta" if copies is not None and copies.delta else "disk",
            path=request.path,
            began=began,
        )
        transaction.seconds |= seconds
        await transaction.begin()
        abandoned: AgentError | None = None
        last_check: Check = nothing_more
        try:
            await transaction.recognize()
            if copies is not None:
                await transaction.admit_late()
                await copies.make(transaction.alive())
                transaction.errors |= copies.errors
            await transaction.pause()
            loading = _Loading(transaction, request.path, copies=copies, checked=checked, read_by=self._read_by)
            if copies is not None:
                await loading.load(transaction.alive())
            else:
                # Looked for beside the load, late ones cost no time to those that stand still.
                _, late = await both(loading.load(transaction.alive()), transaction.admit_late())
                if late:
                    await transaction.pause(late)
                    await loading.load(transaction.alive(late))
                last_check = partial(_refuse_what_changed, transaction, request.path, checked.found)
        except AgentError as error:  # we do not lead any more
            abandoned = error
        finally:
            # Also when something above was cancelled or is a bug of ours: this resumes the fleet.
            result = await transaction.settle(abandoned=abandoned, last_check=last_check)
        self._committed = checked.found
        return result

    def _checked(self, path: str) -> Checked:
        """Raises AgentError, OSError."""
        refuse_layouts(self._fleet, "disk")
        folder = checkpoint_folder(self._fleet, path)
        compared = compare_checkpoint(self._fleet, folder)
        found = self._as_it_was(folder)
        return Checked(compared, found, rights(folder) if found.taken else frozenset())

    def _as_it_was(self, folder: Path) -> Fingerprints:
        """Of what engines are about to read; empty where it is not mounted here.

        Raises OSError, and AgentError if it is the last version's folder and something has changed in it since: an
        engine that came back meanwhile may have read a mixture. The same folder once more is fine, for example after
        an onload.
        """
        try:
            if folder in self._committed.taken:
                self._committed.require_same(folder)
            return Fingerprints.of([folder] if folder.is_dir() else [])
        except CheckpointError as error:
            raise invalid("MutablePath", f"path {folder}: {error}") from error

    async def _copied(self, path: str, *, deadline: float) -> Copies | None:
        """None where engines read the volume themselves. Raises AgentError if no pod has got a copy."""
        weights = self._fleet.connected().spec.weights
        if weights is None or weights.local_copy is None:
            return None
        participants = participants_in(self._fleet)
        copies = Copies(path=path, worker=self._worker, deadline=deadline)
        await copies.make(participants)
        if participants and not copies.paths:
            text = f"no engine's worker could copy {path}; nothing was paused"
            told = [f"{one.pod}: {copies.errors[one.uid]}" for one in participants]
            raise AgentError("NotCopied", text, status=502, details=told)
        await self._fleet.refresh()
        return copies


class _Loading:
    """The transfer: every engine reads the version's folder."""

    def __init__(
        self,
        transaction: Transaction,
        path: str,
        *,
        copies: Copies | None,
        checked: Checked,
        read_by: defaultdict[Kind, frozenset[Rights]],
    ) -> None:
        """`read_by`: see Updater; what is read now is added."""
        self._transaction = transaction
        self._path = path
        self._copies = copies
        self._compared = checked.compared
        self._closed = checked.rights if copies is None else frozenset()
        self._read_by = read_by
        self._not_to_try: dict[Kind, str] = {}
        """Why."""

    async def load(self, who: Sequence[Participant]) -> None:
        clock = time.monotonic()
        transaction, closed = self._transaction, self._closed
        # A checkpoint of another shape kills the scheduler, and so does a file that it may not read: let it kill one
        # of a kind, not all.
        first: dict[Kind, Participant] = {}
        for kind, number in Counter(map(_kind, who)).items():
            if number > 1 and not (self._compared and closed <= self._read_by[kind]):
                first[kind] = next(one for one in who if _kind(one) == kind)
        await transaction.everywhere("loading", self._loaded_and_alive, among=first.values())
        for kind, canary in first.items():
            why = transaction.errors.get(canary.uid)
            if why is None:
                self._read_by[kind] |= closed
            else:
                self._not_to_try[kind] = f"not tried, since {canary.pod} failed: {why}"
        others = [one for one in who if one not in first.values()]
        transaction.errors |= {
            one.uid: self._not_to_try[_kind(one)] for one in others if _kind(one) in self._not_to_try
        }
        await transaction.everywhere("loading", self._loaded, among=others)
        transaction.seconds["load"] += time.monotonic() - clock

    async def _loaded(self, participant: Participant, engine: EngineClient, seconds: float) -> None:
        found = self._path if self._copies is None else self._copies.paths[participant.uid]
        try:
            await engine.update_weights_from_disk(
                found, label=self._transaction.label, flush_cache=False, seconds=seconds
            )
        except EngineUnreachable as ended:
            hint = f"; may its user read the files? There are some of {min(self._closed)}" if self._closed else ""
            raise EngineUnreachable(f"{ended}, while it loaded {found}{hint}") from ended

    async def _loaded_and_alive(self, participant: Participant, engine: EngineClient, seconds: float) -> None:
        await self._loaded(participant, engine, seconds)
        await engine.checksum(seconds=seconds)


def _kind(participant: Participant) -> Kind:
    return participant.group, participant.revision


async def _refuse_what_changed(transaction: Transaction, path: str, unchanged: Fingerprints) -> None:
    try:
        await looking(path, lambda: unchanged.require_same(*unchanged.taken), seconds=transaction.left)
    except (CheckpointError, AgentError) as error:
        transaction.errors |= {participant.uid: str(error) for participant in transaction.alive()}


def refuse_beside_another(fleet: Fleet, leadership: Leadership) -> None:
    if leadership.operations.locked() and not leadership.unasked:
        raise conflict(
            "UpdateInProgress", f"an update, offload or onload of {fleet.name} is running; wait for its answer"
        )
