"""Names that more than one process must agree on: labels, object names, ports, field managers.

Everything that is looked up by name or label anywhere is derived here, so that the operator, the agent and the
command line cannot drift apart.
"""

from __future__ import annotations

GROUP = "rolloutfleet.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

OPERATOR_MANAGER = "rolloutfleet-operator"
SCALE_MANAGER = "rolloutfleet-scale"
AGENT_MANAGER = "rolloutfleet-agent"

LABEL_SERVER = f"{GROUP}/server"
LABEL_COMPONENT = f"{GROUP}/component"
LABEL_GROUP = f"{GROUP}/group"
LABEL_LANGUAGE_ONLY = f"{GROUP}/language-only"
LABEL_ROLE = f"{GROUP}/role"
LABEL_GROUP_UID = f"{GROUP}/group-uid"
LABEL_ENGINE_INDEX = f"{GROUP}/engine-index"
LABEL_EPOCH = f"{GROUP}/epoch"
LABEL_RANK = f"{GROUP}/rank"
LABEL_REVISION = f"{GROUP}/revision"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "rolloutfleet"
COMPONENT_ENGINE = "engine"
COMPONENT_ROUTER = "router"
COMPONENT_TRAINER = "trainer"

ANNOTATION_REVISION = f"{GROUP}/revision"
"""Hash of what the user asked for when an object was built; admission may change the rest without causing drift."""
ANNOTATION_NODES = f"{GROUP}/nodes"
"""Pods of the engine that a pod belongs to."""
ANNOTATION_PEERS = f"{GROUP}/peer-revisions"
"""Of a prefill or decode pod: the revisions of the other role's groups that its own was meant to work with."""
ANNOTATION_RESTART = f"{GROUP}/restart"
"""Of a ServerGroup: engines (INDEX-eEPOCH, separated by commas) whose life of that epoch somebody wants to end. They
drain first. A later life is not meant, so nothing has to remove the annotation."""
ANNOTATION_RESUME = f"{GROUP}/resume"
"""Of a ServerGroup, in the same form: engines that are Failed and are to be started again at once."""
ANNOTATION_TEST_FLEET = f"{GROUP}/test-fleet"
"""Of a RolloutServer, "true": faults may be injected into its engines."""
ANNOTATION_ROLLOUT_SERVERS = f"{GROUP}/rollout-servers"
ANNOTATION_SHARED_MEMORY = f"{GROUP}/shared-memory"
"""Of a trainer's pod: the folder of the node that its containers are to see as /dev/shm (colocation.sharedMemory)."""
ANNOTATION_STORE_VOLUME = f"{GROUP}/store-volume"
"""Of a trainer's pod: the volume on which the agent keeps the samples of a run. It alone is writable for the agent."""

GATE_ROUTABLE = f"{GROUP}/Routable"

ENGINE_CONTAINER = "engine"
ENGINE_PORT = 30000
BOOTSTRAP_PORT = 8998
"""Where a prefill engine tells decode engines how to reach its ranks."""
ENCODER_TABLE_PORT = 8997
"""Where a language-only engine keeps its table of encoders."""
RENDEZVOUS_PORT = 20000
"""Where rank 0 of an engine of several pods waits for the others; the next few ports are SGLang's as well."""
ROUTER_CONTAINER = "router"
ROUTER_PORT = 30000
ROUTER_METRICS_PORT = 29000
WORKER_CONTAINER = "rolloutfleet-worker"
WORKER_PORT = 8478
"""Where the worker in an engine's pod is asked for a local copy of a weight version."""
AGENT_CONTAINER = "rolloutfleet-agent"
AGENT_PORT = 8477
AGENT_METRICS_PORT = 8479
AGENT_METRICS_PORT_NAME = "rf-metrics"
"""By it Prometheus finds the port: metrics, the usual name, may be the trainer's own."""

INITIAL_WEIGHT_VERSION = 0
"""The version of the checkpoint that `spec.model.path` names; a trainer's first update is 1 or more."""

DERIVED_NAME_BUDGET = 43
"""Longest SERVER-GROUP, so that pod names SERVER-GROUP-INDEX-eEPOCH-rRANK (at most -9999-e999999-r99) fit the
63 characters of a host name."""


EXTERNAL_GROUP = "external"
"""Name of the group that holds the engines of spec.external."""

PLACEHOLDER_PRIORITY_CLASS = "rolloutfleet-placeholder"
"""Made by the installation: below every other class, so that placeholders are preempted first."""


def server_group_name(server: str, group: str) -> str:
    return f"{server}-{group}"


def engine_name(server_group: str, index: int, epoch: int) -> str:
    """One life of one engine; what status, events and logs call it."""
    return f"{server_group}-{index}-e{epoch}"


def engine_pod_name(server_group: str, index: int, epoch: int, rank: int) -> str:
    return f"{engine_name(server_group, index, epoch)}-r{rank}"


def ranks_service_name(server_group: str) -> str:
    """Headless Service that gives the pods of an engine of several pods their names."""
    return f"{server_group}-ranks"


def rendezvous_host(server_group: str, namespace: str, index: int, epoch: int) -> str:
    """Rank 0 of one life of one engine, by name: known before any pod exists, never reused by another life."""
    pod = engine_pod_name(server_group, index, epoch, 0)
    return f"{pod}.{ranks_service_name(server_group)}.{namespace}.svc"


def router_name(server: str) -> str:
    return f"{server}-router"


def trainer_name(server: str) -> str:
    """The Lease that says who leads the fleet, and the Role and RoleBinding of those who may."""
    return f"{server}-trainer"


def router_url(server: str, namespace: str) -> str:
    return f"http://{router_name(server)}.{namespace}.svc:{ROUTER_PORT}"
