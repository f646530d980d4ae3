"""What the schema can refuse is refused at apply, by the real API server, with the field and what would be right."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from e2e.fleets import rollout_server
from e2e.support import Kubectl, KubectlError, as_list, eventually

CRDS = Path(__file__).parents[2] / "crds"


def server(name: str = "base", **changes: Any) -> dict[str, Any]:
    """A server of zero engines, with `groups[0]`, `engine`, `router` or spec fields changed."""
    manifest = copy.deepcopy(rollout_server(name, replicas=0))
    group = manifest["spec"]["groups"][0]
    group["engine"] |= changes.pop("engine", {})
    group |= changes.pop("group", {})
    manifest["spec"] |= changes
    return manifest


def pairs(prefill: dict[str, str], decode: dict[str, str], *others: str) -> list[dict[str, Any]]:
    """Groups of a disaggregated server with these `args`, and one of each other role."""
    return [
        {"name": "prefill", "role": "Prefill", "engine": {"image": "i", "args": prefill}},
        {"name": "decode", "role": "Decode", "engine": {"image": "i", "args": decode}},
        *({"name": role.lower(), "role": role, "engine": {"image": "i"}} for role in others),
    ]


def shapes(prefill: dict[str, int], decode: dict[str, int]) -> list[dict[str, Any]]:
    groups = pairs({}, {})
    for group, shape in zip(groups, (prefill, decode), strict=True):
        group["engine"] |= shape
    return groups


OUTSIDE = {"engines": [{"url": "http://10.0.0.5:30000"}]}
TWO_OF_ONE_NAME = [{"name": "main", "engine": {"image": "i"}}] * 2
REFUSED = [
    (server(group={"replicas": -1}), r"groups\[0\].replicas.*greater than or equal to 0"),
    (server(group={"role": "Judge"}), r'groups\[0\].role.*supported values: "Regular", "Prefill", "Decode"'),
    (server(group={"name": "Main"}), r"groups\[0\].name"),
    (server(engine={"tensorParallel": 3, "nodes": 2}), "engine.nodes.*must be divisible by nodes"),
    (server(engine={"env": {"SGLANG_HOST_IP": "x"}}), "engine.env.*set by the operator"),
    (server(engine={"env": {"1A": "x"}}), "engine.env.*do not begin with a digit"),
    (server(engine={"args": {"nnodes": "2"}}), "engine.args.*engine.nodes"),
    (server(engine={"topologyKey": ""}), "topologyKey.*at least 1 chars"),
    (server(group={"rollingUpdate": {"maxUnavailable": 0}}), "rollingUpdate.*must not both be 0"),
    (server(group={"drainTimeoutSeconds": -1}), "drainTimeoutSeconds.*greater than or equal to 0"),
    (server(group={"role": "Prefill"}), "role Prefill needs a group of role Decode"),
    (server(group={"role": "Decode"}), "Decode one of role Prefill"),
    (server(groups=shapes({"tensorParallel": 4}, {"tensorParallel": 6})), "tensorParallel.*multiple of the other"),
    (server(groups=shapes({}, {"pipelineParallel": 2})), "pipelineParallel of a Decode group must be 1"),
    (server(group={"role": "Encoder"}), "role Encoder serves engines of a group of role Regular or Prefill"),
    (server(group={"role": "Placeholder"}), "role Placeholder: runs no engine"),
    (server(groups=[{"name": "main", "engine": {}}]), "engine.image: required"),
    (server(external={"engines": []}), "external.engines.*at least 1 items"),
    (server(external={"engines": [{"url": "https://a:1"}]}), r"external.engines\[0\].url"),
    (server(external={"engines": [{"url": "http://fd00::5:1"}]}), r"external.engines\[0\].url"),
    (server(external=OUTSIDE, groups=[{"name": "external", "engine": {"image": "i"}}]), "name external belongs to"),
    (server("a" * 35, external=OUTSIDE, groups=[]), "metadata.name: with spec.external at most 34"),
    (server(groups=pairs({}, {}, "Regular")), "role Regular beside Prefill and Decode"),
    (server(groups=pairs({"page-size": "64"}, {})), r"engine.args\[page-size\] must be the same"),
    (server(groups=pairs({}, {"kv-cache-dtype": "fp8_e5m2"})), r"engine.args\[kv-cache-dtype\] must be the same"),
    (server(engine={"tensorParallel": 0}), "tensorParallel.*greater than or equal to 1"),
    (server(engine={"args": {"port": "1"}}), "engine.args.*set by the operator"),
    (server(engine={"args": {"served-mod": "x"}}), "engine.args.*abbreviations are set by the operator"),
    (server(engine={"args": {"tp": "2"}}), "engine.args.*tensorParallel"),
    (server(engine={"args": {"--device": "cpu"}}), "engine.args.*without the leading dashes"),
    (server(engine={"args": {"max-total-tokens": 8192}}), 'max-total-tokens.*must be of type string: "integer"'),
    (server(engine={"args": {"enable-metrics": True}}), 'enable-metrics.*must be of type string: "boolean"'),
    (server(groups=TWO_OF_ONE_NAME), r"groups\[1\].*Duplicate value|duplicate entries for key"),
    (server(groups=[]), "at least one group is needed, or external.engines"),
    (server("x" * 40), r"spec.groups\[\].name.*at most 43 characters"),
    (server("1base"), "metadata.name.*beginning with a letter"),
    (server("a.b"), "metadata.name.*beginning with a letter"),
    (server(router={"policy": "fastest"}), "router.policy.*supported values"),
    (server(router={"args": {"worker-urls": "x"}}), "router.args.*set by the operator"),
    (server(group={"recovery": {"backoff": {"initialSeconds": 9, "maxSeconds": 3}}}), "initialSeconds.*not be greater"),
    (server(modle={"path": "/m"}), "modle"),
]


@pytest.fixture(scope="module")
def api(kubectl: Kubectl, operator: None) -> Kubectl:
    return kubectl.within("default")


@pytest.mark.parametrize(("manifest", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_a_bad_spec_is_refused_with_its_field(api: Kubectl, manifest: dict[str, Any], message: str) -> None:
    with pytest.raises(KubectlError, match=f"(?s){message}"):
        api.create(manifest, options=("--dry-run=server",))


def test_a_null_argument_never_becomes_the_word_none(api: Kubectl) -> None:
    manifest = server(engine={"args": {"mem-fraction-static": None, "device": "cpu"}})
    created = api.create(manifest, options=("--dry-run=server", "--output=json"))
    assert "None" not in created
    assert '"mem-fraction-static"' not in created


def test_defaults_are_there_and_a_second_apply_changes_nothing(
    kubectl: Kubectl, operator: None, namespace: str
) -> None:
    inside = kubectl.within(namespace)
    manifest = server()
    inside.apply(manifest)
    stored = inside.json("get", "ros", "base")
    assert stored["spec"]["router"] == {"replicas": 1, "policy": "cache_aware", "args": {}}
    assert stored["spec"]["updateWeights"] is True
    inside.apply(manifest)
    assert inside.json("get", "ros", "base")["metadata"]["generation"] == stored["metadata"]["generation"]


def test_diff_of_what_was_applied_is_empty(kubectl: Kubectl, operator: None, namespace: str) -> None:
    inside = kubectl.within(namespace)
    manifest = as_list(server())
    inside("apply", "--server-side", "--filename=-", stdin=manifest)
    # While the operator still writes status, the two reads that diff compares may differ in it.
    eventually(
        lambda: inside("diff", "--server-side", "--filename=-", stdin=manifest),
        60,
        "kubectl diff has nothing to show",
        accept=lambda difference: difference == "",
    )


def test_status_cannot_be_written_with_the_object(api: Kubectl) -> None:
    manifest = server() | {"status": {"training": {"holder": "impostor"}}}
    created = json.loads(api.create(manifest, options=("--dry-run=server", "--output=json")))
    assert "holder" not in created.get("status", {}).get("training", {})


def test_a_scaled_group_keeps_its_count_when_the_manifest_without_replicas_is_applied_again(
    kubectl: Kubectl, operator: None, namespace: str
) -> None:
    inside = kubectl.within(namespace)
    manifest = server()
    group = manifest["spec"]["groups"][0]
    del group["replicas"]
    # No node has this label: what counts here are pods, not engines.
    group["template"]["spec"]["nodeSelector"] = {"rolloutfleet.dev/nowhere": "true"}
    inside.apply(manifest)
    eventually(lambda: inside("get", "sgrp", "base-main", "--output=name"), 30, "the ServerGroup exists")
    inside("scale", "sgrp", "base-main", "--replicas=2")
    pods = ("get", "pods", "--selector=rolloutfleet.dev/component=engine", "--output=name")
    eventually(lambda: inside(*pods).split(), 30, "two engine pods", accept=lambda found: len(found) == 2)
    inside.apply(manifest)
    manifest["spec"]["router"] = {"args": {"log-level": "warn"}}
    inside.apply(manifest)
    eventually(
        lambda: inside.json("get", "ros", "base"),
        30,
        "the operator has seen the last change",
        accept=lambda ros: ros["status"]["observedGeneration"] == ros["metadata"]["generation"],
    )
    assert inside.json("get", "sgrp", "base-main")["spec"]["replicas"] == 2
    assert len(inside(*pods).split()) == 2


def test_an_object_of_somebody_else_is_not_taken_over_and_the_clash_is_named(
    kubectl: Kubectl, operator: None, namespace: str
) -> None:
    inside = kubectl.within(namespace)
    first, second = server("a"), server("a-b")
    first["spec"]["groups"][0]["name"], second["spec"]["groups"][0]["name"] = "b-c", "c"
    inside.apply(first)
    eventually(lambda: inside("get", "sgrp", "a-b-c", "--output=name"), 30, "the first server's group")
    inside.apply(second)
    ready = eventually(
        lambda: inside.json("get", "ros", "a-b").get("status", {}).get("conditions", []),
        30,
        "the clash is named",
        accept=lambda found: any(c["reason"] == "NameTaken" for c in found),
    )
    assert any("ServerGroup/a-b-c" in condition["message"] for condition in ready)
    assert inside.json("get", "sgrp", "a-b-c")["spec"]["server"] == "a"
    inside("delete", "ros", "a")
    eventually(
        lambda: inside.json("get", "sgrp", "a-b-c")["spec"]["server"],
        60,
        "the name is free again",
        accept=lambda owner: owner == "a-b",
    )


def test_the_crds_can_be_applied_by_the_client_and_replaced(kubectl: Kubectl, operator: None) -> None:
    for name in ("rolloutservers", "servergroups"):
        path = str(CRDS / f"{name}.yaml")
        kubectl("apply", f"--filename={path}")
        kubectl("apply", f"--filename={path}")
        kubectl("replace", f"--filename={path}")
    assert "group of equal engines" in kubectl("explain", "ros.spec.groups").lower()


def test_everything_of_the_category_is_listed_by_its_name(kubectl: Kubectl, operator: None) -> None:
    assert "rolloutservers" in kubectl("api-resources", "--categories=rollout")
    assert "servergroups" in kubectl("api-resources", "--categories=rollout")


@pytest.mark.parametrize("sample", ["cpu.yaml", "gpu.yaml"])
def test_every_sample_is_accepted(api: Kubectl, sample: str) -> None:
    path = CRDS.parent / "manifests/samples" / sample
    api("apply", "--server-side", "--dry-run=server", "--validate=strict", f"--filename={path}")
