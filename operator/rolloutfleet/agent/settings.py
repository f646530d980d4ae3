"""What the agent is told by its environment.

It lives in other people's pods, where every Service of the namespace may inject NAME_PORT=tcp://...: such a value of a
setting of ours is not ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rolloutfleet.api.names import AGENT_METRICS_PORT, AGENT_PORT
from rolloutfleet.plan.injection import parse_rollout_servers


@dataclass(frozen=True)
class Settings:
    servers: dict[str, str]
    """Role to RolloutServer."""
    pod_name: str
    pod_uid: str
    pod_ip: str
    """Where engines reach the trainer's process groups."""
    namespace: str
    host: str
    port: int
    metrics_port: int


def load_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Raises ValueError naming the variable."""
    servers = environment.get("ROLLOUTFLEET_SERVERS")
    if servers is None:
        raise ValueError("ROLLOUTFLEET_SERVERS: missing; for example actor=qwen,reward=rm")
    name, namespace = environment.get("POD_NAME"), environment.get("POD_NAMESPACE")
    if not name or not namespace:
        raise ValueError("POD_NAME and POD_NAMESPACE: missing; the injected container sets them")
    return Settings(
        servers=parse_rollout_servers(servers),
        pod_name=name,
        pod_uid=environment.get("POD_UID", ""),
        pod_ip=environment.get("POD_IP", ""),
        namespace=namespace,
        host=environment.get("ROLLOUTFLEET_AGENT_HOST", "127.0.0.1"),
        port=agent_port(environment),
        metrics_port=_port(environment, "ROLLOUTFLEET_AGENT_METRICS_PORT", AGENT_METRICS_PORT),
    )


def agent_port(environment: Mapping[str, str]) -> int:
    return _port(environment, "ROLLOUTFLEET_AGENT_PORT", AGENT_PORT)


def _port(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, "")
    return int(value) if value.isdigit() else default
