"""Kubernetes events for transitions that a plan found."""

from __future__ import annotations

import os
import socket
from datetime import datetime
from typing import Any

from rolloutfleet.api.names import API_VERSION
from rolloutfleet.kube import events
from rolloutfleet.plan.actions import Emit

CONTROLLER = "rolloutfleet.dev/operator"


def event_manifest(namespace: str, emit: Emit, now: datetime) -> dict[str, Any]:
    return events.event_manifest(
        regarding={
            "apiVersion": "v1" if emit.kind == "Pod" else API_VERSION,
            "kind": emit.kind,
            "name": emit.name,
            "namespace": namespace,
            "uid": emit.uid,
        },
        warning=emit.warning,
        reason=emit.reason,
        note=emit.message,
        action="Reconcile",
        controller=CONTROLLER,
        instance=os.environ.get("POD_NAME") or socket.gethostname(),
        now=now,
    )
