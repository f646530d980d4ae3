"""What a plan lists is performed in its order; of one independent kind, side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import pytest

from rolloutfleet.control import reconcile as module
from rolloutfleet.control.executor import Executor
from rolloutfleet.control.freshness import Stop
from rolloutfleet.control.reconcile import IN_FLIGHT, Reconciler
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.control.trainer_lease import TrainerLease
from rolloutfleet.kube.client import ApiError
from rolloutfleet.kube.queue import WorkQueue
from rolloutfleet.plan.actions import Action, ApplyStatus, CreatePod, DeletePod, Deregister, Verify
from unit.control.cluster import Client, Cluster
from unit.plan.world import DEFAULTS, rollout_server

KEY = FleetKey("rl", "qwen")


class Hands:
    """Performs what it is given: `begun` and `ended` in their order; `fails` says whose turn ends with which error."""

    def __init__(self, fails: dict[str, Exception] | None = None) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.most_at_once = 0
        self._fails = fails or {}
        self._now = 0

    async def perform(self, key: FleetKey, action: Action) -> None:
        self.begun.append(name_of(action))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        for _ in range(3):
            await asyncio.sleep(0)
        self._now -= 1
        self.ended.append(name_of(action))
        if name_of(action) in self._fails:
            raise self._fails[name_of(action)]


def name_of(action: Action) -> str:
    match action:
        case CreatePod(manifest=manifest):
            return str(manifest["name"])
        case DeletePod(name=name) | ApplyStatus(name=name):
            return name
        case Deregister(url=url) | Verify(url=url):
            return url
    raise TypeError(action)


def create(name: str) -> CreatePod:
    return CreatePod({"name": name})


def status(name: str) -> ApplyStatus:
    return ApplyStatus(kind="ServerGroup", name=name, uid="u", status={"lastEpoch": 1})


def verify(name: str) -> Verify:
    return Verify(pod_uid="u", url=name, training_key="")


@pytest.fixture
def perform(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[Action], Hands], WorkQueue[FleetKey]]:
    def run(actions: Sequence[Action], hands: Hands) -> WorkQueue[FleetKey]:
        async def scenario() -> WorkQueue[FleetKey]:
            store = FleetStore(clock=lambda: datetime.now(UTC))
            store.upsert("RolloutServer", rollout_server())
            queue: WorkQueue[FleetKey] = WorkQueue()
            reconcile = Reconciler(
                store=store,
                executor=cast(Executor, hands),
                queue=queue,
                defaults=DEFAULTS,
                clock=lambda: datetime.now(UTC),
                looked_at=lambda _: True,
                lease=TrainerLease(api=Client(Cluster(), "a"), store=store),
            )
            await reconcile(KEY)
            return queue

        def plan(*_: Any, **__: Any) -> list[Action]:
            return list(actions)

        monkeypatch.setattr(module, "plan_fleet", plan)
        return asyncio.run(scenario())

    return run


Perform = Callable[[Sequence[Action], Hands], WorkQueue[FleetKey]]


def test_pods_are_made_side_by_side_after_the_status_that_names_them_and_before_what_follows(perform: Perform) -> None:
    hands = Hands()
    perform([status("s"), create("a"), create("b"), verify("v")], hands)
    assert hands.begun == ["s", "a", "b", "v"]
    assert hands.ended == hands.begun
    assert hands.most_at_once == 2


def test_out_of_the_routers_comes_before_deleted(perform: Perform) -> None:
    hands = Hands()
    leave = [Deregister(router="r", router_uid="r", router_url="", url=url, worker_id="1") for url in ("x", "y")]
    perform([*leave, DeletePod(name="a", uid="u"), DeletePod(name="b", uid="u")], hands)
    assert set(hands.ended[:2]) == {"x", "y"}
    assert set(hands.begun[2:]) == {"a", "b"}


def test_work_on_engines_and_statuses_are_one_at_a_time(perform: Perform) -> None:
    hands = Hands()
    perform([status("s"), status("t"), verify("v"), verify("w")], hands)
    assert hands.most_at_once == 1
    assert hands.ended == ["s", "t", "v", "w"]


def test_a_plan_of_a_thousand_pods_leaves_connections_for_others(perform: Perform) -> None:
    hands = Hands()
    perform([create(str(number)) for number in range(1000)], hands)
    assert len(hands.ended) == 1000
    assert hands.most_at_once == IN_FLIGHT


def test_what_is_refused_keeps_its_neighbours_and_ends_the_plan(perform: Perform) -> None:
    hands = Hands({"a": ApiError("no", status=500)})
    with pytest.raises(ApiError):
        perform([create("a"), create("b"), verify("v")], hands)
    assert set(hands.ended) == {"a", "b"}


def test_a_plan_that_is_outdated_is_made_anew(perform: Perform) -> None:
    hands = Hands({"s": Stop()})
    queue = perform([status("s"), create("a")], hands)
    assert hands.begun == ["s"]
    assert queue.depth() == 1
