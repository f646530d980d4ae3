"""Dashboard, alerts and guide speak of metrics that the operator has, and each alert of an entry in the runbook."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rolloutfleet.agent.collection.observer import Evaluation
from rolloutfleet.agent.observing.metrics import SampleMetrics
from rolloutfleet.agent.observing.observations import Observations
from rolloutfleet.api.names import AGENT_METRICS_PORT_NAME, ANNOTATION_ROLLOUT_SERVERS
from rolloutfleet.api.server_group import ServerGroupStatus
from rolloutfleet.control.metrics import PORT
from rolloutfleet.plan.injection import inject
from unit.agent.test_observations import group, sample
from unit.control.test_metrics import Scene, ended, engine
from unit.docs.test_docs import DOCS, ROOT, anchors

OVERLAY = ROOT / "manifests/overlays/prometheus"
DASHBOARD = json.loads((OVERLAY / "dashboard.json").read_text())
RULES = [
    rule for group in yaml.safe_load((OVERLAY / "alerts.yaml").read_text())["spec"]["groups"] for rule in group["rules"]
]
GUIDE = DOCS / "guides/metrics.md"

FROM_PROMETHEUS = {"instance", "job", "pod"}
"""Labels that a scrape adds."""
OURS = {
    *("namespace", "server", "group", "phase", "reason", "stage", "transport", "outcome"),  # of fleets
    *("role", "status", "state", "evaluation"),  # of samples
    *("kind", "verb", "resource", "code", "asked", "le"),  # of the operator
}
SELECTOR = re.compile(r"\b((?:rolloutfleet|process)_[a-z_]+)(?:\{([^}]*)\})?")


def of_samples() -> CollectorRegistry:
    seen = Observations()
    seen.sample_ended(sample())
    seen.group_finished(group(0, 1.0))
    seen.group_dropped(group(1, 0.0), "zero_std")
    seen.step_leased(1, [group(0, 1.0)], 1)
    seen.step_trained(1)
    seen.queue(open=1, finished=1, running=1)
    seen.evaluation_ended(Evaluation("test", 1, [group(0, 1.0)], failed=0, reward_key="", seconds=1.0))
    registry = CollectorRegistry()
    registry.register(SampleMetrics("rl", {"actor": ("qwen", seen)}))
    return registry


def exported() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """(name, type, labels, help) of all that operator and agents tell once everything has happened."""
    scene = Scene()
    scene.server()
    scene.group(engine())
    scene.metrics.heard("Pod")
    scene.metrics.api_answered("get", "pods", "200", 0.1)
    scene.metrics.probed("ping", 0.1, failed=True)
    scene.written(ServerGroupStatus(), ServerGroupStatus(engines=(engine(recoveries=(ended(2),)),)))
    ended_update = {"transaction": 1, "transport": "disk", "seconds": {"total": 1.0}}
    scene.metrics.server_seen({}, {"status": {"training": {"lastUpdate": ended_update}}})
    text = generate_latest(scene.metrics.registry).decode() + generate_latest(of_samples()).decode()
    for family in text_string_to_metric_families(text):
        labels = {label for sample in family.samples for label in sample.labels}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert family.samples, f"{name} has no value: let it happen above"
        if not name.endswith("_created"):
            yield name, family.type, tuple(sorted(labels)), family.documentation


EXPORTED = {name: (kind, labels, text) for name, kind, labels, text in exported()}


def known_labels(name: str) -> set[str]:
    """Of a sample: a histogram has three names. Raises KeyError where the operator has no such metric."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    if name not in EXPORTED and EXPORTED[base][0] == "histogram":
        return set(EXPORTED[base][1]) - (set() if name.endswith("_bucket") else {"le"})
    assert EXPORTED[name][0] != "histogram", f"{name} has no value of its own"
    return set(EXPORTED[name][1])


def check(expression: str) -> None:
    """Raises if it asks for what is not there."""
    found = list(SELECTOR.finditer(expression))
    assert found, f"no metric in {expression}"
    labels: set[str] = set(FROM_PROMETHEUS)
    for match in found:
        known = known_labels(match[1])
        matched = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", match[2] or ""))
        assert matched <= known, f"{match[0]}: it has {known}"
        labels |= known
    for grouping in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression):
        named = {word.strip() for word in grouping.split(",") if word.strip()}
        assert named <= labels, f"{expression}: grouped by {named}, and there is {labels}"
    assert expression.count("(") == expression.count(")")
    assert expression.count("{") == expression.count("}")


def test_a_metric_or_label_that_is_not_there_is_found() -> None:
    check('sum by (le) (rate(rolloutfleet_recovery_seconds_bucket{stage="loaded"}[5m]))')
    for wrong in (
        "rolloutfleet_unheard_of",
        "rolloutfleet_recovery_seconds_total",
        "rolloutfleet_recovery_seconds",
        'rolloutfleet_ready{group="main"}',
        "sum by (stage) (rolloutfleet_ready)",
        "rolloutfleet_engine_failures",
        "sum by (le) (rolloutfleet_recovery_seconds_count)",
        "vector(1)",
    ):
        with pytest.raises((AssertionError, KeyError)):
            check(wrong)


def test_names_and_units_are_as_prometheus_wants_them_and_labels_are_few() -> None:
    for name, (kind, labels, text) in EXPORTED.items():
        if name.startswith("process_"):
            continue
        assert name.startswith("rolloutfleet_"), name
        assert name.endswith("_total") == (kind == "counter"), name
        assert not re.search(r"_(ms|milliseconds|minutes|percent|kb|mib)(_|$)", name), name
        assert set(labels) <= OURS, name
        assert text
        assert not text.endswith("."), name


