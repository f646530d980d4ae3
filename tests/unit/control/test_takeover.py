"""A standby is warm and does nothing; the next leader goes on where the last one stopped, and does nothing twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rolloutfleet.control.leadership import LEASE, Leadership, operators_lease
from rolloutfleet.control.operator import RESYNC_SECONDS, STALE_SECONDS, WATCHED, Operator
from rolloutfleet.control.progress import PROGRESS_SECONDS
from rolloutfleet.control.store import FleetKey
from rolloutfleet.kube.errors import Unreachable
from rolloutfleet.plan.failures import Trouble
from rolloutfleet.plan.observed import EngineProbe
from unit.control.cluster import Client, Cluster
from unit.plan.world import DEFAULTS, rollout_server
from unit.virtual_time import now, run

KEY = FleetKey("rl", "qwen")


class Replica:
    """A process of the operator: watches come at once, and all that it does goes over one client."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self.client = Client(cluster, name)
        self.held_up = 0.0
        """Seconds that its clock is ahead of the others': it was suspended that long and has not noticed yet."""
        loop = asyncio.get_running_loop()
        lease = operators_lease(self.client, "system", name, monotonic=lambda: loop.time() + self.held_up)
        self.leadership = Leadership(lease)
        self.operator = Operator(api=self.client, defaults=DEFAULTS, namespace=None, leadership=self.leadership)
        self.cluster = cluster
        self.hears = True
        cluster.watchers.append(lambda kind, event, body: self._told(kind, event, body))

    def _told(self, kind: str, event: str, body: dict[str, object]) -> None:
        if self.hears and kind in {watched.resource.kind for watched in WATCHED}:
            self.operator.saw(kind, event, body)

    async def kill(self) -> None:
        """As SIGKILL ends it."""
        self.hears = False
        self.client.trouble = Unreachable("dead")
        await self.operator.stop()

    @property
    def leads(self) -> bool:
        return self.operator.term is not None

    @property
    def writes(self) -> list[tuple[str, str, str]]:
        return self.cluster.writes(self.name)


async def until(condition: Callable[[], object], what: str) -> None:
    begun = now()
    while not condition():
        assert now() - begun < 30, f"not within 30 s: {what}"
        await asyncio.sleep(0.01)


def pods(cluster: Cluster) -> list[str]:
    return cluster.names("Pod")


async def converged() -> tuple[Cluster, Replica, Replica]:
    """A fleet of two engines whose pods are made, the leader, and a standby."""
    cluster = Cluster()
    cluster.put("RolloutServer", rollout_server())
    leader = Replica(cluster, "a")
    await leader.operator.start()
    await until(lambda: len(pods(cluster)) == 2, "both pods")
    standby = Replica(cluster, "b")
    for (kind, _), body in list(cluster.objects.items()):  # as kopf begins, with a list
        standby._told(kind, "ADDED", body)
    await standby.operator.start()
    await asyncio.sleep(5)
    assert (leader.leads, standby.leads) == (True, False)
    return cluster, leader, standby


def test_a_standby_knows_everything_writes_nothing_and_is_healthy() -> None:
    async def scenario() -> None:
        cluster, leader, standby = await converged()
        cluster.remove("Pod", pods(cluster)[0])
        await until(lambda: len(pods(cluster)) == 2, "the leader replaces a pod")
        await asyncio.sleep(3 * RESYNC_SECONDS)
        assert standby.writes == []
        assert standby.operator.store.fleet(KEY) == leader.operator.store.fleet(KEY)
        assert standby.operator.healthy()["leads"] == 0.0
        assert leader.operator.healthy()["leads"] == 1.0
        for replica in (leader, standby):
            await replica.operator.stop()

    run(scenario())


def test_what_dies_together_with_the_leader_is_replaced_once_by_the_next_one() -> None:
    async def scenario() -> None:
        cluster, leader, standby = await converged()
        await leader.kill()
        victim = pods(cluster)[0]
        cluster.remove("Pod", victim)
        await until(lambda: standby.leads and len(pods(cluster)) == 2, "a replacement")
        await asyncio.sleep(2 * RESYNC_SECONDS)
        assert pods(cluster) == ["qwen-main-0-e3-r0", "qwen-main-1-e2-r0"]
        assert [name for verb, kind, name in standby.writes if (verb, kind) == ("create", "Pod")] == [
            "qwen-main-0-e3-r0"
        ]
        await standby.operator.stop()

    run(scenario())


def test_a_takeover_without_need_writes_nothing() -> None:
    async def scenario() -> None:
        _, leader, standby = await converged()
        await leader.operator.stop()
        await until(lambda: standby.leads, "the standby leads")
        await asyncio.sleep(2 * RESYNC_SECONDS)
        assert standby.writes == []
        await standby.operator.stop()

    run(scenario())


