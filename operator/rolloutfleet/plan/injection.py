"""The agent's container in a trainer's pod: what the webhook adds, and `rolloutfleet inject` prints.

A native sidecar: an init container that keeps running, is up before the trainer starts and ends after it. It has a
token of its own (the pod may have none), a restricted security context of its own, and sees the trainer's data
volumes read-only, so that it can look into a checkpoint before it pauses a fleet. Where samples are kept it may write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from rolloutfleet.api.names import (
    AGENT_CONTAINER,
    AGENT_METRICS_PORT,
    AGENT_METRICS_PORT_NAME,
    AGENT_PORT,
    ANNOTATION_ROLLOUT_SERVERS,
    ANNOTATION_SHARED_MEMORY,
    ANNOTATION_STORE_VOLUME,
    COMPONENT_TRAINER,
    LABEL_COMPONENT,
)
from rolloutfleet.plan.security import restricted

TOKEN_VOLUME = "rolloutfleet-agent-token"
SCRATCH_VOLUME = "rolloutfleet-agent-tmp"
SHM_VOLUME = "rolloutfleet-shm"
TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
AGENT_USER = 65532
URL_VARIABLE = "ROLLOUTFLEET_AGENT_URL"

DATA_SOURCES = frozenset(
    {"persistentVolumeClaim", "hostPath", "nfs", "emptyDir", "csi", "ephemeral", "iscsi", "cephfs", "fc", "image"}
)
"""Volume sources that may hold checkpoints; secrets, config maps and tokens are none of the agent's business."""

