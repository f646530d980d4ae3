"""Status changes that are only progress wait a moment: what the next second will have outdated is not worth a write.

An engine on its normal way changes its phase five times in as many moments, and a fleet has many. What anything rests
on is written at once: lives and their ends, checksums, whether the fleet serves, whether something is wrong. That a
life has its pods can wait: until it is written, one that vanishes is made again under its name, as if it had not been.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rolloutfleet.api.common import EnginePhase
from rolloutfleet.plan.actions import Action, ApplyStatus, Emit, Register, Requeue

PROGRESS_SECONDS = 2.0
PROOF_SECONDS = 0.1
"""How long the first proofs of weights wait for those that are under way in the same group: engines that start together
are written once, and registered together. Nothing is told to routers before it is written."""
CROWD = 8
MOST_PATIENCE = 2.0
"""Times as long."""

_COMPUTED = frozenset(
    {"replicas", "ready", "selector", "weightVersion", "observedGeneration", "groups", "router", "weights"}
)
"""Of a status: derived anew with each plan, and told for people alone."""
_NOT_OURS = "training"
_ENGINE_COMPUTED = frozenset({"phase", "reason", "message", "url", "started", "servingSince"})
"""Not the weight version: an update is made of those engines that status says to have the fleet's weights, and routers
are told of an engine only after that."""
_TELLING = ("Ready", "Degraded")
"""Conditions that tell something even when they are seen for a second. Others tell what is under way."""


class Progress:
    """Since when status changes have waited, by kind and name of the object, proofs apart."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}
        self._proofs_since: dict[tuple[str, str], float] = {}

    def held_back(
        self,
        actions: Sequence[Action],
        held: Mapping[tuple[str, str], Mapping[str, Any]],
        now: float,
        *,
        seconds: float = PROGRESS_SECONDS,
    ) -> list[Action]:
        """The actions without statuses that can wait, and without what comes after those: events about what they would
        have told, registrations of engines whose proof they would have written.

        `held`: the statuses as they are, by kind and name. `now`: seconds of any clock that runs evenly. `seconds`: how
        long what is only progress waits.
        """
        waiting: set[tuple[str, str]] = set()
        unwritten: set[str] = set()
        kept: list[Action] = []
        for action in actions:
            match action:
                case ApplyStatus(kind=kind, name=name, status=status):
                    before = held.get((kind, name), {})
                    rest = self._rest((kind, name), before, status, now, seconds)
                    if rest > 0:
                        waiting.add((kind, name))
                        unwritten |= {engine["url"] for engine in _proved(before, status)}
                        kept.append(Requeue(seconds=rest))
                        continue
                case Emit(kind=kind, name=name) if (kind, name) in waiting:
                    continue  # the next plan finds the same difference
                case Register(url=url) if url in unwritten:
                    continue
            kept.append(action)
        return kept

    def _rest(
        self, place: tuple[str, str], before: Mapping[str, Any], after: Mapping[str, Any], now: float, seconds: float
    ) -> float:
        """Seconds that this status may still wait."""
        rest = 0.0
        if only_progress(before, after):
            rest = self._since.setdefault(place, now) + seconds - now
        elif only_proofs_of_some(before, after):
            rest = self._proofs_since.setdefault(place, now) + min(PROOF_SECONDS, seconds) - now
        if rest > 0:
            return rest
        self._since.pop(place, None)
        self._proofs_since.pop(place, None)
        return 0.0


def patience(seconds: float, *, waiting: int) -> float:
    """How long progress waits while so many fleets wait for their plans: work goes before words."""
    return seconds * min(1.0 + waiting / CROWD, MOST_PATIENCE)


def only_progress(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a status differs in nothing but steps of a normal way."""
    if _routable(after) < _routable(before):
        return False
    return _substance(before) == _substance(_without_first_pods(before, after))


def only_proofs_of_some(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether beside progress nothing has happened but that weights of engines were proved, and others are about to."""
    proved = {engine["index"] for engine in _proved(before, after)}
    if not proved or not any(_nearly_proved(engine) for engine in after["engines"]):
        return False
    unproved = [{**e, "weightVersion": None} if e["index"] in proved else e for e in after["engines"]]
    return only_progress(before, {**after, "engines": unproved, "measured": before.get("measured")})


def _proved(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Engines of a group whose weights were not known before."""
    engines = after.get("engines")
    if not isinstance(engines, list):
        return []
    unknown = {e["index"] for e in before.get("engines") or () if e.get("weightVersion") is None}
    return [engine for engine in engines if engine["index"] in unknown and engine.get("weightVersion") is not None]


def _nearly_proved(engine: Mapping[str, Any]) -> bool:
    return engine.get("phase") == EnginePhase.STARTING or engine.get("reason") == "WeightsUnproved"


def _without_first_pods(before: Mapping[str, Any], after: Mapping[str, Any]) -> Mapping[str, Any]:
    """Lives that had no pods before are told as if they had none yet."""
    engines = after.get("engines")
    if not isinstance(engines, list):
        return after
    bare = {(e["index"], e["epoch"]) for e in before.get("engines") or () if not e.get("podUid")}
    return {
        **after,
        "engines": [
            {**engine, "pod": "", "podUid": ""} if (engine["index"], engine["epoch"]) in bare else engine
            for engine in engines
        ],
    }


def _routable(status: Mapping[str, Any]) -> int:
    engines = status.get("engines")
    return int((engines if isinstance(engines, Mapping) else status).get("routable") or 0)


def _substance(status: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in status.items() if name not in _COMPUTED and value}
    engines = kept.pop("engines", None)
    kept.pop("routable", None)
    kept.pop(_NOT_OURS, None)
    kept["conditions"] = _conditions(status.get("conditions") or ())
    if isinstance(engines, Mapping):
        kept |= {"failed": engines["failed"]} if engines.get("failed") else {}
    elif engines:
        kept["engines"] = [
            {name: value for name, value in engine.items() if name not in _ENGINE_COMPUTED and value}
            | {"failed": engine.get("phase") == "Failed", "weightVersion": engine.get("weightVersion")}
            for engine in engines
        ]
    return kept


def _conditions(conditions: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    true = {condition["type"] for condition in conditions if condition.get("status") == "True"}
    settled = any(c["type"] == "Progressing" and c.get("status") == "False" for c in conditions)
    return {kind: kind in true for kind in _TELLING} | {"settled": settled}
