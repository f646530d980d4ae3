"""Routers with many engines, and engines that share their nodes' network: with stand-ins, since only numbers count."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.fleets import (
    Trainer,
    await_routable,
    engines,
    listed_urls,
    rollout_server,
    router_pods,
    stand_in,
    stand_in_code,
    through_proxy,
    trainer_pod,
)
from e2e.support import Kubectl, eventually

ROLLOUT = "fleet.generate([[1, 2]] * 16, n=4, max_new_tokens=4, ignore_eos=True, timeout=120)"


@pytest.fixture
def space(kubectl: Kubectl, operator: None, namespace: str) -> Kubectl:
    inside = kubectl.within(namespace)
    inside("create", "serviceaccount", "trainer")
    stand_in_code(inside)
    return inside


def served(kubectl: Kubectl) -> list[int]:
    return [
        int(through_proxy(kubectl, engine["pod"], "/requests")["count"]) for engine in engines(kubectl, "many-main")
    ]


def test_a_router_that_starts_without_its_operator_gets_no_traffic_before_its_table_is_complete(
    kubectl: Kubectl, space: Kubectl
) -> None:
    space.apply(
        rollout_server(
            "many",
            groups=[stand_in("main", "Regular", 4)],
            router={"replicas": 2, "policy": "round_robin"},
            service_accounts=("trainer",),
        ),
        trainer_pod("trainer", "actor=many"),
    )
    await_routable(space, "many", 4, seconds=120)
    space("wait", "pod/trainer", "--for=condition=Ready", "--timeout=60s")
    trainer = Trainer(space, "trainer")
    trainer("fleet.wait_ready(engines=4, timeout=60)", timeout=120)
    system = kubectl.within("rolloutfleet-system")
    old = router_pods(space, "many")
    with ThreadPoolExecutor() as pool:
        rollout = pool.submit(trainer, f"[{ROLLOUT} for _ in range(4)]", timeout=300)
        system("scale", "deploy/rolloutfleet-operator", "--replicas=0")
        try:
            # One that is told to go still lists engines.
            system(
                "wait",
                "pod",
                "--selector=app.kubernetes.io/name=rolloutfleet-operator",
                "--for=delete",
                "--timeout=60s",
            )
            space("delete", "pod", old[0], "--grace-period=0", "--force")
            (fresh,) = eventually(
                lambda: [pod for pod in router_pods(space, "many") if pod not in old], 30, "a new router pod"
            )
            space("wait", f"pod/{fresh}", "--for=condition=ContainersReady", "--timeout=60s")
            ready = space("get", "pod", fresh, "--output=jsonpath={.status.conditions[?(@.type=='Ready')].status}")
            assert ready == "False", "it knows no engine"
            assert not listed_urls(space, fresh)
        finally:
            system("scale", "deploy/rolloutfleet-operator", "--replicas=2")
        space("wait", f"pod/{fresh}", "--for=condition=Ready", "--timeout=90s")
        rollouts = rollout.result()
    assert len(listed_urls(space, fresh)) == 4
    samples = [sample for groups in rollouts for group in groups for sample in group["samples"]]
    assert len(samples) == 4 * 64
    assert {sample["status"] for sample in samples} == {"truncated"}

    before = served(space)
    trainer(ROLLOUT)
    shares = [now - then for now, then in zip(served(space), before, strict=True)]
    assert sum(shares) == 64
    assert max(shares) <= 2 * 64 / 4


def test_engines_in_their_nodes_network_are_kept_apart_by_their_ports(kubectl: Kubectl, space: Kubectl) -> None:
    nodes = len(kubectl.json("get", "nodes")["items"])
    network = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    space.apply(rollout_server("many", groups=[stand_in("main", "Regular", nodes + 1, **network)]))
    await_routable(space, "many", nodes, seconds=120)
    found = engines(space, "many-main")
    (left,) = [engine for engine in found if engine["phase"] != "Serving"]
    assert left["reason"] == "Unschedulable"
    assert "free ports" in left["message"]
    urls = [engine["url"] for engine in found if engine["phase"] == "Serving"]
    assert len(set(urls)) == nodes
    assert listed_urls(space, router_pods(space, "many")[0]) == set(urls)
