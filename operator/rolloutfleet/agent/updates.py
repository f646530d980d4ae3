"""A weight update from disk, as a fenced transaction.

1. Refuse what can be refused before anything is paused. 2. Record the intent. 3. Pause every engine, load, read
checksums. 4. Commit version and checksums together. 5. Continue the survivors, always. Engines that fell out stay
paused: the operator takes them out of the routers and brings them up to date.

The transaction runs in a task of its own: a trainer that hangs up does not leave a fleet paused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath

from rolloutfleet.agent.errors import AgentError, conflict, invalid, unavailable
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.api.agent import UpdateResult, UpdateWeights
from rolloutfleet.api.common import EnginePhase
from rolloutfleet.api.rollout_server import TrainingStatus, TrainingWeights, WeightsPhase
from rolloutfleet.api.server_group import EngineStatus
from rolloutfleet.api.weight_labels import weight_label
from rolloutfleet.engine.checkpoint import Checkpoint, CheckpointError, differences, read_checkpoint
from rolloutfleet.engine.errors import EngineError, EngineRefused
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.plan.update import Aftermath, Outcome, Participant, outcome_of, resuming_order

logger = logging.getLogger(__name__)

VERIFY_SECONDS = 30.0
CONTINUE_SECONDS = 20.0
CONTINUE_ATTEMPTS = 3
DIFFERENCES_SHOWN = 5


class Updater:
    """Weight updates of one fleet, one at a time."""

    def __init__(self, *, fleet: Fleet, leadership: Leadership, engine: Callable[[str], EngineClient]) -> None:
        self._fleet = fleet
        self._leadership = leadership
        self._engine = engine

    async def update(self, request: UpdateWeights) -> UpdateResult:
        """Raises AgentError: nothing was paused, or the fleet was resumed and no version was committed."""
        if self._leadership.operations.locked():
            raise conflict(
                "UpdateInProgress",
                f"an update, offload or onload of {self._fleet.name} is running; wait for its answer",
            )
        return await self._leadership.alone(self._transaction(request))

    async def finish(self) -> None:
        """Wait for a running transaction: at shutdown a fleet must not be left paused."""
        async with self._leadership.operations:
            return

    async def _transaction(self, request: UpdateWeights) -> UpdateResult:
        await self._fleet.refresh()
        target, doubtful = self._check(request)
        self._leadership.require()
        participants = self._participants()
        before = self._fleet.training
        started = time.monotonic()
        deadline = started + request.timeout_seconds
        seconds: dict[str, float] = {}

        old = before.weights or TrainingWeights(phase=WeightsPhase.COMMITTED, version=0)
        previous = self._fleet.committed_checksums()
        # Engines whose memory is released are paused already, and go on when the last tag is resident.
        released = before.memory is not None and bool(before.memory.tags)
        ends = datetime.now(UTC) + timedelta(seconds=request.timeout_seconds + VERIFY_SECONDS + CONTINUE_SECONDS)
        intent = old.model_copy(
            update={
                "phase": WeightsPhase.UPDATING,
                "transaction": old.transaction + 1,
                "target_version": target,
                "target_path": request.path,
                "deadline": ends.isoformat(timespec="seconds"),
                "engines": (),
            }
        )
        await self._leadership.write(before.model_copy(update={"weights": intent}))

        errors: dict[str, str] = {}
        try:
            clock = time.monotonic()
            participants = await self._joined_by_late_ones(participants)
            await self._everywhere(participants, errors, self._recognize if released else self._pause, deadline)
            seconds["pause"] = time.monotonic() - clock
            clock = time.monotonic()
            await self._load(participants, errors, request.path, target, doubtful, deadline)
            seconds["load"] = time.monotonic() - clock
        finally:
            # Also when something above was cancelled or is a bug of ours: what follows resumes the fleet.
            clock = time.monotonic()
            aftermath = await asyncio.gather(*(self._look(participant, errors) for participant in participants))
            outcome = outcome_of(
                aftermath,
                fleet=self._fleet.id,
                target=target,
                previous=old.version,
                previous_checksums=previous,
            )
            seconds["verify"] = time.monotonic() - clock
            await self._commit(before, intent, outcome, request.path)
            if not released:
                await self._continue(outcome.survivors)
            seconds["total"] = time.monotonic() - started
        if not outcome.committed:
            raise AgentError(
                "UpdateFailed",
                f"no engine took version {target} from {request.path}; version {outcome.version} stays",
                status=502,
                details=[f"{verdict.pod}: {verdict.outcome}: {verdict.message}" for verdict in outcome.verdicts],
            )
        return UpdateResult(
            version=outcome.version,
            committed=True,
            engines=list(outcome.verdicts),
            seconds={name: round(value, 4) for name, value in seconds.items()},
        )

    # Before anything is paused

    def _check(self, request: UpdateWeights) -> tuple[int, bool]:
        """(target version, whether the checkpoint could not be compared with one that is known to load)."""
        server = self._fleet.connected()
        if not server.spec.update_weights:
            raise conflict("Frozen", f"RolloutServer {server.name} has updateWeights: false; its weights never change")
        committed = self._fleet.committed_version
        target = request.version if request.version is not None else committed + 1
        if target <= committed:
            raise conflict(
                "VersionNotNewer",
                f"version {target} is not newer than the committed version {committed}; "
                f"the next one is {committed + 1}",
            )
        memory = self._fleet.training.memory
        if memory is not None and "weights" in memory.tags:
            raise conflict("WeightsReleased", "the engines' weights are offloaded: onload the tag weights first")
        if server.spec.weights is None:
            raise conflict(
                "NoWeightsVolume", f"RolloutServer {server.name} has no spec.weights: engines see no checkpoint"
            )
        mount = PurePosixPath(server.spec.weights.mount_path)
        path = PurePosixPath(request.path)
        if ".." in path.parts or not path.is_relative_to(mount) or path == mount:
            raise invalid("PathOutsideVolume", f"path {request.path}: must be a folder below {mount}")
        return target, self._doubtful(Path(request.path), Path(mount))

    def _doubtful(self, path: Path, mount: Path) -> bool:
        if not mount.is_dir():
            logger.warning("%s is not mounted in the agent: the checkpoint cannot be checked before the pause", mount)
            return True
        try:
            new = read_checkpoint(path)
        except CheckpointError as error:
            raise invalid("BadCheckpoint", f"path {path}: {error}") from error
        except OSError as error:
            raise invalid("BadCheckpoint", f"path {path}: cannot be read by the agent: {error}") from error
        reference = self._reference()
        if reference is None:
            return True
        wrong = differences(reference, new)
        if wrong:
            shown = wrong[:DIFFERENCES_SHOWN]
            raise invalid(
                "BadCheckpoint",
                f"path {path}: differs from the served model {reference.path} in {len(wrong)} tensors: "
                f"{'; '.join(shown)}",
                details=wrong[:100],
            )
        return False

    def _reference(self) -> Checkpoint | None:
        """The checkpoint that the engines hold, if this container sees it."""
        weights = self._fleet.training.weights
        for path in (weights.path if weights else "", self._fleet.connected().spec.model.path):
            try:
                if path:
                    return read_checkpoint(Path(path))
            except (CheckpointError, OSError):
                continue
        return None

    async def _joined_by_late_ones(self, participants: list[Participant]) -> list[Participant]:
        """With those that the operator has proved between our look and our intent. From then on it registers nobody,
        but what it has asked of a router before may still be under way."""
        await self._fleet.refresh()
        known = {participant.uid for participant in participants}
        return participants + [late for late in self._found() if late.uid not in known]

    def _participants(self) -> list[Participant]:
        found = self._found()
        if not found:
            raise unavailable("NoEngines", f"RolloutServer {self._fleet.name} has no engine that could be updated now")
        return found

    def _found(self) -> list[Participant]:
        """Engines that may be answering requests, or could be by the time the update ends."""
        training = self._fleet.training
        held = set(training.memory.uids) if training.memory else set()
        if training.weights is not None:
            # Proved by our own last update: status may not say Serving again yet.
            held |= {verdict.uid for verdict in training.weights.engines if verdict.outcome == "Committed"}
        # An engine that is not current is left to the operator, which may be loading it right now.
        return [
            Participant(
                pod=engine.pod,
                uid=engine.pod_uid,
                url=engine.url,
                group=group.name,
                revision=engine.revision,
                role=engine.facts.role if engine.facts is not None else group.spec.role,
            )
            for group, engine in self._fleet.trained_engines()
            if engine.url and _takes_part(engine, self._fleet.committed_version, held)
        ]

    # The engines

    async def _everywhere(
        self,
        participants: Sequence[Participant],
        errors: dict[str, str],
        step: Callable[[EngineClient, float], Awaitable[None]],
        deadline: float,
    ) -> None:
        """One step on all engines that have no error yet, at once; each error stays with its engine."""
        self._leadership.require()

        async def one(participant: Participant) -> None:
            left = max(deadline - time.monotonic(), 0.1)
            try:
                await step(self._engine(participant.url), left)
            except EngineError as error:
                errors[participant.pod] = str(error)

        await asyncio.gather(*(one(participant) for participant in participants if participant.pod not in errors))

    async def _recognize(self, engine: EngineClient, seconds: float) -> None:
        await engine.require_fleet(self._fleet.id, seconds=seconds)

    async def _pause(self, engine: EngineClient, seconds: float) -> None:
        """Running samples go back to the queue and continue afterwards, computed anew from their tokens."""
        await self._recognize(engine, seconds)
        await engine.pause("retract", seconds=seconds)
        await engine.flush_cache()

    async def _load(
        self,
        participants: Sequence[Participant],
        errors: dict[str, str],
        path: str,
        version: int,
        doubtful: bool,
        deadline: float,
    ) -> None:
        label = weight_label(version, self._fleet.id)

        async def load(engine: EngineClient, seconds: float) -> None:
            await engine.update_weights_from_disk(path, label=label, flush_cache=False, seconds=seconds)
            await engine.checksum(seconds=seconds)

        fit = [participant for participant in participants if participant.pod not in errors]
        if doubtful and len(fit) > 1:
            # A checkpoint of another shape kills the scheduler: let it kill one, not all.
            await self._everywhere(fit[:1], errors, load, deadline)
            if fit[0].pod in errors:
                for participant in fit[1:]:
                    errors[participant.pod] = f"not tried, since {fit[0].pod} failed: {errors[fit[0].pod]}"
                return
            fit = fit[1:]
        await self._everywhere(fit, errors, load, deadline)

    async def _look(self, participant: Participant, errors: dict[str, str]) -> Aftermath:
        engine = self._engine(participant.url)
        error = errors.get(participant.pod, "")
        try:
            checksum = await engine.checksum(seconds=VERIFY_SECONDS)
            label = (await engine.model_info()).weight_version
        except EngineRefused as refused:
            return Aftermath(participant, error=error or str(refused))
        except EngineError as unreachable:
            return Aftermath(participant, error=error or str(unreachable), reachable=False)
        return Aftermath(participant, error=error, label=label, checksum=checksum)

    async def _commit(self, before: TrainingStatus, intent: TrainingWeights, outcome: Outcome, path: str) -> None:
        weights = intent.model_copy(
            update={
                "phase": WeightsPhase.COMMITTED,
                "version": outcome.version,
                "path": path if outcome.committed else intent.path,
                "checksums": outcome.checksums if outcome.committed else intent.checksums,
                "target_version": None,
                "target_path": "",
                "deadline": "",
                "engines": outcome.verdicts,
            }
        )
        await self._leadership.write(before.model_copy(update={"weights": weights}))

    async def _continue(self, survivors: Sequence[Participant]) -> None:
        async def one(participant: Participant) -> None:
            for attempt in range(1, CONTINUE_ATTEMPTS + 1):
                try:
                    await self._engine(participant.url).continue_generation(seconds=CONTINUE_SECONDS)
                    return
                except EngineError as error:
                    # Nothing is lost: the operator resumes an engine that is paused and held by nobody.
                    logger.warning("%s not continued (attempt %d): %s", participant.pod, attempt, error)

        for wave in resuming_order(participant.role for participant in survivors):
            await asyncio.gather(*(one(participant) for participant in survivors if participant.role in wave))


def _takes_part(engine: EngineStatus, committed: int, held: set[str]) -> bool:
    """Whoever has the committed weights may be answering requests, whatever else keeps it from serving in full."""
    if engine.phase is EnginePhase.DRAINING:
        return False  # it finishes its requests and goes
    return engine.phase is EnginePhase.SERVING or engine.weight_version == committed or engine.pod_uid in held
