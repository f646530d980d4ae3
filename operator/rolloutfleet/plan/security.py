"""How our own containers run: as Kubernetes' restricted pod security standard asks, with a read-only root besides."""

from __future__ import annotations

from typing import Any


def restricted() -> dict[str, Any]:
    """A container's securityContext."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
