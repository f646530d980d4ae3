"""What Prometheus is told: scraped from a running server, of fleets as the API server has them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rolloutfleet.api.server_group import EngineStatus, Recovery, ServerGroupStatus
from rolloutfleet.control.metrics import COMMON_ENDS, OTHER, WORDS, Metrics, Words, started
from rolloutfleet.control.operator import WATCHED, Operator
from rolloutfleet.control.states import Sources, States
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.engine.errors import EngineError
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.kube.client import KubeApi
from rolloutfleet.kube.queue import WorkQueue
from rolloutfleet.plan.observed import EngineProbe
from unit.engine.stand_in import Answer, Asked, StandIn
from unit.kube.test_client import Server, credentials, served
from unit.plan.world import DEFAULTS

NOW = datetime(2026, 1, 1, 0, 10, tzinfo=UTC)
KEY = FleetKey("rl", "qwen")


class Scene:
    """A store, a queue and what Prometheus reads of them."""

    def __init__(self) -> None:
        self.clock = 100.0
        self.leads = True
        self.metrics = Metrics(monotonic=lambda: self.clock)
        self.store = FleetStore(clock=lambda: NOW)
        self.queue: WorkQueue[FleetKey] = WorkQueue(clock=lambda: self.clock)
        States(
            self.metrics,
            Sources(
                store=self.store,
                queue=lambda: self.queue if self.leads else None,
                leading=lambda: self.leads,
                clock=lambda: NOW,
            ),
        )
        self._version = 0

    def server(self, name: str = "qwen", *, ready: str = "True", version: int | None = 3) -> dict[str, Any]:
        status: dict[str, Any] = {"conditions": [{"type": "Ready", "status": ready, "reason": "Serving"}]}
        if version is not None:
            status["weights"] = {"version": version}
        return self._keep("RolloutServer", {"metadata": {"name": name, "uid": f"uid-{name}"}, "status": status})

    def group(self, *engines: EngineStatus, server: str = "qwen", role: str = "Regular", **status: int) -> None:
        found = ServerGroupStatus.model_validate({**status, "engines": engines})
        metadata = {
            "name": f"{server}-main",
            "uid": f"uid-{server}-main",
            "labels": {"rolloutfleet.dev/server": server},
        }
        spec = {"server": server, "role": role, "replicas": max(len(engines), 1), "model": {"path": "/m"}}
        self._keep("ServerGroup", {"metadata": metadata, "spec": spec, "status": found.dump()})

    def answers(self, uid: str, label: str) -> None:
        self.store.probes[uid] = EngineProbe(answering=True, label=label)

    def written(self, before: ServerGroupStatus, after: ServerGroupStatus, *, key: FleetKey = KEY) -> None:
        self.metrics.status_written(key, f"{key.name}-main", before.dump(), after.dump())

    def _keep(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        body["metadata"] |= {"namespace": "rl", "resourceVersion": str(self._version)}
        self.store.upsert(kind, body)
        return body

    def scrape(self) -> Scraped:
        return asyncio.run(scraped(self.metrics))


class Scraped(dict[str, dict[tuple[str, ...], float]]):
    """Values by sample name and label values, in the order of the labels' names."""

    def of(self, name: str) -> dict[tuple[str, ...], float]:
        return self.get(f"rolloutfleet_{name}", {})


async def scraped(metrics: Metrics) -> Scraped:
    runner = await started(metrics.registry, host="127.0.0.1", port=0)
    try:
        async with httpx.AsyncClient(trust_env=False) as http:
            response = await http.get(f"http://127.0.0.1:{runner.addresses[0][1]}/metrics")
    finally:
        await runner.cleanup()
    assert response.status_code == 200
    assert response.headers["Content-Type"].startswith("text/plain")
    found = Scraped()
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = tuple(sample.labels[name] for name in sorted(sample.labels))
            assert labels not in found.setdefault(sample.name, {}), f"{sample.name} {labels} is told twice"
            found[sample.name][labels] = sample.value
    return found


def engine(index: int = 0, phase: str = "Serving", **fields: Any) -> EngineStatus:
    known = {"epoch": 1, "pod": f"qwen-main-{index}-e1-r0", "pod_uid": f"uid-{index}"}
    return EngineStatus.model_validate({"index": index, "phase": phase, **known, **fields})


def ended(epoch: int, reason: str = "OOMKilled", **stages: str) -> Recovery:
    return Recovery.model_validate({"epoch": epoch, "reason": reason, "detected": "2026-01-01T00:00:00Z", **stages})


# States


