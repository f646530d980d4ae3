"""`make bench-recovery`: how long a fleet of real engines takes from a fault to each step of its recovery.

On the local two-node cluster, under generation load. The last line of the output is one JSON object. For each fault,
{p50, p99, n} in seconds of:

- `fault_to_router_removal_s`: the router lists the dead engine no more
- `fault_to_unroutable_s`: nor sends anything to it: not listed, or listed as unhealthy
- `fault_to_replacement_created_s`: the pod of its next life exists, by a watch
- `loaded_to_routable_s`: from the first 200 of the new engine's /ping until the router lists it as healthy
- `fault_to_exit_s`, of `kill`: until the kernel has ended the processes and closed what they had open; nobody outside
  can know earlier

Beside them `operator_kill_to_react_s` (kill -9 of the leading operator and, at once, an engine's pod deleted: until its
replacement exists), `duplicate_recreations` (pods of engines beyond one for each engine that a fault ended),
`requests_failed_at_client` (samples that the trainer was told had failed, calls that raised), and the load average.

p99 of a few rounds is their maximum; `--rounds 100` gives it its name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path
from typing import Any

from e2e.conftest import find_kubectl, install_operator
from e2e.faults import ENGINE_PROCESS, OPERATOR_PROCESS, STAND_IN_PROCESS, cut_off, exits, send
from e2e.fleets import engine_group, engines, rollout_server, router_pods, stand_in, stand_in_code, trainer_pod
from e2e.support import Kubectl, eventually, remove_namespace
from e2e.watching import Life, PodWatch, RouterPoll, first_ping

SERVER, GROUP = "bench", "bench-main"
SYSTEM = "rolloutfleet-system"
CONTROL_PLANE, OTHER = "node0", "node1"
FAULTS = ("kill", "delete", "hang", "node", "operator")
ROUNDS = 3
RECOVERY = {
    "backoff": {"initialSeconds": 1, "maxSeconds": 4, "resetAfterSeconds": 1},
    "healthCheck": {"periodSeconds": 2, "timeoutSeconds": 3, "failureThreshold": 2},
}
RECOVERED_SECONDS = 240.0
NOTICED_SECONDS = 120.0
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:4.0f}s] {text}", file=sys.stderr, flush=True)


@dataclass
class Figures:
    """Seconds of each round of one fault; None where something was not seen in time."""

    removal: list[float | None] = field(default_factory=list)
    unroutable: list[float | None] = field(default_factory=list)
    created: list[float | None] = field(default_factory=list)
    routable: list[float | None] = field(default_factory=list)
    exited: list[float | None] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return {
            "fault_to_router_removal_s": spread(self.removal),
            "fault_to_unroutable_s": spread(self.unroutable),
            "fault_to_replacement_created_s": spread(self.created),
            "loaded_to_routable_s": spread(self.routable),
            **({"fault_to_exit_s": spread(self.exited)} if self.exited else {}),
        }


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Nearest rank. What was not seen in time is counted as `missed` and belongs to no quantile."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return {"p50": None, "p99": None, "n": 0, "missed": len(values)}

    def rank(share: float) -> float:
        return round(known[max(math.ceil(share * len(known)) - 1, 0)], 3)

    missed = len(values) - len(known)
    return {"p50": rank(0.5), "p99": rank(0.99), "n": len(known), **({"missed": missed} if missed else {})}


class Bench:
    def __init__(self, kubectl: Kubectl, pods: PodWatch, router: RouterPoll, replicas: int, part: bytes) -> None:
        """`part`: of the command line of an engine's processes."""
        self._kubectl = kubectl
        self._pods = pods
        self._router = router
        self._replicas = replicas
        self._part = part
        self._turn = 0
        self._killed: list[int] = []
        self.ended = 0
        """Engines that a fault has ended, or that were moved by us: so many pods may have been made anew."""
        self.figures: dict[str, Figures] = {}
        self.reactions: list[float | None] = []

    def settled(self) -> list[Life]:
        """The pods of all engines, once all serve; in the order of their indexes."""

        def serving() -> list[Life]:
            records = engines(self._kubectl, GROUP)
            uids = [record.get("podUid", "") for record in records if record["phase"] == "Serving"]
            lives = {life.uid: life for life in self._pods.seen()}
            return [lives[uid] for uid in uids if uid in lives and not lives[uid].ending]

        return eventually(
            serving, RECOVERED_SECONDS, "all engines serve", accept=lambda found: len(found) == self._replicas
        )

    def round(self, fault: str) -> None:
        lives = self.settled()
        time.sleep(2.0)  # longer than backoff.resetAfterSeconds, so that no round pays for the one before
        if fault == "operator":
            self._operator(lives)
            return
        victims = self._victims(fault, lives)
        self.ended += len(victims)
        figures = self.figures.setdefault(fault, Figures())
        with contextlib.ExitStack() as undo:
            begun = self._break(fault, victims, undo)
            if fault == "kill":
                figures.exited.append(self._exited(begun))
            with ThreadPoolExecutor() as pool:
                fresh = list(pool.map(lambda victim: self._follow(victim, begun, figures), victims))
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda life: self._until_routable(life, figures), filter(None, fresh)))
        latest = {name: values[-1] for name, values in vars(figures).items() if values}
        say(f"{fault} of {', '.join(life.name for life in victims)}: {latest}")

    def _victims(self, fault: str, lives: Sequence[Life]) -> list[Life]:
        if fault == "node":
            if not any(life.node == OTHER for life in lives):
                lives = self._move(lives[0])
            return [life for life in lives if life.node == OTHER]
        self._turn += 1
        return [lives[self._turn % len(lives)]]

    def _move(self, life: Life) -> list[Life]:
        """Have an engine on the node that can be cut off."""
        say(f"moving {life.name} to {OTHER}")
        self._kubectl("cordon", CONTROL_PLANE)
        try:
            self.ended += 1
            self._pods.delete(life.name, grace_seconds=1)
            self._replacement(life, time.monotonic())
            return self.settled()
        finally:
            self._kubectl("uncordon", CONTROL_PLANE)

    def _break(self, fault: str, victims: Sequence[Life], undo: contextlib.ExitStack) -> float:
        """The moment right after the fault was there."""
        if fault == "kill":
            self._killed = send(victims[0].uid, signal.SIGKILL, part=self._part)
        elif fault == "hang":
            send(victims[0].uid, signal.SIGSTOP, part=self._part)
        elif fault == "delete":
            self._pods.delete(victims[0].name)
        elif fault == "node":
            undo.enter_context(cut_off(OTHER))
        return time.monotonic()

    def _exited(self, begun: float) -> float | None:
        """How long the kernel takes to end processes of a gigabyte: until then their sockets are open."""
        moment = exits(self._killed, seconds=NOTICED_SECONDS)
        return moment - begun if moment is not None else None

    def _replacement(self, victim: Life, begun: float) -> Life | None:
        return self._pods.wait(
            lambda life: life.index == victim.index and life.epoch > victim.epoch, seconds=NOTICED_SECONDS
        )

    def _follow(self, victim: Life, begun: float, figures: Figures) -> Life | None:
        fresh = self._replacement(victim, begun)
        removed = self._router.since(begun, lambda workers: victim.url not in workers, seconds=NOTICED_SECONDS)
        unroutable = self._router.since(begun, lambda workers: not workers.get(victim.url), seconds=NOTICED_SECONDS)
        figures.created.append(fresh.created - begun if fresh is not None else None)
        figures.removal.append(removed - begun if removed is not None else None)
        figures.unroutable.append(unroutable - begun if unroutable is not None else None)
        return fresh

    def _until_routable(self, life: Life, figures: Figures) -> None:
        begun = time.monotonic()
        placed = self._pods.wait(lambda other: other.uid == life.uid and bool(other.url), seconds=NOTICED_SECONDS)
        loaded = first_ping(life.url, seconds=RECOVERED_SECONDS) if placed is not None else None
        listed = self._router.since(begun, lambda workers: workers.get(life.url, False), seconds=RECOVERED_SECONDS)
        figures.routable.append(listed - loaded if listed is not None and loaded is not None else None)

    def _operator(self, lives: Sequence[Life]) -> None:
        self._turn += 1
        victim = lives[self._turn % len(lives)]
        self.ended += 1
        # Both replicas are up: after the last round the kubelet lets the killed one wait.
        self._kubectl.within(SYSTEM)("rollout", "status", "deploy/rolloutfleet-operator", "--timeout=120s")
        leader = eventually(lambda: leading_operator(self._kubectl), 30, "an operator leads")
        send(leader["metadata"]["uid"], signal.SIGKILL, part=OPERATOR_PROCESS)
        begun = time.monotonic()
        self._pods.delete(victim.name)
        fresh = self._replacement(victim, begun)
        self.reactions.append(fresh.created - begun if fresh is not None else None)
        say(f"operator killed: reacted after {self.reactions[-1]} s")

    def recreations(self) -> int:
        """Pods made beyond the first ones and one for each engine that a fault has ended."""
        return len(self._pods.seen()) - self._replicas - self.ended


