"""What is known of the cluster's nodes. Watches of nodes and of pods run apart: a pod may be told before its node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rolloutfleet.plan.observed import node_of, node_ready


class Nodes:
    def __init__(self) -> None:
        self.states: dict[str, bool | None] | None = None
        """Whether each node is ready; None of one that is gone. None of all until they were listed; one of which
        nobody has told yet is not there."""
        self._versions: dict[str, int] = {}

    def saw(self, node: Mapping[str, Any], *, deleted: bool) -> set[str]:
        """Take news of a node; its name, if it changed between ready, not ready and gone."""
        name, version = node["metadata"]["name"], _version(node)
        if self.states is None or version <= self._versions.get(name, 0):
            return set()  # the first list will tell; or this is no news
        before, after = self.states.get(name), None if deleted else node_ready(node)
        self.states[name], self._versions[name] = after, version
        return {name} if before is not after else set()

    def replace(self, nodes: Iterable[Mapping[str, Any]], version: str, pods: Iterable[Mapping[str, Any]]) -> set[str]:
        """A full list, as of resourceVersion `version`; the names of those that changed. `pods`: all that are known."""
        before, listed_at = self.states or {}, int(version)
        listed = {node["metadata"]["name"]: node for node in nodes}
        # Of a pod that is younger than the list, the node may be so too.
        hosts = {node_of(pod): _version(pod) for pod in sorted(pods, key=_version, reverse=True)} | {"": listed_at + 1}
        gone = {name for name, oldest in hosts.items() if oldest <= listed_at or before.get(name, True) is None}
        after: dict[str, bool | None] = dict.fromkeys(gone - listed.keys())
        after |= {name: node_ready(node) for name, node in listed.items()}
        versions = dict.fromkeys(gone, listed_at) | {name: _version(node) for name, node in listed.items()}
        for name, known in self._versions.items():
            if known > versions.get(name, listed_at):
                after[name], versions[name] = before.get(name), known
        self.states, self._versions = after, versions
        return {name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)}


def _version(body: Mapping[str, Any]) -> int:
    return int(body["metadata"].get("resourceVersion") or 0)
