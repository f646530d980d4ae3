"""Why a fleet does not serve in full, in one sentence: from conditions and engine records alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from rolloutfleet.api.common import Condition, EnginePhase
from rolloutfleet.api.rollout_server import RolloutServer, WeightsPhase
from rolloutfleet.api.server_group import EngineStatus, ServerGroup
from rolloutfleet.cli.advice import advice
from rolloutfleet.cli.fleet import Engine, engines_of
from rolloutfleet.plan.status import SERVING


class Serves(IntEnum):
    """The value is the exit code of `why`."""

    IN_FULL = 0
    PARTLY = 1
    NOT = 2


@dataclass(frozen=True)
class Explanation:
    serves: Serves
    sentence: str
    next_step: str
    """In the runbook's words; empty when nothing is to be done."""


def explain(server: RolloutServer, groups: Sequence[ServerGroup]) -> Explanation:
    if server.metadata.get("deletionTimestamp"):
        return Explanation(Serves.NOT, f"{server.name} is being deleted.", "")
    ready = next((condition for condition in server.status.conditions if condition.type == "Ready"), None)
    if ready is None:
        sentence = f"{server.name} does not serve: the operator has not looked at it yet."
        return Explanation(Serves.NOT, sentence, advice("Reconciling"))
    if ready.status == "True" and ready.reason == SERVING:
        return Explanation(Serves.IN_FULL, _in_full(server), "")
    serves = Serves.PARTLY if ready.status == "True" else Serves.NOT
    start = f"{server.name} serves partly" if serves is Serves.PARTLY else f"{server.name} does not serve"
    engine = _culprit(ready, engines_of(groups))
    if engine is None:
        cause = f"{ready.reason}: {ready.message or 'no message'}"
        next_step = _named(_advice(ready.reason), server=server.name, engine="ENGINE")
    else:
        cause = f"{_share(server)}; {_of_engine(engine)}{_others(engine, engines_of(groups))}"
        step = _advice(engine.record.reason, external=engine.group.spec.external is not None)
        next_step = _named(step, server=server.name, engine=engine.name)
    return Explanation(serves, f"{start}: {cause}{_unseen(server)}.", next_step)


def _in_full(server: RolloutServer) -> str:
    weights, training = server.status.weights, server.status.training
    version = "" if weights is None or weights.version is None else f" with weight version {weights.version}"
    held = ""
    if training is not None and training.weights is not None and training.weights.phase is WeightsPhase.UPDATING:
        held = f"; the trainer updates it to version {training.weights.target_version}"
        held += f", until {training.weights.deadline} at the latest" if training.weights.deadline else ""
    elif training is not None and training.memory is not None and training.memory.phase != "Resident":
        held = f"; the trainer holds its memory ({training.memory.phase}: {', '.join(training.memory.tags)})"
    return f"{server.name} serves in full: {_share(server)}{version}{held}{_unseen(server)}."


def _share(server: RolloutServer) -> str:
    counts = server.status.engines
    return "no engines" if counts is None else f"{counts.routable}/{counts.desired} engines routable"


def _unseen(server: RolloutServer) -> str:
    if server.status.observed_generation >= server.generation:
        return ""
    return f" (the operator has not seen the last change: generation {server.generation})"


def _culprit(ready: Condition, engines: Sequence[Engine]) -> Engine | None:
    """The engine that the condition speaks of: it names its life, or has its reason."""
    named = (engine for engine in engines if f"{engine.life}:" in ready.message)
    alike = (engine for engine in engines if engine.record.reason == ready.reason)
    return next(named, None) or next(alike, None)


def _of_engine(engine: Engine) -> str:
    record = engine.record
    text = f"{engine.life} is {record.phase}"
    text += f" ({record.reason})" if record.reason else ""
    text += f": {record.message}" if record.message else ""
    if record.phase is EnginePhase.FAILED:
        return text + (f"; next try at {record.retry_at}" if record.retry_at else "")
    failure = record.last_failure
    if failure is not None and record.phase in (EnginePhase.PENDING, EnginePhase.STARTING) and not record.started:
        text += f"; its last life ended with {failure.reason}"
        text += f" ({failure.message})" if failure.message else ""
    return text


def _others(engine: Engine, engines: Sequence[Engine]) -> str:
    def alike(record: EngineStatus) -> bool:
        return (record.phase, record.reason) == (engine.record.phase, engine.record.reason)

    number = sum(alike(other.record) for other in engines) - 1
    return f"; {number} more like it" if number else ""


def _named(step: str, *, server: str, engine: str) -> str:
    """With names in place of the runbook's NAME and ENGINE."""
    return re.sub(r"\bENGINE\b", engine, re.sub(r"\bNAME\b", server, step))


def _advice(reason: str, *, external: bool = False) -> str:
    unknown = f"{reason} is a word of Kubernetes': its documentation, and `kubectl describe pod`" if reason else ""
    return advice(reason, external=external) or unknown
