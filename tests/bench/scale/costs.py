"""What a process and a user of the API cost: /proc and the API server's audit log."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.scale.control_plane import AUDIT_LOG

WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_rss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return round(int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024, 1)


@dataclass
class Writes:
    operator: Counter[str] = field(default_factory=Counter)
    """By verb, resource and status code."""
    others: Counter[str] = field(default_factory=Counter)
    """By user."""
    reads: Counter[str] = field(default_factory=Counter)
    """Of the operator."""


class AuditLog:
    """From now on."""

    def __init__(self, operator: str, namespace: str) -> None:
        """The operator's user and the namespace that it runs in."""
        self._operator = operator
        self._namespace = namespace
        self._offset = AUDIT_LOG.stat().st_size

    def read(self) -> Writes:
        found = Writes()
        with AUDIT_LOG.open("rb") as log:
            log.seek(self._offset)
            for line in log.read().splitlines():
                self._count(found, json.loads(line))
        return found

    def _count(self, found: Writes, event: dict[str, Any]) -> None:
        user, verb = event["user"]["username"], event["verb"]
        reference = event.get("objectRef") or {}
        ours = user == self._operator
        what = "/".join(filter(None, (reference.get("resource"), reference.get("subresource"))))
        if verb not in WRITES:
            if ours and verb in ("get", "list"):
                found.reads[f"{verb} {what}"] += 1
            return
        if not ours:
            found.others[user.removeprefix("system:serviceaccount:")] += 1
            return
        if reference.get("resource") == "leases" and reference.get("namespace") == self._namespace:
            return  # leader election: it renews all the time, whatever there is to do
        code = (event.get("responseStatus") or {}).get("code", 0)
        found.operator[f"{verb} {what}" + (f" ({code})" if code >= 400 else "")] += 1


def quantiles(seconds: Sequence[float]) -> dict[str, float | int | None]:
    """Nearest rank; null where nothing was measured."""
    values = sorted(seconds)
    pick = [round(values[round(q * (len(values) - 1))], 3) if values else None for q in (0.5, 0.99)]
    return {"p50": pick[0], "p99": pick[1], "n": len(values)}
