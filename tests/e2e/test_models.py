"""Several fleets of one trainer: a trained one that is scaled and changed under load, a frozen one, and one whose only
engine somebody else runs. The tests run in order and share them."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from e2e.fleets import (
    SHARED,
    START_SECONDS,
    Trainer,
    TrainerError,
    await_routable,
    engine_group,
    engines,
    ready,
    rollout_server,
    trainer_pod,
)
from e2e.outside import OutsideEngine, network_namespace
from e2e.support import Kubectl, eventually, remove_namespace

MODELS = f"{SHARED}/models"
GREEDY = "fleet.generate([[1, 2, 3], [9, 8, 7, 6]], temperature=0.0, max_new_tokens=12, ignore_eos=True, timeout=120)"
LOAD = "fleet.generate([[1, 2]] * 8, n=4, max_new_tokens=32, ignore_eos=True, timeout=170)"


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory, operator: None) -> Iterator[OutsideEngine]:
    with network_namespace() as namespace:
        engine = OutsideEngine(namespace, f"{MODELS}/m0", tmp_path_factory.mktemp("outside") / "engine.log")
        try:
            yield engine
        finally:
            engine.kill()


@pytest.fixture(scope="module")
def space(
    kubectl: Kubectl, operator: None, outside: OutsideEngine, vanishing_namespaces: list[str]
) -> Iterator[Kubectl]:
    name = f"e2e-models-{uuid.uuid4().hex[:6]}"
    kubectl("create", "namespace", name)
    inside = kubectl.within(name)
    inside("create", "serviceaccount", "trainer")
    account = ("trainer",)
    trainer = trainer_pod("trainer", "actor=actor,reward=judge,student=outside")
    trainer["spec"]["containers"][0]["volumeMounts"].append({"name": "weights", "mountPath": MODELS, "readOnly": True})
    # Engine and trainer must see the checkpoints under one path, and the engine's is that of this machine.
    volume = {"mountPath": MODELS, "volume": {"hostPath": {"path": MODELS, "type": "Directory"}}}
    inside.apply(
        actor(replicas=2),
        rollout_server("judge", service_accounts=account, updateWeights=False),
        rollout_server(
            "outside",
            model=f"{MODELS}/m0",
            groups=[],
            external={"engines": [{"url": f"{outside.url}/"}]},
            service_accounts=account,
            weights=volume,
        ),
        trainer,
    )
    outside.start()
    yield inside
    remove_namespace(kubectl, name)
    vanishing_namespaces.append(name)


def actor(*, replicas: int | None = None, **group: Any) -> dict[str, Any]:
    """Without `replicas` whoever scales the ServerGroup owns the count."""
    return rollout_server("actor", groups=[engine_group(replicas=replicas, **group)], service_accounts=("trainer",))


def tokens(trainer: Trainer) -> list[list[int]]:
    return [group["samples"][0]["response_tokens"] for group in trainer(GREEDY)]


def student(space: Kubectl) -> Trainer:
    return Trainer(space, "trainer", "student")


@contextmanager
def under_load(space: Kubectl) -> Iterator[list[dict[str, Any]]]:
    """Samples that a trainer asks for all the while; after the block, every one of them."""
    trainer = Trainer(space, "trainer")
    samples: list[dict[str, Any]] = []
    going = True

    def rollouts() -> None:
        while going:
            samples.extend(sample for group in trainer(LOAD, timeout=240) for sample in group["samples"])

    with ThreadPoolExecutor() as pool:
        rolling = pool.submit(rollouts)
        try:
            yield samples
        finally:
            going = False
        rolling.result()


@contextmanager
def watched(space: Kubectl, path: str) -> Iterator[Callable[[], list[str]]]:
    """Every value that a field of the server `actor` takes, by a watch."""
    command = [str(space.binary), f"--kubeconfig={space.kubeconfig}", f"--namespace={space.namespace}"]
    command += ["get", "ros", "actor", "--watch", f"--output=jsonpath={{{path}}}{{'\\n'}}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        lines: list[str] = []
        with ThreadPoolExecutor() as pool:
            reading = pool.submit(lines.extend, watch.stdout)
            try:
                yield lambda: [line.strip() for line in lines]
            finally:
                watch.terminate()
                reading.result(timeout=30)


def test_one_trainer_reaches_all_of_its_models(space: Kubectl) -> None:
    await_routable(space, "actor", 2)
    await_routable(space, "judge", 1)
    await_routable(space, "outside", 1)
    said = [tokens(Trainer(space, "trainer", role)) for role in ("actor", "reward", "student")]
    assert said[0] == said[1] == said[2]


def test_an_external_engine_has_no_pod_and_says_who_it_is(space: Kubectl, outside: OutsideEngine) -> None:
    (engine,) = engines(space, "outside-external")
    assert (engine["url"], engine["phase"], engine["weightVersion"]) == (outside.url, "Serving", 0)
    assert engine["facts"] == {
        "role": "Regular",
        "tensorParallel": 1,
        "pipelineParallel": 1,
        "memorySaver": False,
        "version": engine["facts"]["version"],
    }
    labels = "--selector=rolloutfleet.dev/server=outside,rolloutfleet.dev/component=engine"
    assert not space("get", "pods", labels, "--output=name").strip()


def test_an_external_engine_is_trained_on(space: Kubectl) -> None:
    before = tokens(student(space))
    result = student(space)(f"fleet.update_weights({MODELS + '/m1'!r}, timeout=120)")
    assert [verdict["outcome"] for verdict in result["engines"]] == ["Committed"]
    after = tokens(student(space))
    assert after != before
    await_routable(space, "outside", 1, seconds=30)


def test_an_external_engine_without_the_memory_saver_is_not_offloaded(space: Kubectl, outside: OutsideEngine) -> None:
    with pytest.raises(TrainerError, match="enable-memory-saver"):
        student(space)("fleet.offload()")


def test_an_external_engine_that_dies_is_not_restarted_and_comes_back_with_the_trained_weights(
    space: Kubectl, outside: OutsideEngine
) -> None:
    before = tokens(student(space))
    outside.kill()
    # Its router may notice before the operator does.
    eventually(
        lambda: ready(space, "outside"),
        60,
        "it is said to be gone",
        accept=lambda c: (c["status"], c["reason"]) == ("False", "NotAnswering"),
    )
    outside.start()  # with version 0 of the model, as its owner knows it
    await_routable(space, "outside", 1)
    assert tokens(student(space)) == before
    space("delete", "ros", "outside", "--wait=false")
    outside.kill()


def test_a_frozen_model_refuses_updates_and_recovers_like_any_other(space: Kubectl) -> None:
    judge = Trainer(space, "trainer", "reward")
    before = tokens(judge)
    with pytest.raises(TrainerError, match="updateWeights: false"):
        judge("fleet.update_weights('/weights/m1')")
    assert Trainer(space, "trainer")("fleet.update_weights('/weights/m1', timeout=120)")["version"] == 1
    assert tokens(Trainer(space, "trainer")) != before
    victim = engines(space, "judge-main")[0]["pod"]
    space("delete", "pod", victim, "--grace-period=0", "--force")
    eventually(lambda: engines(space, "judge-main")[0], 60, "a new life", accept=lambda e: e["pod"] not in ("", victim))
    await_routable(space, "judge", 1)
    assert tokens(judge) == before
    space("delete", "ros", "judge", "--wait=false")


def test_scaling_up_and_down_under_load_loses_no_sample(space: Kubectl) -> None:
    space.apply(actor())
    eventually(
        lambda: space.json("get", "ros", "actor"),
        30,
        "the operator has seen it",
        accept=lambda ros: ros["status"]["observedGeneration"] == ros["metadata"]["generation"],
    )
    assert space.json("get", "sgrp", "actor-main")["spec"]["replicas"] == 2, "the count stays when its owner goes"
    with under_load(space) as samples:
        space("scale", "sgrp", "actor-main", "--replicas=4")
        await_routable(space, "actor", 4, seconds=START_SECONDS + 60)
        assert [engine["weightVersion"] for engine in engines(space, "actor-main")] == [1] * 4
        space("scale", "sgrp", "actor-main", "--replicas=1")
        eventually(lambda: engines(space, "actor-main"), 90, "one engine is left", accept=lambda found: len(found) == 1)
    assert samples
    assert {sample["status"] for sample in samples} == {"truncated"}
    assert {span["version"] for sample in samples for span in sample["weight_versions"]} == {1}


def test_a_change_under_load_keeps_one_engine_routable_and_a_broken_image_stops_at_one(space: Kubectl) -> None:
    space("scale", "sgrp", "actor-main", "--replicas=2")
    await_routable(space, "actor", 2)
    with under_load(space) as samples, watched(space, ".status.engines.routable") as routable:
        space.apply(actor(engine={"env": {"ROLLOUTFLEET_TEST": "1"}}))
        eventually(
            lambda: {engine["revision"] for engine in engines(space, "actor-main")},
            30,
            "the change is under way",
            accept=lambda revisions: len(revisions) == 2,
        )
        eventually(
            lambda: {(engine["revision"], engine["phase"]) for engine in engines(space, "actor-main")},
            2 * START_SECONDS,
            "both engines are of the new revision",
            accept=lambda found: len(found) == 1 and {phase for _, phase in found} == {"Serving"},
        )
        kept = {engine["pod"] for engine in engines(space, "actor-main")}
        space.apply(actor(engine={"env": {"ROLLOUTFLEET_TEST": "1"}, "image": "localhost/rolloutfleet/absent:dev"}))
        eventually(
            lambda: {engine["reason"] for engine in engines(space, "actor-main")},
            120,
            "the broken image is named",
            accept=lambda reasons: bool(reasons & {"ImagePullBackOff", "ErrImageNeverPull"}),
        )
        assert len(kept & {engine["pod"] for engine in engines(space, "actor-main")}) == 1
        space.apply(actor(engine={"env": {"ROLLOUTFLEET_TEST": "1"}}))
        await_routable(space, "actor", 2)
        assert len(kept & {engine["pod"] for engine in engines(space, "actor-main")}) == 1
    assert samples
    assert {sample["status"] for sample in samples} == {"truncated"}
    assert set(routable()) == {"1", "2"}, routable()
