"""Kubernetes events for transitions that a plan found."""

from __future__ import annotations

import os
import socket
from datetime import datetime
from typing import Any

from rolloutfleet.api.names import API_VERSION
from rolloutfleet.plan.actions import Emit

CONTROLLER = "rolloutfleet.dev/operator"


def event_manifest(namespace: str, emit: Emit, now: datetime) -> dict[str, Any]:
    """An events.k8s.io/v1 Event; `note` is at most 1024 characters there."""
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"generateName": f"{emit.name}-", "namespace": namespace},
        "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "type": "Warning" if emit.warning else "Normal",
        "reason": emit.reason,
        "note": emit.message[:1024],
        "action": "Reconcile",
        "reportingController": CONTROLLER,
        "reportingInstance": os.environ.get("POD_NAME") or socket.gethostname(),
        "regarding": {
            "apiVersion": "v1" if emit.kind == "Pod" else API_VERSION,
            "kind": emit.kind,
            "name": emit.name,
            "namespace": namespace,
            "uid": emit.uid,
        },
    }
