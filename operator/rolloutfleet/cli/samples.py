"""`samples NAME`: what the trainer of a fleet is fed, as the agent beside it sees it."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys

from pydantic import ValidationError

from rolloutfleet.api.names import (
    AGENT_CONTAINER,
    AGENT_PORT,
    ANNOTATION_ROLLOUT_SERVERS,
    COMPONENT_TRAINER,
    LABEL_COMPONENT,
    trainer_name,
)
from rolloutfleet.api.samples_view import SamplesView
from rolloutfleet.cli import in_pod
from rolloutfleet.cli.fleet import read_fleet
from rolloutfleet.cli.in_pod import agent
from rolloutfleet.cli.samples_text import as_text
from rolloutfleet.cli.session import Refused, Session, Verbs, add_verb
from rolloutfleet.kube.client import LEASE, POD, Forbidden, NotFound
from rolloutfleet.kube.exec import run_in_pod
from rolloutfleet.plan.injection import InjectionError, parse_rollout_servers

EXEC_SECONDS = 30.0
WATCH_SECONDS = 2.0
CLEAR = "\x1b[H\x1b[2J"


def add_to(verbs: Verbs) -> None:
    parser = add_verb(verbs, "samples", run, summary="show rewards, throughput and the last samples of a fleet")
    parser.add_argument("--pod", help="a trainer's pod; default: the one that leads, or the only one")
    parser.add_argument("--role", help="in the pod's annotation; default: the first one with this RolloutServer")
    parser.add_argument("--last", type=int, default=3, help="how many samples; default: 3")
    parser.add_argument("--watch", action="store_true", help="again every 2 seconds, until Ctrl-C")
    parser.add_argument("-o", "--output", choices=["json"], help="for programs")


async def run(session: Session, options: argparse.Namespace) -> int:
    if options.last < 0:
        raise Refused(f"--last {options.last}: must be 0 or more")
    pod, role = await find_agent(session, options.name, pod=options.pod, role=options.role)
    while True:
        text = await ask(session, pod, f"/v1/servers/{role}/samples.json?limit={options.last}")
        print((CLEAR if options.watch else "") + _shown(text, session, pod, options), flush=True)
        if not options.watch:
            return 0
        await asyncio.sleep(WATCH_SECONDS)


def _shown(text: str, session: Session, pod: str, options: argparse.Namespace) -> str:
    if options.output == "json":
        return text
    try:
        view = SamplesView.model_validate_json(text)
    except ValidationError as error:
        raise Refused(f"{pod}: not what an agent of this version answers: {error}") from error
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    page = f"http://localhost:{AGENT_PORT}/v1/servers/{view.role}/samples.html"
    return (
        f"{session.namespace}/{view.server}, role {view.role}, beside {pod}\n\n"
        f"{as_text(view, width=shutil.get_terminal_size().columns, colour=colour)}\n\n"
        f"page: kubectl port-forward -n {session.namespace} pod/{pod} {AGENT_PORT}, then {page}"
    )


async def ask(session: Session, pod: str, path: str) -> str:
    """The agent's answer. Raises Refused, ApiError."""
    ended = await run_in_pod(
        session.api.credentials,
        namespace=session.namespace,
        pod=pod,
        container=AGENT_CONTAINER,
        command=in_pod.command(agent, path),
        seconds=EXEC_SECONDS,
    )
    if ended.exit_code:
        said = (ended.stderr or ended.stdout).strip() or f"exit code {ended.exit_code}"
        raise Refused(f"{pod}: {said}")
    return ended.stdout


async def find_agent(session: Session, server: str, *, pod: str | None, role: str | None) -> tuple[str, str]:
    """(pod, role) of a trainer that names the server. Raises Refused."""
    name = (await read_fleet(session, server)).server.name
    labels = f"{LABEL_COMPONENT}={COMPONENT_TRAINER}"
    trainers: dict[str, list[str]] = {}
    for found in (await session.api.list(POD, namespace=session.namespace, label_selector=labels)).items:
        annotation = (found["metadata"].get("annotations") or {}).get(ANNOTATION_ROLLOUT_SERVERS, "")
        try:
            roles = [known for known, meant in parse_rollout_servers(annotation).items() if meant == name]
        except InjectionError:
            continue
        if roles and (found.get("status") or {}).get("phase") == "Running":
            trainers[found["metadata"]["name"]] = roles
    chosen = pod or await _leader(session, name, among=trainers)
    if chosen not in trainers:
        there = ", ".join(sorted(trainers)) or "none"
        problem = f"--pod {pod}: no trainer of {name} that runs" if pod else f"{name}: it is not clear which trainer"
        raise Refused(f"{problem}; --pod may be: {there}")
    roles = trainers[chosen]
    if role is not None and role not in roles:
        raise Refused(f"--role {role}: pod {chosen} has {', '.join(roles)} for {name}")
    return chosen, role or roles[0]


async def _leader(session: Session, server: str, *, among: dict[str, list[str]]) -> str:
    """The one that leads, or the only one; empty where neither can be told."""
    try:
        lease = await session.api.get(LEASE, trainer_name(server), namespace=session.namespace)
        holder = str((lease.get("spec") or {}).get("holderIdentity") or "")
    except (Forbidden, NotFound):
        holder = ""
    return holder if holder in among else next(iter(among)) if len(among) == 1 else ""
