"""Which revision of the user's intent a pod was built from.

Only what the user wrote counts: defaults that a newer operator adds, or that admission writes into pods, must never
recycle an engine: a field that stands at its default counts as not written.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from rolloutfleet.api.server_group import ServerGroupSpec

SHAPES_NO_POD = {"replicas", "recovery", "update_weights", "rolling_update", "drain_timeout_seconds"}
"""What an engine need not be made anew for."""


def digest(intent: Any) -> str:
    """Ten hexadecimal digits; the order of keys in a manifest makes no difference."""
    canonical = json.dumps(intent, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def group_revision(spec: ServerGroupSpec) -> str:
    intent = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=SHAPES_NO_POD)
    return digest(intent)