def test_everything_is_listed_before_anything_is_written_and_groups_before_pods() -> None:
    async def scenario() -> None:
        cluster, leader, standby = await converged()
        standby.hears = False  # its watches lag: it has not heard of the next pod
        cluster.remove("Pod", pods(cluster)[0], told=True)
        await until(lambda: len(pods(cluster)) == 2, "the leader replaces a pod")
        await asyncio.sleep(PROGRESS_SECONDS + 1)
        standby.operator.saw("ServerGroup", "MODIFIED", cluster.objects["ServerGroup", "qwen-main"])
        begun = len(cluster.calls)
        await leader.operator.stop()
        await until(lambda: standby.leads, "the standby leads")
        await asyncio.sleep(5)
        assert standby.writes == [], "a pod that only a status names is not taken for deleted"
        listed = [kind for _, verb, kind, _ in cluster.calls[begun:] if verb == "list"]
        assert listed.index("ServerGroup") < listed.index("Pod")
        await standby.operator.stop()

    run(scenario())


def test_a_plan_in_progress_stops_before_its_next_action_and_the_next_leader_finishes_it() -> None:
    async def scenario() -> None:
        cluster, leader, standby = await converged()

        def hold_up(verb: str, kind: str, name: str) -> None:
            if (verb, kind, name) == ("apply", "ServerGroup", "qwen-main"):
                leader.held_up = 60.0

        written = len(leader.writes)
        leader.client.before = hold_up
        cluster.remove("Pod", pods(cluster)[0])
        await until(lambda: leader.held_up, "the epoch in status")
        await asyncio.sleep(0.1)
        assert leader.leads, "its own timers have not told it yet"
        assert [kind for _, kind, _ in leader.writes[written:]] == ["ServerGroup"]
        assert len(pods(cluster)) == 1
        await leader.kill()
        await until(lambda: len(pods(cluster)) == 2, "the replacement")
        assert pods(cluster) == ["qwen-main-0-e3-r0", "qwen-main-1-e2-r0"], "of the epoch that was recorded"
        await standby.operator.stop()

    run(scenario())


def test_a_term_begins_without_what_an_earlier_one_remembered() -> None:
    async def scenario() -> None:
        _, leader, standby = await converged()
        store = leader.operator.store
        store.busy["uid"] = "verify"
        store.registering["router"] = {}
        store.tables["router"] = {}
        store.probes["uid"] = EngineProbe(answering=True)
        store.create_failures[KEY] = {"pod": Trouble("Forbidden", "quota")}
        first = leader.operator.term
        leader.client.trouble = Unreachable("no way")
        await until(lambda: not leader.leads, "it leads no more")
        await until(lambda: standby.leads, "the standby leads")
        leader.client.trouble = None
        await asyncio.sleep(10)
        assert not leader.leads
        await standby.operator.stop()
        await until(lambda: leader.leads, "it leads again")
        assert leader.operator.term is not first
        left = [store.busy, store.registering, store.tables, store.probes, store.create_failures.get(KEY, {})]
        assert left == [{}] * 5
        await leader.operator.stop()

    run(scenario())


def test_nobody_asks_a_leader_that_is_gone_to_act() -> None:
    async def scenario() -> None:
        cluster, leader, standby = await converged()
        await standby.operator.stop()
        leader.client.trouble = Unreachable("no way")
        await until(lambda: not leader.leads, "it leads no more")
        before = len(leader.writes)
        cluster.remove("Pod", pods(cluster)[0])
        await asyncio.sleep(5)
        assert len(leader.writes) == before
        leader.client.trouble = None
        await until(lambda: len(pods(cluster)) == 2, "it takes its lease back and works on")
        assert cluster.objects["Lease", LEASE]["spec"]["holderIdentity"] == "a"
        await leader.operator.stop()

    run(scenario())


def test_liveness_fails_when_a_watch_owes_what_lists_find_and_not_when_it_is_only_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr("rolloutfleet.control.operator.time.monotonic", asyncio.get_running_loop().time)
        cluster, leader, standby = await converged()
        await asyncio.sleep(2 * STALE_SECONDS)
        standby.operator.healthy()
        standby.hears = False
        await asyncio.sleep(2 * STALE_SECONDS)
        standby.operator.healthy()  # nothing has happened that it could have been told
        cluster.remove("Pod", pods(cluster)[0])
        await asyncio.sleep(RESYNC_SECONDS + 1)
        standby.operator.healthy()
        await asyncio.sleep(STALE_SECONDS)
        with pytest.raises(RuntimeError, match="watch of"):
            standby.operator.healthy()
        leader.operator.healthy()
        standby.hears = True
        for kind in ("ServerGroup", "Pod", "RolloutServer"):
            for (held, _), body in list(cluster.objects.items()):
                if held == kind:
                    standby._told(kind, "ADDED", body)
        standby.operator.healthy()
        for replica in (leader, standby):
            await replica.operator.stop()

    run(scenario())


def test_liveness_fails_without_a_full_list() -> None:
    async def scenario() -> None:
        _, leader, standby = await converged()
        standby.operator._listed_at -= STALE_SECONDS
        with pytest.raises(RuntimeError, match="no full list"):
            standby.operator.healthy()
        for replica in (leader, standby):
            await replica.operator.stop()

    run(scenario())