def server(replicas: int, stand_ins: bool) -> dict[str, Any]:
    group = engine_group(replicas=replicas)
    if stand_ins:
        group = stand_in("main", "Regular", replicas)
    group["recovery"] = RECOVERY
    group["template"]["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"rolloutfleet.dev/component": "engine"}},
        }
    ]
    return rollout_server(SERVER, groups=[group], service_accounts=("trainer",))


def loaded_trainer() -> dict[str, Any]:
    pod = trainer_pod("trainer", f"actor={SERVER}")
    (container,) = pod["spec"]["containers"]
    container["command"] = ["python3", "-u", "-c", Path(__file__).with_name("load.py").read_text()]
    pod["spec"]["nodeName"] = CONTROL_PLANE
    return pod


@contextlib.contextmanager
def fleet(kubectl: Kubectl, replicas: int, stand_ins: bool) -> Iterator[Kubectl]:
    """A namespace with the fleet, its router and trainer on the node that is never cut off."""
    name = f"bench-recovery-{uuid.uuid4().hex[:6]}"
    kubectl("create", "namespace", name)
    inside = kubectl.within(name)
    try:
        inside("create", "serviceaccount", "trainer")
        if stand_ins:
            stand_in_code(inside)
        kubectl("cordon", OTHER)
        try:
            inside.apply(server(0, stand_ins), loaded_trainer())
            eventually(lambda: router_address(inside), 60, "the router has an address")
            await_leader_beside_the_control_plane(kubectl)
        finally:
            kubectl("uncordon", OTHER)
        inside.apply(server(replicas, stand_ins))
        yield inside
    finally:
        remove_namespace(kubectl, name)


