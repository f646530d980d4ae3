"""Metrics of what is: fleets, engines, queue and leader, read from what the operator holds when Prometheus asks.

Nothing is kept, so the series of a fleet end with it. It reads the objects as the API server wrote them: to parse a
thousand of them at each scrape would hold up reconciles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from rolloutfleet.api.common import EnginePhase
from rolloutfleet.api.weight_labels import fleet_id, parse_label
from rolloutfleet.control.metrics import COMMON_ENDS, Metrics
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.kube.queue import WorkQueue
from rolloutfleet.plan.observed import external_uid, parse_time

FLEET = ("namespace", "server")
GROUP = (*FLEET, "group")

BEHIND = frozenset({"WeightsBehind", "WrongWeights", "CatchUpFailed", "AwaitingUpdate", "NoLocalCopy"})


@dataclass(frozen=True)
class Sources:
    """What there is to be read."""

    store: FleetStore
    queue: Callable[[], WorkQueue[FleetKey] | None]
    """None while this replica does not act."""
    leading: Callable[[], bool]
    clock: Callable[[], datetime]


class States:
    """A collector of prometheus_client."""

    def __init__(self, metrics: Metrics, sources: Sources) -> None:
        self._metrics = metrics
        self._sources = sources
        metrics.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        yield from self._of_the_operator()
        # A standby sees the fleets too: told twice they would add up to two of each.
        yield from self._of_the_fleets() if self._sources.leading() else ()

    def _of_the_operator(self) -> Iterator[Metric]:
        queue = self._sources.queue()
        yield GaugeMetricFamily(
            "rolloutfleet_leader",
            "1 if this replica of the operator leads and acts, 0 if it stands by",
            float(self._sources.leading()),
        )
        yield GaugeMetricFamily(
            "rolloutfleet_queue_depth", "Fleets that wait for a reconcile", queue.depth() if queue is not None else 0
        )
        yield GaugeMetricFamily(
            "rolloutfleet_queue_oldest_seconds",
            "For how long the first of them has waited",
            queue.oldest_age() if queue is not None else 0,
        )
        ages = GaugeMetricFamily(
            "rolloutfleet_last_event_age_seconds",
            "Since the operator heard of this kind of objects, by a watch event or by the full list of each minute",
            labels=("kind",),
        )
        for kind, seconds in self._metrics.silences().items():
            ages.add_metric((kind,), seconds)
        yield ages

    def _of_the_fleets(self) -> Iterator[Metric]:
        of_server = _Gauges(
            FLEET,
            {
                "ready": "1 if condition Ready of the RolloutServer is True, else 0",
                "mass_failure": "1 while engines that look dead are not replaced, because most look dead at once",
                "weight_version": "Version of the weights that the trainer has committed",
                "weight_version_skew": "How many versions the oldest engine that answers is behind",
                "recovery_pending_seconds": "How long the oldest recovery that is not over has lasted, without engines "
                "that the trainer holds and those that wait for somebody to resume them",
            },
        )
        of_group = _Gauges(
            GROUP,
            {
                "engines_desired": "Engines asked for",
                "engines_ready": "Engines that answer, and placeholders that hold their GPUs",
                "engines_routable": "Engines with the right weights that every router lists as healthy",
                "engines_failed_for_good": "Engines that failed more than recovery.maxRestarts times in a row and wait "
                "for somebody to resume them",
            },
        )
        phases = GaugeMetricFamily("rolloutfleet_engines", "Engines by phase", labels=(*GROUP, "phase"))
        failures = CounterMetricFamily(
            "rolloutfleet_engine_failures",
            "Ends of engines' lives that were not planned, since this process began to lead",
            labels=(*GROUP, "reason"),
        )
        there: set[tuple[FleetKey, str]] = set()
        groups_of: dict[FleetKey, list[Mapping[str, Any]]] = {}
        for key, group in self._sources.store.groups():
            groups_of.setdefault(key, []).append(group)
        for key in self._sources.store.fleet_keys():
            server = self._sources.store.server(key)
            if server is None:
                continue
            groups = groups_of.get(key, [])
            of_server.add(key, self._server(server, groups))
            for group in groups:
                name = group["metadata"]["name"]
                there.add((key, name))
                engines = _engines(group)
                of_group.add((*key, name), _group(group, engines))
                counted = dict.fromkeys(EnginePhase, 0)
                for engine in engines:
                    counted[EnginePhase(engine.get("phase", EnginePhase.PENDING))] += 1
                for phase, count in counted.items():
                    phases.add_metric((*key, name, phase), count)
                for reason, count in self._ends(key, group).items():
                    failures.add_metric((*key, name, reason), count)
        for gone in self._metrics.ends.keys() - there:
            del self._metrics.ends[gone]
        yield from of_server.families
        yield from of_group.families
        yield phases
        yield failures

    def _ends(self, key: FleetKey, group: Mapping[str, Any]) -> dict[str, int]:
        met = self._metrics.ends.get((key, group["metadata"]["name"]), {})
        ours = group["spec"].get("role") != "External"  # the ends of those are not seen
        return {**dict.fromkeys(COMMON_ENDS if ours else (), 0), **met}

    def _server(self, server: Mapping[str, Any], groups: list[Mapping[str, Any]]) -> dict[str, float]:
        status = server.get("status") or {}
        version = (status.get("weights") or {}).get("version")
        engines = [engine for group in groups for engine in _engines(group)]
        values = {
            "ready": float(any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())),
            "mass_failure": float(any(engine.get("reason") == "MassFailure" for engine in engines)),
            "recovery_pending_seconds": max(map(self._pending, engines), default=0.0),
        }
        if version is not None:
            values["weight_version"] = version
            fleet = fleet_id(server["metadata"]["uid"])
            values["weight_version_skew"] = max((self._skew(engine, version, fleet) for engine in engines), default=0)
        return values

    def _skew(self, engine: Mapping[str, Any], committed: int, fleet: str) -> int:
        """By the engine's label, which is no proof: one known to have other weights is behind by one at least."""
        uid = external_uid(engine["url"]) if engine.get("facts") else engine.get("podUid", "")
        probe = self._sources.store.probes.get(uid)
        if probe is None or not probe.answering:
            return 0
        label = parse_label(probe.label)
        behind = committed - label.version if label is not None and label.fleet in ("", fleet) else 0
        return max(behind, 1 if engine.get("reason") in BEHIND else 0)

    def _pending(self, engine: Mapping[str, Any]) -> float:
        last: Mapping[str, Any] = (engine.get("recoveries") or ({},))[-1]
        over = last.get("epoch") != engine["epoch"] or last.get("routable")
        if over or engine.get("phase") == EnginePhase.HELD or _failed_for_good(engine):
            return 0.0
        detected = parse_time(last.get("detected", ""))
        return (self._sources.clock() - detected).total_seconds() if detected is not None else 0.0


class _Gauges:
    """Families of the same labels."""

    def __init__(self, labels: tuple[str, ...], helps: Mapping[str, str]) -> None:
        self._families = {
            name: GaugeMetricFamily(f"rolloutfleet_{name}", text, labels=labels) for name, text in helps.items()
        }

    def add(self, labels: tuple[str, ...], values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._families[name].add_metric(labels, value)

    @property
    def families(self) -> Iterable[Metric]:
        return self._families.values()


def _group(group: Mapping[str, Any], engines: list[Mapping[str, Any]]) -> dict[str, float]:
    status = group.get("status") or {}
    return {
        "engines_desired": group["spec"].get("replicas", 0),
        "engines_ready": status.get("ready", 0),
        "engines_routable": status.get("routable", 0),
        "engines_failed_for_good": sum(map(_failed_for_good, engines)),
    }


def _engines(group: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return (group.get("status") or {}).get("engines") or []


def _failed_for_good(engine: Mapping[str, Any]) -> bool:
    return engine.get("phase") == EnginePhase.FAILED and not engine.get("retryAt")