def test_a_fleet_is_told_in_figures_and_no_pod_is_named() -> None:
    scene = Scene()
    scene.server()
    scene.group(engine(0), engine(1), engine(2, "Failed", retry_at="2026-01-01T00:11:00Z"), ready=2, routable=2)
    found = scene.scrape()
    assert found.of("ready") == {("rl", "qwen"): 1}
    assert found.of("engines_desired") == {("qwen-main", "rl", "qwen"): 3}
    assert found.of("engines_ready") == {("qwen-main", "rl", "qwen"): 2}
    assert found.of("engines_routable") == {("qwen-main", "rl", "qwen"): 2}
    assert found.of("engines_failed_for_good") == {("qwen-main", "rl", "qwen"): 0}
    phases = {labels[2]: value for labels, value in found.of("engines").items()}
    assert phases == {
        **dict.fromkeys(("Pending", "Starting", "Stale", "Held", "Draining", "Reserved"), 0),
        "Serving": 2,
        "Failed": 1,
    }
    assert not [labels for samples in found.values() for labels in samples if any("-e1" in word for word in labels)]


def test_the_series_of_a_fleet_end_with_it() -> None:
    scene = Scene()
    body = scene.server()
    scene.group(engine())
    scene.server("other")
    scene.group(engine(), server="other")
    scene.written(ServerGroupStatus(), ServerGroupStatus(engines=(engine(recoveries=(ended(2),)),)))
    assert any("qwen" in labels for labels in scene.scrape().of("engine_failures_total"))
    scene.store.remove("RolloutServer", body)
    found = scene.scrape()
    assert not [labels for samples in found.values() for labels in samples if "qwen" in labels]
    assert found.of("ready") == {("rl", "other"): 1}
    assert scene.metrics.ends == {}


def test_a_fleet_that_the_operator_has_not_looked_at_yet_has_no_weights_and_is_not_ready() -> None:
    scene = Scene()
    scene.store.upsert(
        "RolloutServer", {"metadata": {"name": "qwen", "namespace": "rl", "uid": "u", "resourceVersion": "1"}}
    )
    found = scene.scrape()
    assert found.of("ready") == {("rl", "qwen"): 0}
    assert found.of("weight_version") == {}


@pytest.mark.parametrize("status", ["False", "Unknown"])
def test_only_a_fleet_that_says_so_is_ready(status: str) -> None:
    scene = Scene()
    scene.server(ready=status)
    assert scene.scrape().of("ready") == {("rl", "qwen"): 0}


def test_the_skew_is_that_of_the_oldest_engine_that_answers() -> None:
    scene = Scene()
    scene.server(version=7)
    scene.group(engine(0), engine(1), engine(2), engine(3))
    scene.answers("uid-0", "7")
    assert scene.scrape().of("weight_version") == {("rl", "qwen"): 7}
    assert scene.scrape().of("weight_version_skew") == {("rl", "qwen"): 0}
    scene.answers("uid-1", "4")
    scene.answers("uid-2", "6")
    scene.store.probes["uid-3"] = EngineProbe(answering=False, label="0")
    assert scene.scrape().of("weight_version_skew") == {("rl", "qwen"): 3}


@pytest.mark.parametrize(
    ("label", "reason", "skew"),
    [
        ("4@uid-qwen", "WeightsBehind", 3),
        ("4@uid-othe", "OtherFleet", 0),  # whoever has its address by now: it is not this fleet's
        ("7@uid-qwen", "WrongWeights", 1),  # the checksum is not the label's
        ("7", "CatchUpFailed", 1),
        ("8", "", 0),  # an update is under way
        ("default", "", 0),  # somebody else's engine, not adopted yet
        ("", "", 0),  # an encoder
    ],
)
def test_a_label_is_not_believed_against_what_is_known(label: str, reason: str, skew: int) -> None:
    scene = Scene()
    scene.server(version=7)
    scene.group(engine(reason=reason))
    scene.answers("uid-0", label)
    assert scene.scrape().of("weight_version_skew") == {("rl", "qwen"): skew}


