"""Faults that users inject, and restart and resume, on a fleet of one real engine. The tests run in order and share it.

A failure is final here (`maxRestarts: 0`), so that a killed engine waits for somebody to resume it.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from e2e.fleets import (
    START_SECONDS,
    await_routable,
    engine_group,
    engines,
    label_for,
    label_of,
    rollout_server,
    stand_in,
    stand_in_code,
    through_proxy,
)
from e2e.support import Kubectl, KubectlError, eventually, remove_namespace
from rolloutfleet.cli import faults
from rolloutfleet.cli.explain import Serves, explain
from rolloutfleet.cli.faults import Target, find_target
from rolloutfleet.cli.fleet import read_fleet
from rolloutfleet.cli.main import main
from rolloutfleet.cli.session import Refused, Session
from rolloutfleet.kube.client import KubeApi
from rolloutfleet.kube.config import load_credentials

GROUP = "qwen-main"
RECOVERY = {
    "maxRestarts": 0,
    "backoff": {"initialSeconds": 1, "maxSeconds": 1},
    # Hangs of some seconds are to be seen, and not to be ended by a new life.
    "healthCheck": {"failureThreshold": 100, "weightsPeriodSeconds": 5},
}


@pytest.fixture(scope="module")
def space(kubectl: Kubectl, operator: None, vanishing_namespaces: list[str]) -> Iterator[Kubectl]:
    name = f"e2e-faults-{uuid.uuid4().hex[:6]}"
    kubectl("create", "namespace", name)
    inside = kubectl.within(name)
    inside.apply(rollout_server("qwen", groups=[engine_group(recovery=RECOVERY)]))
    stand_in_code(inside)
    small = stand_in("main", "Regular", 1)
    limit = {"memory": "192Mi"}
    small["template"]["spec"]["containers"][0]["resources"] = {"requests": limit, "limits": limit}
    inside.apply(rollout_server("small", groups=[{**small, "recovery": RECOVERY}]))
    await_routable(inside, "qwen", 1)
    yield inside
    remove_namespace(kubectl, name)
    vanishing_namespaces.append(name)


def act(space: Kubectl, work: Callable[[Session], Awaitable[Any]]) -> Any:
    async def scenario() -> Any:
        api = KubeApi(load_credentials())
        try:
            return await work(Session(api=api, namespace=str(space.namespace)))
        finally:
            await api.close()

    return asyncio.run(scenario())


def inject(space: Kubectl, fault: Callable[[Session, Target], Awaitable[str]], *, server: str = "qwen") -> str:
    """Into the server's first engine; what was done."""

    async def work(session: Session) -> str:
        return await fault(session, await find_target(session, server, f"{server}-main-0"))

    return str(act(space, work))


def serves(space: Kubectl, server: str = "qwen") -> Serves:
    async def work(session: Session) -> Serves:
        fleet = await read_fleet(session, server)
        return explain(fleet.server, fleet.groups).serves

    return Serves(act(space, work))


def record(space: Kubectl, group: str = GROUP) -> dict[str, Any]:
    return engines(space, group)[0]


def await_new_life(space: Kubectl, old: dict[str, Any]) -> dict[str, Any]:
    found = eventually(
        lambda: record(space),
        START_SECONDS,
        f"an engine serves in a life after e{old['epoch']}",
        accept=lambda now: now["epoch"] > old["epoch"] and now["phase"] == "Serving",
    )
    await_routable(space, "qwen", 1, seconds=60)
    return found


def answers(space: Kubectl) -> bool:
    """The engine itself, within the second that the API server's proxy is given."""
    with contextlib.suppress(KubectlError, TimeoutError):
        path = f"/api/v1/namespaces/{space.namespace}/pods/{record(space)['pod']}:30000/proxy/ping"
        space("get", "--raw", path, "--request-timeout=1s")
        return True
    return False


def verb(space: Kubectl, *arguments: str) -> int:
    return main([*arguments, f"--namespace={space.namespace}"])


def test_a_fleet_is_broken_only_once_it_is_marked_and_the_refusal_has_the_command(space: Kubectl) -> None:
    with pytest.raises(Refused) as refused:
        inject(space, faults.kill)
    command = str(refused.value).partition("kubectl ")[2].split()
    space(*command)
    space("annotate", "rolloutserver", "small", "rolloutfleet.dev/test-fleet=true")

    async def find(session: Session) -> str:
        return (await find_target(session, "qwen", "qwen-main-0")).name

    assert act(space, find) == record(space)["pod"]


