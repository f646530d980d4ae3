"""Where each kind that we touch lives in the API."""

from __future__ import annotations

from dataclasses import dataclass

from rolloutfleet.api.names import GROUP, VERSION


@dataclass(frozen=True)
class Resource:
    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """The URL path; no namespace means all of them."""
        parts = [f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/".join(parts)


ROLLOUT_SERVER = Resource(GROUP, VERSION, "rolloutservers", "RolloutServer")
SERVER_GROUP = Resource(GROUP, VERSION, "servergroups", "ServerGroup")
POD = Resource("", "v1", "pods", "Pod")
SERVICE = Resource("", "v1", "services", "Service")
SECRET = Resource("", "v1", "secrets", "Secret")
NODE = Resource("", "v1", "nodes", "Node", namespaced=False)
REPLICA_SET = Resource("apps", "v1", "replicasets", "ReplicaSet")
ROLE = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDING = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
LEASE = Resource("coordination.k8s.io", "v1", "leases", "Lease")
EVENT = Resource("events.k8s.io", "v1", "events", "Event")
DISRUPTION_BUDGET = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
MUTATING_WEBHOOK = Resource(
    "admissionregistration.k8s.io",
    "v1",
    "mutatingwebhookconfigurations",
    "MutatingWebhookConfiguration",
    namespaced=False,
)
# Of schedulers that place pods all together or not at all; a cluster may have none of them.
COSCHEDULING_POD_GROUP = Resource("scheduling.x-k8s.io", "v1alpha1", "podgroups", "PodGroup")
VOLCANO_POD_GROUP = Resource("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup")
POD_GROUPS = (COSCHEDULING_POD_GROUP, VOLCANO_POD_GROUP)

_ALL = (
    ROLLOUT_SERVER,
    SERVER_GROUP,
    POD,
    NODE,
    SERVICE,
    SECRET,
    REPLICA_SET,
    ROLE,
    ROLE_BINDING,
    LEASE,
    EVENT,
    DISRUPTION_BUDGET,
    MUTATING_WEBHOOK,
)
_BY_KIND = {resource.kind: resource for resource in _ALL}
_BY_API = {(resource.api_version, resource.kind): resource for resource in (*_ALL, *POD_GROUPS)}


def by_kind(kind: str, api_version: str = "") -> Resource:
    """`api_version` is needed for a kind that more than one API group has: PodGroup."""
    return _BY_API[api_version, kind] if api_version else _BY_KIND[kind]
