"""Prometheus metrics of the operator: what happened is counted here; what is, is read when somebody asks (states.py).

Labels are namespace, server, group and words of small sets. Names of pods are in events and status, where they cost
nothing once they are over. docs/guides/metrics.md lists all metrics; a test keeps it true.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any, get_args

from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    ProcessCollector,
    generate_latest,
)
from pydantic import ValidationError

from rolloutfleet.api.rollout_server import Transport
from rolloutfleet.api.server_group import ServerGroupStatus
from rolloutfleet.control.store import FleetKey
from rolloutfleet.plan.recovery_times import STAGES, ends, reached

logger = logging.getLogger(__name__)

PORT = 8081
PATH = "/metrics"

RECOVERY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
UPDATE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TRANSPORTS = tuple(transport for transport in get_args(Transport) if transport)
COMMITTED, FAILED = "Committed", "Failed"
REQUEST_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)

COMMON_ENDS = (
    *("EngineExited", "OOMKilled", "StartupDeadlineExceeded", "Hung", "NotAnswering"),
    *("PodDeleted", "NodeNotReady"),
)
"""Shown as 0 before the first one. A counter that begins with 1 has not risen, as far as Prometheus can tell; of these
the first one counts in a rate too."""
WORDS = 64
OTHER = "Other"
"""In place of a reason, once WORDS different ones were met: most of them are Kubernetes' own, whose list is open."""

ASKED = {
    ("GET", "/ping"): "ping",
    ("GET", "/ready"): "ready",
    ("GET", "/model_info"): "model_info",
    ("GET", "/server_info"): "server_info",
    ("GET", "/v1/loads"): "load",
    ("GET", "/health"): "encoder_health",
    ("GET", "/list_encoder_urls"): "encoder_table",
    ("GET", "/workers"): "router_table",
    ("POST", "/generate"): "generate",
    ("POST", "/weights_checker"): "checksum",
}
"""What engines and routers are asked, by method and path; orders to them are no probes."""


class Words:
    """Keeps a label bounded although its words come from elsewhere."""

    def __init__(self, limit: int = WORDS) -> None:
        self._limit = limit
        self._met: set[str] = set()

    def __call__(self, word: str) -> str:
        if word not in self._met:
            if len(self._met) >= self._limit:
                return OTHER
            self._met.add(word)
        return word


