"""A Lease has one leader at a time, told by the contender's own clock, and a number that rises with each leader."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rolloutfleet.kube import lease as lease_module
from rolloutfleet.kube.client import LEASE, KubeApi, Resource
from rolloutfleet.kube.errors import ApiError, Conflict, NotFound, Unreachable
from rolloutfleet.kube.lease import DURATION_SECONDS, RENEW_SECONDS, HeldBy, LeaseHolder


class Leases:
    """Stands in for the API server: get and conditional update of one Lease."""

    def __init__(self, spec: dict[str, Any] | None = None) -> None:
        metadata = {"name": "qwen-trainer", "namespace": "rl", "resourceVersion": "1"}
        self.stored: dict[str, Any] = {"metadata": metadata, "spec": spec or {}}
        self.fail: ApiError | None = None
        self.before_update: list[dict[str, Any]] = []
        """Specs that others write between our get and our update."""

    @property
    def spec(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.stored["spec"])

    async def get(
        self, resource: Resource, name: str, *, namespace: str | None = None, cached: bool = False
    ) -> dict[str, Any]:
        assert resource is LEASE
        if self.fail:
            raise self.fail
        if (namespace, name) != ("rl", "qwen-trainer"):
            raise NotFound(name, status=404)
        return deepcopy(self.stored)

    async def update(self, resource: Resource, manifest: dict[str, Any]) -> dict[str, Any]:
        assert resource is LEASE
        while self.before_update:
            self.write(self.before_update.pop())
        if manifest["metadata"]["resourceVersion"] != self.stored["metadata"]["resourceVersion"]:
            raise Conflict("changed", status=409)
        self.write(manifest["spec"])
        return deepcopy(self.stored)

    def write(self, spec: dict[str, Any]) -> None:
        metadata = self.stored["metadata"]
        version = str(int(metadata["resourceVersion"]) + 1)
        self.stored = {"metadata": {**metadata, "resourceVersion": version}, "spec": deepcopy(spec)}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def contender(leases: Leases, clock: Clock, identity: str = "pod-a", name: str = "qwen-trainer") -> LeaseHolder:
    return LeaseHolder(api=cast(KubeApi, leases), namespace="rl", name=name, identity=identity, monotonic=clock)


def test_an_empty_lease_is_taken_at_once_and_numbered() -> None:
    leases, clock = Leases(), Clock()
    holder = contender(leases, clock)
    assert holder.valid is False
    assert asyncio.run(holder.acquire()) == 1
    assert (holder.valid, holder.fence, holder.holder) == (True, 1, "pod-a")
    assert leases.spec["holderIdentity"] == "pod-a"
    assert leases.spec["leaseTransitions"] == 1
    assert leases.spec["leaseDurationSeconds"] == DURATION_SECONDS
    assert leases.spec["acquireTime"] == leases.spec["renewTime"]


def test_a_lease_that_does_not_exist_is_not_created() -> None:
    with pytest.raises(NotFound):
        asyncio.run(contender(Leases(), Clock(), name="other").acquire())


def test_who_leads_is_told_to_those_who_come_later() -> None:
    async def scenario() -> None:
        leases, clock = Leases(), Clock()
        await contender(leases, clock, "pod-a").acquire()
        second = contender(leases, clock, "pod-b")
        with pytest.raises(HeldBy) as refusal:
            await second.acquire()
        assert refusal.value.holder == "pod-a"
        assert second.holder == "pod-a"
        assert (second.valid, second.fence) == (False, 0)
        assert leases.spec["holderIdentity"] == "pod-a"

    asyncio.run(scenario())


def test_expiry_counts_from_when_the_contender_itself_last_saw_a_change() -> None:
    async def scenario() -> None:
        stale = {
            "holderIdentity": "pod-a",
            "leaseTransitions": 6,
            "leaseDurationSeconds": DURATION_SECONDS,
            "renewTime": "2001-01-01T00:00:00.000000Z",
        }
        leases, clock = Leases(stale), Clock()
        second = contender(leases, clock, "pod-b")
        with pytest.raises(HeldBy):  # the clock of another machine says nothing: it is watched for a whole term
            await second.acquire()
        clock.now += DURATION_SECONDS - 0.1
        with pytest.raises(HeldBy):
            await second.acquire()
        leases.write({**stale, "renewTime": "2001-01-01T00:00:15.000000Z"})
        clock.now += 0.2
        with pytest.raises(HeldBy):
            await second.acquire()
        clock.now += DURATION_SECONDS
        assert await second.acquire() == 7
        assert leases.spec["holderIdentity"] == "pod-b"

    asyncio.run(scenario())


def test_a_lease_that_was_deleted_gives_no_number_that_was_given_before() -> None:
    leases = Leases()
    assert asyncio.run(contender(leases, Clock(), "pod-a").acquire(above=6)) == 7
    assert leases.spec["leaseTransitions"] == 7


def test_a_holder_that_asked_for_a_longer_term_is_given_it() -> None:
    async def scenario() -> None:
        leases, clock = Leases({"holderIdentity": "pod-a", "leaseDurationSeconds": 60}), Clock()
        second = contender(leases, clock, "pod-b")
        for step in (0.0, DURATION_SECONDS + 1.0, 40.0):
            clock.now += step
            with pytest.raises(HeldBy):
                await second.acquire()
        clock.now += 10.0
        assert await second.acquire() == 1

    asyncio.run(scenario())


def test_the_number_rises_when_a_restarted_process_of_the_same_pod_comes_back() -> None:
    async def scenario() -> None:
        leases, clock = Leases(), Clock()
        first = contender(leases, clock)
        assert await first.acquire() == 1
        assert await contender(leases, clock).acquire() == 2
        with pytest.raises(HeldBy):
            await first.renew()
        assert first.valid is False

    asyncio.run(scenario())


def test_validity_ends_by_the_own_clock_and_a_renewal_prolongs_it() -> None:
    async def scenario() -> None:
        leases, clock = Leases(), Clock()
        holder = contender(leases, clock)
        await holder.acquire()
        clock.now += DURATION_SECONDS - 1.0
        assert holder.valid
        await holder.renew()
        acquired = leases.spec["acquireTime"]
        clock.now += DURATION_SECONDS - 1.0
        assert holder.valid
        assert (leases.spec["leaseTransitions"], leases.spec["acquireTime"]) == (1, acquired)
        clock.now += 1.0
        assert not holder.valid

    asyncio.run(scenario())


def test_validity_counts_from_before_the_request_since_others_count_from_after_it() -> None:
    async def scenario() -> None:
        leases, clock = Leases(), Clock()
        holder = contender(leases, clock)
        write = leases.update

        async def slow(resource: Resource, manifest: dict[str, Any]) -> dict[str, Any]:
            clock.now += 10.0
            return await write(resource, manifest)

        leases.update = slow  # type: ignore[method-assign]
        await holder.acquire()
        clock.now += DURATION_SECONDS - 10.0
        assert not holder.valid

    asyncio.run(scenario())


def test_a_holder_that_was_overtaken_loses_at_its_next_renewal() -> None:
    async def scenario() -> None:
        leases, clock = Leases(), Clock()
        holder = contender(leases, clock)
        await holder.acquire()
        leases.write({"holderIdentity": "pod-b", "leaseTransitions": 2})
        with pytest.raises(HeldBy, match="pod-b"):
            await holder.renew()
        assert (holder.valid, holder.holder) == (False, "pod-b")
        assert leases.spec["holderIdentity"] == "pod-b"

    asyncio.run(scenario())


def test_a_change_between_look_and_renewal_is_no_loss_until_the_next_look_says_so() -> None:
    async def scenario() -> None:
        leases = Leases()
        holder = contender(leases, Clock())
        await holder.acquire()
        leases.before_update = [leases.spec]
        with pytest.raises(Conflict):
            await holder.renew()
        assert holder.valid
        await holder.renew()
        assert holder.valid

    asyncio.run(scenario())


def test_of_two_that_see_a_free_lease_at_once_one_gets_it() -> None:
    async def scenario() -> None:
        leases = Leases()
        leases.before_update = [{"holderIdentity": "pod-b", "leaseTransitions": 1}]
        holder = contender(leases, Clock())
        with pytest.raises(HeldBy):
            await holder.acquire()
        assert (holder.valid, holder.fence) == (False, 0)
        assert leases.spec["holderIdentity"] == "pod-b"

    asyncio.run(scenario())


def test_a_released_lease_is_taken_by_the_next_one_at_once_with_a_higher_number() -> None:
    async def scenario() -> None:
        leases, clock = Leases(), Clock()
        first = contender(leases, clock, "pod-a")
        await first.acquire()
        await first.release()
        assert (first.valid, first.holder) == (False, "")
        assert leases.spec["holderIdentity"] is None
        assert await contender(leases, clock, "pod-b").acquire() == 2

    asyncio.run(scenario())


def test_a_lease_that_somebody_else_holds_meanwhile_is_not_released() -> None:
    async def scenario() -> None:
        leases, clock = Leases(), Clock()
        holder = contender(leases, clock)
        await holder.acquire()
        leases.write({"holderIdentity": "pod-b", "leaseTransitions": 2})
        await holder.release()
        assert leases.spec["holderIdentity"] == "pod-b"

    asyncio.run(scenario())


# keep()


class Pauses:
    """Stands in for asyncio.sleep: time passes on the test's clock."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = clock
        self.taken = 0
        self.then: dict[int, Any] = {}
        monkeypatch.setattr(lease_module, "asyncio", SimpleNamespace(sleep=self, timeout=asyncio.timeout))

    async def __call__(self, seconds: float) -> None:
        self.taken += 1
        self.clock.now += seconds
        if self.taken in self.then:
            self.then[self.taken]()
        assert self.taken < 100, "keep() does not end"


def test_keeping_ends_when_another_has_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        leases, clock = Leases(), Clock()
        pauses = Pauses(clock, monkeypatch)
        pauses.then[10] = lambda: leases.write({"holderIdentity": "pod-b", "leaseTransitions": 2})
        holder = contender(leases, clock)
        await holder.acquire()
        await holder.keep()
        assert (pauses.taken, holder.valid) == (10, False)

    asyncio.run(scenario())


def test_keeping_bears_an_outage_that_is_shorter_than_the_term_and_ends_with_a_longer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        leases, clock = Leases(), Clock()
        pauses = Pauses(clock, monkeypatch)

        def outage() -> None:
            leases.fail = Unreachable("no answer")

        def recovery() -> None:
            leases.fail = None

        pauses.then = {1: outage, 3: recovery, 20: outage}
        holder = contender(leases, clock)
        await holder.acquire()
        await holder.keep()
        assert not holder.valid
        assert pauses.taken == 19 + -(-DURATION_SECONDS // int(RENEW_SECONDS)), "lost one term after the last renewal"
        assert leases.spec["holderIdentity"] == "pod-a"

    asyncio.run(scenario())