def await_leader_beside_the_control_plane(kubectl: Kubectl) -> None:
    """A leading operator on the node that is cut off would measure its own absence: that is `operator`'s part."""
    system = kubectl.within(SYSTEM)

    def at_home() -> bool:
        pod = leading_operator(kubectl)
        if pod["spec"]["nodeName"] != OTHER:
            return True
        system("delete", "pod", pod["metadata"]["name"], "--wait=false")
        return False

    eventually(at_home, 60, f"the leading operator is not on {OTHER}")


def leading_operator(kubectl: Kubectl) -> dict[str, Any]:
    """Its pod, which holds the Lease."""
    system = kubectl.within(SYSTEM)
    holder = str(system.json("get", "lease", "rolloutfleet-operator")["spec"].get("holderIdentity"))
    listed = system.json("get", "pods", "--selector=app.kubernetes.io/name=rolloutfleet-operator")["items"]
    pods = [pod for pod in listed if not pod["metadata"].get("deletionTimestamp")]
    leading = [pod for pod in pods if holder == pod["metadata"]["name"]]
    assert leading, f"the Lease is held by {holder!r}, the operator's pods are {[p['metadata']['name'] for p in pods]}"
    return dict(leading[0])


def router_address(kubectl: Kubectl) -> str:
    """Empty until it has one."""
    (pod,) = router_pods(kubectl, SERVER) or ("",)
    return str(kubectl.json("get", "pod", pod)["status"].get("podIP", "")) if pod else ""


def client_figures(kubectl: Kubectl) -> dict[str, Any]:
    lines = kubectl("logs", "trainer", "--container=trainer", timeout=60).splitlines()
    calls = [json.loads(line) for line in lines if line.startswith("{")]
    calls = list(dropwhile(lambda call: "error" in call, calls))  # until the fleet was there
    raised = [call["error"] for call in calls if "error" in call]
    statuses = [status for call in calls for status in call.get("statuses", [])]
    failed = [status for status in statuses if status not in ("completed", "truncated")]
    for call in calls:
        if call.get("errors") or call.get("error") in raised:
            say(f"client: {call}")
    return {
        "requests_failed_at_client": len(failed) + len(raised),
        "samples": len(statuses),
        "attempts_of_a_sample_at_most": max((call.get("attempts", 0) for call in calls), default=0),
        "longest_call_s": max((call["seconds"] for call in calls), default=0.0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-recovery", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of each fault (default: {ROUNDS})")
    parser.add_argument("--only", choices=FAULTS, action="append", help="this fault alone; may be repeated")
    parser.add_argument("--engines", type=int, default=2, help="engines of the fleet (default: 2)")
    parser.add_argument("--stand-ins", action="store_true", help="stand-ins for engines: for many rounds, no result")
    options = parser.parse_args()
    faults: Sequence[str] = options.only or FAULTS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))

    kubectl = Kubectl(binary=find_kubectl(), kubeconfig=kubeconfig())
    install_operator(kubectl)
    with fleet(kubectl, options.engines, options.stand_ins) as inside, contextlib.ExitStack() as watches:
        pods = watches.enter_context(PodWatch(str(inside.namespace)))
        router = watches.enter_context(RouterPoll(f"http://{router_address(inside)}:30000"))
        bench = Bench(inside, pods, router, options.engines, STAND_IN_PROCESS if options.stand_ins else ENGINE_PROCESS)
        bench.settled()
        say(f"{options.engines} engines serve; thresholds: {json.dumps(RECOVERY)}")
        try:
            for fault in faults:
                for _ in range(options.rounds):
                    bench.round(fault)
            bench.settled()
        finally:  # a run that is cut short says what it has
            print(json.dumps(outcome(bench, inside, options)), flush=True)
    return 0


def outcome(bench: Bench, kubectl: Kubectl, options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {fault: figures.summary() for fault, figures in bench.figures.items()}
    if bench.reactions:
        result["operator_kill_to_react_s"] = spread(bench.reactions)
    result |= {"duplicate_recreations": bench.recreations(), **client_figures(kubectl)}
    load = round(os.getloadavg()[1], 1)
    return result | {"engines": options.engines, "stand_ins": options.stand_ins, "recovery": RECOVERY, "load": load}


def kubeconfig() -> Path:
    value = os.environ.get("KUBECONFIG", "")
    if not value:
        sys.exit("KUBECONFIG is not set: `make up`, then KUBECONFIG=/var/lib/rolloutfleet-cluster/admin.kubeconfig")
    return Path(value)


if __name__ == "__main__":
    sys.exit(main())
