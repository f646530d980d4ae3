"""The operator's leader dies at the moment at which an engine does: the standby takes over, and repeats nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from e2e.fleets import ENGINE_IMAGE, await_routable, engines, rollout_server, router_pods, stand_in, stand_in_code
from e2e.support import Kubectl, eventually

SERVER = "ha"
GROUP = f"{SERVER}-main"
LABEL = "app.kubernetes.io/name=rolloutfleet-operator"
LEASE_SECONDS = 15.0
"""The longest lease: the operator asks for it where the API server answers late, as a machine under tests may."""

KILL = """
import os, pathlib, signal
killed = []
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        words, groups = (process / "cmdline").read_text(), (process / "cgroup").read_text().replace("_", "-")
    except OSError:
        continue
    if "rolloutfleet.control" in words and "{uid}" in groups:
        os.kill(int(process.name), signal.SIGKILL)
        killed.append(words)
assert len(killed) == 1, killed
"""
"""The operator's process in the pod of that UID."""


@pytest.fixture
def system(kubectl: Kubectl, operator: None) -> Iterator[Kubectl]:
    """The operator's namespace, with both replicas up before and after the test."""
    inside = kubectl.within("rolloutfleet-system")
    await_replicas(inside)
    yield inside
    await_replicas(inside)


@pytest.fixture
def space(kubectl: Kubectl, system: Kubectl, namespace: str) -> Kubectl:
    """A fleet of two stand-ins."""
    inside = kubectl.within(namespace)
    stand_in_code(inside)
    inside.apply(rollout_server(SERVER, groups=[stand_in("main", "Regular", 2)]))
    await_routable(inside, SERVER, 2, seconds=120)
    return inside


def await_replicas(system: Kubectl) -> None:
    system("rollout", "status", "deploy/rolloutfleet-operator", "--timeout=120s")
    eventually(lambda: leader(system) in replicas(system), 60, "one of the replicas leads")


def replicas(system: Kubectl) -> set[str]:
    pods = system.json("get", "pods", f"--selector={LABEL}")["items"]
    return {pod["metadata"]["name"] for pod in pods if not pod["metadata"].get("deletionTimestamp")}


def leader(system: Kubectl) -> str:
    return str(lease(system).get("holderIdentity") or "")


def lease(system: Kubectl) -> dict[str, Any]:
    return dict(system.json("get", "lease", "rolloutfleet-operator")["spec"])


def delete(system: Kubectl, space: Kubectl) -> Callable[[], None]:
    """The pod of the leader, without grace."""
    pod = leader(system)
    return lambda: print(system("delete", "pod", pod, "--grace-period=0", "--force"))


def kill(system: Kubectl, space: Kubectl) -> Callable[[], None]:
    """The process of the leader, from outside: within a container nothing kills its first process."""
    pod = system.json("get", "pod", leader(system))
    space.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "killer"},
            "spec": {
                "nodeName": pod["spec"]["nodeName"],
                "hostPID": True,
                "terminationGracePeriodSeconds": 0,
                "containers": [
                    {
                        "name": "killer",
                        "image": ENGINE_IMAGE,
                        "command": ["sleep", "infinity"],
                        "securityContext": {"runAsUser": 0},
                    }
                ],
            },
        }
    )
    space("wait", "pod/killer", "--for=condition=Ready", "--timeout=60s")
    code = KILL.format(uid=pod["metadata"]["uid"])
    return lambda: print(space("exec", "killer", "--", "python3", "-S", "-c", code))


@pytest.mark.parametrize("end_leader", [delete, kill])
def test_an_engine_that_dies_with_the_leader_is_replaced_once(
    end_leader: Callable[[Kubectl, Kubectl], Callable[[], None]], system: Kubectl, space: Kubectl
) -> None:
    before, terms = engines(space, GROUP), lease(system)["leaseTransitions"]
    victim, other = before
    end = end_leader(system, space)
    end()
    space("delete", "pod", victim["pod"], "--grace-period=0", "--force")

    replacement = f"{GROUP}-0-e3-r0"
    eventually(
        lambda: pods_of_engines(space),
        LEASE_SECONDS + 30,
        "the engine has its replacement",
        accept=lambda pods: pods == {replacement, other["pod"]},
    )
    # A deleted leader may live long enough to make the replacement itself: its pod is gone before its process.
    eventually(lambda: lease(system)["leaseTransitions"] > terms, LEASE_SECONDS + 30, "another one leads")
    await_routable(space, SERVER, 2, seconds=60)
    await_replicas(system)  # the dead replica is back, and would be the second to replace the engine
    after = engines(space, GROUP)
    assert [engine["pod"] for engine in after] == [replacement, other["pod"]]
    assert [engine["restarts"] for engine in after] == [1, 0]
    assert space.json("get", "sgrp", GROUP)["status"]["lastEpoch"] == 3
    assert created_pods(space) == {victim["pod"], other["pod"], replacement}


def test_a_rolling_update_of_the_operator_touches_no_engine_and_no_gate(system: Kubectl, space: Kubectl) -> None:
    before, terms, gates = replicas(system), lease(system)["leaseTransitions"], gates_of(space)
    system("rollout", "restart", "deploy/rolloutfleet-operator")
    await_replicas(system)
    eventually(lambda: replicas(system).isdisjoint(before), 60, "both replicas are new")
    await_replicas(system)
    assert lease(system)["leaseTransitions"] > terms
    await_routable(space, SERVER, 2, seconds=60)
    assert gates_of(space) == gates, "a new leader looks before it judges"
    assert [engine["restarts"] for engine in engines(space, GROUP)] == [0, 0]


def test_both_replicas_serve_the_webhook(system: Kubectl) -> None:
    def ready() -> int:
        slices = system.json("get", "endpointslices", "--selector=kubernetes.io/service-name=rolloutfleet-webhook")
        endpoints = [endpoint for item in slices["items"] for endpoint in item.get("endpoints") or []]
        return sum(bool(endpoint["conditions"].get("ready")) for endpoint in endpoints)

    eventually(ready, 60, "two endpoints", accept=lambda count: count == 2)


def pods_of_engines(space: Kubectl) -> set[str]:
    pods = space.json("get", "pods", "--selector=rolloutfleet.dev/component=engine")["items"]
    return {pod["metadata"]["name"] for pod in pods}


def created_pods(space: Kubectl) -> set[str]:
    """Every engine's pod that was ever there, by what the scheduler has told."""
    events = space.json("get", "events", "--field-selector=reason=Scheduled")["items"]
    names = {event.get("involvedObject", {}).get("name", "") for event in events}
    return {name for name in names if name.startswith(GROUP)}


def gates_of(space: Kubectl) -> dict[str, str]:
    """When the gate of each engine and router last changed."""
    found = {}
    for pod in sorted(pods_of_engines(space)) + router_pods(space, SERVER):
        conditions = space.json("get", "pod", pod)["status"]["conditions"]
        (gate,) = [one for one in conditions if one["type"] == "rolloutfleet.dev/Routable"]
        found[pod] = f"{gate['status']} since {gate['lastTransitionTime']}"
    return found
