"""The pod of an engine: ours first, then the user's template laid over it, then what must not be lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rolloutfleet.api.names import (
    ANNOTATION_NODES,
    ANNOTATION_PEERS,
    ANNOTATION_REVISION,
    BOOTSTRAP_PORT,
    COMPONENT_ENGINE,
    ENCODER_TABLE_PORT,
    ENGINE_CONTAINER,
    ENGINE_PORT,
    GATE_ROUTABLE,
    LABEL_COMPONENT,
    LABEL_ENGINE_INDEX,
    LABEL_EPOCH,
    LABEL_GROUP,
    LABEL_GROUP_UID,
    LABEL_LANGUAGE_ONLY,
    LABEL_MANAGED_BY,
    LABEL_RANK,
    LABEL_ROLE,
    LABEL_SERVER,
    MANAGED_BY,
    PLACEHOLDER_PRIORITY_CLASS,
    RENDEZVOUS_PORT,
    engine_name,
    engine_pod_name,
    ranks_service_name,
)
from rolloutfleet.api.server_group import ServerGroup, ServerGroupSpec
from rolloutfleet.plan.engine_args import engine_arguments
from rolloutfleet.plan.engine_env import CACHE_PATH, engine_environment
from rolloutfleet.plan.gang import membership
from rolloutfleet.plan.objects import Defaults, owner_reference
from rolloutfleet.plan.overlay import OverlayError, merge
from rolloutfleet.plan.revision import group_revision
from rolloutfleet.plan.worker_container import copy_mount, copy_volumes, worker_container

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
EXIT_SECONDS = 60
"""SGLang polls its own shutdown every 5 s and gives its schedulers 15 s."""
SHM_VOLUME = "rolloutfleet-shm"
KUBERNETES_GRACE_SECONDS = 30
"""Of a pod that says nothing."""
CLAIM = "rolloutfleet-gpus"
"""What a colocated engine's pod calls the trainer's ResourceClaim."""


def engine_pod(
    group: ServerGroup,
    *,
    index: int,
    epoch: int,
    defaults: Defaults,
    rank: int = 0,
    peers: Iterable[str] = (),
    gang: str = "",
) -> dict[str, Any]:
    """The pod manifest. Raises OverlayError when the template cannot be applied; the text names the field.

    `peers`: revisions of the other role's groups that a prefill or decode engine is meant to work with.
    `gang`: apiVersion of the PodGroup that the pods of this life are in.
    """
    gang_labels, gang_annotations = membership(gang, engine_name(group.name, index, epoch))
    labels = {
        LABEL_SERVER: group.spec.server,
        LABEL_COMPONENT: COMPONENT_ENGINE,
        LABEL_GROUP: group.name,
        LABEL_ROLE: group.spec.role,
        LABEL_LANGUAGE_ONLY: "true" if group.spec.language_only else "false",
        LABEL_GROUP_UID: group.uid,
        LABEL_ENGINE_INDEX: str(index),
        LABEL_EPOCH: str(epoch),
        LABEL_RANK: str(rank),
        LABEL_MANAGED_BY: MANAGED_BY,
        **gang_labels,
    }
    template = {"metadata": {"labels": {}, "annotations": {}}, "spec": _pod_spec(group, index, epoch, rank, defaults)}
    overlay = group.spec.template or {}
    _refuse_owned_fields(overlay)
    template = merge(template, overlay)
    _refuse_short_grace(template["spec"], group)
    metadata = template["metadata"]
    annotations = {
        ANNOTATION_REVISION: group_revision(group.spec),
        ANNOTATION_NODES: str(group.spec.own_engine.nodes),
        ANNOTATION_PEERS: ",".join(sorted(peers)),
        **gang_annotations,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": engine_pod_name(group.name, index, epoch, rank),
            "namespace": group.namespace,
            "labels": {**(metadata.get("labels") or {}), **labels},
            "annotations": {**(metadata.get("annotations") or {}), **annotations},
            "ownerReferences": [owner_reference(group)],
        },
        "spec": template["spec"],
    }


def _pod_spec(group: ServerGroup, index: int, epoch: int, rank: int, defaults: Defaults) -> dict[str, Any]:
    if group.spec.role == "Placeholder":
        return _placeholder_spec(group, defaults)
    return _engine_spec(group, index, epoch, rank, defaults)


def _placeholder_spec(group: ServerGroup, defaults: Defaults) -> dict[str, Any]:
    """Sleeps, costs nothing, and is the first to go when somebody else needs the GPUs."""
    engine = group.spec.own_engine
    resources = {GPU_RESOURCE: str(engine.gpus_per_pod), "cpu": "10m", "memory": "16Mi"}
    return {
        "restartPolicy": "Never",
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "priorityClassName": PLACEHOLDER_PRIORITY_CLASS,
        "terminationGracePeriodSeconds": 0,
        "tolerations": [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}],
        "containers": [
            {
                "name": ENGINE_CONTAINER,
                "image": engine.image or defaults.placeholder_image,
                "resources": {"requests": dict(resources), "limits": dict(resources)},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "runAsNonRoot": True,
                    "runAsUser": 65532,
                    "capabilities": {"drop": ["ALL"]},
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
            }
        ],
    }


def _engine_spec(group: ServerGroup, index: int, epoch: int, rank: int, defaults: Defaults) -> dict[str, Any]:
    spec = group.spec
    mounts: list[dict[str, Any]] = [
        {"name": SHM_VOLUME, "mountPath": "/dev/shm"},
        {"name": CACHE_VOLUME, "mountPath": CACHE_PATH},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": SHM_VOLUME, **_shared_memory(spec)},
        {"name": CACHE_VOLUME, "emptyDir": {}},
    ]
    sidecars: dict[str, Any] = {}
    if spec.weights is not None:
        weights_mount = {"name": WEIGHTS_VOLUME, "mountPath": spec.weights.mount_path, "readOnly": True}
        volumes.append({"name": WEIGHTS_VOLUME, **spec.weights.volume})
        mounts.append(weights_mount)
        copy = spec.weights.local_copy
        if copy is not None and spec.copies_weights:
            volumes += copy_volumes(copy)
            mounts.append(copy_mount())
            context = ((spec.template or {}).get("spec") or {}).get("securityContext")
            user = isinstance(context, dict) and bool(context.get("runAsUser"))
            worker = worker_container(spec.weights, copy, weights_mount, user=user, defaults=defaults)
            sidecars = {"initContainers": [worker]}
    claims, resources = _gpus(spec, index, rank)
    return {
        **claims,
        **_placement(group, index, epoch),
        **_names(group, index, epoch, rank),
        "restartPolicy": "Never",
        # As PID 1 a crashed SGLang cannot kill itself and exits 0; with the pause process as PID 1 it exits 137.
        "shareProcessNamespace": True,
        # Every Service of the namespace would inject NAME_PORT=tcp://... into SGLang's environment.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": spec.drain_timeout_seconds + EXIT_SECONDS,
        "readinessGates": [{"conditionType": GATE_ROUTABLE}],
        "tolerations": [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}],
        "volumes": volumes,
        **sidecars,
        "containers": [
            {
                "name": ENGINE_CONTAINER,
                "image": spec.own_engine.image,
                "command": ["python3", "-m", "sglang.launch_server"],
                "args": engine_arguments(group, index=index, epoch=epoch, rank=rank, bind=defaults.bind_address),
                "ports": _ports(spec),
                "env": engine_environment(spec),
                "resources": resources,
                "volumeMounts": mounts,
                # The last lines of the log become the reason that users see when the engine dies.
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "readinessProbe": _readiness(spec, rank),
            }
        ],
    }


def _gpus(spec: ServerGroupSpec, index: int, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of the pod's spec, the container's resources): GPUs of its own, or the trainer's."""
    if spec.colocation is None:
        own = {GPU_RESOURCE: str(spec.own_engine.gpus_per_pod)}
        return {}, {"requests": dict(own), "limits": dict(own)}
    if spec.colocation.resource_claim is None:
        return {}, {}

    def named(template: str) -> str:
        return template.replace("{index}", str(index)).replace("{rank}", str(rank))

    request = spec.colocation.request
    claim = {"name": CLAIM, **({"request": named(request)} if request is not None else {})}
    pod = {"resourceClaims": [{"name": CLAIM, "resourceClaimName": named(spec.colocation.resource_claim)}]}
    return pod, {"claims": [claim]}