_ROLE = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_VARIABLE = re.compile(r"\$\(([^()]+)\)")
_SHARED = re.compile(r"/dev/shm/[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_SERVER = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


class InjectionError(ValueError):
    """The pod cannot be injected; the text names the value and what would be right."""


def parse_rollout_servers(value: str) -> dict[str, str]:
    """`actor=qwen,reward=rm` as {role: RolloutServer}. Raises InjectionError."""
    roles: dict[str, str] = {}
    for entry in value.split(","):
        role, separator, server = (part.strip() for part in entry.partition("="))
        if not separator or not _ROLE.fullmatch(role) or not _SERVER.fullmatch(server):
            raise InjectionError(
                f"{ANNOTATION_ROLLOUT_SERVERS}: {value!r}: {entry.strip()!r} is not ROLE=SERVER in lower case, with a "
                "RolloutServer of the pod's own namespace; for example actor=qwen,reward=rm"
            )
        if role in roles:
            raise InjectionError(f"{ANNOTATION_ROLLOUT_SERVERS}: {value!r}: role {role} is named twice")
        roles[role] = server
    return roles


def inject(pod: Mapping[str, Any], *, agent_image: str, pull_policy: str = "IfNotPresent") -> dict[str, Any]:
    """The pod (or pod template) with the agent in it; unchanged where it is already. Raises InjectionError."""
    injected = deepcopy(dict(pod))
    value = ((injected.get("metadata") or {}).get("annotations") or {}).get(ANNOTATION_ROLLOUT_SERVERS)
    if value is None:
        return injected
    if not isinstance(value, str):
        raise InjectionError(f"{ANNOTATION_ROLLOUT_SERVERS}: {value!r}: must be a text; for example actor=qwen")
    servers = parse_rollout_servers(value)
    spec = injected.get("spec")
    if not isinstance(spec, dict):
        raise InjectionError(f"spec: {spec!r}: must be a pod's spec")
    if _agent_present(spec):
        return injected
    _refuse_taken_names(spec)
    annotations = injected["metadata"]["annotations"]
    shared = annotations.get(ANNOTATION_SHARED_MEMORY)
    agent = _agent(spec, servers, agent_image, pull_policy, store=_store_volume(spec, annotations))
    if shared is not None:
        agent["resources"] |= _claims(spec)
    # By this label the operator finds trainers, to tell those that name a missing server.
    labels = injected["metadata"].get("labels") or {}
    injected["metadata"]["labels"] = {**labels, LABEL_COMPONENT: COMPONENT_TRAINER}
    spec["initContainers"] = [agent, *(spec.get("initContainers") or [])]
    spec["volumes"] = [*(spec.get("volumes") or []), *_volumes()]
    if shared is not None:
        _share_memory(spec, shared)
    for container in spec.get("containers") or []:
        variables = container["env"] = container.get("env") or []
        if all(variable.get("name") != URL_VARIABLE for variable in variables):
            variables.append({"name": URL_VARIABLE, "value": f"http://127.0.0.1:{AGENT_PORT}"})
    return injected


def _store_volume(spec: Mapping[str, Any], annotations: Mapping[str, Any]) -> str | None:
    """Name of the one volume that the agent may write to."""
    name = annotations.get(ANNOTATION_STORE_VOLUME)
    if name is None:
        return None
    mounts = [m for container in spec.get("containers") or [] for m in container.get("volumeMounts") or []]
    usable = sorted({m["name"] for m in mounts if not m.get("readOnly")} & _data_volumes(spec))
    if name not in usable:
        raise InjectionError(
            f"{ANNOTATION_STORE_VOLUME}: {name!r}: must be a data volume that a container of the pod mounts and may "
            f"write to; there is {', '.join(usable) or 'none'}"
        )
    return str(name)


def _share_memory(spec: dict[str, Any], path: object) -> None:
    """The trainer's containers and colocated engines of the same node see one /dev/shm, which CUDA IPC needs."""
    if not isinstance(path, str) or not _SHARED.fullmatch(path):
        raise InjectionError(
            f"{ANNOTATION_SHARED_MEMORY}: {path!r}: must be /dev/shm/NAME in lower case, the same as "
            "colocation.sharedMemory of the RolloutServer's group"
        )
    for container in spec.get("containers") or []:
        mounts = container["volumeMounts"] = container.get("volumeMounts") or []
        if any(mount["mountPath"].rstrip("/") == "/dev/shm" for mount in mounts):
            raise InjectionError(
                f"{ANNOTATION_SHARED_MEMORY}: container {container.get('name')} mounts something at /dev/shm; remove it"
            )
        mounts.append({"name": SHM_VOLUME, "mountPath": "/dev/shm"})
    spec["volumes"].append({"name": SHM_VOLUME, "hostPath": {"path": path, "type": "DirectoryOrCreate"}})


def _claims(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The GPUs that trainer and engines share, so that the agent can see whether they are free."""
    claims = [claim for c in spec.get("containers") or [] for claim in (c.get("resources") or {}).get("claims") or []]
    each = [deepcopy(claim) for position, claim in enumerate(claims) if claim not in claims[:position]]
    return {"claims": each} if each else {}


def _agent_present(spec: Mapping[str, Any]) -> bool:
    volumes = {volume.get("name") for volume in spec.get("volumes") or []}
    names = {container.get("name") for container in spec.get("initContainers") or []}
    return AGENT_CONTAINER in names and TOKEN_VOLUME in volumes


def _refuse_taken_names(spec: Mapping[str, Any]) -> None:
    for kind in ("containers", "initContainers"):
        for container in spec.get(kind) or []:
            if container.get("name") == AGENT_CONTAINER:
                raise InjectionError(
                    f"spec.{kind}: the name {AGENT_CONTAINER} belongs to the injected agent; rename yours"
                )
    for volume in spec.get("volumes") or []:
        if volume.get("name") in (TOKEN_VOLUME, SCRATCH_VOLUME, SHM_VOLUME):
            raise InjectionError(f"spec.volumes: the name {volume['name']} belongs to the injected agent; rename yours")


def _agent(
    spec: Mapping[str, Any], servers: Mapping[str, str], image: str, pull_policy: str, *, store: str | None
) -> dict[str, Any]:
    security = restricted()
    # Where the pod's user is another than root (OpenShift gives arbitrary ones), the agent runs as that user.
    if not (spec.get("securityContext") or {}).get("runAsUser"):
        security |= {"runAsUser": AGENT_USER, "runAsGroup": 0}
    variables: list[dict[str, Any]] = [
        {"name": "ROLLOUTFLEET_SERVERS", "value": ",".join(f"{role}={name}" for role, name in servers.items())},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "ROLLOUTFLEET_AGENT_PORT", "value": str(AGENT_PORT)},
        {"name": "ROLLOUTFLEET_AGENT_METRICS_PORT", "value": str(AGENT_METRICS_PORT)},
    ]
    mounts = list(_data_mounts(spec, variables, store))
    metrics = {"name": AGENT_METRICS_PORT_NAME, "containerPort": AGENT_METRICS_PORT, "protocol": "TCP"}
    return {
        "name": AGENT_CONTAINER,
        "image": image,
        "imagePullPolicy": pull_policy,
        "restartPolicy": "Always",
        "env": variables,
        # On its node's network a pod would own the port of the whole node, and the next trainer have no place there.
        **({} if spec.get("hostNetwork") else {"ports": [metrics]}),
        "startupProbe": {
            "exec": {"command": ["python3", "-m", "rolloutfleet.agent.healthcheck"]},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": 30,
        },
        "resources": {
            "requests": {"cpu": "100m", "memory": "128Mi"},
            "limits": {"cpu": "2", "memory": "2Gi"},
        },
        "securityContext": security,
        "volumeMounts": [
            {"name": TOKEN_VOLUME, "mountPath": TOKEN_PATH, "readOnly": True},
            {"name": SCRATCH_VOLUME, "mountPath": "/tmp"},
            *mounts,
        ],
    }


def _data_mounts(
    spec: Mapping[str, Any], variables: list[dict[str, Any]], store: str | None
) -> Iterable[dict[str, Any]]:
    """Twins of the trainer's mounts, read-only but for the store's; `variables` is given what their subPathExpr
    needs."""
    data = _data_volumes(spec)
    taken = {TOKEN_PATH, "/tmp"}
    for container in spec.get("containers") or []:
        for mount in container.get("volumeMounts") or []:
            path = mount["mountPath"].rstrip("/") or "/"
            if mount["name"] in data and path not in taken and _resolves(mount, container, variables):
                taken.add(path)
                subpath = {key: mount[key] for key in ("subPath", "subPathExpr") if key in mount}
                access = {} if mount["name"] == store and not mount.get("readOnly") else {"readOnly": True}
                yield {"name": mount["name"], "mountPath": mount["mountPath"], **access, **subpath}


def _data_volumes(spec: Mapping[str, Any]) -> set[str]:
    return {volume["name"] for volume in spec.get("volumes") or [] if DATA_SOURCES & set(volume)}


def _resolves(mount: Mapping[str, Any], container: Mapping[str, Any], variables: list[dict[str, Any]]) -> bool:
    """Whether the agent can have the variables of a subPathExpr: with one unknown the kubelet starts no container."""
    theirs = {variable.get("name"): variable for variable in container.get("env") or []}
    ours = {variable["name"]: variable for variable in variables}
    missing = []
    for name in dict.fromkeys(_VARIABLE.findall(mount.get("subPathExpr") or "")):
        variable = theirs.get(name)
        if variable is None or _source(ours.get(name, variable)) != _source(variable):
            return False
        # Values that come of other variables, secrets or config maps are not followed.
        if "$" in variable.get("value", "") or not set(variable.get("valueFrom") or {}) <= {"fieldRef"}:
            return False
        if name not in ours:
            missing.append(deepcopy(variable))
    variables += missing
    return True


def _source(variable: Mapping[str, Any]) -> tuple[Any, Any]:
    """Where the value comes from, whether or not the API server has filled in apiVersion v1."""
    return variable.get("value"), ((variable.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath")


def _volumes() -> list[dict[str, Any]]:
    token = {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}
    authority = {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
    namespace = {"downwardAPI": {"items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]}}
    return [
        {"name": TOKEN_VOLUME, "projected": {"sources": [token, authority, namespace], "defaultMode": 0o444}},
        {"name": SCRATCH_VOLUME, "emptyDir": {}},
    ]
