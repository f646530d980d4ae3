"""How many engines an eviction may take: what `kubectl drain` and cluster autoscalers ask before they end a pod.

One engine after another, as for a rolling change; none while the trainer holds the group, and that ends with its
deadline or with the trainer. An engine that is not ready never keeps a node from being drained. An evicted engine
leaves the routers when its deletion begins and finishes its requests in its grace period, while its successor starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rolloutfleet.api.names import COMPONENT_ENGINE, LABEL_COMPONENT, LABEL_GROUP, LABEL_SERVER, router_name
from rolloutfleet.api.rollout_server import RolloutServer
from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.plan.objects import metadata_of, router_labels
from rolloutfleet.plan.training import Training


def disruption_budgets(
    server: RolloutServer, groups: Sequence[ServerGroup], training: Training
) -> list[dict[str, Any]]:
    """One for each group whose engines are ours, and one for the routers where there are several."""
    budgets = [
        _engines(server, group, held=training.holds(offload=group.spec.offload))
        for group in groups
        if _evictable(group)
    ]
    if server.spec.router.replicas > 1:
        spec = {
            "maxUnavailable": 1,
            "selector": {"matchLabels": router_labels(server)},
            # None is ready before an engine serves: their nodes could not be drained until one does.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        }
        budgets.append(_budget(server, router_name(server.name), spec))
    return budgets


def _evictable(group: ServerGroup) -> bool:
    return group.spec.role != "Placeholder" and group.spec.external is None and group.spec.replicas > 0


def _engines(server: RolloutServer, group: ServerGroup, *, held: bool) -> dict[str, Any]:
    """In pods, since that is what is evicted. A number of pods: a percentage or maxUnavailable would ask the scale of
    the ServerGroup, which counts engines."""
    at_a_time = 0 if held else max(group.spec.rolling_update.max_unavailable, 1)
    needed = max(group.spec.replicas - at_a_time, 0) * group.spec.own_engine.nodes
    labels = {LABEL_SERVER: server.name, LABEL_GROUP: group.name, LABEL_COMPONENT: COMPONENT_ENGINE}
    spec = {
        "minAvailable": needed,
        "selector": {"matchLabels": labels},
        "unhealthyPodEvictionPolicy": "IfHealthyBudget" if held else "AlwaysAllow",
    }
    return _budget(server, group.name, spec)


def _budget(server: RolloutServer, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata_of(server, name),
        "spec": spec,
    }
