"""The objects around the engines: ServerGroups, the router's ReplicaSet and Service, the trainers' rights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rolloutfleet.api.common import ExternalSpec, Role
from rolloutfleet.api.names import (
    ANNOTATION_REVISION,
    API_VERSION,
    COMPONENT_ROUTER,
    EXTERNAL_GROUP,
    GATE_ROUTABLE,
    GROUP,
    LABEL_COMPONENT,
    LABEL_GROUP,
    LABEL_MANAGED_BY,
    LABEL_REVISION,
    LABEL_SERVER,
    MANAGED_BY,
    RENDEZVOUS_PORT,
    ROUTER_CONTAINER,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    ranks_service_name,
    router_name,
    server_group_name,
    trainer_name,
)
from rolloutfleet.api.rollout_server import GroupSpec, RolloutServer
from rolloutfleet.api.schema import Resource
from rolloutfleet.api.server_group import ServerGroup, ServerGroupSpec
from rolloutfleet.plan.actions import Action, Apply, DeleteObject, Emit
from rolloutfleet.plan.engine_args import router_arguments
from rolloutfleet.plan.observed import Fleet, canonical_url
from rolloutfleet.plan.revision import digest
from rolloutfleet.plan.security import restricted


@dataclass(frozen=True)
class Defaults:
    """What the installation of the operator decides."""

    router_image: str
    placeholder_image: str
    """Of a program that sleeps."""
    agent_image: str
    """Also of the worker beside engines with a copy of the weights."""
    image_pull_policy: str = "IfNotPresent"
    bind_address: str = "0.0.0.0"
    """Where engines and routers listen; `::` in a cluster whose pods have IPv6 addresses."""


ROUTER_SET = "ReplicaSet"
"""One for each template that routers have had and that still serves; its name ends with the template's digest."""
CHILD_KINDS = ("ServerGroup", ROUTER_SET, "Service", "Role", "RoleBinding", "Lease", "PodDisruptionBudget")


def child_actions(
    fleet: Fleet, wanted_objects: Iterable[Mapping[str, Any]], applied_versions: Mapping[str, str]
) -> list[Action]:
    """Apply what differs from what is wanted, delete what is not wanted any more."""
    wanted = {_key(manifest): manifest for manifest in map(_stamped, wanted_objects)}
    actions: list[Action] = []
    for key, manifest in wanted.items():
        found = fleet.children.get(key)
        if _differs(manifest, found, applied_versions.get(key, "")):
            actions.append(Apply(manifest))
            if found is not None and _revision(found) == _revision(manifest):
                actions.append(_put_back(fleet.server, key))
    actions += [
        DeleteObject(kind=key.split("/")[0], name=key.split("/")[1], uid=str(child["metadata"]["uid"]))
        for key, child in fleet.children.items()
        if key not in wanted and not child["metadata"].get("deletionTimestamp")
    ]
    return actions


def wanted_children(server: RolloutServer, defaults: Defaults, *, pairs: bool) -> list[dict[str, Any]]:
    children = [_server_group(server, group) for group in server.spec.groups]
    if server.spec.external is not None:
        children.append(_external_group(server, server.spec.external))
    children += [_ranks_service(server, group) for group in server.spec.groups if group.engine.nodes > 1]
    children += [_router_service(server), _router_replica_set(server, defaults, pairs=pairs)]
    children.append(_lease(server))
    if server.spec.trainers.service_accounts:
        children += [_role(server), _role_binding(server)]
    return children


def _key(manifest: Mapping[str, Any]) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def _differs(wanted: Mapping[str, Any], found: Mapping[str, Any] | None, applied_version: str) -> bool:
    if found is None:
        return True
    if _revision(found) != _revision(wanted):
        return True
    if applied_version == version_of(found):
        # Nobody edited it since our apply: what differs was changed by admission, and would be changed again.
        return False
    return not contains(found, wanted)


def version_of(found: Mapping[str, Any]) -> str:
    """Changes when somebody edits what is wanted of an object. Kinds without a generation have no status of their own
    that changes all the time, so any change counts."""
    metadata = found["metadata"]
    generation = metadata.get("generation")
    return f"generation {generation}" if generation is not None else f"version {metadata.get('resourceVersion', '')}"


