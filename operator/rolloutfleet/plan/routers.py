"""A change of the template of routers: new ones start beside the old ones, which go when all new ones take traffic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rolloutfleet.plan.actions import Action, DeleteObject
from rolloutfleet.plan.objects import ROUTER_SET
from rolloutfleet.plan.observed import Fleet


def without_early_retirements(
    actions: Iterable[Action], fleet: Fleet, wanted_objects: Iterable[Mapping[str, Any]]
) -> list[Action]:
    """The actions but for deletions of routers that still take traffic for those that do not yet."""
    wanted = next(manifest for manifest in wanted_objects if manifest["kind"] == ROUTER_SET)
    serving = Counter(router.made_by for router in fleet.router_pods if router.running and router.gate)
    complete = serving[wanted["metadata"]["name"]] >= wanted["spec"]["replicas"]

    return [action for action in actions if complete or not _retires(action, serving)]


def _retires(action: Action, serving: Mapping[str, int]) -> bool:
    return isinstance(action, DeleteObject) and action.kind == ROUTER_SET and serving.get(action.name, 0) > 0
