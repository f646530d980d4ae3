"""Faults in engines of test fleets: for `inject-fault`, and for our own tests.

Each function does one thing to one pod and says in a few words what it did. Raises Refused and ApiError.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from rolloutfleet.api.names import ANNOTATION_TEST_FLEET, ENGINE_CONTAINER, ENGINE_PORT, engine_pod_name
from rolloutfleet.cli import in_pod
from rolloutfleet.cli.fleet import Engine, Fleet, read_fleet
from rolloutfleet.cli.in_pod import memory, network, signals
from rolloutfleet.cli.restart import refuse_others
from rolloutfleet.cli.session import Refused, Session
from rolloutfleet.kube.client import POD, ApiError, Forbidden, NotFound, Object
from rolloutfleet.kube.exec import run_in_pod

EXEC_SECONDS = 30.0
FILL_SECONDS = 300.0
LOAD_SECONDS = 600.0
END_SECONDS = 30.0
START_SECONDS = 60.0
POLL_SECONDS = 0.2
KILLED = 137


@dataclass(frozen=True)
class Target:
    """One pod of one engine, as it was when it was chosen."""

    engine: Engine
    rank: int
    pod: Object

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def container(self) -> Object:
        containers: list[Object] = self.pod["spec"]["containers"]
        return next(container for container in containers if container["name"] == ENGINE_CONTAINER)


async def find_target(session: Session, server: str, engine: str, *, rank: int = 0) -> Target:
    """A pod that runs, of a fleet that is marked as one for tests."""
    fleet = await read_fleet(session, server)
    refuse_real_fleet(fleet)
    chosen = fleet.find(engine)
    refuse_others(chosen)
    name = engine_pod_name(chosen.group.name, chosen.record.index, chosen.record.epoch, rank)
    nodes = chosen.group.spec.own_engine.nodes
    if not 0 <= rank < nodes:
        raise Refused(f"--rank {rank}: {chosen.name} has ranks 0 to {nodes - 1}")
    try:
        pod = await session.api.get(POD, name, namespace=session.namespace)
    except NotFound as error:
        raise Refused(f"{chosen.life} is {chosen.record.phase} and has no pod {name}") from error
    if not _runs(pod):
        raise Refused(f"pod {name}: its container does not run")
    return Target(engine=chosen, rank=rank, pod=pod)


def refuse_real_fleet(fleet: Fleet) -> None:
    server = fleet.server
    if (server.metadata.get("annotations") or {}).get(ANNOTATION_TEST_FLEET) != "true":
        mark = f"kubectl annotate -n {server.namespace} rolloutserver {server.name} {ANNOTATION_TEST_FLEET}=true"
        raise Refused(f"{server.name} is not marked as a test fleet. If it may be broken: {mark}")


async def kill(session: Session, target: Target) -> str:
    """SIGKILL to every process of the engine's container."""
    return await _in_container(session, target, signals, "SIGKILL", lethal=True)


async def hang(session: Session, target: Target, *, seconds: float | None = None) -> str:
    """SIGSTOP, and SIGCONT after `seconds`, whether we are still there or not."""
    if seconds is None:
        return await _in_container(session, target, signals, "SIGSTOP")
    return await _in_container(session, target, signals, "SIGSTOP", str(seconds)) + f", SIGCONT in {seconds:g} s"


async def wake(session: Session, target: Target) -> str:
    """SIGCONT: the end of a hang."""
    return await _in_container(session, target, signals, "SIGCONT")


async def fill_memory(session: Session, target: Target) -> str:
    """Up to the container's limit, where the kernel kills."""
    limits = [(spec.get("resources") or {}).get("limits") or {} for spec in (target.container, target.pod["spec"])]
    if not any("memory" in limit for limit in limits):
        raise Refused(f"{target.name}: its container has no memory limit, so that its node would run out of memory")
    await _in_container(session, target, memory, seconds=FILL_SECONDS, lethal=True)
    return "its memory was filled, and its container is killed"


async def cut_network(session: Session, target: Target, *, seconds: float | None = None) -> str:
    """Drop what the pod sends, from an ephemeral container of the engine's image that may change the network."""
    if target.pod["spec"].get("hostNetwork"):
        raise Refused(f"{target.name}: it uses its node's network, and the node would be cut off")
    name = await _add_network_cutter(session, target, seconds)
    await _await_network_cutter(session, target, name)
    until = "until the pod is gone" if seconds is None else f"for {seconds:g} s"
    return f"its network is cut {until}"