def test_a_restart_ends_one_life_and_not_the_next(space: Kubectl, capsys: pytest.CaptureFixture[str]) -> None:
    old = record(space)
    assert verb(space, "restart", "qwen", old["pod"]) == 0
    new = await_new_life(space, old)
    assert new["epoch"] == old["epoch"] + 1
    assert [(life["epoch"], life["reason"]) for life in new["recoveries"]] == [(new["epoch"], "RestartRequested")]
    capsys.readouterr()
    assert verb(space, "timeline", "qwen") == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert f"{GROUP}-0-e{new['epoch']}" in line
    assert "waits" not in line
    # Its annotation is still there, and asked for the life before.
    assert space.json("get", "sgrp", GROUP)["metadata"]["annotations"]["rolloutfleet.dev/restart"]
    assert verb(space, "restart", "qwen", old["pod"]) == 3
    assert record(space)["epoch"] == new["epoch"]


def test_a_hang_ends_by_itself_in_the_same_life(space: Kubectl) -> None:
    before = record(space)
    said = inject(space, lambda session, target: faults.hang(session, target, seconds=6))
    assert said.startswith("SIGSTOP to ")
    eventually(lambda: not answers(space), 5, "the engine does not answer")
    eventually(lambda: answers(space), 30, "the engine answers again")
    await_routable(space, "qwen", 1, seconds=60)
    assert record(space)["epoch"] == before["epoch"]


def test_a_hang_without_an_end_is_ended_by_waking_it(space: Kubectl) -> None:
    inject(space, faults.hang)
    eventually(lambda: not answers(space), 5, "the engine does not answer")
    inject(space, faults.wake)
    eventually(lambda: answers(space), 30, "the engine answers again")


def test_a_cut_network_comes_back_with_its_routes(space: Kubectl) -> None:
    before = record(space)
    inject(space, lambda session, target: faults.cut_network(session, target, seconds=6))
    eventually(lambda: not answers(space), 6, "the engine is not reached")
    eventually(lambda: answers(space), 60, "the engine is reached again")
    await_routable(space, "qwen", 1, seconds=60)
    assert record(space)["epoch"] == before["epoch"]


def test_weights_that_somebody_exchanged_under_the_same_label_are_found_and_put_right(space: Kubectl) -> None:
    before = record(space)
    said = inject(space, lambda session, target: faults.load_wrong_weights(session, target, path="/models/m1"))
    assert said == f"it has loaded /models/m1, still labelled {label_for(space, 'qwen', 0)}"
    eventually(
        lambda: space("get", "events.events.k8s.io", "--output=jsonpath={.items[*].reason}"),
        60,
        "an event says WrongWeights",
        accept=lambda reasons: "WrongWeights" in reasons.split(),
    )
    eventually(
        lambda: through_proxy(space, before["pod"], "/model_info")["model_path"],
        60,
        "the engine has the fleet's weights again",
        accept=lambda path: path == "/models/m0",
    )
    await_routable(space, "qwen", 1, seconds=60)
    assert label_of(space, before["pod"]) == label_for(space, "qwen", 0)
    assert record(space)["epoch"] == before["epoch"]


def test_a_killed_engine_waits_to_be_resumed_and_then_serves(
    space: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    before = record(space)
    assert verb(space, "resume", "qwen") == 3
    assert "nothing to resume" in capsys.readouterr().err
    inject(space, faults.kill)
    ended = eventually(
        lambda: record(space), 60, "it is Failed for good", accept=lambda now: now["reason"] == "RestartsExhausted"
    )
    assert ended["epoch"] > before["epoch"]
    assert ended["lastFailure"]["pod"] == before["pod"]
    eventually(lambda: serves(space), 30, "why says that nothing serves", accept=lambda found: found is Serves.NOT)
    capsys.readouterr()
    assert verb(space, "why", "qwen") == 2
    assert "kubectl rolloutfleet resume qwen" in capsys.readouterr().out
    with pytest.raises(Refused, match="has no pod"):
        inject(space, faults.kill)
    assert verb(space, "resume", "qwen") == 0
    assert await_new_life(space, before)["epoch"] == ended["epoch"]
    assert serves(space) is Serves.IN_FULL


def test_an_engine_whose_memory_is_filled_is_killed_for_it(space: Kubectl) -> None:
    await_routable(space, "small", 1, seconds=120)
    inject(space, faults.fill_memory, server="small")
    eventually(
        lambda: record(space, "small-main").get("lastFailure") or {},
        60,
        "its kubelet has told how the engine's life ended",
        accept=lambda failure: failure.get("reason") == "OOMKilled",
    )


def test_memory_without_a_limit_is_not_filled(space: Kubectl) -> None:
    with pytest.raises(Refused, match="no memory limit"):
        inject(space, faults.fill_memory)