def test_an_external_engine_is_known_by_its_address() -> None:
    scene = Scene()
    scene.server(version=7)
    facts = {"role": "Regular", "tensor_parallel": 1, "pipeline_parallel": 1, "memory_saver": False}
    scene.group(engine(url="http://10.0.0.5:30000", pod_uid="g/0/1", facts=facts), role="External")
    scene.answers("external:http://10.0.0.5:30000", "5")
    found = scene.scrape()
    assert found.of("weight_version_skew") == {("rl", "qwen"): 2}
    assert found.of("engine_failures_total") == {}


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"phase": "Starting", "epoch": 2, "recoveries": (ended(2),)}, 600),
        ({"phase": "Serving", "epoch": 2, "recoveries": (ended(2, routable="2026-01-01T00:01:00Z"),)}, 0),
        ({"phase": "Held", "epoch": 2, "recoveries": (ended(2),)}, 0),
        ({"phase": "Starting", "epoch": 3, "recoveries": (ended(2),)}, 0),  # a changed spec began another life
        ({"phase": "Failed", "epoch": 2, "recoveries": (ended(2),)}, 0),
        ({"phase": "Failed", "epoch": 2, "retry_at": "2026-01-01T00:20:00Z", "recoveries": (ended(2),)}, 600),
    ],
)
def test_a_recovery_is_pending_until_the_engine_serves_or_others_have_to_act(
    fields: dict[str, Any], seconds: float
) -> None:
    scene = Scene()
    scene.server()
    scene.group(engine(0), engine(1, **fields))
    assert scene.scrape().of("recovery_pending_seconds") == {("rl", "qwen"): seconds}


def test_engines_that_nobody_starts_any_more_and_mass_failures_are_told() -> None:
    scene = Scene()
    scene.server()
    scene.group(engine(0, "Failed"), engine(1, "Starting", reason="MassFailure"))
    found = scene.scrape()
    assert found.of("engines_failed_for_good") == {("qwen-main", "rl", "qwen"): 1}
    assert found.of("mass_failure") == {("rl", "qwen"): 1}


def test_a_standby_tells_of_itself_and_leaves_the_fleets_to_the_leader() -> None:
    scene = Scene()
    scene.server()
    scene.group(engine())
    scene.queue.add(KEY)
    scene.clock += 5
    found = scene.scrape()
    assert (found.of("leader"), found.of("queue_depth"), found.of("queue_oldest_seconds")) == (
        {(): 1},
        {(): 1},
        {(): 5},
    )
    scene.leads = False
    found = scene.scrape()
    assert (found.of("leader"), found.of("queue_depth")) == ({(): 0}, {(): 0})
    assert found.of("ready") == found.of("engines") == {}


def test_the_age_of_a_kind_is_counted_from_what_was_last_heard() -> None:
    scene = Scene()
    scene.metrics.heard("Pod")
    scene.clock += 7
    scene.metrics.heard("Lease")
    scene.clock += 1
    assert scene.scrape().of("last_event_age_seconds") == {("Pod",): 8, ("Lease",): 1}


# Events


def test_ends_and_stages_are_counted_once_whatever_else_the_status_says() -> None:
    scene = Scene()
    scene.server()
    scene.group(engine())
    quiet = engine(1, recoveries=(ended(2, "Hung", routable="2026-01-01T00:00:09Z"),))
    before = ServerGroupStatus(engines=(engine(), quiet))
    begun = ServerGroupStatus(engines=(engine(recoveries=(ended(3),)), quiet))
    replaced = ServerGroupStatus(engines=(engine(recoveries=(ended(3, replaced="2026-01-01T00:00:00.2Z"),)), quiet))
    for old, new in ((before, begun), (begun, replaced), (replaced, replaced)):
        scene.written(old, new)
    found = scene.scrape()
    failures = {labels[2]: value for labels, value in found.of("engine_failures_total").items()}
    assert failures == {**dict.fromkeys(COMMON_ENDS, 0), "OOMKilled": 1}
    counts = {labels: value for labels, value in found.of("recovery_seconds_count").items() if value}
    assert counts == {("OOMKilled", "replaced"): 1}
    assert found.of("recovery_seconds_bucket")["0.1", "OOMKilled", "replaced"] == 0
    assert found.of("recovery_seconds_bucket")["0.25", "OOMKilled", "replaced"] == 1


def test_an_update_is_counted_once_by_how_it_ended_with_its_phases() -> None:
    def server(transaction: int, **changed: Any) -> dict[str, Any]:
        last = {"transaction": transaction, "transport": "distributed", "committed": True, "fellOut": 1, "bytes": 100}
        seconds = {"seconds": {"paused": 0.2, "total": 0.3}}
        return {"status": {"training": {"lastUpdate": {**last, **seconds, **changed}}}}

    scene = Scene()
    for before, after in (
        (None, server(1)),  # what had ended before this process knew of it
        ({}, server(2)),
        (server(2), server(2)),
        (server(2), server(3, committed=False, fellOut=2, bytes=0)),
    ):
        scene.metrics.server_seen(before, after)
    found = scene.scrape()
    updates = {labels: value for labels, value in found.of("weight_updates_total").items() if value}
    assert updates == {("Committed", "distributed"): 1, ("Failed", "distributed"): 1}
    assert found.of("weight_update_seconds_count")["paused", "distributed"] == 2
    assert found.of("weight_update_bytes_total") == {("distributed",): 100}
    assert list(found.of("weight_update_casualties_total").values()) == [3]


