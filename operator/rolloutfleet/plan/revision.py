"""Which revision of the user's intent a pod was built from.

Only what the user wrote counts: defaults that a newer operator adds, or that admission writes into pods, must never
recycle an engine. Replicas and recovery settings do not shape a pod and stay out.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from rolloutfleet.api.server_group import ServerGroupSpec


def digest(intent: Any) -> str:
    """Ten hexadecimal digits; the order of keys in a manifest makes no difference."""
    canonical = json.dumps(intent, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def group_revision(spec: ServerGroupSpec) -> str:
    intent = spec.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude={"replicas", "recovery", "update_weights"}
    )
    return digest(intent)