# Alerts


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_asks_for_what_there_is_and_says_what_to_do(rule: dict[str, Any]) -> None:
    assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
    check(rule["expr"])
    assert re.fullmatch(r"\d+[smh]", rule["for"])
    assert rule["labels"]["severity"] in ("critical", "warning")
    annotations = rule["annotations"]
    assert set(annotations) == {"summary", "description", "runbook_url"}
    page, _, anchor = annotations["runbook_url"].partition("#")
    assert ROOT / page == DOCS / "runbook.md"
    assert anchor == rule["alert"].lower()
    assert anchor in anchors(DOCS / "runbook.md")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_names_what_it_is_about_by_labels_that_its_expression_keeps(rule: dict[str, Any]) -> None:
    kept = [
        {word.strip() for word in grouping.split(",")} for grouping in re.findall(r"by \(([^)]*)\)", rule["expr"])
    ] or [set()]
    named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert named <= kept[0], rule["alert"]
    if {"namespace", "server"} <= kept[0]:
        assert named >= {"namespace", "server"}, f"{rule['alert']}: which fleet?"


def test_the_runbook_has_no_alert_that_does_not_exist() -> None:
    section = (DOCS / "runbook.md").read_text().split("\n## Alerts\n")[1].split("\n## ")[0]
    assert re.findall(r"^### (\w+)$", section, re.MULTILINE) == [rule["alert"] for rule in RULES]


# The dashboard


def targets() -> Iterator[Any]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield pytest.param(target, id=f"{panel['title']} {target['refId']}")


@pytest.mark.parametrize("target", list(targets()))
def test_a_panel_asks_for_what_there_is(target: dict[str, Any]) -> None:
    check(target["expr"].replace("$__rate_interval", "5m").replace("$__range", "1h"))
    for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
        assert re.search(rf"\bby \([^)]*\b{label}\b", target["expr"]) or label in FROM_PROMETHEUS, target["expr"]


def test_panels_have_names_places_and_a_source_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "namespace", "server"}
    for name in ("namespace", "server"):
        query = variables[name]["query"]["query"]
        match = re.fullmatch(r"label_values\((\w+)(?:{.*})?, (\w+)\)", query)
        assert match, query
        assert match[2] in known_labels(match[1])


def test_everything_that_is_told_is_shown() -> None:
    shown = {match[1] for p in targets() for match in SELECTOR.finditer(p.values[0]["expr"])}
    shown = {name if name in EXPORTED else re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert {name for name in EXPORTED if name.startswith("rolloutfleet_")} <= shown


# Manifests


def test_prometheus_finds_the_port_by_its_name() -> None:
    base = ROOT / "manifests/base"
    documents = yaml.safe_load_all((base / "operator.yaml").read_text())
    deployment = next(document for document in documents if document["kind"] == "Deployment")
    service = yaml.safe_load((base / "metrics.yaml").read_text())
    monitor = yaml.safe_load((OVERLAY / "servicemonitor.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {"name": "metrics", "containerPort": PORT} in container["ports"]
    assert service["spec"]["ports"] == [{"name": "metrics", "port": PORT, "targetPort": "metrics"}]
    assert service["spec"]["selector"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == "metrics"
    assert endpoint["honorLabels"], "or the namespace of a fleet is lost"
    assert "metrics.yaml" in yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]


def test_prometheus_finds_the_agents_by_the_label_and_the_port_that_injection_gives() -> None:
    pod = {"metadata": {"annotations": {ANNOTATION_ROLLOUT_SERVERS: "actor=qwen"}}, "spec": {"containers": []}}
    injected = inject(pod, agent_image="agent")
    monitor = yaml.safe_load((OVERLAY / "podmonitor.yaml").read_text())["spec"]
    assert monitor["selector"]["matchLabels"].items() <= injected["metadata"]["labels"].items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    (agent,) = injected["spec"]["initContainers"]
    assert [port["name"] for port in agent["ports"]] == [endpoint["port"]] == [AGENT_METRICS_PORT_NAME]
    assert endpoint["honorLabels"]
    assert monitor["namespaceSelector"] == {"any": True}


def test_the_overlay_has_all_of_its_files_and_needs_nothing_of_the_base() -> None:
    overlay = yaml.safe_load((OVERLAY / "kustomization.yaml").read_text())
    (dashboard,) = overlay["configMapGenerator"]
    files = {entry.partition("=")[2] for entry in dashboard["files"]}
    assert {*overlay["resources"], *files, "kustomization.yaml"} == {path.name for path in OVERLAY.iterdir()}
    assert dashboard["options"]["labels"] == {"grafana_dashboard": "1"}
    for name in overlay["resources"]:
        manifest = yaml.safe_load((OVERLAY / name).read_text())
        assert manifest["apiVersion"] == "monitoring.coreos.com/v1"


# The guide


def test_the_guide_has_a_row_for_each_metric_and_none_besides() -> None:
    wanted = [
        f"| `{name}` | {kind} | {', '.join(label for label in labels if label != 'le')} | {text} |"
        for name, (kind, labels, text) in sorted(EXPORTED.items())
        if name.startswith("rolloutfleet_")
    ]
    rows = [line for line in GUIDE.read_text().splitlines() if line.startswith("| `rolloutfleet_")]
    assert rows == wanted, "\n" + "\n".join(wanted)
