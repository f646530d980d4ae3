"""One replica of the operator acts at a time; the next one begins at once, or when the lease has certainly ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from copy import deepcopy
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutfleet.control.freshness import NotLeading
from rolloutfleet.control.leadership import (
    ATTEMPT_SECONDS,
    DURATION_SECONDS,
    LEASE,
    LOOK_SECONDS,
    MARGIN_SECONDS,
    RENEW_SECONDS,
    Leadership,
)
from rolloutfleet.kube.client import KubeApi, Resource
from rolloutfleet.kube.errors import AlreadyExists, ApiError, Conflict, NotFound, Unreachable
from rolloutfleet.kube.lease import DURATION_SECONDS as LONGEST_LEASE_SECONDS
from rolloutfleet.kube.lease import LeaseHolder
from unit.virtual_time import now, run

Term = Callable[[], Awaitable[None]]
LATENCY = 0.02


class ApiServer:
    """Holds one Lease; `None` until somebody creates it."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        return dict(self.lease["spec"])


class Line:
    """One replica's way to the API server. `trouble` is raised instead of an answer; `hangs`: no answer ever comes."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.latency = LATENCY
        self.trouble: ApiError | None = None
        self.hangs = False

    async def _pass(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(self.latency)
        if self.trouble is not None:
            raise self.trouble

    async def get(
        self, resource: Resource, name: str, *, namespace: str | None = None, cached: bool = False
    ) -> dict[str, Any]:
        assert (name, namespace) == (LEASE, "system")
        await self._pass()
        if self.server.lease is None:
            raise NotFound(name, status=404)
        return deepcopy(self.server.lease)

    async def create(self, resource: Resource, manifest: dict[str, Any]) -> dict[str, Any]:
        await self._pass()
        if self.server.lease is not None:
            raise AlreadyExists("exists", status=409)
        self.server.lease = {**deepcopy(manifest), "spec": {}}
        self.server.lease["metadata"]["resourceVersion"] = "1"
        return deepcopy(self.server.lease)

    async def update(self, resource: Resource, manifest: dict[str, Any]) -> dict[str, Any]:
        await self._pass()
        assert self.server.lease is not None
        held = self.server.lease["metadata"]["resourceVersion"]
        if manifest["metadata"]["resourceVersion"] != held:
            raise Conflict("changed", status=409)
        self.server.lease = deepcopy(manifest)
        self.server.lease["metadata"]["resourceVersion"] = str(int(held) + 1)
        return deepcopy(self.server.lease)


class Replica:
    """A process of the operator whose work is to count; `terms` tells when each of its terms began and ended."""

    def __init__(self, server: ApiServer, name: str) -> None:
        self.line = Line(server)
        self.terms: list[list[float]] = []
        loop = asyncio.get_running_loop()
        lease = LeaseHolder(
            api=cast(KubeApi, self.line),
            namespace="system",
            name=LEASE,
            identity=name,
            duration_seconds=DURATION_SECONDS,
            renew_seconds=RENEW_SECONDS,
            margin_seconds=MARGIN_SECONDS,
            create=True,
            monotonic=loop.time,
        )
        self.leadership = Leadership(lease)
        self.process = asyncio.create_task(self.leadership.run(self._term))

    async def _term(self) -> None:
        self.terms.append([now()])
        try:
            await asyncio.Event().wait()
        finally:
            self.terms[-1].append(now())

    @property
    def acts(self) -> bool:
        return bool(self.terms) and len(self.terms[-1]) == 1

    async def terminate(self) -> None:
        """As SIGTERM ends it."""
        self.process.cancel()
        await asyncio.gather(self.process, return_exceptions=True)

    async def kill(self) -> None:
        """As SIGKILL ends it: nobody hears of it."""
        self.line.trouble = Unreachable("dead")
        await self.terminate()


async def until(condition: Callable[[], bool], *, seconds: float = 60.0) -> float:
    """How long that took."""
    begun = now()
    while not condition():
        assert now() - begun < seconds, "it never comes"
        await asyncio.sleep(0.01)
    return now() - begun


def test_of_two_that_find_no_lease_one_leads_and_the_other_stands_by() -> None:
    async def scenario() -> None:
        server = ApiServer()
        first, second = Replica(server, "a"), Replica(server, "b")
        await asyncio.sleep(60)
        assert sorted([first.acts, second.acts]) == [False, True]
        assert (len(first.terms) + len(second.terms), server.spec["leaseTransitions"]) == (1, 1)
        leader, standby = (first, second) if first.acts else (second, first)
        leader.leadership.require()
        with pytest.raises(NotLeading):
            standby.leadership.require()

    run(scenario())


def test_a_leader_that_is_told_to_end_stops_then_gives_the_lease_back_and_the_standby_begins_at_its_next_look() -> None:
    async def scenario() -> None:
        server = ApiServer()
        leader = Replica(server, "a")
        await until(lambda: leader.acts)
        standby = Replica(server, "b")
        await asyncio.sleep(10)
        await leader.terminate()
        assert server.spec["holderIdentity"] is None
        assert await until(lambda: standby.acts) < LOOK_SECONDS + 1.0
        assert leader.terms[-1][1] <= standby.terms[0][0]
        assert server.spec["leaseTransitions"] == 2

    run(scenario())


@pytest.mark.parametrize("after_renewal", [0.1, 0.5, 0.99])
def test_after_a_kill_the_standby_begins_when_the_lease_has_ended_and_not_before(after_renewal: float) -> None:
    async def scenario() -> None:
        server = ApiServer()
        leader = Replica(server, "a")
        standby = Replica(server, "b")
        await until(lambda: leader.acts)
        await asyncio.sleep(10)
        stamp = server.spec["renewTime"]
        await until(lambda: server.spec["renewTime"] != stamp)
        await asyncio.sleep(after_renewal)
        await leader.kill()
        took = await until(lambda: standby.acts)
        since_renewal = took + after_renewal
        assert since_renewal > DURATION_SECONDS
        assert since_renewal < DURATION_SECONDS + LOOK_SECONDS + 5 * LATENCY, "it looks when the lease ends"

    run(scenario())


def test_a_process_that_starts_anew_in_the_leaders_pod_leads_at_once_under_a_new_number() -> None:
    async def scenario() -> None:
        server = ApiServer()
        leader, standby = Replica(server, "a"), Replica(server, "b")
        await until(lambda: leader.acts)
        await asyncio.sleep(10)
        await leader.kill()
        again = Replica(server, "a")
        assert await until(lambda: again.acts) < 1.0
        assert server.spec["leaseTransitions"] == 2
        await asyncio.sleep(20)
        assert (again.acts, standby.terms) == (True, [])

    run(scenario())


@pytest.mark.parametrize("hangs", [True, False])
def test_a_leader_that_cannot_renew_stops_before_another_may_begin_and_ends_no_process(hangs: bool) -> None:
    async def scenario() -> None:
        server = ApiServer()
        leader, standby = Replica(server, "a"), Replica(server, "b")
        await until(lambda: leader.acts)
        await asyncio.sleep(10)
        leader.line.hangs, leader.line.trouble = hangs, Unreachable("no answer")
        await until(lambda: not leader.acts)
        with pytest.raises(NotLeading):
            leader.leadership.require()
        await until(lambda: standby.acts)
        assert standby.terms[0][0] - leader.terms[0][1] >= MARGIN_SECONDS - LATENCY
        leader.line.hangs, leader.line.trouble = False, None
        await asyncio.sleep(20)
        assert not leader.process.done()
        assert (leader.acts, standby.acts) == (False, True), "it does not take back what it lost"

    run(scenario())


@pytest.mark.parametrize("seconds", [0.5, 1.5, 10.0])
def test_an_api_server_that_is_away_pauses_the_operator_at_most(seconds: float) -> None:
    async def scenario() -> None:
        server = ApiServer()
        replicas = [Replica(server, "a"), Replica(server, "b")]
        await until(lambda: any(replica.acts for replica in replicas))
        await asyncio.sleep(10)
        for replica in replicas:
            replica.line.hangs = True
        await asyncio.sleep(seconds)
        borne = DURATION_SECONDS - MARGIN_SECONDS - RENEW_SECONDS
        assert any(replica.acts for replica in replicas) == (seconds < borne)
        for replica in replicas:
            replica.line.hangs = False
        await until(lambda: any(replica.acts for replica in replicas))
        await asyncio.sleep(20)
        assert sum(replica.acts for replica in replicas) == 1
        assert not any(replica.process.done() for replica in replicas)

    run(scenario())


@pytest.mark.parametrize("latency", [0.6, 2.0, 3.0])
def test_where_every_answer_is_late_leases_are_longer_and_the_leader_leads_on(latency: float) -> None:
    async def scenario() -> None:
        server = ApiServer()
        leader = Replica(server, "a")
        await until(lambda: leader.acts)
        leader.line.latency = latency
        await asyncio.sleep(60)
        terms = len(leader.terms)
        await asyncio.sleep(300)
        assert (leader.acts, len(leader.terms)) == (True, terms), "at most the change costs a term"
        assert server.spec["leaseDurationSeconds"] == LONGEST_LEASE_SECONDS
        leader.line.latency = LATENCY
        await asyncio.sleep(30)
        assert server.spec["leaseDurationSeconds"] == DURATION_SECONDS

    run(scenario())


def test_one_lost_answer_costs_nothing() -> None:
    async def scenario() -> None:
        server = ApiServer()
        leader = Replica(server, "a")
        await until(lambda: leader.acts)
        for _ in range(20):
            leader.line.hangs = True
            await asyncio.sleep(RENEW_SECONDS / 2)
            leader.line.hangs = False
            await asyncio.sleep(3.3 * RENEW_SECONDS)
        assert len(leader.terms) == 1

    run(scenario())


def test_work_that_ends_by_itself_is_an_error_and_the_lease_is_given_back() -> None:
    async def broken() -> None:
        raise ValueError("a bug")

    async def scenario() -> None:
        server = ApiServer()
        replica = Replica(server, "a")
        await until(lambda: replica.acts)
        await replica.terminate()
        with pytest.raises(ValueError, match="a bug"):
            await replica.leadership.run(broken)
        assert server.spec["holderIdentity"] is None

    run(scenario())


def test_without_a_lease_it_leads_for_ever() -> None:
    async def scenario() -> None:
        leadership, begun = Leadership(), asyncio.Event()

        async def term() -> None:
            begun.set()
            await asyncio.Event().wait()

        process = asyncio.create_task(leadership.run(term))
        await begun.wait()
        leadership.require()
        process.cancel()
        await asyncio.gather(process, return_exceptions=True)

    run(scenario())


Cut = tuple[int, float, float]
"""Which replica is cut off, after how many seconds, for how long."""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 6.0), st.floats(0.0, 8.0)), max_size=12))
def test_whoever_is_cut_off_when_and_for_how_long_two_never_act_at_once(cuts: list[Cut]) -> None:
    async def scenario() -> None:
        server = ApiServer()
        replicas = [Replica(server, name) for name in "abc"]

        async def cut(index: int, seconds: float) -> None:
            replicas[index].line.hangs = True
            await asyncio.sleep(seconds)
            replicas[index].line.hangs = False

        running = []
        for index, pause, seconds in cuts:
            await asyncio.sleep(pause)
            running.append(asyncio.create_task(cut(index, seconds)))
        await asyncio.gather(*running)
        # At worst a request hangs, and then a lease ends that was asked for by one who is slow.
        longest = ATTEMPT_SECONDS + LONGEST_LEASE_SECONDS + 2 * LOOK_SECONDS
        await until(lambda: any(replica.acts for replica in replicas), seconds=longest)
        end = now()
        terms = sorted([*term, end][:2] for replica in replicas for term in replica.terms)
        for (_, ended), (begun, _) in pairwise(terms):
            assert ended <= begun
        assert not any(replica.process.done() for replica in replicas)

    run(scenario())
