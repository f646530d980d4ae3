"""The faults of a chaos run: each picks its target by chance, and tells which engines it may have ended."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from e2e.faults import ENGINE_PROCESS, OPERATOR_PROCESS, STAND_IN_PROCESS, NotFound, cut_off, send
from e2e.fleets import router_pods
from e2e.support import Kubectl, KubectlError
from e2e.watching import Life, PodWatch

SYSTEM = "rolloutfleet-system"
OPERATOR = "--selector=app.kubernetes.io/name=rolloutfleet-operator"
NODE = "node1"
"""The one that can be cut off: the control plane runs on the other."""
AGENT_PROCESS = b"rolloutfleet.agent"
KUBELET_PATIENCE_SECONDS = 60.0
"""Between two kills of a container that its kubelet starts anew: it waits longer after each."""


@dataclass
class World:
    """What faults are done to."""

    kubectl: Kubectl
    server: str
    pods: PodWatch
    random: Random
    stand_ins: bool
    broken: dict[str, list[str]] = field(default_factory=dict)
    """Faults that may have ended an engine, by UID of its pod."""
    last_kill: dict[str, float] = field(default_factory=dict)

    def alive(self) -> list[Life]:
        return [life for life in self.pods.seen() if not life.ending]

    def engine(self) -> Life:
        lives = self.alive()
        if not lives:
            raise NotFound("no engine is alive")
        return self.random.choice(lives)

    def mark(self, life: Life, fault: str) -> None:
        self.broken.setdefault(life.uid, []).append(fault)

    @property
    def part(self) -> bytes:
        return STAND_IN_PROCESS if self.stand_ins else ENGINE_PROCESS

    def patient(self, what: str) -> None:
        now = time.monotonic()
        if now - self.last_kill.get(what, -KUBELET_PATIENCE_SECONDS) < KUBELET_PATIENCE_SECONDS:
            raise NotFound(f"{what} was killed a moment ago")
        self.last_kill[what] = now


def kill(world: World) -> str:
    life = world.engine()
    world.mark(life, "kill")
    send(life.uid, signal.SIGKILL, part=world.part)
    return life.name


def stop(world: World) -> str:
    """SIGSTOP, for a moment or for long enough to be taken for dead."""
    life, seconds = world.engine(), world.random.choice([1.0, 3.0, 15.0])
    if seconds > 1:
        world.mark(life, "stop")
    send(life.uid, signal.SIGSTOP, part=world.part)
    try:
        time.sleep(seconds)
    finally:
        with contextlib.suppress(NotFound):
            send(life.uid, signal.SIGCONT, part=world.part)
    return f"{life.name} for {seconds:g} s"


def delete(world: World) -> str:
    life = world.engine()
    world.mark(life, "delete")
    world.pods.delete(life.name)
    return life.name


def delete_force(world: World) -> str:
    life = world.engine()
    world.mark(life, "delete_force")
    world.pods.delete(life.name, grace_seconds=0)
    return life.name


def evict(world: World) -> str:
    life = world.engine()
    world.mark(life, "evict")
    if world.pods.evict(life.name):
        return life.name
    return f"nothing: the budget forbids to evict {life.name}"


def router(world: World) -> str:
    pod = world.random.choice(router_pods(world.kubectl, world.server))
    force = ["--grace-period=0", "--force"] if world.random.random() < 0.5 else []
    world.kubectl("delete", "pod", pod, "--wait=false", *force)
    return pod


def operator_delete(world: World) -> str:
    pods = world.kubectl.within(SYSTEM)("get", "pods", OPERATOR, "--output=name").split()
    pod = world.random.choice(pods)
    world.kubectl.within(SYSTEM)("delete", pod, "--grace-period=0", "--force", "--wait=false")
    return pod


def operator_kill(world: World) -> str:
    world.patient("operator")
    listed = world.kubectl.within(SYSTEM).json("get", "pods", OPERATOR)["items"]
    pod = world.random.choice(listed)["metadata"]
    send(pod["uid"], signal.SIGKILL, part=OPERATOR_PROCESS)
    return str(pod["name"])


def agent_kill(world: World) -> str:
    """The kubelet starts the container anew; the trainer's code goes on."""
    world.patient("agent")
    uid = world.kubectl.json("get", "pod", "trainer")["metadata"]["uid"]
    send(uid, signal.SIGKILL, part=AGENT_PROCESS)
    return "trainer"


def node(world: World) -> str:
    """A node without its network: for a moment, or for longer than Kubernetes waits (15 s in this cluster)."""
    seconds = world.random.choice([3.0, 8.0, 30.0, 90.0])
    with cut_off(NODE):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for life in world.alive():
                if life.node == NODE:
                    world.mark(life, "node")
            time.sleep(0.2)
    for life in world.alive():
        if life.node == NODE:
            world.mark(life, "node")
    return f"{NODE} for {seconds:g} s"


FAULTS: dict[str, tuple[Callable[[World], str], int]] = {
    "kill": (kill, 4),
    "stop": (stop, 3),
    "delete": (delete, 3),
    "delete_force": (delete_force, 2),
    "evict": (evict, 2),
    "router": (router, 2),
    "operator_delete": (operator_delete, 2),
    "operator_kill": (operator_kill, 1),
    "agent_kill": (agent_kill, 1),
    "node": (node, 1),
}
"""And how often each comes, relative to the others."""


def inject(world: World, only: Sequence[str] = ()) -> tuple[str, str]:
    """One fault by chance: (its name, what was hit). What could not be hit now says so."""
    names = list(only) or list(FAULTS)
    (name,) = world.random.choices(names, weights=[FAULTS[name][1] for name in names])
    try:
        return name, FAULTS[name][0](world)
    except (NotFound, IndexError) as error:
        return name, f"nothing: {error}"
    except KubectlError as error:
        return name, f"nothing: {error.stderr.strip()[:200]}"
