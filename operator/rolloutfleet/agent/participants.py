"""Which engines an update touches."""

from __future__ import annotations

from rolloutfleet.agent.membership import Fleet
from rolloutfleet.api.common import EnginePhase
from rolloutfleet.api.server_group import EngineStatus, ServerGroup
from rolloutfleet.plan.update import Participant


def participants_in(fleet: Fleet) -> list[Participant]:
    """Engines that may be answering requests, or could be by the time an update ends; but none whose weights are
    released, or of which nobody knows whether they are."""
    training = fleet.training
    memory = training.memory.engines if training.memory else ()
    away = {entry.uid for entry in memory if entry.state != "Known" or "weights" in entry.released}
    held = {entry.uid for entry in memory}
    if training.weights is not None:
        # Proved by our own last update: status may not say Serving again yet.
        held |= {verdict.uid for verdict in training.weights.engines if verdict.outcome == "Committed"}
    return [
        participant_of(group, engine)
        for group, engine in fleet.trained_engines()
        if engine.url and engine.pod_uid not in away and _takes_part(engine, fleet.committed_version, held)
    ]


def _takes_part(engine: EngineStatus, committed: int, held: set[str]) -> bool:
    """Whoever has the committed weights may be answering requests, whatever else keeps it from serving in full; so may
    one that has only missed a look. One that waits for this very update takes part as well; any other that is not
    current is left to the operator, which may be loading it right now."""
    if engine.phase is EnginePhase.DRAINING:
        return False  # it finishes its requests and goes
    if engine.phase is EnginePhase.SERVING or engine.weight_version == committed or engine.pod_uid in held:
        return True
    silent = engine.phase is EnginePhase.STARTING and engine.started
    return silent or engine.reason == "AwaitingUpdate"


def participant_of(group: ServerGroup, engine: EngineStatus) -> Participant:
    shape = engine.facts or group.spec.engine
    return Participant(
        pod=engine.pod,
        uid=engine.pod_uid,
        url=engine.url,
        group=group.name,
        revision=engine.revision,
        role=engine.facts.role if engine.facts is not None else group.spec.role,
        ranks=shape.tensor_parallel if shape is not None else 1,
        pipeline_stages=shape.pipeline_parallel if shape is not None else 1,
        releasable=releasable(group, engine),
    )


def releasable(group: ServerGroup, engine: EngineStatus) -> bool:
    """Its memory can be released."""
    if group.spec.external is not None:
        return engine.facts is not None and engine.facts.memory_saver
    return group.spec.offload