class Metrics:
    """Counts events. Its methods are what the rest of the operator is given to tell them by."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._monotonic = monotonic
        self._reason = Words()
        self._heard: dict[str, float] = {}
        self.ends: dict[tuple[FleetKey, str], dict[str, int]] = {}
        """Ends of engines' lives by reason, of each group (fleet, name). States.py shows and forgets them with it."""
        self._recovery = Histogram(
            "rolloutfleet_recovery_seconds",
            "From the moment when the operator learned that an engine ended until its next life reached this stage",
            ("stage", "reason"),
            buckets=RECOVERY_BUCKETS,
            registry=self.registry,
        )
        for stage in STAGES:
            for cause in COMMON_ENDS:
                self._recovery.labels(stage, self._reason(cause))
        self._reconciles = Histogram(
            "rolloutfleet_reconcile_seconds",
            "One reconcile of one fleet: observe, plan, act",
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._reconcile_errors = Counter(
            "rolloutfleet_reconcile_errors",
            "Reconciles that ended in an error and are repeated after a pause",
            registry=self.registry,
        )
        self._api_requests = Counter(
            "rolloutfleet_api_requests",
            "Requests to the Kubernetes API by answer; code NoAnswer: none came. Repetitions count, watches do not",
            ("verb", "resource", "code"),
            registry=self.registry,
        )
        self._api_seconds = Histogram(
            "rolloutfleet_api_request_seconds",
            "Time until the Kubernetes API answered",
            ("verb",),
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._probes = Histogram(
            "rolloutfleet_probe_seconds",
            "Time until an engine or a router answered what was asked, or until it was given up",
            ("asked",),
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._probe_failures = Counter(
            "rolloutfleet_probe_failures",
            "Questions to engines and routers that got no answer, or an error; engines that load give none",
            ("asked",),
            registry=self.registry,
        )

        self._updates = Counter(
            "rolloutfleet_weight_updates",
            "Weight updates that ended while this process led, by how they ended",
            ("transport", "outcome"),
            registry=self.registry,
        )
        self._update_seconds = Histogram(
            "rolloutfleet_weight_update_seconds",
            "Phases of weight updates up to the commit; paused: engines stood still; total: all of it",
            ("transport", "phase"),
            buckets=UPDATE_BUCKETS,
            registry=self.registry,
        )
        self._update_bytes = Counter(
            "rolloutfleet_weight_update_bytes",
            "Sent to each engine by trainers; nothing where engines read checkpoints",
            ("transport",),
            registry=self.registry,
        )
        self._casualties = Counter(
            "rolloutfleet_weight_update_casualties",
            "Engines that fell out of weight updates",
            registry=self.registry,
        )
        for transport in TRANSPORTS:
            for outcome in (COMMITTED, FAILED):
                self._updates.labels(transport, outcome)

    # What the operator tells

    def heard(self, kind: str) -> None:
        """A watch event or a list of this kind came."""
        self._heard[kind] = self._monotonic()

    def silences(self) -> Mapping[str, float]:
        """Seconds since each kind was heard of."""
        now = self._monotonic()
        return {kind: now - at for kind, at in self._heard.items()}

    def api_answered(self, verb: str, resource: str, code: str, seconds: float) -> None:
        self._api_requests.labels(verb, resource, code).inc()
        self._api_seconds.labels(verb).observe(seconds)

    def probed(self, asked: str, seconds: float, *, failed: bool) -> None:
        self._probes.labels(asked).observe(seconds)
        failures = self._probe_failures.labels(asked)  # from the first question on: a rate needs its 0
        if failed:
            failures.inc()

    def timed(self, reconcile: Callable[[FleetKey], Awaitable[None]]) -> Callable[[FleetKey], Awaitable[None]]:
        async def observed(key: FleetKey) -> None:
            began = self._monotonic()
            try:
                await reconcile(key)
            except Exception:
                self._reconcile_errors.inc()
                raise
            finally:
                self._reconciles.observe(self._monotonic() - began)

        return observed

    def status_written(self, key: FleetKey, group: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """The API server took the status `after` of this ServerGroup, which was `before` until then."""
        try:
            old, new = _with_news(before, after)
        except ValidationError:
            return  # written by another version: it is not known what is new
        for stage, cause, seconds in reached(old, new):
            self._recovery.labels(stage, self._reason(cause)).observe(seconds)
        for cause in ends(old, new):
            of_group = self.ends.setdefault((key, group), {})
            word = self._reason(cause)
            of_group[word] = of_group.get(word, 0) + 1

    def server_seen(self, before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> None:
        """A RolloutServer was `before` until then; None: it was not known, and neither is what is new."""
        last = _last_update(after)
        if before is None or not last or last.get("transaction") == _last_update(before).get("transaction"):
            return
        transport = str(last.get("transport", ""))
        self._updates.labels(transport, COMMITTED if last.get("committed") else FAILED).inc()
        for phase, seconds in (last.get("seconds") or {}).items():
            self._update_seconds.labels(transport, phase).observe(seconds)
        self._update_bytes.labels(transport).inc(last.get("bytes") or 0)
        self._casualties.inc(last.get("fellOut") or 0)

    def asked(self, method: str, path: str, status: int | None, seconds: float) -> None:
        """A question to an engine or a router was answered, or not (status None)."""
        question = ASKED.get((method, path))
        if question is not None:
            paused = question == "ready" and status == HTTPStatus.SERVICE_UNAVAILABLE  # that is an answer
            self.probed(question, seconds, failed=(status is None or status >= HTTPStatus.BAD_REQUEST) and not paused)


def _last_update(server: Mapping[str, Any]) -> Mapping[str, Any]:
    training = (server.get("status") or {}).get("training") or {}
    last: Mapping[str, Any] = training.get("lastUpdate") or {}
    return last


def _with_news(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[ServerGroupStatus, ServerGroupStatus]:
    """Both statuses with those engines alone whose recoveries differ: of a thousand engines few do."""
    known = {engine["index"]: engine for engine in before.get("engines") or ()}
    changed = [
        engine
        for engine in after.get("engines") or ()
        if engine.get("recoveries") and engine["recoveries"] != known.get(engine["index"], {}).get("recoveries")
    ]
    return _of(known[engine["index"]] for engine in changed if engine["index"] in known), _of(changed)


def _of(engines: Iterable[Mapping[str, Any]]) -> ServerGroupStatus:
    return ServerGroupStatus.model_validate({"engines": list(engines)})


async def serve(registry: CollectorRegistry, *, port: int = PORT) -> None:
    """Answer Prometheus for ever; cancelled with the process."""
    runner = await started(registry, port=port)
    try:
        logger.info("metrics on port %d", port)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def started(registry: CollectorRegistry, *, port: int, host: str | None = None) -> web.AppRunner:
    """A server that answers already; `cleanup` ends it."""

    async def scrape(_: web.Request) -> web.Response:
        # Read at one moment, here, where everything is written; put in words beside the loop, since that takes longer
        # than what a reconcile should wait for (at 1,000 fleets 0.03 s and 0.2 s).
        found = _Collected(list(registry.collect()))
        text = await asyncio.to_thread(generate_latest, found)
        headers = {"Content-Type": CONTENT_TYPE_PLAIN_0_0_4}
        response = web.Response(body=text, headers=headers, zlib_executor_size=1 << 16)
        response.enable_compression()
        return response

    app = web.Application()
    app.router.add_get(PATH, scrape)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner


class _Collected:
    """A collector of what was collected already."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics
