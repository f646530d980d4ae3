"""Every field of a RolloutServer, changed there and back, on fleets of every shape.

Fields and values come from the generated schema, and what the API server's CEL rules refuse is left out. The plan must
converge or say why not, every field must make a difference that is seen here or is tested elsewhere by name, and the
way back must end where it began.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import cel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutfleet.api.crdgen import structural_schema
from rolloutfleet.api.rollout_server import RolloutServer
from rolloutfleet.api.schema import MAP_TYPE, VALIDATIONS
from rolloutfleet.plan.actions import Requeue
from unit.plan.world import World, rollout_server

Spec = dict[str, Any]
SCHEMA = structural_schema(RolloutServer)
UNITS = Path(__file__).parents[1]

TESTED_ELSEWHERE = {
    "updateWeights": "agent/test_update_refusals.py::test_frozen_weights_are_refused",
    "groups[].recovery.startupDeadlineSeconds": "plan/test_fleet.py::test_an_engine_that_never_answers_is_replaced",
    "groups[].recovery.backoff.initialSeconds": "plan/test_fleet.py::test_engines_that_die_at_start_wait_longer",
    "groups[].recovery.backoff.maxSeconds": "plan/test_fleet.py::test_engines_that_die_at_start_wait_longer",
    "groups[].recovery.backoff.resetAfterSeconds": "plan/test_recovery.py::test_an_engine_that_has_served_long_enough",
    "groups[].recovery.maxRestarts": "plan/test_recovery.py::test_after_max_restarts",
    "groups[].recovery.healthCheck.periodSeconds": "control/test_health.py::test_an_engine_is_asked_every_period",
    "groups[].recovery.healthCheck.timeoutSeconds": "control/test_health.py::test_no_answer_within_the_timeout",
    "groups[].recovery.healthCheck.failureThreshold": "plan/test_recovery.py::test_an_engine_that_hangs_is_replaced",
    "groups[].recovery.healthCheck.weightsPeriodSeconds": "control/test_health.py::test_weights_are_due_every_period",
    "groups[].recovery.forceDeleteAfterSeconds": "plan/test_recovery.py::test_a_pod_on_a_lost_node_is_forced_away",
    "groups[].drainTimeoutSeconds": "plan/test_changes.py::test_when_its_time_is_up_what_still_runs_is_aborted",
    "groups[].rollingUpdate.maxUnavailable": "plan/test_changes.py::test_a_change_keeps_what_may_not_be_missing",
    "groups[].rollingUpdate.maxSurge": "plan/test_changes.py::test_a_change_keeps_what_may_not_be_missing",
    "external.engines[].modelPath": "plan/test_external.py::test_one_with_another_model_is_named",
}
"""Fields that show only when something happens; the name may be the beginning of a test's."""

WORDS: dict[str, list[Any]] = {
    "groups[].name": ["other"],
    "external.engines[].url": ["http://10.9.0.2:30000", "http://[fd00::5]:30000"],
    "weights.mountPath": ["/elsewhere"],
    "trainers.serviceAccounts": [["one"], ["one", "two"]],
    "weights.localCopy.sizeLimit": ["1Gi", "512Mi"],
    "weights.volume": [{"persistentVolumeClaim": {"claimName": "w"}}],
    "groups[].template": [{"metadata": {"labels": {"team": "a"}}}, {"spec": {"nodeSelector": {"zone": "b"}}}],
    "groups[].engine.args": [{"mem-fraction-static": "0.8"}, {"page-size": "64", "enable-metrics": ""}],
    "groups[].engine.env": [{"NCCL_CUMEM_ENABLE": "1"}, {"TOKENIZERS_PARALLELISM": "false"}],
    "groups[].colocation.resourceClaim": ["gpus-{index}-{rank}", "gpus"],
    "groups[].colocation.request": ["gpu-{index}", "gpu-{index}-{rank}"],
    "groups[].colocation.sharedMemory": ["/dev/shm/one", "/dev/shm/two"],
    "router.args": [{"log-level": "warn"}],
}
"""Values of fields whose form a type does not tell."""

