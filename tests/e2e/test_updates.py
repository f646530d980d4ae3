"""Weight updates of real engines under load, by each transport and in each pause mode, who dies in the middle, and what
becomes of a fleet that is scaled meanwhile."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from e2e import faults
from e2e.fleets import (
    START_SECONDS,
    Trainer,
    TrainerError,
    await_routable,
    engines,
    label_for,
    rollout_server,
    trainer_pod,
)
from e2e.load import updated_under_load
from e2e.support import Kubectl, eventually, remove_namespace
from e2e.updating import (
    GREEDY,
    SENDER,
    SERVER,
    Stopped,
    before_commit,
    between_buckets,
    caught_up,
    in_pause,
    kill,
    labels,
    restored,
    scale,
    send,
    settled,
)


@pytest.fixture(scope="module")
def space(kubectl: Kubectl, operator: None, vanishing_namespaces: list[str]) -> Iterator[Kubectl]:
    """A fleet of two engines that serves version 0, the model m0, and a trainer beside it."""
    name = f"e2e-updates-{uuid.uuid4().hex[:6]}"
    kubectl("create", "namespace", name)
    inside = kubectl.within(name)
    inside("create", "serviceaccount", "trainer")
    pod = trainer_pod("trainer", f"actor={SERVER}")
    pod["spec"]["containers"][0]["volumeMounts"].append({"name": "weights", "mountPath": "/models", "readOnly": True})
    inside.apply(rollout_server(SERVER, replicas=2, service_accounts=("trainer",)), pod)
    await_routable(inside, SERVER, 2)
    inside("wait", "pod/trainer", "--for=condition=Ready", "--timeout=60s")
    yield inside
    remove_namespace(kubectl, name)
    vanishing_namespaces.append(name)


@pytest.fixture
def trainer(space: Kubectl) -> Trainer:
    found = Trainer(space, "trainer")
    found("fleet.wait_ready(engines=2, timeout=120)", timeout=150)
    return found


@pytest.fixture(scope="module")
def greedy(space: Kubectl) -> dict[str, Any]:
    """Tokens by model, each of an engine that was started with it."""
    found = {"m0": Trainer(space, "trainer")(GREEDY)}
    space.apply(rollout_server("fresh", model="/models/m1", service_accounts=("trainer",)))
    await_routable(space, "fresh", 1)
    fresh = trainer_pod("fresh", "actor=fresh")
    space.apply(fresh)
    space("wait", "pod/fresh", "--for=condition=Ready", "--timeout=60s")
    found["m1"] = Trainer(space, "fresh")(GREEDY)
    space("delete", "ros/fresh", "pod/fresh", "--force", "--grace-period=0")
    assert found["m0"] != found["m1"]
    return found


# It works


@pytest.mark.parametrize("pause_mode", ["InPlace", "Retract", "Abort"])
@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_an_update_under_load_gives_the_tokens_of_a_fresh_engine_and_samples_say_which_version_made_what(
    space: Kubectl, trainer: Trainer, greedy: dict[str, Any], transport: str, pause_mode: str
) -> None:
    version = trainer("fleet.weight_version")
    model = "m1" if trainer(GREEDY) == greedy["m0"] else "m0"

    def update() -> dict[str, Any]:
        if transport == "disk":
            arguments = f"'/weights/{model}', pause_mode={pause_mode!r}, timeout=120"
            result: dict[str, Any] = trainer(f"fleet.update_weights({arguments})")
        else:
            before, expression = send(model, pause_mode=pause_mode, transport=transport, source=f"/weights/{model}")
            result = trainer(expression, before=before)
        return result

    result = updated_under_load(space, trainer, f"{SERVER}-main", update, pause_mode=pause_mode)
    assert result["version"] == version + 1
    assert [verdict["outcome"] for verdict in result["engines"]] == ["Committed"] * 2
    assert trainer(GREEDY) == greedy[model]
    assert labels(space) == {label_for(space, SERVER, version + 1)}


@pytest.mark.parametrize("bucket_bytes", [1, 100_000])
def test_the_size_of_buckets_changes_nothing(
    space: Kubectl, trainer: Trainer, greedy: dict[str, Any], bucket_bytes: int
) -> None:
    model = "m1" if trainer(GREEDY) == greedy["m0"] else "m0"
    before, expression = send(model, bucket_bytes=bucket_bytes, source=f"/weights/{model}")
    result = trainer(expression, before=before)
    assert [verdict["outcome"] for verdict in result["engines"]] == ["Committed"] * 2
    assert trainer(GREEDY) == greedy[model]


def test_a_trainer_goes_back_to_an_older_version_on_purpose_and_never_by_accident(
    space: Kubectl, trainer: Trainer, greedy: dict[str, Any]
) -> None:
    version = trainer("fleet.weight_version")
    with pytest.raises(TrainerError, match="VersionNotNewer"):
        trainer(f"fleet.update_weights('/weights/m1', version={version})")
    older = trainer(f"fleet.update_weights('/weights/m1', version={max(version - 1, 1)}, rollback=True)")
    assert older["version"] == max(version - 1, 1)
    assert trainer(GREEDY) == greedy["m1"]
    await_routable(space, SERVER, 2, seconds=60)


def test_tensors_that_are_no_numbers_are_refused_before_an_engine_is_asked(space: Kubectl, trainer: Trainer) -> None:
    version = trainer("fleet.weight_version")
    before, expression = send("m0")
    poisoned = before + "next(iter(state.values())).view(-1)[5] = float('nan')\n"
    with pytest.raises(TrainerError, match="NonFiniteWeights"):
        trainer(expression, before=poisoned)
    assert trainer("fleet.weight_version") == version


# Somebody dies in the middle


def test_an_engine_that_is_killed_between_two_buckets_comes_back_and_the_other_commits(
    space: Kubectl, trainer: Trainer, greedy: dict[str, Any]
) -> None:
    version = settled(space, trainer)
    victim = engines(space, f"{SERVER}-main")[1]
    with ThreadPoolExecutor() as pool:
        update = Stopped(space, trainer, pool, "m1")
        faults.send(victim["podUid"], signal.SIGKILL, part=faults.ENGINE_PROCESS)
        update.go_on()
        result = update.result.result()
    assert result["version"] == version + 1
    outcomes = {verdict["pod"]: verdict["outcome"] for verdict in result["engines"]}
    assert outcomes.pop(victim["pod"]) == "Unreachable"
    assert list(outcomes.values()) == ["Committed"]
    assert trainer(GREEDY) == greedy["m1"]
    waiting = eventually(
        lambda: engines(space, f"{SERVER}-main")[1],
        240,
        "no checkpoint of the version is known: the new life waits for the next update",
        accept=lambda engine: engine["reason"] == "AwaitingUpdate",
    )
    assert waiting["pod"] != victim["pod"]
    settled(space, trainer)


def test_a_trainer_that_is_killed_between_two_buckets_leaves_the_old_version_serving(
    space: Kubectl, trainer: Trainer, greedy: dict[str, Any]
) -> None:
    killed = kill(space, trainer, SENDER, between_buckets)
    with pytest.raises(TrainerError):
        killed.update.result()
    restored(space, trainer, killed.version, greedy["m0"])


def test_an_agent_that_is_killed_between_two_buckets_leaves_the_old_version_serving_and_the_next_update_works(
    space: Kubectl, trainer: Trainer, greedy: dict[str, Any]
) -> None:
    killed = kill(space, trainer, faults.AGENT_PROCESS, between_buckets)
    with pytest.raises(TrainerError, match="AgentUnreachable"):
        killed.update.result()
    restored(space, trainer, killed.version, greedy["m0"])
    trainer("fleet.wait_ready(engines=2, timeout=120)", timeout=150)
    assert trainer("fleet.update_weights('/weights/m1', timeout=120)")["version"] == killed.version + 1
    assert trainer(GREEDY) == greedy["m1"]


def test_an_engine_that_is_killed_while_it_is_being_paused_catches_up_alone(
    space: Kubectl, trainer: Trainer, greedy: dict[str, Any]
) -> None:
    killed = kill(space, trainer, faults.ENGINE_PROCESS, in_pause)
    verdicts = {verdict["pod"]: verdict for verdict in killed.update.result()["engines"]}
    verdict = verdicts.pop(killed.engine)
    assert (verdict["outcome"], "/flush_cache" in verdict["message"]) == ("Unreachable", True), verdict
    assert [survivor["outcome"] for survivor in verdicts.values()] == ["Committed"]
    caught_up(space, trainer, killed.version + 1, greedy["m1"])


def test_an_engine_that_is_killed_before_the_commit_is_recorded_catches_up_alone(
    space: Kubectl, trainer: Trainer, greedy: dict[str, Any]
) -> None:
    killed = kill(space, trainer, faults.ENGINE_PROCESS, before_commit)
    outcomes = {verdict["pod"]: verdict["outcome"] for verdict in killed.update.result()["engines"]}
    # It had answered for its weights by then, or had not.
    assert outcomes.pop(killed.engine) in ("Committed", "Unreachable")
    assert list(outcomes.values()) == ["Committed"]
    caught_up(space, trainer, killed.version + 1, greedy["m1"])


@pytest.mark.parametrize("moment", [in_pause, before_commit])
def test_a_trainer_that_is_killed_when_all_has_been_sent_has_updated_its_fleet(
    space: Kubectl, trainer: Trainer, greedy: dict[str, Any], moment: Any
) -> None:
    """In the pause: engines read a checkpoint by themselves."""
    killed = kill(space, trainer, SENDER, moment)
    with pytest.raises(TrainerError):
        killed.update.result()
    restored(space, trainer, killed.version + 1, greedy["m1"])


def test_an_agent_that_is_killed_in_the_pause_leaves_the_old_version_serving(
    space: Kubectl, trainer: Trainer, greedy: dict[str, Any]
) -> None:
    killed = kill(space, trainer, faults.AGENT_PROCESS, in_pause)
    with pytest.raises(TrainerError, match="AgentUnreachable"):
        killed.update.result()
    restored(space, trainer, killed.version, greedy["m0"])


def test_an_agent_that_is_killed_before_the_commit_is_recorded_leaves_one_version_serving(
    space: Kubectl, trainer: Trainer, greedy: dict[str, Any]
) -> None:
    """What it has sent to the API server, that may still do: one version or the other."""
    killed = kill(space, trainer, faults.AGENT_PROCESS, before_commit)
    with pytest.raises(TrainerError, match="AgentUnreachable"):
        killed.update.result()
    committed = space.json("get", "ros", SERVER)["status"]["training"]["weights"]["version"]
    assert committed in (killed.version, killed.version + 1)
    restored(space, trainer, committed, greedy["m1" if committed > killed.version else "m0"])


def test_an_api_server_that_is_away_for_twenty_seconds_in_the_middle_leaves_one_version_serving(
    space: Kubectl, trainer: Trainer, greedy: dict[str, Any]
) -> None:
    version = settled(space, trainer)
    with ThreadPoolExecutor() as pool:
        update = Stopped(space, trainer, pool, "m1")
        with faults.without_api_server(20.0):
            pass
        update.go_on()
        try:
            version, tokens = update.result.result()["version"], greedy["m1"]
        except TrainerError:  # it did not lead any more when it came to the commit
            tokens = greedy["m0"]
    if tokens == greedy["m0"]:
        restored(space, trainer, version, tokens)
    else:
        assert trainer(GREEDY) == tokens


# Engines come and go in the middle


@pytest.mark.parametrize("moment", [between_buckets, in_pause])
def test_an_engine_that_is_added_in_the_middle_serves_the_new_version_without_another_update(
    space: Kubectl, trainer: Trainer, greedy: dict[str, Any], moment: Any
) -> None:
    version = settled(space, trainer)
    with ThreadPoolExecutor() as pool:
        with moment(space, trainer, pool, "m1") as update:
            scale(space, 3)
            eventually(
                lambda: {engine["index"]: engine["phase"] for engine in engines(space, f"{SERVER}-main")},
                START_SECONDS,
                "the third engine is on its way",
                accept=lambda phases: phases.get(2) in ("Pending", "Starting", "Held"),
            )
        result = update.result()
    assert result["version"] == version + 1
    assert [verdict["outcome"] for verdict in result["engines"]] == ["Committed"] * 2
    await_routable(space, SERVER, 3)
    assert labels(space) == {label_for(space, SERVER, version + 1)}
    assert trainer(GREEDY) == greedy["m1"]
    scale(space, 2)
    await_routable(space, SERVER, 2, seconds=60)


@pytest.mark.parametrize("moment", [between_buckets, in_pause])
def test_an_engine_that_is_taken_away_in_the_middle_goes_when_the_update_is_through(
    space: Kubectl, trainer: Trainer, greedy: dict[str, Any], moment: Any
) -> None:
    version = settled(space, trainer)
    with ThreadPoolExecutor() as pool:
        with moment(space, trainer, pool, "m1") as update:
            scale(space, 1)
            eventually(
                lambda: space.json("get", "sgrp", f"{SERVER}-main")["spec"]["replicas"],
                20,
                "the group knows",
                accept=lambda replicas: replicas == 1,
            )
        result = update.result()
    assert result["version"] == version + 1
    assert [verdict["outcome"] for verdict in result["engines"]] == ["Committed"] * 2
    await_routable(space, SERVER, 1, seconds=60)
    assert trainer(GREEDY) == greedy["m1"]
    scale(space, 2)
    await_routable(space, SERVER, 2)


# Two at once


def test_of_two_agents_one_leads_and_the_other_is_told_who(space: Kubectl, trainer: Trainer) -> None:
    settled(space, trainer)
    space.apply(trainer_pod("second", f"actor={SERVER}"))
    space("wait", "pod/second", "--for=condition=Ready", "--timeout=60s")
    with pytest.raises(TrainerError, match=r"NotLeading: .*pod trainer leads it"):
        Trainer(space, "second")("fleet.update_weights('/weights/m1')")
    with pytest.raises(TrainerError, match="NotLeading"):
        Trainer(space, "second")("fleet.offload()")
    space("delete", "pod", "second", "--force", "--grace-period=0")
