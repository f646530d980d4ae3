"""Fleets as the API server has them, for tests of the command line."""

from __future__ import annotations

from typing import Any

from rolloutfleet.api.rollout_server import RolloutServer
from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.cli.fleet import Fleet

Body = dict[str, Any]


def condition(kind: str, status: str, reason: str, message: str = "") -> Body:
    since = "2026-01-01T00:00:00+00:00"
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since}


def engine(index: int = 0, epoch: int = 1, phase: str = "Serving", reason: str = "", **fields: Any) -> Body:
    pod = f"qwen-main-{index}-e{epoch}-r0"
    return {"index": index, "epoch": epoch, "phase": phase, "reason": reason, "pod": pod, **fields}


def group(*engines: Body, name: str = "main", role: str = "Regular", **metadata: Any) -> Body:
    spec: Body = {"server": "qwen", "role": role, "replicas": len(engines), "model": {"path": "/models/m0"}}
    if role == "External":
        spec["external"] = {"engines": [{"url": record["url"]} for record in engines]}
    else:
        spec["engine"] = {"image": "engine:1"}
    full = f"qwen-{name}"
    labels = {"rolloutfleet.dev/server": "qwen"}
    return {
        "metadata": {"name": full, "namespace": "rl", "uid": f"uid-{full}", "labels": labels, **metadata},
        "spec": spec,
        "status": {"engines": list(engines), "ready": len(engines), "routable": len(engines), "weightVersion": 3},
    }


def server(ready: Body | None = None, *, routable: int = 2, desired: int = 2, **status: Any) -> Body:
    engines = {"desired": desired, "routable": routable}
    found = {"conditions": [ready] if ready else [], "engines": engines, "observedGeneration": 1, **status}
    return {
        "metadata": {"name": "qwen", "namespace": "rl", "uid": "uid-qwen", "generation": 1},
        "spec": {"model": {"path": "/models/m0"}, "groups": [{"name": "main", "engine": {"image": "engine:1"}}]},
        "status": found,
    }


def fleet(body: Body, *groups: Body) -> Fleet:
    return Fleet(RolloutServer.model_validate(body), tuple(ServerGroup.model_validate(each) for each in groups))
