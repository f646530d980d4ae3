"""The pod of an engine: ours first, then the user's template laid over it, then what must not be lost."""

from __future__ import annotations

from typing import Any

from rolloutfleet.api.names import (
    ANNOTATION_REVISION,
    COMPONENT_ENGINE,
    ENGINE_CONTAINER,
    ENGINE_PORT,
    GATE_ROUTABLE,
    LABEL_COMPONENT,
    LABEL_ENGINE_INDEX,
    LABEL_EPOCH,
    LABEL_GROUP,
    LABEL_GROUP_UID,
    LABEL_MANAGED_BY,
    LABEL_RANK,
    LABEL_SERVER,
    MANAGED_BY,
    engine_pod_name,
)
from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.plan.engine_args import engine_arguments
from rolloutfleet.plan.objects import owner_reference
from rolloutfleet.plan.overlay import OverlayError, merge
from rolloutfleet.plan.revision import group_revision

GPU_RESOURCE = "nvidia.com/gpu"

OWNED_POD_FIELDS = (
    "restartPolicy",
    "shareProcessNamespace",
    "hostPID",
    "hostname",
    "subdomain",
    "readinessGates",
)
"""Fields on which the identity and recovery of an engine rest; a template may not set them."""

WEIGHTS_VOLUME = "rolloutfleet-weights"
CACHE_VOLUME = "rolloutfleet-cache"
SHM_VOLUME = "rolloutfleet-shm"
CACHE_PATH = "/var/cache/rolloutfleet"


def engine_pod(group: ServerGroup, *, index: int, epoch: int, rank: int = 0) -> dict[str, Any]:
    """The pod manifest. Raises OverlayError when the template cannot be applied; the text names the field."""
    labels = {
        LABEL_SERVER: group.spec.server,
        LABEL_COMPONENT: COMPONENT_ENGINE,
        LABEL_GROUP: group.name,
        LABEL_GROUP_UID: group.uid,
        LABEL_ENGINE_INDEX: str(index),
        LABEL_EPOCH: str(epoch),
        LABEL_RANK: str(rank),
        LABEL_MANAGED_BY: MANAGED_BY,
    }
    template = {"metadata": {"labels": {}, "annotations": {}}, "spec": _pod_spec(group)}
    overlay = group.spec.template or {}
    _refuse_owned_fields(overlay)
    template = merge(template, overlay)
    metadata = template["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": engine_pod_name(group.name, index, epoch, rank),
            "namespace": group.namespace,
            "labels": {**(metadata.get("labels") or {}), **labels},
            "annotations": {
                **(metadata.get("annotations") or {}),
                ANNOTATION_REVISION: group_revision(group.spec),
            },
            "ownerReferences": [owner_reference(group)],
        },
        "spec": template["spec"],
    }


def _pod_spec(group: ServerGroup) -> dict[str, Any]:
    spec = group.spec
    mounts: list[dict[str, Any]] = [
        {"name": SHM_VOLUME, "mountPath": "/dev/shm"},
        {"name": CACHE_VOLUME, "mountPath": CACHE_PATH},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": SHM_VOLUME, "emptyDir": {"medium": "Memory"}},
        {"name": CACHE_VOLUME, "emptyDir": {}},
    ]
    if spec.weights is not None:
        volumes.append({"name": WEIGHTS_VOLUME, **spec.weights.volume})
        mounts.append({"name": WEIGHTS_VOLUME, "mountPath": spec.weights.mount_path, "readOnly": True})
    gpus = {GPU_RESOURCE: str(spec.engine.gpus_per_pod)}
    return {
        "restartPolicy": "Never",
        # As PID 1 a crashed SGLang cannot kill itself and exits 0; with the pause process as PID 1 it exits 137.
        "shareProcessNamespace": True,
        # Every Service of the namespace would inject NAME_PORT=tcp://... into SGLang's environment.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 60,
        "readinessGates": [{"conditionType": GATE_ROUTABLE}],
        "tolerations": [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}],
        "volumes": volumes,
        "containers": [
            {
                "name": ENGINE_CONTAINER,
                "image": spec.engine.image,
                "command": ["python3", "-m", "sglang.launch_server"],
                "args": engine_arguments(spec),
                "ports": [{"name": "http", "containerPort": ENGINE_PORT, "protocol": "TCP"}],
                "env": [
                    {"name": "SGLANG_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    # Images run under any user: home and compile caches must be writable.
                    {"name": "HOME", "value": CACHE_PATH},
                    {"name": "XDG_CACHE_HOME", "value": CACHE_PATH},
                    {"name": "TRITON_CACHE_DIR", "value": f"{CACHE_PATH}/triton"},
                    # The router registers through /health. With a generation in it, a paused engine would not answer,
                    # and SGLang would then call itself unhealthy for good (measured, 0.5.23).
                    {"name": "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "value": "0"},
                    # Expandable segments break the memory saver, and NCCL settings must agree with the trainer's.
                    {"name": "NCCL_CUMEM_ENABLE", "value": "0"},
                ],
                "resources": {"requests": dict(gpus), "limits": dict(gpus)},
                "volumeMounts": mounts,
                # The last lines of the log become the reason that users see when the engine dies.
                "terminationMessagePolicy": "FallbackToLogsOnError",
                # /ping is a flag: 200 while the trainer holds the engine, without generating a token.
                "readinessProbe": {
                    "httpGet": {"path": "/ping", "port": ENGINE_PORT},
                    "periodSeconds": 2,
                    "timeoutSeconds": 3,
                    "failureThreshold": 3,
                },
            }
        ],
    }


def _refuse_owned_fields(overlay: dict[str, Any]) -> None:
    unknown = set(overlay) - {"metadata", "spec"}
    if unknown:
        raise OverlayError(f"template.{min(unknown)}: unknown; a template has metadata and spec")
    for part in ("metadata", "spec"):
        if not isinstance(overlay.get(part, {}), dict):
            raise OverlayError(f"template.{part}: must be an object")
    metadata = set(overlay.get("metadata", {})) - {"labels", "annotations"}
    if metadata:
        raise OverlayError(f"template.metadata.{min(metadata)}: only labels and annotations can be set")
    for field in OWNED_POD_FIELDS:
        if field in overlay.get("spec", {}):
            raise OverlayError(f"template.spec.{field}: set by the operator, since recovery rests on it; remove it")
    for container in overlay.get("spec", {}).get("containers") or []:
        if isinstance(container, dict) and container.get("name") == ENGINE_CONTAINER and "args" in container:
            raise OverlayError(
                "template.spec.containers[engine].args: set by the operator; use engine.args. "
                "A command that replaces ours is handed `sglang.launch_server`'s arguments"
            )
