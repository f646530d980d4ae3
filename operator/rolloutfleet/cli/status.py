"""`status NAME`: a fleet at a glance, the worst engines first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rolloutfleet.api.names import COMPONENT_ENGINE, LABEL_COMPONENT, LABEL_SERVER, trainer_name
from rolloutfleet.api.rollout_server import RolloutServer, WeightsPhase
from rolloutfleet.cli.fleet import Fleet, read_fleet
from rolloutfleet.cli.session import Session, Verbs, add_verb
from rolloutfleet.cli.text import age, table
from rolloutfleet.kube.client import LEASE, POD, Forbidden, NotFound


@dataclass(frozen=True)
class Surroundings:
    """What is not in the custom resources, and may be hidden from who asks."""

    nodes: Mapping[str, str]
    """By pod."""
    lease: Mapping[str, Any]
    """The spec of the trainer's Lease; empty when nobody ever led."""


def add_to(verbs: Verbs) -> None:
    parser = add_verb(verbs, "status", run, summary="show a fleet at a glance, the worst engines first")
    parser.add_argument("-o", "--output", choices=["json"], help="for programs")


async def run(session: Session, options: argparse.Namespace) -> int:
    fleet = await read_fleet(session, options.name)
    surroundings = await look_around(session, fleet)
    print(as_json(fleet, surroundings) if options.output == "json" else as_text(fleet, surroundings, datetime.now(UTC)))
    return 0


async def look_around(session: Session, fleet: Fleet) -> Surroundings:
    name = fleet.server.name
    labels = f"{LABEL_SERVER}={name},{LABEL_COMPONENT}={COMPONENT_ENGINE}"
    try:
        pods = (await session.api.list(POD, namespace=session.namespace, label_selector=labels)).items
    except Forbidden:
        pods = []
    try:
        lease = await session.api.get(LEASE, trainer_name(name), namespace=session.namespace)
    except (Forbidden, NotFound):
        lease = {}
    return Surroundings(
        nodes={pod["metadata"]["name"]: pod["spec"].get("nodeName") or "" for pod in pods},
        lease=lease.get("spec") or {},
    )


def as_text(fleet: Fleet, surroundings: Surroundings, now: datetime) -> str:
    server = fleet.server
    conditions = [
        [
            condition.type,
            condition.status,
            condition.reason,
            age(condition.last_transition_time, now),
            condition.message,
        ]
        for condition in server.status.conditions
    ]
    groups = [
        [
            group.name,
            group.spec.role,
            *(str(number) for number in (group.spec.replicas, group.status.ready, group.status.routable)),
            _version(group.status.weight_version),
            next((known.reason for known in group.status.conditions if known.type == "Ready"), ""),
        ]
        for group in fleet.groups
    ]
    engines = [
        [
            engine.name,
            f"e{engine.record.epoch}",
            engine.group.spec.role,
            engine.record.phase.value,
            engine.record.reason,
            _version(engine.record.weight_version),
            str(engine.record.restarts),
            surroundings.nodes.get(engine.record.pod, ""),
            age(engine.record.serving_since, now),
        ]
        for engine in fleet.engines
    ]
    parts = [
        f"{server.namespace}/{server.name}",
        table(["CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE"], conditions),
        table(["PART", "STATE"], _parts(server, surroundings, now)),
        table(["GROUP", "ROLE", "DESIRED", "READY", "ROUTABLE", "WEIGHTS", "REASON"], groups),
        table(["ENGINE", "LIFE", "ROLE", "PHASE", "REASON", "WEIGHTS", "RESTARTS", "NODE", "SERVING"], engines),
    ]
    return "\n\n".join(parts)


def _version(version: int | None) -> str:
    return "" if version is None else str(version)


def _parts(server: RolloutServer, surroundings: Surroundings, now: datetime) -> list[list[str]]:
    router, weights = server.status.router, server.status.weights
    return [
        ["router", f"{router.url}, {router.ready}/{router.replicas} replicas take traffic" if router else ""],
        ["weights", _weights(server) if weights else ""],
        ["trainer", _trainer(server, surroundings, now)],
    ]


def _weights(server: RolloutServer) -> str:
    weights, training = server.status.weights, server.status.training
    if weights is None or weights.version is None:
        return ""
    text = f"version {weights.version} from {weights.path or server.spec.model.path}"
    sent = training.weights if training is not None else None
    if sent is not None and sent.phase is WeightsPhase.UPDATING:
        text += f"; version {sent.target_version} from {sent.target_path} is being sent, until {sent.deadline}"
    return text


def _trainer(server: RolloutServer, surroundings: Surroundings, now: datetime) -> str:
    lease, training = surroundings.lease, server.status.training
    holder = str(lease.get("holderIdentity") or "") if lease else (training.holder if training is not None else "")
    if not holder:
        return "nobody leads"
    text = f"{holder} leads"
    if lease.get("renewTime"):
        text += f", lease renewed {age(lease['renewTime'], now)} ago, valid for {lease.get('leaseDurationSeconds')}s"
    if training is not None and training.memory is not None and training.memory.phase != "Resident":
        text += f"; memory {training.memory.phase}: {', '.join(training.memory.tags)}"
    return text


def as_json(fleet: Fleet, surroundings: Surroundings) -> str:
    return json.dumps(
        {
            "name": fleet.server.name,
            "namespace": fleet.server.namespace,
            "status": fleet.server.status.dump(),
            "lease": dict(surroundings.lease),
            "groups": [
                {
                    "name": group.name,
                    "role": group.spec.role,
                    "replicas": group.spec.replicas,
                    "ready": group.status.ready,
                    "routable": group.status.routable,
                    "conditions": [condition.dump() for condition in group.status.conditions],
                }
                for group in fleet.groups
            ],
            "engines": [
                {
                    "name": engine.name,
                    "group": engine.group.name,
                    "role": engine.group.spec.role,
                    "node": surroundings.nodes.get(engine.record.pod, ""),
                    **engine.record.dump(),
                }
                for engine in fleet.engines
            ],
        },
        indent=2,
    )