def test_a_rate_can_be_taken_of_the_first_end_and_the_first_recovery() -> None:
    scene = Scene()
    scene.server()
    scene.group(engine())
    found = scene.scrape()
    assert {labels[2] for labels in found.of("engine_failures_total")} == set(COMMON_ENDS)
    assert {labels[0] for labels in found.of("recovery_seconds_count")} == set(COMMON_ENDS)


def test_a_status_of_another_version_is_not_counted() -> None:
    scene = Scene()
    scene.metrics.status_written(KEY, "qwen-main", {}, {"engines": [{"index": 0, "epoch": 1, "recoveries": [{}]}]})
    assert scene.metrics.ends == {}


def test_words_that_others_choose_are_bounded() -> None:
    words = Words(limit=2)
    assert [words(word) for word in ("A", "B", "C", "A", "D")] == ["A", "B", OTHER, "A", OTHER]
    scene = Scene()
    scene.server()
    scene.group(engine())
    for epoch in range(1, 3 * WORDS):
        scene.written(
            ServerGroupStatus(), ServerGroupStatus(engines=(engine(recoveries=(ended(epoch, f"Word{epoch}"),)),))
        )
    reasons = {labels[2] for labels in scene.scrape().of("engine_failures_total")}
    assert OTHER in reasons
    assert len(reasons) == WORDS + 1


def test_a_reconcile_is_timed_and_its_error_counted_and_raised() -> None:
    scene = Scene()

    async def reconcile(key: FleetKey) -> None:
        scene.clock += 0.02
        if key.name == "broken":
            raise ValueError("no")

    async def both() -> None:
        timed = scene.metrics.timed(reconcile)
        await timed(KEY)
        with pytest.raises(ValueError, match="no"):
            await timed(FleetKey("rl", "broken"))

    asyncio.run(both())
    found = scene.scrape()
    assert found.of("reconcile_seconds_count") == {(): 2}
    assert found.of("reconcile_seconds_sum") == {(): pytest.approx(0.04)}
    assert found.of("reconcile_errors_total") == {(): 1}


# What engines and routers are asked


async def paused_and_failing(asked: Asked) -> Answer:
    """An engine that is paused, and a router that fails."""
    codes = {"/ready": 503, "/workers": 500}
    return codes.get(asked.path, 200), {"model_path": "/m", "weight_version": "1"}


def test_questions_are_timed_by_what_was_asked_and_a_paused_engine_has_answered() -> None:
    metrics = Metrics()

    async def scenario() -> None:
        async with Http(max_connections=4, observe=metrics.asked) as http:
            async with StandIn(paused_and_failing) as stand_in:
                engine = EngineClient(stand_in.url, http=http)
                assert await engine.ping()
                assert not await engine.ready()
                await engine.model_info()
                await engine.continue_generation()  # an order, not a question
                with pytest.raises(EngineError):
                    await RouterClient(stand_in.url, http=http).list_workers()
            with pytest.raises(EngineError):
                await engine.ping()  # nobody is there any more

    asyncio.run(scenario())
    found = asyncio.run(scraped(metrics))
    assert found.of("probe_seconds_count") == {("ping",): 2, ("ready",): 1, ("model_info",): 1, ("router_table",): 1}
    failures = found.of("probe_failures_total")
    assert failures == {("ping",): 1, ("ready",): 0, ("model_info",): 0, ("router_table",): 1}


# The operator


def test_the_operator_tells_of_each_kind_that_it_watches_and_of_its_requests() -> None:
    metrics = Metrics()
    empty = Server((200, {"metadata": {"resourceVersion": "1"}, "items": [], "resources": []}))

    async def scenario() -> None:
        async with served(empty) as url:
            api = KubeApi(credentials(url), observe=metrics.api_answered)
            operator = Operator(api=api, defaults=DEFAULTS, namespace=None, metrics=metrics)
            await operator._resync()
            assert (await scraped(metrics)).of("leader") == {(): 0}
            operator.begin_term()
            await operator.stop()

    asyncio.run(scenario())
    found = asyncio.run(scraped(metrics))
    assert {kind for (kind,) in found.of("last_event_age_seconds")} == {watched.resource.kind for watched in WATCHED}
    listed = {resource for code, resource, verb in found.of("api_requests_total") if (code, verb) == ("200", "list")}
    assert listed == {watched.resource.plural for watched in WATCHED}
    assert found.of("leader") == {(): 1}
    assert "process_resident_memory_bytes" in found
