"""One fleet's life on a real cluster with real engines, router and agent. The tests run in order and share it."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2e.fleets import (
    START_SECONDS,
    Trainer,
    TrainerError,
    await_routable,
    engines,
    label_for,
    label_of,
    listed_urls,
    paused,
    ready,
    rollout_server,
    router_pods,
    signal_engine,
    trainer_pod,
)
from e2e.support import Kubectl, KubectlError, eventually, remove_namespace

GROUP = "qwen-main"
PROMPTS = [[1, 2, 3], [7, 8, 9, 10]]
GREEDY = f"fleet.generate({PROMPTS}, n=1, temperature=0.0, max_new_tokens=12, ignore_eos=True)"


@pytest.fixture(scope="module")
def space(kubectl: Kubectl, operator: None, vanishing_namespaces: list[str]) -> Iterator[Kubectl]:
    name = f"e2e-fleet-{uuid.uuid4().hex[:6]}"
    kubectl("create", "namespace", name)
    inside = kubectl.within(name)
    inside("create", "serviceaccount", "trainer")
    yield inside
    remove_namespace(kubectl, name)
    vanishing_namespaces.append(name)


@pytest.fixture(scope="module")
def trainer(space: Kubectl) -> Trainer:
    """Created before the server that it names: the agent waits for it."""
    space.apply(trainer_pod("trainer", "actor=qwen"))
    space("wait", "pod/trainer", "--for=condition=Ready", "--timeout=60s")
    return Trainer(space, "trainer")


def test_a_trainer_that_names_a_missing_server_is_told_so_and_waits(space: Kubectl, trainer: Trainer) -> None:
    view = trainer("fleet.view()")
    assert view["state"] in ("Forbidden", "WaitingForServer")
    assert "qwen" in view["message"]
    with pytest.raises(TrainerError, match="qwen"):
        trainer("fleet.generate([[1]], n=1)")
    eventually(
        lambda: space("get", "events.events.k8s.io", "--output=jsonpath={.items[*].reason}"),
        30,
        "an event says that the RolloutServer is missing",
        accept=lambda reasons: "RolloutServerMissing" in reasons.split(),
    )


def test_an_applied_server_becomes_ready_and_kubectl_get_says_so(space: Kubectl, trainer: Trainer) -> None:
    space.apply(rollout_server("qwen", replicas=2, service_accounts=("trainer",)))
    await_routable(space, "qwen", 2)
    condition = eventually(lambda: ready(space, "qwen"), 30, "Ready", accept=lambda c: c.get("status") == "True")
    assert condition["reason"] == "Serving"
    table = space("get", "rolloutservers,servergroups,pods")
    header = table.splitlines()[0].split()
    assert header == ["NAME", "READY", "ENGINES", "ROUTABLE", "WEIGHTS", "SKEW", "REASON", "AGE"]
    for engine in engines(space, GROUP):
        assert engine["phase"] == "Serving"
        space("wait", f"pod/{engine['pod']}", "--for=condition=rolloutfleet.dev/Routable", "--timeout=1s")
        space("wait", f"pod/{engine['pod']}", "--for=condition=Ready", "--timeout=10s")
    assert len(listed_urls(space, router_pods(space, "qwen")[0])) == 2


def test_a_second_apply_changes_nothing_and_a_settled_fleet_is_not_written(space: Kubectl) -> None:
    manifest = rollout_server("qwen", replicas=2, service_accounts=("trainer",))
    before = space.json("get", "ros", "qwen")["metadata"]["generation"]
    space.apply(manifest)
    assert space.json("get", "ros", "qwen")["metadata"]["generation"] == before

    def versions() -> dict[str, str]:
        listed = space.json("get", "ros,sgrp,pods,replicasets,services,roles,rolebindings")
        return {f"{o['kind']}/{o['metadata']['name']}": o["metadata"]["resourceVersion"] for o in listed["items"]}

    first = versions()
    time.sleep(15)  # the claim is that nothing happens in this time
    assert versions() == first


def test_the_waiting_trainer_connects_and_samples_carry_log_probs_and_versions(trainer: Trainer) -> None:
    view = trainer("fleet.wait_ready(engines=2, timeout=60)")
    assert view["leading"]
    groups = trainer(f"fleet.generate({PROMPTS}, n=3, temperature=1.0, max_new_tokens=8, ignore_eos=True)")
    assert [group["prompt"] for group in groups] == PROMPTS
    for sample in (sample for group in groups for sample in group["samples"]):
        assert sample["status"] == "truncated"
        assert len(sample["response_tokens"]) == len(sample["rollout_log_probs"]) == 8
        assert all(log_prob <= 0 for log_prob in sample["rollout_log_probs"])
        assert sample["weight_versions"] == [{"version": 0, "start": 0, "end": 8}]


def test_refused_updates_name_the_cause_and_pause_nothing(space: Kubectl, trainer: Trainer) -> None:
    refusals = {
        "fleet.update_weights('/weights/m9')": "no such folder",
        "fleet.update_weights('/models/m1')": "must be a folder below /weights",
        "fleet.update_weights('/weights/../models/m1')": "must be a folder below /weights",
        "fleet.offload()": "offload: false in every group",
        "fleet.generate([[1]], max_tokens=3)": "max_new_tokens is meant",
    }
    for expression, cause in refusals.items():
        with pytest.raises(TrainerError, match=cause):
            trainer(expression)
    assert not any(paused(space, engine["pod"]) for engine in engines(space, GROUP))
    assert "training" not in space.json("get", "ros", "qwen")["status"]


def test_an_update_reaches_every_engine_and_samples_equal_those_of_a_fresh_engine(
    space: Kubectl, trainer: Trainer
) -> None:
    before = trainer(GREEDY)
    result = trainer("fleet.update_weights('/weights/m1', version=2)")
    assert {verdict["outcome"] for verdict in result["engines"]} == {"Committed"}
    assert [label_of(space, engine["pod"]) for engine in engines(space, GROUP)] == [label_for(space, "qwen", 2)] * 2
    after = trainer(GREEDY)
    assert all(s["weight_versions"][0]["version"] == 2 for group in after for s in group["samples"])
    with pytest.raises(TrainerError, match="not newer than the committed version 2"):
        trainer("fleet.update_weights('/weights/m1', version=2)")

    fresh = rollout_server("fresh", model="/models/m1", service_accounts=("trainer",), updateWeights=False)
    space.apply(fresh, trainer_pod("other", "actor=fresh"))
    await_routable(space, "fresh", 1)
    space("wait", "pod/other", "--for=condition=Ready", "--timeout=60s")
    reference = Trainer(space, "other")
    reference("fleet.wait_ready(timeout=60)")
    expected = [group["samples"][0]["response_tokens"] for group in reference(GREEDY)]
    assert [group["samples"][0]["response_tokens"] for group in after] == expected
    assert [group["samples"][0]["response_tokens"] for group in before] != expected
    with pytest.raises(TrainerError, match="updateWeights"):
        reference("fleet.update_weights('/weights/m1')")
    space("delete", "ros", "fresh")
    space("delete", "pod", "other", "--wait=false")


def test_a_second_trainer_is_told_who_leads(space: Kubectl, trainer: Trainer) -> None:
    space.apply(trainer_pod("second", "actor=qwen"))
    space("wait", "pod/second", "--for=condition=Ready", "--timeout=60s")
    second = Trainer(space, "second")
    eventually(lambda: second("fleet.view()"), 20, "the second sees the leader", accept=lambda v: bool(v["holder"]))
    with pytest.raises(TrainerError, match="pod trainer leads it"):
        second("fleet.update_weights('/weights/m1', version=9)")
    space("delete", "pod", "second", "--grace-period=1")


def test_a_deleted_engine_is_replaced_and_not_routed_before_it_has_caught_up(space: Kubectl) -> None:
    victim = engines(space, GROUP)[0]
    router = router_pods(space, "qwen")[0]
    label = label_for(space, "qwen", 2)
    space("delete", "pod", victim["pod"], "--grace-period=1")
    eventually(
        lambda: victim["url"] not in listed_urls(space, router), 15, "the router has forgotten the deleted engine"
    )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        record = engines(space, GROUP)[0]
        if record["epoch"] != victim["epoch"] and record.get("url"):
            if record["url"] in listed_urls(space, router):
                assert label_of(space, record["pod"]) == label, "routed with other weights than the fleet's"
            if record["phase"] == "Serving":
                break
        time.sleep(0.3)
    record = engines(space, GROUP)[0]
    assert record["phase"] == "Serving"
    assert record["weightVersion"] == 2
    assert record["lastFailure"]["reason"] == "PodDeleted"
    await_routable(space, "qwen", 2)


def test_the_operator_may_die_in_the_middle_of_a_rollout(kubectl: Kubectl, space: Kubectl, trainer: Trainer) -> None:
    system = kubectl.within("rolloutfleet-system")
    before = {engine["pod"] for engine in engines(space, GROUP)}
    with ThreadPoolExecutor() as pool:
        rollout = pool.submit(
            trainer, "fleet.generate([[1, 2]] * 16, n=4, max_new_tokens=48, ignore_eos=True, timeout=150)"
        )
        system(
            "delete", "pod", "--selector=app.kubernetes.io/name=rolloutfleet-operator", "--grace-period=0", "--force"
        )
        groups = rollout.result()
    assert {sample["status"] for group in groups for sample in group["samples"]} == {"truncated"}
    system("rollout", "status", "deploy/rolloutfleet-operator", "--timeout=60s")
    await_routable(space, "qwen", 2, seconds=60)
    assert {engine["pod"] for engine in engines(space, GROUP)} == before


def test_a_killed_router_gets_its_table_back_and_no_sample_is_lost(space: Kubectl, trainer: Trainer) -> None:
    (old,) = router_pods(space, "qwen")
    with ThreadPoolExecutor() as pool:
        rollout = pool.submit(
            trainer, "fleet.generate([[1, 2]] * 8, n=4, max_new_tokens=32, ignore_eos=True, timeout=150)"
        )
        space("delete", "pod", old, "--grace-period=0", "--force")
        groups = rollout.result()
    assert {sample["status"] for group in groups for sample in group["samples"]} == {"truncated"}

    def table() -> set[str]:
        (router,) = router_pods(space, "qwen")
        return listed_urls(space, router)

    eventually(table, 60, "the new router lists both engines", accept=lambda urls: len(urls) == 2)


def test_an_agent_that_dies_while_engines_are_paused_does_not_leave_them_so(space: Kubectl, trainer: Trainer) -> None:
    first, second = (engine["pod"] for engine in engines(space, GROUP))
    signal_engine(space, second, "SIGSTOP")  # so that the update hangs while `first` is paused
    try:
        with ThreadPoolExecutor() as pool:
            update = pool.submit(trainer, "fleet.update_weights('/weights/m0', version=3, timeout=100)")
            eventually(lambda: paused(space, first), 30, "the first engine is paused")
            space("delete", "pod", "trainer", "--grace-period=0", "--force")
            with pytest.raises((TrainerError, subprocess.TimeoutExpired)):
                update.result()
            # The other engine still hangs: the survivor does not wait for it.
            eventually(lambda: not paused(space, first), 90, "the operator has resumed the first engine")
    finally:
        signal_engine(space, second, "SIGCONT")
    eventually(lambda: not paused(space, second), 90, "the second engine generates again")
    await_routable(space, "qwen", 2, seconds=60)
    space.apply(trainer_pod("trainer", "actor=qwen"))
    space("wait", "pod/trainer", "--for=condition=Ready", "--timeout=60s")
    trainer("fleet.wait_ready(engines=2, timeout=60)", timeout=120)
    # The agent may have had time to commit with the engine that answered: what counts is that one version serves.
    committed = trainer("fleet.weight_version")
    assert committed in (2, 3)
    groups = trainer(GREEDY)
    assert [s["weight_versions"][0]["version"] for group in groups for s in group["samples"]] == [committed] * 2
    result = trainer("fleet.update_weights('/weights/m0', version=4)")
    assert {verdict["outcome"] for verdict in result["engines"]} == {"Committed"}


def test_a_deleted_server_takes_everything_with_it(space: Kubectl) -> None:
    space("delete", "ros", "qwen", "--timeout=30s")
    eventually(
        lambda: space(
            "get",
            "sgrp,pods,replicasets,services,roles,rolebindings,leases",
            "--selector=rolloutfleet.dev/server",
            "--output=name",
        ),
        90,
        "nothing of the fleet is left",
        accept=lambda names: not names.strip(),
    )


@pytest.mark.parametrize(
    ("name", "engine", "reason"),
    [
        ("image", {"image": "registry.invalid/no-such:image"}, "ImagePullBackOff"),
        ("gpus", {"tensorParallel": 64}, "Unschedulable"),
    ],
)
def test_what_only_the_cluster_can_tell_becomes_a_reason_and_an_event(
    space: Kubectl, name: str, engine: dict[str, object], reason: str
) -> None:
    space.apply(rollout_server(name, engine=engine))
    condition = eventually(
        lambda: ready(space, name), 60, f"{name} is not Ready: {reason}", accept=lambda c: c.get("reason") == reason
    )
    assert condition["status"] == "False"
    assert f"{name}-main-0-e1" in condition["message"]
    eventually(
        lambda: space("get", "events.events.k8s.io", "--output=jsonpath={.items[*].reason}"),
        20,
        "an event tells the reason",
        accept=lambda reasons: reason in reasons.split(),
    )
    space("delete", "ros", name)


def test_a_model_path_that_is_missing_is_named_and_heals_when_corrected(space: Kubectl) -> None:
    space.apply(rollout_server("path", model="/models/none"))
    condition = eventually(
        lambda: ready(space, "path"), 120, "path is not Ready", accept=lambda c: c.get("reason") == "EngineExited"
    )
    assert "/models/none" in condition["message"]
    space.apply(rollout_server("path", model="/models/m0"))
    await_routable(space, "path", 1)
    space("delete", "ros", "path")


def test_pods_with_a_wrong_annotation_are_refused_with_the_value(space: Kubectl) -> None:
    for value in ("qwen", "actor=", "actor=qwen,actor=other", "actor=other-namespace/qwen", "Actor=Qwen"):
        with pytest.raises(KubectlError, match=value.split(",")[0]):
            space.apply(trainer_pod("refused", value))
