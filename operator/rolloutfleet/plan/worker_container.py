"""The worker beside an engine (spec.weights.localCopy): a native sidecar, which copies weights into the pod."""

from __future__ import annotations

from typing import Any

from rolloutfleet.api.common import LocalCopySpec, WeightsSpec
from rolloutfleet.api.names import WORKER_CONTAINER, WORKER_PORT
from rolloutfleet.plan.objects import Defaults
from rolloutfleet.plan.security import restricted

COPY_VOLUME = "rolloutfleet-local-copy"
COPY_PATH = "/var/lib/rolloutfleet/weights"
SCRATCH_VOLUME = "rolloutfleet-worker-tmp"
WORKER_USER = 65532


def copy_volumes(copy: LocalCopySpec) -> list[dict[str, Any]]:
    return [
        {"name": COPY_VOLUME, "emptyDir": {"sizeLimit": copy.size_limit}},
        {"name": SCRATCH_VOLUME, "emptyDir": {}},
    ]


def copy_mount() -> dict[str, Any]:
    """The engine's."""
    return {"name": COPY_VOLUME, "mountPath": COPY_PATH, "readOnly": True}


def worker_container(
    weights: WeightsSpec, copy: LocalCopySpec, weights_mount: dict[str, Any], *, user: bool, defaults: Defaults
) -> dict[str, Any]:
    """`user`: the pod's template says as whom its containers run."""
    return {
        "name": WORKER_CONTAINER,
        "image": defaults.agent_image,
        "imagePullPolicy": defaults.image_pull_policy,
        "command": ["python3", "-m", "rolloutfleet.worker"],
        "restartPolicy": "Always",
        "env": [
            {"name": "ROLLOUTFLEET_WEIGHTS_PATH", "value": weights.mount_path},
            {"name": "ROLLOUTFLEET_COPY_PATH", "value": COPY_PATH},
            # Past the limit the kubelet would evict the pod, so the worker stays below it.
            {"name": "ROLLOUTFLEET_COPY_LIMIT_BYTES", "value": str(copy.limit_bytes)},
            {"name": "ROLLOUTFLEET_BIND_ADDRESS", "value": defaults.bind_address},
        ],
        "ports": [{"name": "copies", "containerPort": WORKER_PORT, "protocol": "TCP"}],
        # No readiness probe: an engine whose worker is down serves on, and falls out of the next update.
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": WORKER_PORT},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"cpu": "4", "memory": "2Gi"},
        },
        "securityContext": {
            **restricted(),
            **({} if user else {"runAsUser": WORKER_USER, "runAsGroup": 0}),
        },
        "volumeMounts": [
            weights_mount,
            {"name": COPY_VOLUME, "mountPath": COPY_PATH},
            {"name": SCRATCH_VOLUME, "mountPath": "/tmp"},
        ],
    }