ENGINE = {"image": "engine:1"}
_BASES: dict[str, Spec] = {
    "regular": {"groups": [{"name": "main", "replicas": 2, "engine": ENGINE}]},
    "pairs": {
        "groups": [
            {"name": "prefill", "role": "Prefill", "replicas": 1, "engine": ENGINE},
            {"name": "decode", "role": "Decode", "replicas": 2, "engine": ENGINE},
        ]
    },
    "ranks": {"groups": [{"name": "main", "replicas": 1, "engine": {**ENGINE, "nodes": 2, "tensorParallel": 4}}]},
    "encoders": {
        "groups": [
            {"name": "main", "replicas": 1, "engine": ENGINE},
            {"name": "vision", "role": "Encoder", "replicas": 1, "engine": ENGINE},
        ]
    },
    "placeholder": {
        "groups": [
            {"name": "held", "role": "Placeholder", "replicas": 1, "engine": {}},
            {"name": "main", "replicas": 1, "engine": ENGINE},
        ]
    },
    "colocated": {
        "groups": [{"name": "main", "replicas": 1, "engine": ENGINE, "colocation": {"resourceClaim": "gpus-{index}"}}]
    },
    "external": {
        "groups": [{"name": "main", "replicas": 1, "engine": ENGINE}],
        "external": {"engines": [{"url": "http://10.9.0.1:30000"}]},
    },
}


BASES = {name: rollout_server(**spec)["spec"] for name, spec in _BASES.items()}