def places(server: RolloutServer) -> set[str]:
    """`Kind/name` of every object that the server wants to have."""
    anyhow = Defaults(router_image="", placeholder_image="", agent_image="")
    budgets = (*server.server_groups, router_name(server.name))
    return {_key(child) for child in wanted_children(server, anyhow, pairs=False)} | {
        f"PodDisruptionBudget/{name}" for name in budgets
    }


def _revision(manifest: Mapping[str, Any]) -> str:
    return str((manifest["metadata"].get("annotations") or {}).get(ANNOTATION_REVISION, ""))


def _put_back(server: RolloutServer, key: str) -> Emit:
    text = f"{key} was edited by somebody else and is put back: change RolloutServer {server.name} instead"
    if key.startswith("ServerGroup/"):
        text += ", and leave replicas out there if an autoscaler owns the count"
    return Emit(
        kind="RolloutServer", name=server.name, uid=server.uid, warning=True, reason="HandEditPutBack", message=text
    )


def contains(found: Any, wanted: Any) -> bool:
    """Whether all that is wanted is there; what others added beside it does not matter."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(contains(found.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return (
            isinstance(found, list)
            and len(found) == len(wanted)
            and all(contains(have, want) for have, want in zip(found, wanted, strict=True))
        ) or (wanted == [] and found is None)
    return bool(found == wanted) or (wanted == {} and found is None)


def _stamped(manifest: Mapping[str, Any]) -> dict[str, Any]:
    intent = {key: value for key, value in manifest.items() if key != "metadata"}
    metadata = {**manifest["metadata"], "annotations": {ANNOTATION_REVISION: digest(intent)}}
    return {**manifest, "metadata": metadata}


def metadata_of(server: RolloutServer, name: str, **labels: str) -> dict[str, Any]:
    """Of an object that the server owns."""
    return {
        "name": name,
        "namespace": server.namespace,
        "labels": {LABEL_SERVER: server.name, LABEL_MANAGED_BY: MANAGED_BY, **labels},
        "ownerReferences": [owner_reference(server)],
    }


def owner_reference(owner: Resource) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": owner.kind_info.name,
        "name": owner.name,
        "uid": owner.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _server_group(server: RolloutServer, group: GroupSpec) -> dict[str, Any]:
    spec = ServerGroupSpec(
        server=server.name,
        role=group.role,
        model=server.spec.model,
        update_weights=server.spec.update_weights,
        engine=group.engine,
        language_only=group.role in LANGUAGE_ROLES and encodes_apart(server),
        offload=group.offload,
        colocation=group.colocation,
        template=group.template,
        recovery=group.recovery,
        rolling_update=group.rolling_update,
        drain_timeout_seconds=group.drain_timeout_seconds,
        weights=server.spec.weights,
    ).dump()
    if group.replicas is None:
        # Not ours: an autoscaler owns it. The schema's default makes it 1 at creation.
        del spec["replicas"]
    else:
        spec["replicas"] = group.replicas
    return _group_object(server, group.name, spec)


def _external_group(server: RolloutServer, external: ExternalSpec) -> dict[str, Any]:
    spec = ServerGroupSpec(
        server=server.name,
        role="External",
        replicas=len({canonical_url(engine.url) for engine in external.engines}),
        model=server.spec.model,
        update_weights=server.spec.update_weights,
        external=external,
        weights=server.spec.weights,
    )
    return _group_object(server, EXTERNAL_GROUP, spec.dump())


def _group_object(server: RolloutServer, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": "ServerGroup",
        "metadata": metadata_of(server, server_group_name(server.name, name)),
        "spec": spec,
    }


def _ranks_service(server: RolloutServer, group: GroupSpec) -> dict[str, Any]:
    """Names for the pods of engines of several pods, from before they are ready: they must find rank 0 to become so."""
    name = server_group_name(server.name, group.name)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata_of(server, ranks_service_name(name)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL_SERVER: server.name, LABEL_GROUP: name},
            "ports": [{"name": "rendezvous", "port": RENDEZVOUS_PORT, "protocol": "TCP"}],
        },
    }


def disaggregated(server: RolloutServer, groups: Iterable[ServerGroup]) -> bool:
    """Prefill and decode run in engines of their own, and the router pairs them.

    The groups of the spec decide; where there are none, what the external engines have said of themselves.
    """
    roles: set[Role] = {group.role for group in server.spec.groups if group.role != "Placeholder"}
    if not roles:
        facts = [engine.facts for group in groups if group.spec.external for engine in group.status.engines]
        roles = {fact.role for fact in facts if fact is not None}
    return bool(roles & {"Prefill", "Decode"})


LANGUAGE_ROLES = ("Regular", "Prefill")
"""Roles whose engines read prompts, and so need what encoders make of images."""


def encodes_apart(server: RolloutServer) -> bool:
    """Images are encoded by engines of their own."""
    return any(group.role == "Encoder" for group in server.spec.groups)


def router_labels(server: RolloutServer) -> dict[str, str]:
    return {LABEL_SERVER: server.name, LABEL_COMPONENT: COMPONENT_ROUTER}


def _router_service(server: RolloutServer) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata_of(server, router_name(server.name)),
        "spec": {
            "selector": router_labels(server),
            "ports": [{"name": "http", "port": ROUTER_PORT, "targetPort": "http", "protocol": "TCP"}],
        },
    }


KEEPALIVE = {"net.ipv4.tcp_keepalive_intvl": "5", "net.ipv4.tcp_keepalive_probes": "3"}
"""The router asks after 30 s of silence whether an engine's machine is still there, and with these for 15 s more before
it gives a request up that the engine had taken; what the engine never acknowledged is sent again for many minutes.
Sysctls that every kubelet since 1.29 takes for safe."""


def _router_replica_set(server: RolloutServer, defaults: Defaults, *, pairs: bool) -> dict[str, Any]:
    router = server.spec.router
    probe = {"path": "/liveness", "port": "http"}
    container = {
        "name": ROUTER_CONTAINER,
        "image": router.image or defaults.router_image,
        "imagePullPolicy": defaults.image_pull_policy,
        "args": router_arguments(router, disaggregated=pairs, bind=defaults.bind_address),
        "ports": [
            {"name": "http", "containerPort": ROUTER_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": ROUTER_METRICS_PORT, "protocol": "TCP"},
        ],
        "env": [{"name": "HOME", "value": "/tmp"}],
        "readinessProbe": {"httpGet": probe, "periodSeconds": 2},
        "livenessProbe": {"httpGet": probe, "periodSeconds": 10, "failureThreshold": 6},
        # The router closes its listener at SIGTERM: wait until endpoints have forgotten this pod.
        "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"cpu": "2", "memory": "2Gi"},
        },
        "securityContext": restricted(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    template = {
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 200,
        "securityContext": {"sysctls": [{"name": n, "value": v} for n, v in KEEPALIVE.items()]},
        # Traffic only when the worker table is complete: a fresh replica knows no engine.
        "readinessGates": [{"conditionType": GATE_ROUTABLE}],
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    revision = digest(template)
    labels = {**router_labels(server), LABEL_REVISION: revision}
    name = f"{router_name(server.name)}-{revision}"
    return {
        "apiVersion": "apps/v1",
        "kind": ROUTER_SET,
        "metadata": metadata_of(server, name, **{LABEL_COMPONENT: COMPONENT_ROUTER}),
        "spec": {
            "replicas": router.replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": {**labels, LABEL_MANAGED_BY: MANAGED_BY}}, "spec": template},
        },
    }


def _lease(server: RolloutServer) -> dict[str, Any]:
    """Made here and empty, so that an agent needs no right to create Leases, which cannot be limited by name."""
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": metadata_of(server, trainer_name(server.name)),
    }


def _role(server: RolloutServer) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": metadata_of(server, trainer_name(server.name)),
        "rules": [
            {
                "apiGroups": [GROUP],
                "resources": ["rolloutservers"],
                "resourceNames": [server.name],
                "verbs": ["get", "list", "watch"],
            },
            {
                "apiGroups": [GROUP],
                "resources": ["servergroups"],
                "resourceNames": sorted(server.server_groups),
                "verbs": ["get", "list", "watch"],
            },
            {
                "apiGroups": [GROUP],
                "resources": ["rolloutservers/status"],
                "resourceNames": [server.name],
                "verbs": ["patch"],
            },
            {
                "apiGroups": ["coordination.k8s.io"],
                "resources": ["leases"],
                "resourceNames": [trainer_name(server.name)],
                "verbs": ["get", "update"],
            },
            {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]},
        ],
    }


def _role_binding(server: RolloutServer) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata_of(server, trainer_name(server.name)),
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "Role",
            "name": trainer_name(server.name),
        },
        "subjects": [
            {"kind": "ServiceAccount", "name": account, "namespace": server.namespace}
            for account in sorted(server.spec.trainers.service_accounts)
        ],
    }
