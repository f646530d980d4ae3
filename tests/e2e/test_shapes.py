"""Fleets of every shape answer as one Regular engine does: disaggregated pairs and engines of two pods.

All of them share a namespace and one trainer, so that they start at once. Weights are random, so equal greedy tokens
mean equal weights and a KV cache that arrived whole. They compute in float32: in bfloat16 the sums of two ranks round
differently from one rank's, and in one prompt of fifty another token comes out.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.fleets import (
    Trainer,
    await_routable,
    engine_group,
    engines,
    ready,
    rollout_server,
    router_pods,
    signal_engine,
    through_proxy,
    trainer_pod,
)
from e2e.support import Kubectl, eventually, remove_namespace

PRECISE = {"dtype": "float32"}
PAIRS = {"disaggregation-transfer-backend": "mooncake", **PRECISE}
# Else a decode engine wants host memory beyond a reserve of 10 GiB.
DECODE = {"disaggregation-decode-retraction-backup": "cpu_tensor", **PAIRS}
PAIR_ENV = {"MC_FORCE_TCP": "1"}  # no RDMA here
RANKS_ENV = {
    # Gloo in place of NCCL, and one core a rank.
    "SGLANG_NCCL_SO_PATH": "/nonexistent.so",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    "TORCHDYNAMO_DISABLE": "1",
}
_random = random.Random(7)
PROMPTS = [[_random.randrange(1, 500) for _ in range(_random.randrange(2, 40))] for _ in range(50)]
GREEDY = f"fleet.generate({PROMPTS}, temperature=0.0, max_new_tokens=12, ignore_eos=True, timeout=150)"


def nodes(kubectl: Kubectl) -> list[str]:
    return sorted(node["metadata"]["name"] for node in kubectl.json("get", "nodes")["items"])


@pytest.fixture(scope="module")
def space(kubectl: Kubectl, operator: None, vanishing_namespaces: list[str]) -> Iterator[Kubectl]:
    name = f"e2e-shapes-{uuid.uuid4().hex[:6]}"
    kubectl("create", "namespace", name)
    inside = kubectl.within(name)
    inside("create", "serviceaccount", "trainer")
    first, second = nodes(kubectl)[:2]
    pair_engine = {"env": PAIR_ENV}
    inside.apply(
        rollout_server("plain", groups=[engine_group(args=PRECISE)], service_accounts=("trainer",)),
        rollout_server(
            "pairs",
            groups=[
                engine_group("prefill", role="Prefill", node=first, engine=pair_engine, args=PAIRS),
                engine_group("decode", role="Decode", node=second, engine=pair_engine, args=DECODE),
            ],
            service_accounts=("trainer",),
        ),
        rollout_server(
            "ranks",
            groups=[
                engine_group(
                    engine={"nodes": 2, "tensorParallel": 2, "env": RANKS_ENV},
                    args=PRECISE,
                    recovery={
                        "backoff": {"initialSeconds": 2, "maxSeconds": 4},
                        "healthCheck": {"periodSeconds": 2, "timeoutSeconds": 15, "failureThreshold": 2},
                    },
                )
            ],
            service_accounts=("trainer",),
        ),
        trainer_pod("trainer", "actor=plain,pairs=pairs,ranks=ranks"),
    )
    yield inside
    remove_namespace(kubectl, name)
    vanishing_namespaces.append(name)


@pytest.fixture(scope="module")
def expected(space: Kubectl) -> list[list[int]]:
    """What one Regular engine says."""
    await_routable(space, "plain", 1)
    return tokens(Trainer(space, "trainer"))


def tokens(trainer: Trainer) -> list[list[int]]:
    groups = trainer(GREEDY)
    assert all(group["samples"][0]["status"] == "truncated" for group in groups), groups
    return [group["samples"][0]["response_tokens"] for group in groups]


def pods(kubectl: Kubectl, group: str) -> dict[str, dict[str, Any]]:
    found = kubectl.json("get", "pods", f"--selector=rolloutfleet.dev/group={group}")["items"]
    return {pod["metadata"]["name"]: pod for pod in found if not pod["metadata"].get("deletionTimestamp")}


def test_a_pair_on_two_nodes_says_what_one_engine_says(space: Kubectl, expected: list[list[int]]) -> None:
    await_routable(space, "pairs", 2)
    hosts = {
        pod["spec"]["nodeName"] for group in ("prefill", "decode") for pod in pods(space, f"pairs-{group}").values()
    }
    assert len(hosts) == 2
    workers = through_proxy(space, router_pods(space, "pairs")[0], "/workers")["workers"]
    assert sorted((worker["worker_type"], worker.get("bootstrap_port")) for worker in workers) == [
        ("decode", None),
        ("prefill", 8998),
    ]
    assert tokens(Trainer(space, "trainer", "pairs")) == expected


def test_when_the_prefill_pod_is_killed_the_fleet_says_so_and_comes_back_with_the_same_tokens(
    space: Kubectl, expected: list[list[int]]
) -> None:
    victim = engines(space, "pairs-prefill")[0]["pod"]
    survivor = engines(space, "pairs-decode")[0]["pod"]
    space("delete", "pod", victim, "--grace-period=0", "--force")
    eventually(
        lambda: ready(space, "pairs"),
        20,
        "without a prefill engine it is not ready",
        accept=lambda c: c["status"] == "False",
    )
    await_routable(space, "pairs", 2)
    assert engines(space, "pairs-decode")[0]["pod"] == survivor
    assert engines(space, "pairs-prefill")[0]["pod"] != victim
    assert tokens(Trainer(space, "trainer", "pairs")) == expected


def test_a_pair_takes_an_update_of_weights(space: Kubectl, expected: list[list[int]]) -> None:
    both = [Trainer(space, "trainer", role) for role in ("actor", "pairs")]
    for trainer in both:
        assert trainer("fleet.update_weights('/weights/m1', timeout=120)")["version"] == 1
    plain, pairs = (tokens(trainer) for trainer in both)
    assert plain == pairs != expected
    assert both[0]("fleet.update_weights('/weights/m0', timeout=120)")["version"] == 2
    space("delete", "ros", "pairs", "--wait=false")  # its schedulers poll, and what follows starts engines


def test_an_engine_of_two_pods_says_what_one_pod_says(space: Kubectl, expected: list[list[int]]) -> None:
    await_routable(space, "ranks", 1)
    members = pods(space, "ranks-main")
    assert len({pod["spec"]["nodeName"] for pod in members.values()}) == 2
    for name in members:
        space("wait", f"pod/{name}", "--for=condition=rolloutfleet.dev/Routable", "--timeout=5s")
    assert tokens(Trainer(space, "trainer", "ranks")) == expected


@pytest.mark.parametrize(
    ("rank", "end", "reason"),
    [(1, "SIGKILL", "EngineExited"), (1, "SIGSTOP", "Hung"), (0, "deleted", "PodDeleted")],
)
def test_when_either_pod_ends_or_hangs_both_come_back(
    space: Kubectl, expected: list[list[int]], rank: int, end: str, reason: str
) -> None:
    """Of the follower only its scheduler: the container and its dummy /health may go on as if nothing were."""
    before = pods(space, "ranks-main")
    victim = next(name for name in before if name.endswith(f"-r{rank}"))
    if end == "deleted":
        space("delete", "pod", victim, "--grace-period=0", "--force")
    else:
        signal_engine(space, victim, end, part="scheduler")
    eventually(
        lambda: set(pods(space, "ranks-main")),
        120,
        "two new pods",
        accept=lambda now: len(now) == 2 and not now & set(before),
    )
    assert engines(space, "ranks-main")[0]["lastFailure"]["reason"] == reason
    await_routable(space, "ranks", 1)
    assert tokens(Trainer(space, "trainer", "ranks")) == expected