def _shared_memory(spec: ServerGroupSpec) -> dict[str, Any]:
    if spec.colocation is None or spec.colocation.shared_memory is None:
        return {"emptyDir": {"medium": "Memory"}}
    return {"hostPath": {"path": spec.colocation.shared_memory, "type": "DirectoryOrCreate"}}


def _readiness(spec: ServerGroupSpec, rank: int) -> dict[str, Any]:
    if spec.role == "Encoder":  # its only answer to this question encodes a tiny image
        probe = {"path": "/health", "periodSeconds": 10, "timeoutSeconds": 15}
    elif rank > 0:
        # A dummy, and nothing else is there: rank 0 answers only while all of them do their part.
        probe = {"path": "/health", "periodSeconds": 2, "timeoutSeconds": 3}
    else:
        # A flag: 200 while the trainer holds the engine, without generating a token.
        probe = {"path": "/ping", "periodSeconds": 2, "timeoutSeconds": 3}
    return {"httpGet": {"path": probe.pop("path"), "port": ENGINE_PORT}, **probe, "failureThreshold": 3}


def _placement(group: ServerGroup, index: int, epoch: int) -> dict[str, Any]:
    """Engines of a group on different nodes where that is possible; pods of one engine together where the user asks."""
    placement: dict[str, Any] = {
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {LABEL_GROUP_UID: group.uid}},
            }
        ]
    }
    if group.spec.own_engine.topology_key is not None:
        same_life = {LABEL_GROUP_UID: group.uid, LABEL_ENGINE_INDEX: str(index), LABEL_EPOCH: str(epoch)}
        term = {"topologyKey": group.spec.own_engine.topology_key, "labelSelector": {"matchLabels": same_life}}
        placement["affinity"] = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    return placement


