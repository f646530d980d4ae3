"""What the operator does when it hears of an update before it hears who leads it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.control.trainer_lease import TrainerLease
from rolloutfleet.kube.errors import Unreachable
from rolloutfleet.plan.observed import Fleet
from rolloutfleet.plan.training import training_of
from unit.control.cluster import Client, Cluster
from unit.plan.world import rollout_server

KEY = FleetKey("rl", "qwen")


def lease(fence: int, *, holder: str = "trainer", version: int = 1) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "qwen-trainer",
            "namespace": "rl",
            "uid": "lease",
            "resourceVersion": str(version),
            "labels": {"rolloutfleet.dev/server": "qwen"},
            "ownerReferences": [{"uid": "uid-qwen"}],
        },
        "spec": {"holderIdentity": holder, "leaseTransitions": fence, "leaseDurationSeconds": 15, "renewTime": "now"},
    }


def updating(fence: int) -> dict[str, Any]:
    weights = {"version": 0, "target": 1, "transaction": 1, "phase": "Updating", "deadline": "2999-01-01T00:00:00Z"}
    return {**rollout_server(), "status": {"training": {"holder": "trainer", "fence": fence, "weights": weights}}}


class Seen:
    """A store that has heard of an update, and an API server that knows the Lease."""

    def __init__(self, *, heard: dict[str, Any] | None, known: dict[str, Any] | None, fence: int = 2) -> None:
        self.store = FleetStore(clock=lambda: datetime.now(UTC))
        self.store.upsert("RolloutServer", updating(fence))
        if heard is not None:
            self.store.upsert("Lease", heard)
        cluster = Cluster()
        if known is not None:
            cluster.put("Lease", known)
        self.client = Client(cluster, "operator")
        self.asked = 0
        self.client.before = lambda *_: setattr(self, "asked", self.asked + 1)
        self._lease = TrainerLease(api=self.client, store=self.store)

    @property
    def fleet(self) -> Fleet:
        fleet = self.store.fleet(KEY)
        assert fleet is not None
        return fleet

    @property
    def held(self) -> bool:
        return training_of(self.fleet, datetime.now(UTC)).held

    def catches_up(self) -> bool:
        return asyncio.run(self._lease.catches_up(KEY, self.fleet))


@pytest.mark.parametrize("heard", [None, lease(1, holder="its predecessor")])
def test_an_update_of_a_leader_that_was_not_heard_of_is_held(heard: dict[str, Any] | None) -> None:
    seen = Seen(heard=heard, known=lease(2))
    assert not seen.held, "it would pass for one whose leader has died"
    assert seen.catches_up()
    assert seen.held


def test_the_lease_is_asked_for_once_where_it_is_behind_for_good() -> None:
    seen = Seen(heard=lease(0, holder="", version=1000), known=None, fence=3)
    seen.client.cluster.put("Lease", lease(0, holder=""))
    assert [seen.catches_up() for _ in range(3)] == [False] * 3
    assert (seen.asked, seen.held) == (1, False)


def test_nobody_is_asked_while_the_lease_is_as_new_as_the_status() -> None:
    seen = Seen(heard=lease(2), known=lease(2))
    assert not seen.catches_up()
    assert (seen.asked, seen.held) == (0, True)


def test_while_nobody_can_be_asked_nothing_is_planned() -> None:
    seen = Seen(heard=None, known=lease(2))
    seen.client.trouble = Unreachable("no route")
    with pytest.raises(Unreachable):
        seen.catches_up()
    seen.client.trouble = None
    assert seen.catches_up()
