"""A router lists an address that belongs to another fleet's engine by now: no answer of that engine becomes a sample.

With stand-ins: each answers with a token that tells its model. Both fleets are at weight version 0.
"""

from __future__ import annotations

from typing import Any

import pytest

from e2e.fleets import (
    Trainer,
    await_routable,
    engines,
    label_for,
    label_of,
    listed_urls,
    rollout_server,
    router_pods,
    stand_in,
    stand_in_code,
    through_proxy,
    trainer_pod,
)
from e2e.support import Kubectl, eventually

OURS = ord("0")
"""What stand-ins of /models/m0 answer with."""
OPERATOR = "--selector=app.kubernetes.io/name=rolloutfleet-operator"


def fleet(name: str, model: str) -> dict[str, Any]:
    groups = [stand_in("main", "Regular", 1)]
    router = {"policy": "round_robin"}
    return rollout_server(name, model=model, groups=groups, router=router, service_accounts=("trainer",))


@pytest.fixture
def space(kubectl: Kubectl, operator: None, namespace: str) -> Kubectl:
    inside = kubectl.within(namespace)
    inside("create", "serviceaccount", "trainer")
    stand_in_code(inside)
    inside.apply(fleet("ours", "/models/m0"), fleet("theirs", "/models/m1"), trainer_pod("trainer", "actor=ours"))
    for name in ("ours", "theirs"):
        await_routable(inside, name, 1, seconds=120)
    inside("wait", "pod/trainer", "--for=condition=Ready", "--timeout=60s")
    return inside


def add_worker(kubectl: Kubectl, router: str, url: str) -> None:
    """As the operator registers an engine; from inside, since the API server's proxy sends no JSON."""
    code = (
        "import http.client, json\n"
        "router = http.client.HTTPConnection('127.0.0.1', 30000, timeout=10)\n"
        f"body = json.dumps({{'url': {url!r}, 'worker_type': 'regular'}})\n"
        "router.request('POST', '/workers', body, {'Content-Type': 'application/json'})\n"
        "answer = router.getresponse()\n"
        "assert answer.status < 300, (answer.status, answer.read())\n"
    )
    kubectl("exec", router, "--container=router", "--", "python3", "-c", code)


def healthy(kubectl: Kubectl, router: str) -> set[str]:
    workers = through_proxy(kubectl, router, "/workers")["workers"]
    return {worker["url"] for worker in workers if worker["is_healthy"]}


def samples(trainer: Trainer, request: str) -> list[dict[str, Any]]:
    groups = trainer(f"fleet.generate({request}, max_new_tokens=4, ignore_eos=True)")
    return [sample for group in groups for sample in group["samples"]]


def test_no_answer_of_another_fleets_engine_becomes_a_sample(kubectl: Kubectl, space: Kubectl) -> None:
    trainer = Trainer(space, "trainer")
    trainer("fleet.wait_ready(engines=1, timeout=60)", timeout=120)
    (mine,), (stranger,) = engines(space, "ours-main"), engines(space, "theirs-main")
    assert label_of(space, stranger["pod"]) == label_for(space, "theirs", 0) != label_of(space, mine["pod"])
    (router,) = router_pods(space, "ours")

    def answered() -> int:
        return int(through_proxy(space, stranger["pod"], "/requests")["count"])

    system = kubectl.within("rolloutfleet-system")
    system("scale", "deploy/rolloutfleet-operator", "--replicas=0")
    try:
        system("wait", "pod", OPERATOR, "--for=delete", "--timeout=60s")
        add_worker(space, router, stranger["url"])
        eventually(
            lambda: healthy(space, router),
            60,
            "the router sends requests to both",
            accept=lambda urls: urls == {mine["url"], stranger["url"]},
        )
        before = answered()
        taken = samples(trainer, "[[1, 2]] * 8, n=4, timeout=120")
        assert answered() > before, "the other fleet's engine was asked as well"
        assert len(taken) == 32
        assert {sample["status"] for sample in taken} == {"truncated"}
        assert {token for sample in taken for token in sample["response_tokens"]} == {OURS}
        assert max(sample["attempts"] for sample in taken) > 1

        # Nobody else answers any more.
        space("delete", "pod", mine["pod"], "--grace-period=0", "--force")
        before = answered()
        lost = samples(trainer, "[[1, 2]], n=4, timeout=15")
        assert answered() > before
        assert [(sample["status"], sample["response_tokens"]) for sample in lost] == [("aborted", [])] * 4
    finally:
        system("scale", "deploy/rolloutfleet-operator", "--replicas=1")

    system("rollout", "status", "deploy/rolloutfleet-operator", "--timeout=60s")
    eventually(
        lambda: (listed_urls(space, router), {engine.get("url") for engine in engines(space, "ours-main")}),
        120,
        "the router has forgotten the other fleet's engine and lists the new one of its own",
        accept=lambda seen: stranger["url"] not in seen[0] and bool(seen[0]) and seen[0] == seen[1],
    )
    await_routable(space, "ours", 1, seconds=60)
    taken = samples(trainer, "[[1, 2]], n=4, timeout=60")
    assert {token for sample in taken for token in sample["response_tokens"]} == {OURS}
    assert engines(space, "theirs-main")[0]["pod"] == stranger["pod"]
    assert label_of(space, stranger["pod"]) == label_for(space, "theirs", 0)