def _names(group: ServerGroup, index: int, epoch: int, rank: int) -> dict[str, Any]:
    """A DNS name of its own for each pod of an engine of several pods."""
    if group.spec.own_engine.nodes == 1:
        return {}
    return {
        "hostname": engine_pod_name(group.name, index, epoch, rank),
        "subdomain": ranks_service_name(group.name),
    }


def _ports(spec: ServerGroupSpec) -> list[dict[str, Any]]:
    """Declared, so that the scheduler keeps engines apart that share their nodes' network (hostNetwork)."""
    ports = {"http": ENGINE_PORT}
    if spec.role == "Prefill":
        ports["bootstrap"] = BOOTSTRAP_PORT
    if spec.language_only:
        ports["encoders"] = ENCODER_TABLE_PORT
    if spec.own_engine.nodes > 1:
        ports["rendezvous"] = RENDEZVOUS_PORT
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]


def _refuse_short_grace(pod_spec: dict[str, Any], group: ServerGroup) -> None:
    grace = pod_spec.get("terminationGracePeriodSeconds", KUBERNETES_GRACE_SECONDS)
    if group.spec.role == "Placeholder":
        return
    if not isinstance(grace, int) or grace < group.spec.drain_timeout_seconds:
        raise OverlayError(
            f"template.spec.terminationGracePeriodSeconds: {grace} is shorter than drainTimeoutSeconds "
            f"({group.spec.drain_timeout_seconds}): requests would be killed while they may still run; "
            "raise it, or lower drainTimeoutSeconds"
        )


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
