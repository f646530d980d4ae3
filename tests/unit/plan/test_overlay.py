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


ADDED = {"name": "MINE", "value": "$(THEIRS)"}
MERGED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"containers": [{"name": "engine", "ports": [{"containerPort": 30000, "protocol": "UDP"}]}]},
        {"containers": [{"name": "engine", "ports": [{"name": "http", "containerPort": 30000, "protocol": "UDP"}]}]},
    ),
    (
        {"containers": [{"name": "engine", "env": [{"name": "HOME", "value": "/root"}, ADDED]}]},
        {"containers": [{"name": "engine", "env": [{"name": "HOME", "value": "/root"}, ADDED]}]},
    ),
    (
        {"containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": None, "cpu": "8"}}}]},
        {"containers": [{"name": "engine", "resources": {"limits": {"cpu": "8"}}}]},
    ),
    (
        {"containers": [{"name": "engine", "volumeMounts": [{"mountPath": "/dev/shm", "name": "mine"}]}]},
        {"containers": [{"name": "engine", "volumeMounts": [{"mountPath": "/dev/shm", "name": "mine"}]}]},
    ),
    (
        {"volumes": [{"name": "cache", "emptyDir": None, "hostPath": {"path": "/c"}}, {"name": "more", "nfs": {}}]},
        {"volumes": [{"name": "cache", "hostPath": {"path": "/c"}}, {"name": "more", "nfs": {}}]},
    ),
    ({"tolerations": [{"key": "pool"}]}, {"tolerations": [{"key": "pool"}]}),
    ({"nodeSelector": {"gpu": "h200"}}, {"nodeSelector": {"zone": "a", "gpu": "h200"}}),
]
"""Overlays of POD, and what `kubectl patch --local --type=strategic` (1.34) makes of the fields that they name: but for
the order in lists, where it puts what an overlay adds first, and we last."""
POD: dict[str, Any] = {
    "containers": [
        {
            "name": "engine",
            "ports": [{"name": "http", "containerPort": 30000, "protocol": "TCP"}],
            "env": [{"name": "HOME", "value": "/cache"}],
            "resources": {"limits": {"nvidia.com/gpu": "4"}},
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
        }
    ],
    "volumes": [{"name": "cache", "emptyDir": {}}],
    "tolerations": [{"key": "nvidia.com/gpu"}],
    "nodeSelector": {"zone": "a"},
}


@pytest.mark.parametrize(("overlay", "merged"), MERGED)
def test_an_overlay_gives_what_kubectl_patch_gives(overlay: dict[str, Any], merged: dict[str, Any]) -> None:
    wanted = {**POD, **merged}
    if "containers" in merged:
        wanted["containers"] = [{**POD["containers"][0], **merged["containers"][0]}]
    assert merge(POD, overlay) == wanted


@pytest.mark.parametrize("command", [None, ["/activate.sh"]])
def test_whatever_the_image_starts_with_the_arguments_are_handed_on(command: list[str] | None) -> None:
    engine = {"name": "engine", **({"command": command} if command else {})}
    plain, changed = (
        engine_pod(group(template), index=0, epoch=1, defaults=DEFAULTS)["spec"]["containers"][0]
        for template in (None, {"spec": {"containers": [engine]}})
    )
    assert plain["command"] == ["python3", "-m", "sglang.launch_server"], "the image's ENTRYPOINT is not used"
    assert changed["command"] == (command or plain["command"])
    assert changed["args"] == plain["args"] != []


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
        (
            {"spec": {"terminationGracePeriodSeconds": None}},
            "template.spec.terminationGracePeriodSeconds: 30 is shorter",
        ),
        ({"spec": {"containers": None}}, "template.spec.containers: null must be a list"),
        ({"spec": {"containers": "engine"}}, 'template.spec.containers: "engine" must be a list'),
        ({"spec": {"volumes": {"name": "v"}}}, "template.spec.volumes: {"),
        ({"spec": {"containers": [{"name": "engine", "env": None}]}}, "template.spec.containers[0].env: null"),
        ({"metadata": {"labels": ["a"]}}, 'template.metadata.labels: ["a"] must be an object'),
        ({"metadata": {"annotations": 5}}, "template.metadata.annotations: 5 must be an object"),
        ({"metadata": None}, "template.metadata: must be an object"),
    ],
)
def test_what_cannot_be_applied_is_refused_by_its_field(template: dict[str, Any], field: str) -> None:
    with pytest.raises(OverlayError) as refusal:
        engine_pod(group(template), index=0, epoch=1, defaults=DEFAULTS)
    assert str(refusal.value).startswith(field)


@pytest.mark.parametrize("context", [None, "root", {"runAsUser": None}])
def test_a_security_context_that_says_nothing_of_a_user_is_none_to_the_worker(context: Any) -> None:
    spec = group({"spec": {"securityContext": context}}).spec.dump()
    weights = {"volume": {"emptyDir": {}}, "mountPath": "/w", "localCopy": {"sizeLimit": "40Gi"}}
    metadata = {"name": "qwen-main", "namespace": "rl", "uid": "u"}
    copying = ServerGroup.model_validate({"metadata": metadata, "spec": {**spec, "weights": weights}})
    worker = engine_pod(copying, index=0, epoch=1, defaults=DEFAULTS)["spec"]["initContainers"][0]
    assert worker["securityContext"]["runAsUser"]


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