def leaves(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if node.get("type") == "object" and "properties" in node and node.get(MAP_TYPE) != "atomic":
        for name, child in node["properties"].items():
            yield from leaves(child, f"{path}.{name}" if path else name)
    elif node.get("type") == "array" and node["items"].get("type") == "object":
        yield from leaves(node["items"], f"{path}[]")
    else:
        yield path, node


FIELDS = dict(leaves(SCHEMA["properties"]["spec"]))


def values(path: str) -> list[Any]:
    """Some that the schema allows."""
    node = FIELDS[path]
    if path in WORDS:
        return list(WORDS[path])
    if "enum" in node:
        return list(node["enum"])
    if node["type"] == "boolean":
        return [True, False]
    if node["type"] == "integer":
        low = node["minimum"]
        return [value for value in (low, low + 1, low + 2, node.get("default", low)) if value <= node["maximum"]]
    return ["first", "second"]


def changed(spec: Spec, path: str, value: Any) -> Spec:
    """The spec with one field (of the first item of each list on the way) set."""
    result = copy.deepcopy(spec)
    node: Any = result
    *parents, last = path.split(".")
    for name in parents:
        key = name.removesuffix("[]")
        node = node.setdefault(key, [] if name.endswith("[]") else {})
        if name.endswith("[]"):
            node = node[0]
    node[last] = value
    return result


def rules(node: dict[str, Any], found: Any) -> Iterator[tuple[str, Any]]:
    """(CEL rule, the value that it speaks of) for everything in an object."""
    yield from ((rule["rule"], found) for rule in node.get(VALIDATIONS, []))
    if isinstance(found, dict):
        for name, child in node.get("properties", {}).items():
            if name in found:
                yield from rules(child, found[name])
    elif isinstance(found, list):
        for item in found:
            yield from rules(node["items"], item)


def defaulted(node: dict[str, Any], found: Any) -> Any:
    if isinstance(found, dict) and "properties" in node and node.get(MAP_TYPE) != "atomic":
        filled = {
            name: copy.deepcopy(child["default"]) for name, child in node["properties"].items() if "default" in child
        }
        return {name: defaulted(node["properties"].get(name, {}), value) for name, value in {**filled, **found}.items()}
    if isinstance(found, list):
        return [defaulted(node.get("items", {}), item) for item in found]
    return found


_programs: dict[str, Any] = {}


def admitted(server: dict[str, Any]) -> bool:
    """What the API server would say of it."""
    whole = {"metadata": server["metadata"], "spec": defaulted(SCHEMA["properties"]["spec"], server["spec"])}
    for rule, value in rules(SCHEMA, whole):
        if rule not in _programs:
            _programs[rule] = cel.compile(rule)
        if not _programs[rule].execute({"self": value}):
            return False
    return True


def serving(spec: Spec) -> World:
    server = rollout_server(**copy.deepcopy(spec))
    assert admitted(server)
    world = World(server)
    for url in ("http://10.9.0.1:30000", "http://10.9.0.2:30000", "http://[fd00::5]:30000"):
        world.start_outside(url)
    world.settle(limit=200)
    return world


def apply(world: World, spec: Spec) -> None:
    world.server["spec"] = copy.deepcopy(rollout_server(**spec)["spec"])
    for path in ("first", "second"):
        world.checkpoints.setdefault(path, "sum-0")
    world.settle(limit=300)


def effects(world: World) -> str:
    """Everything outside the custom resources, without what tells one life of an engine from the next."""
    children = {
        key: {**child, "metadata": {k: v for k, v in child["metadata"].items() if k not in ("uid", "generation")}}
        for key, child in world.children.items()
        if not key.startswith("ServerGroup/")
    }
    pods = []
    for pod in world.pods.values():
        metadata = copy.deepcopy(pod["metadata"])
        for name in ("rolloutfleet.dev/epoch", "rolloutfleet.dev/engine-index", "rolloutfleet.dev/group-uid"):
            metadata["labels"].pop(name)
        spec = {key: value for key, value in pod["spec"].items() if key != "nodeName"}
        pods.append({"labels": metadata["labels"], "spec": spec})
    tables = [sorted(worker.kind.type for worker in table.values()) for table in world.tables.values()]
    outside = [
        sorted(url for url in table if url.startswith("http://10.9") or "[" in url) for table in world.tables.values()
    ]
    text = json.dumps([children, sorted(map(json.dumps, pods)), tables, outside], sort_keys=True)
    text = re.sub(r'rolloutfleet.dev/epoch[\\": ]+\d+', "epoch", text)
    text = re.sub(r"uid-\d+", "uid", text)
    text = re.sub(r'rolloutfleet.dev/engine-index[\\": ]+\d+', "index", text)
    return re.sub(r"-\d+-e\d+-r", "-e-r", text)


def says(world: World) -> list[tuple[str, str, str]]:
    return [(c["type"], c["status"], c["reason"]) for c in world.server["status"]["conditions"]]


def candidates(base: Spec, path: str) -> list[Spec]:
    """The base with other values of this field, as far as they are admitted."""
    if path.startswith("external") and "external" not in base:
        return []
    specs = [changed(base, path, value) for value in values(path)]
    if path == "groups[].name":
        specs = [changed(base, path, "renamed")]
    return [spec for spec in specs if spec != base and admitted(rollout_server(**copy.deepcopy(spec)))]


@pytest.mark.parametrize("path", FIELDS)
def test_a_changed_field_converges_makes_a_difference_and_can_be_taken_back(path: str) -> None:
    made_a_difference = tried = False
    for base in BASES.values():
        for spec in candidates(base, path):
            tried = True
            world = serving(base)
            before, said = effects(world), says(world)
            apply(world, spec)
            made_a_difference |= effects(world) != before
            if world.ready()[0] != "True":
                assert world.ready()[1] not in ("Reconciling", "Serving"), "it says why"
            apply(world, base)
            assert effects(world) == before
            assert says(world) == said
    assert tried, "no value of it is ever admitted"
    if path in TESTED_ELSEWHERE:
        file, test = TESTED_ELSEWHERE[path].split("::")
        assert f"def {test}" in (UNITS / file).read_text(), "the test that shows its effect is gone"
    else:
        assert made_a_difference, "the operator ignores it"


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_specs_of_several_changes_converge_both_ways(data: st.DataObject) -> None:
    base = data.draw(st.sampled_from(sorted(BASES)).map(BASES.__getitem__))
    spec = base
    for _ in range(data.draw(st.integers(1, 4))):
        found = candidates(spec, data.draw(st.sampled_from(sorted(FIELDS))))
        spec = data.draw(st.sampled_from(found)) if found else spec
    world = serving(base)
    before, said = effects(world), says(world)
    for _ in range(data.draw(st.integers(0, 3), label="rounds before it is taken back")):
        world.server["spec"] = copy.deepcopy(rollout_server(**spec)["spec"])
        for path in ("first", "second"):
            world.checkpoints.setdefault(path, "sum-0")
        for action in world.plan():
            world.perform(action)
        world.run_pods()
        world.now += timedelta(seconds=1)
    apply(world, spec)
    assert [action for action in world.plan() if not isinstance(action, Requeue)] == []
    apply(world, base)
    assert effects(world) == before
    assert says(world) == said