async def load_wrong_weights(session: Session, target: Target, *, path: str) -> str:
    """A checkpoint that the engine sees at `path`, under the label that it has."""
    if target.engine.group.spec.role == "Encoder" or target.rank:
        raise Refused(f"{target.name}: an encoder, or a rank above 0, loads no weights by itself")

    async def ask(path: str, body: Object | None = None) -> Object:
        return await session.api.ask_pod(
            target.name, ENGINE_PORT, path, namespace=session.namespace, body=body, seconds=LOAD_SECONDS
        )

    label = str((await ask("/model_info"))["weight_version"])
    # Requests that run keep their cache: SGLang refuses to flush it under them, after it has loaded the weights.
    loaded = await ask("/update_weights_from_disk", {"model_path": path, "weight_version": label, "flush_cache": False})
    if not loaded.get("success"):
        raise Refused(f"{target.name}: {path} not loaded: {loaded.get('message')}")
    return f"it has loaded {path}, still labelled {label}"


async def _in_container(
    session: Session,
    target: Target,
    script: ModuleType,
    *arguments: str,
    seconds: float = EXEC_SECONDS,
    lethal: bool = False,
) -> str:
    """Its last line. `lethal`: the container is meant to end by it, and with it what we wait for."""
    try:
        ended = await run_in_pod(
            session.api.credentials,
            namespace=session.namespace,
            pod=target.name,
            container=ENGINE_CONTAINER,
            command=in_pod.command(script, *arguments),
            seconds=seconds,
        )
    except (Forbidden, NotFound):
        raise
    except ApiError:
        if lethal and await _ends(session, target):
            return "its container has ended"
        raise
    if ended.exit_code and not (lethal and ended.exit_code == KILLED):
        said = (ended.stderr or ended.stdout).strip().splitlines()
        raise Refused(f"{target.name}: {said[-1] if said else f'exit code {ended.exit_code}'}")
    said = ended.stdout.strip().splitlines()
    return said[-1] if said else ""


async def _ends(session: Session, target: Target) -> bool:
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline:
        try:
            pod = await session.api.get(POD, target.name, namespace=session.namespace)
        except NotFound:
            return True
        if not _runs(pod):
            return True
        await asyncio.sleep(POLL_SECONDS)
    return False


def _runs(pod: Object) -> bool:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    return any(status["name"] == ENGINE_CONTAINER and "running" in (status.get("state") or {}) for status in statuses)


async def _add_network_cutter(session: Session, target: Target, seconds: float | None) -> str:
    pod = await session.api.get(POD, target.name, namespace=session.namespace)
    there: list[Object] = pod["spec"].get("ephemeralContainers") or []
    name = f"cut-network-{len(there) + 1}"
    cutter: dict[str, Any] = {
        "name": name,
        "image": target.container["image"],
        "imagePullPolicy": "IfNotPresent",
        "command": in_pod.command(network, *([] if seconds is None else [str(math.ceil(seconds))])),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "runAsUser": 0,  # for others the capability would have no effect
            "runAsNonRoot": False,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN"]},
        },
    }
    body = {
        "metadata": {"resourceVersion": pod["metadata"]["resourceVersion"], "uid": target.pod["metadata"]["uid"]},
        "spec": {"ephemeralContainers": [*there, cutter]},
    }
    await session.api.patch(POD, target.name, body, namespace=session.namespace, subresource="ephemeralcontainers")
    return name


async def _await_network_cutter(session: Session, target: Target, name: str) -> None:
    """Until it runs or has done its work."""
    deadline = time.monotonic() + START_SECONDS
    running = 0
    state: Object = {}
    while time.monotonic() < deadline:
        pod = await session.api.get(POD, target.name, namespace=session.namespace)
        statuses = pod.get("status", {}).get("ephemeralContainerStatuses") or []
        state = next((status.get("state") or {} for status in statuses if status["name"] == name), {})
        ended = state.get("terminated")
        if ended is not None:
            if ended.get("exitCode") == 0:
                return
            raise Refused(f"{target.name}: network not cut: {str(ended.get('message') or ended.get('reason')).strip()}")
        running += "running" in state
        if running > 2:  # Python has started by then, or has said why not
            return
        await asyncio.sleep(POLL_SECONDS)
    raise Refused(f"{target.name}: container {name} does not start: {state.get('waiting') or 'no status'}")
