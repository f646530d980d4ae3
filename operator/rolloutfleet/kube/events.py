"""Kubernetes events as operator and agent both write them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

NOTE_LIMIT = 1024
"""Characters of `note` that events.k8s.io/v1 takes."""


def event_manifest(
    *,
    regarding: dict[str, str],
    warning: bool,
    reason: str,
    note: str,
    action: str,
    controller: str,
    instance: str,
    now: datetime,
) -> dict[str, Any]:
    """An Event of events.k8s.io/v1 about `regarding` (apiVersion, kind, namespace, name, uid), in its namespace."""
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"generateName": f"{regarding['name']}-", "namespace": regarding["namespace"]},
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "note": note[:NOTE_LIMIT],
        "action": action,
        "reportingController": controller,
        "reportingInstance": instance,
        "regarding": regarding,
    }
