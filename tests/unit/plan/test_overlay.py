"""Template overlays merge as Kubernetes' strategic merge does, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.plan.engine_pod import engine_pod
from rolloutfleet.plan.overlay import OverlayError, merge
from rolloutfleet.plan.revision import group_revision
from unit.plan.world import DEFAULTS

OVERLAY: dict[str, Any] = {
    "metadata": {"annotations": {"sidecar.istio.io/inject": "false"}, "labels": {"team": "rl"}},
    "spec": {
        "containers": [
            {
                "name": "engine",
                "env": [
                    {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    {"name": "MY_URL", "value": "http://$(POD_IP):$(PORT)/"},
                    {"name": "NCCL_CUMEM_ENABLE", "value": "1"},
                ],
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            },
            {"name": "metrics-proxy", "image": "busybox", "ports": [{"containerPort": 30000, "protocol": "UDP"}]},
        ],
        "tolerations": [{"key": "pool", "operator": "Equal", "value": "rollout"}],
        "terminationGracePeriodSeconds": 600,
    },
}


def group(template: dict[str, Any] | None) -> ServerGroup:
    return ServerGroup.model_validate(
        {
            "metadata": {"name": "qwen-main", "namespace": "rl", "uid": "u"},
            "spec": {
                "server": "qwen",
                "model": {"path": "/m"},
                "engine": {"image": "i", "tensorParallel": 4},
                "template": template,
            },
        }
    )


def test_lists_merge_by_their_keys_and_other_lists_are_replaced() -> None:
    pod = engine_pod(group(OVERLAY), index=0, epoch=3, defaults=DEFAULTS)
    engine, proxy = pod["spec"]["containers"]
    env = {variable["name"]: variable for variable in engine["env"]}
    assert env["NCCL_CUMEM_ENABLE"]["value"] == "1"
    assert env["SGLANG_HOST_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    names = [variable["name"] for variable in engine["env"]]
    assert names.index("POD_IP") < names.index("MY_URL"), "a variable is defined before it is used"
    assert engine["image"] == "i"
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert proxy["name"] == "metrics-proxy"
    assert pod["spec"]["tolerations"] == OVERLAY["spec"]["tolerations"]
    assert pod["spec"]["terminationGracePeriodSeconds"] == 600
    assert pod["metadata"]["labels"]["team"] == "rl"
    assert pod["metadata"]["labels"]["rolloutfleet.dev/epoch"] == "3"


def test_null_removes_a_field() -> None:
    pod = engine_pod(
        group({"spec": {"containers": [{"name": "engine", "readinessProbe": None}]}}),
        index=0,
        epoch=1,
        defaults=DEFAULTS,
    )
    assert "readinessProbe" not in pod["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("template", "field"),
    [
        ({"spec": {"restartPolicy": "Always"}}, "template.spec.restartPolicy"),
        ({"spec": {"readinessGates": []}}, "template.spec.readinessGates"),
        ({"spec": {"containers": [{"name": "engine", "args": ["x"]}]}}, "template.spec.containers[engine].args"),
        ({"spec": {"containers": [{"image": "x"}]}}, "template.spec.containers[0].name"),
        ({"spec": {"containers": [{"name": "engine", "$patch": "delete"}]}}, "template.spec.containers[0].$patch"),
        (
            {"spec": {"volumes": [{"name": "v", "nfs": {"$patch": "x"}}]}},
            "template.spec.volumes[0].nfs.$patch",
        ),
        ({"spec": {"$setElementOrder/containers": []}}, "template.spec.$setElementOrder/containers"),
        ({"metadata": {"name": "x"}}, "template.metadata.name"),
        ({"status": {}}, "template.status"),
    ],
)
def test_what_cannot_be_applied_is_refused_by_its_field(template: dict[str, Any], field: str) -> None:
    with pytest.raises(OverlayError) as refusal:
        engine_pod(group(template), index=0, epoch=1, defaults=DEFAULTS)
    assert str(refusal.value).startswith(field)


def test_the_order_of_keys_in_a_template_makes_no_new_revision() -> None:
    def turned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return value

    assert group_revision(group(OVERLAY).spec) == group_revision(group(turned(OVERLAY)).spec)


def test_merging_changes_neither_side() -> None:
    base: dict[str, Any] = {"spec": {"containers": [{"name": "a", "env": [{"name": "X", "value": "1"}]}]}}
    overlay: dict[str, Any] = {"spec": {"containers": [{"name": "a", "env": [{"name": "X", "value": "2"}]}]}}
    merged = merge(base, overlay)
    merged["spec"]["containers"][0]["env"][0]["value"] = "3"
    assert base["spec"]["containers"][0]["env"][0]["value"] == "1"
    assert overlay["spec"]["containers"][0]["env"][0]["value"] == "2"
