"""Gang scheduling: the pods of an engine are placed all together or not at all.

Two engines that each hold half of the machines they need wait for ever. The default scheduler places pods one by one,
so this needs one that knows PodGroups: the user names it in the template (`schedulerName`), the cluster has its API.

1. An engine of one pod needs no gang.
2. The default scheduler knows no PodGroups; `volcano` knows Volcano's; any other name is taken for a scheduler with
   the coscheduling plugin.
3. What the cluster does not have is not used, and a template that names a PodGroup itself keeps it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rolloutfleet.api.names import (
    ANNOTATION_NODES,
    LABEL_ENGINE_INDEX,
    LABEL_EPOCH,
    LABEL_GROUP,
    LABEL_GROUP_UID,
    LABEL_MANAGED_BY,
    LABEL_SERVER,
    engine_name,
)
from rolloutfleet.api.server_group import ServerGroupSpec

COSCHEDULING = "scheduling.x-k8s.io/v1alpha1"
VOLCANO = "scheduling.volcano.sh/v1beta1"

COSCHEDULING_LABEL = "scheduling.x-k8s.io/pod-group"
VOLCANO_ANNOTATION = "scheduling.k8s.io/group-name"
VOLCANO_QUEUE_ANNOTATION = "scheduling.volcano.sh/queue-name"

_DEFAULT_SCHEDULER = "default-scheduler"
_LABELS = (LABEL_SERVER, LABEL_GROUP, LABEL_GROUP_UID, LABEL_ENGINE_INDEX, LABEL_EPOCH, LABEL_MANAGED_BY)


def gang_api(spec: ServerGroupSpec, available: Collection[str]) -> str:
    """apiVersion of the PodGroups for a group's engines; empty where there are none to be."""
    template = spec.template or {}
    scheduler = (template.get("spec") or {}).get("schedulerName") or _DEFAULT_SCHEDULER
    if spec.own_engine.nodes == 1 or scheduler == _DEFAULT_SCHEDULER:
        return ""
    metadata = template.get("metadata") or {}
    maps = (metadata.get(field) for field in ("labels", "annotations"))
    theirs = {name for named in maps if isinstance(named, Mapping) for name in named}  # any other is refused elsewhere
    if theirs & {COSCHEDULING_LABEL, VOLCANO_ANNOTATION}:
        return ""
    api = VOLCANO if scheduler == "volcano" else COSCHEDULING
    return api if api in available else ""


def membership(api: str, name: str) -> tuple[dict[str, str], dict[str, str]]:
    """(labels, annotations) by which a pod is one of a PodGroup."""
    return (
        {COSCHEDULING_LABEL: name} if api == COSCHEDULING else {},
        {VOLCANO_ANNOTATION: name} if api == VOLCANO else {},
    )


def gang_of_pod(metadata: Mapping[str, Any]) -> str:
    """apiVersion of the PodGroup of ours that a pod is one of; empty if it is in none, or in somebody else's."""
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    index, epoch = int(labels.get(LABEL_ENGINE_INDEX, -1)), int(labels.get(LABEL_EPOCH, 0))
    ours = engine_name(labels.get(LABEL_GROUP, ""), index, epoch)
    if labels.get(COSCHEDULING_LABEL) == ours:
        return COSCHEDULING
    return VOLCANO if annotations.get(VOLCANO_ANNOTATION) == ours else ""


def pod_group(pod: Mapping[str, Any], api: str) -> dict[str, Any]:
    """The PodGroup of one life of an engine, from the manifest of any of its pods."""
    metadata = pod["metadata"]
    labels, annotations = metadata["labels"], metadata["annotations"]
    spec: dict[str, Any] = {"minMember": int(annotations[ANNOTATION_NODES])}
    if api == VOLCANO:
        # Volcano reads these from the PodGroup alone; where it makes one itself, it takes them from the pod as well.
        queue, priority = annotations.get(VOLCANO_QUEUE_ANNOTATION), pod["spec"].get("priorityClassName")
        spec |= ({"queue": queue} if queue else {}) | ({"priorityClassName": priority} if priority else {})
    return {
        "apiVersion": api,
        "kind": "PodGroup",
        "metadata": {
            "name": engine_name(labels[LABEL_GROUP], int(labels[LABEL_ENGINE_INDEX]), int(labels[LABEL_EPOCH])),
            "namespace": metadata["namespace"],
            "labels": {name: labels[name] for name in _LABELS},
            "ownerReferences": metadata["ownerReferences"],
        },
        "spec": spec,
    }
