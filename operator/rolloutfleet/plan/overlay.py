"""A pod template overlay, laid over a pod by the rules of Kubernetes' strategic merge.

Maps merge key by key and null removes a key. Lists with a merge key merge item by item; other lists are replaced.
What would take the place of a map or of such a list and is none is refused, and so is null for such a list: what the
operator has put there would go with it.
`$patch`, `$retainKeys` and their like are refused: stored as fields they would be silently ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "ownerReferences": "uid",
}
"""`patchMergeKey` of the lists inside a pod template (k8s.io/api/core/v1)."""


class OverlayError(ValueError):
    """The overlay cannot be applied; the text names the field."""


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any], *, path: str = "template") -> dict[str, Any]:
    merged = deepcopy(dict(base))
    for key, value in overlay.items():
        here = f"{path}.{key}"
        if key.startswith("$"):
            raise OverlayError(f"{here}: patch directives are not supported; remove it and write the fields wanted")
        there = merged.get(key)
        if isinstance(there, list) and key in MERGE_KEYS:
            if not isinstance(value, list):
                text = f"must be a list, whose items are merged by {MERGE_KEYS[key]} with those of the operator"
                raise OverlayError(f"{here}: {_shown(value)} {text}")
            merged[key] = _merge_list(there, value, MERGE_KEYS[key], here)
        elif value is None:
            merged.pop(key, None)
        elif isinstance(there, Mapping):
            if not isinstance(value, Mapping):
                raise OverlayError(f"{here}: {_shown(value)} must be an object, or null to remove it")
            merged[key] = merge(there, value, path=here)
        else:
            _refuse_directives(value, here)
            merged[key] = deepcopy(value)
    return merged


def _merge_list(base: list[Any], overlay: list[Any], key: str, path: str) -> list[Any]:
    merged = list(base)
    for position, item in enumerate(overlay):
        here = f"{path}[{position}]"
        if not isinstance(item, Mapping) or (key not in item and "$patch" not in item):
            raise OverlayError(f"{here}.{key}: missing; items of this list are merged by {key}")
        if "$patch" in item:
            raise OverlayError(f"{here}.$patch: patch directives are not supported; write the fields wanted")
        found = next((i for i, old in enumerate(merged) if old.get(key) == item[key]), None)
        if found is None:
            _refuse_directives(item, here)
            merged.append(deepcopy(dict(item)))
        else:
            merged[found] = merge(merged[found], item, path=here)
    return merged


def _shown(value: Any) -> str:
    return json.dumps(value)[:40]


def _refuse_directives(value: Any, path: str) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if str(key).startswith("$"):
                raise OverlayError(f"{path}.{key}: patch directives are not supported; write the fields wanted")
            _refuse_directives(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            _refuse_directives(inner, f"{path}[{position}]")
