"""Engines that end, hang or lose their node, on the real cluster. Stand-ins where many lives are needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from e2e.fleets import (
    CPU_ARGUMENTS,
    await_routable,
    engine_group,
    engines,
    ready,
    rollout_server,
    signal_engine,
    stand_in,
    stand_in_code,
)
from e2e.support import Kubectl, eventually

STAND_IN = "/stand-in/engine.py"
IMPATIENT = {
    "healthCheck": {"periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 4},
    "backoff": {"initialSeconds": 1, "maxSeconds": 2},
}


def stand_ins(kubectl: Kubectl, replicas: int, **pod_spec: Any) -> None:
    group = {**stand_in("main", "Regular", replicas, **pod_spec), "recovery": IMPATIENT}
    kubectl.apply(rollout_server("tough", groups=[group]))
    await_routable(kubectl, "tough", replicas, seconds=90)


def restarts(kubectl: Kubectl) -> list[int]:
    return [engine["restarts"] for engine in engines(kubectl, "tough-main")]


def test_an_engine_that_always_dies_is_given_up_with_its_cause_resumed_on_request_and_cured_by_its_spec(
    kubectl: Kubectl, operator: None, namespace: str
) -> None:
    inside = kubectl.within(namespace)
    recovery = {"maxRestarts": 1, "backoff": {"initialSeconds": 1, "maxSeconds": 2}}
    bad = engine_group(args={"attention-backend": "no-such-backend"}, recovery=recovery)
    inside.apply(rollout_server("tough", groups=[bad]))

    def given_up(lives: int) -> dict[str, Any]:
        (engine,) = eventually(
            lambda: engines(inside, "tough-main"),
            180,
            f"given up after {lives} lives",
            accept=lambda seen: [(e["reason"], e["epoch"]) for e in seen] == [("RestartsExhausted", lives + 1)],
        )
        return engine

    engine = given_up(2)
    assert (engine["phase"], engine["restarts"]) == ("Failed", 1)
    engine = eventually(
        lambda: engines(inside, "tough-main")[0],
        30,
        "its kubelet told why",
        accept=lambda seen: "invalid choice: 'no-such-backend'" in seen["message"],
    )
    assert "no-such-backend" in engine["lastFailure"]["log"]
    assert ready(inside, "tough")["reason"] == "RestartsExhausted"

    def kept() -> list[tuple[str, str]]:
        pods = inside.json("get", "pods", "--selector=rolloutfleet.dev/component=engine")["items"]
        return [(pod["metadata"]["name"], pod["status"]["phase"]) for pod in pods]

    # Its end was heard before its kubelet told of it.
    eventually(kept, 30, "the last pod is kept", accept=lambda pods: pods == [("tough-main-0-e2-r0", "Failed")])

    inside("annotate", "servergroup", "tough-main", f"rolloutfleet.dev/resume=0-e{engine['epoch']}")
    eventually(
        lambda: engines(inside, "tough-main")[0],
        180,
        "it is tried again",
        accept=lambda engine: engine["epoch"] > 3,
    )
    inside.apply(rollout_server("tough", groups=[engine_group(args=CPU_ARGUMENTS, recovery=recovery)]))
    await_routable(inside, "tough", 1)


def test_an_engine_that_hangs_is_replaced_and_when_most_of_them_do_none_is(
    kubectl: Kubectl, operator: None, namespace: str
) -> None:
    inside = kubectl.within(namespace)
    stand_in_code(inside)
    stand_ins(inside, 3)
    first, second, third = (engine["pod"] for engine in engines(inside, "tough-main"))
    signal_engine(inside, first, "SIGSTOP", part=STAND_IN)
    eventually(lambda: restarts(inside), 60, "one is replaced", accept=lambda seen: seen == [1, 0, 0])
    assert engines(inside, "tough-main")[0]["lastFailure"]["reason"] == "NotAnswering"
    await_routable(inside, "tough", 3, seconds=60)

    with ThreadPoolExecutor() as together:
        list(together.map(lambda pod: signal_engine(inside, pod, "SIGSTOP", part=STAND_IN), (second, third)))
    eventually(
        lambda: [engine["reason"] for engine in engines(inside, "tough-main")],
        60,
        "status says that most of them fail together",
        accept=lambda reasons: reasons.count("MassFailure") == 2,
    )
    for pod in (second, third):
        signal_engine(inside, pod, "SIGCONT", part=STAND_IN)
    await_routable(inside, "tough", 3, seconds=60)
    assert restarts(inside) == [1, 0, 0]
    assert [engine["pod"] for engine in engines(inside, "tough-main")][1:] == [second, third]


def test_a_node_is_drained_engine_by_engine(kubectl: Kubectl, operator: None, namespace: str) -> None:
    inside = kubectl.within(namespace)
    stand_in_code(inside)
    stand_ins(inside, 2)
    nodes = kubectl("get", "nodes", "--output=name").split()
    node = inside.json("get", "pod", engines(inside, "tough-main")[0]["pod"])["spec"]["nodeName"]
    assert len(nodes) > 1, "an engine that is drained needs another node"
    selector = "--pod-selector=rolloutfleet.dev/server=tough,rolloutfleet.dev/component=engine"
    flags = (selector, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
    try:
        kubectl("drain", node, *flags, timeout=150)
        await_routable(inside, "tough", 2, seconds=60)
        places = {
            inside.json("get", "pod", engine["pod"])["spec"]["nodeName"] for engine in engines(inside, "tough-main")
        }
        assert node not in places
        moved = [engine for engine in engines(inside, "tough-main") if engine["restarts"]]
        assert {engine["lastFailure"]["reason"] for engine in moved} == {"EvictionByEvictionAPI"}
        assert {engine["failuresInRow"] for engine in moved} == {0}
    finally:
        kubectl("uncordon", node)
