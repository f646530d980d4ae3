"""What an agent writes after it was overtaken, as a real API server refuses it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from api_server.control_plane import ControlPlane
from rolloutfleet.agent.errors import AgentError
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.api.names import AGENT_MANAGER, API_VERSION, trainer_name
from rolloutfleet.api.rollout_server import TrainingStatus, TrainingWeights, WeightsPhase
from rolloutfleet.kube import client as kube

NAMESPACE = "default"


class Agent:
    """That of one trainer's pod, as far as it leads and writes."""

    def __init__(self, api: kube.KubeApi, server: str, pod: str) -> None:
        self.fleet = Fleet(api=api, namespace=NAMESPACE, role="actor", name=server, pod_name=pod, pod_uid=pod)
        self.leadership = Leadership(api=api, namespace=NAMESPACE, fleet=self.fleet, identity=pod)

    async def leads(self) -> None:
        """As `Leadership.run` does."""
        await self.fleet.refresh()
        await self.leadership.lease.acquire(above=self.fleet.training.fence)

    async def writes(self, version: int) -> None:
        weights = TrainingWeights(phase=WeightsPhase.COMMITTED, version=version)
        await self.leadership.write(TrainingStatus(weights=weights))


async def make(api: kube.KubeApi, name: str) -> None:
    """A RolloutServer and its trainer's Lease, as the operator makes it."""
    group = {"name": "main", "replicas": 1, "engine": {"image": "engine"}}
    metadata = {"namespace": NAMESPACE, "name": name}
    spec = {"model": {"path": "/models/m0"}, "groups": [group]}
    await api.create(
        kube.ROLLOUT_SERVER, {"apiVersion": API_VERSION, "kind": "RolloutServer", "metadata": metadata, "spec": spec}
    )
    await make_lease(api, name)


async def make_lease(api: kube.KubeApi, name: str) -> None:
    metadata = {"namespace": NAMESPACE, "name": trainer_name(name)}
    await api.create(
        kube.LEASE, {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": {}}
    )


async def leading(api: kube.KubeApi, server: str, pod: str = "agent") -> Agent:
    """One that leads it and has written version 1."""
    agent = Agent(api, server, pod)
    await agent.leads()
    await agent.writes(1)
    return agent


async def written(api: kube.KubeApi, name: str) -> TrainingStatus | None:
    fleet = Agent(api, name, "nobody").fleet
    await fleet.refresh()
    return fleet.connected().status.training


def play(cluster: ControlPlane, story: Callable[[kube.KubeApi], Coroutine[Any, Any, None]]) -> None:
    async def told() -> None:
        api = kube.KubeApi(cluster.credentials, max_connections=4)
        try:
            async with asyncio.timeout(60):
                await story(api)
        finally:
            await api.close()

    asyncio.run(told())


def test_an_agent_that_does_not_know_yet_that_it_was_overtaken_writes_nothing(cluster: ControlPlane) -> None:
    async def story(api: kube.KubeApi) -> None:
        await make(api, "overtaken")
        late, leader = await leading(api, "overtaken", "late"), Agent(api, "overtaken", "leader")
        await late.leadership.lease.release()
        await leader.leads()
        await leader.writes(2)
        late.leadership.lease._valid_until = float("inf")  # its clock stood still
        with pytest.raises(AgentError, match="pod leader has taken over") as refusal:
            await late.writes(3)
        assert refusal.value.code == "Fenced"
        there = await written(api, "overtaken")
        assert there is not None
        assert there.weights is not None
        assert (there.holder, there.weights.version) == ("leader", 2)

    play(cluster, story)


def test_a_write_that_was_given_up_and_comes_late_undoes_no_later_one(cluster: ControlPlane) -> None:
    async def story(api: kube.KubeApi) -> None:
        await make(api, "late")
        agent = await leading(api, "late")
        intent = agent.fleet.training
        await agent.writes(2)
        again = {
            "apiVersion": API_VERSION,
            "kind": "RolloutServer",
            "metadata": {"namespace": NAMESPACE, "name": "late"},
            "status": {"training": intent.dump()},
        }
        with pytest.raises(kube.Invalid, match="an earlier write that comes late"):
            await api.apply(kube.ROLLOUT_SERVER, again, field_manager=AGENT_MANAGER, force=True, subresource="status")
        there = await written(api, "late")
        assert there is not None
        assert there.weights is not None
        assert there.weights.version == 2

    play(cluster, story)


def test_what_was_begun_for_a_server_is_not_written_to_another_of_its_name(cluster: ControlPlane) -> None:
    async def story(api: kube.KubeApi) -> None:
        await make(api, "anew")
        agent = await leading(api, "anew")
        await api.delete(kube.ROLLOUT_SERVER, "anew", namespace=NAMESPACE)
        await api.delete(kube.LEASE, trainer_name("anew"), namespace=NAMESPACE)
        await make(api, "anew")
        for seen in (False, True):
            with pytest.raises(AgentError, match="was deleted and made anew") as refusal:
                await agent.writes(2)
            assert refusal.value.code == "NotLeading"
            there = await written(api, "anew")
            assert there is not None
            assert (there.weights, there.holder) == (None, ""), f"withdrawn; the new one was seen: {seen}"
            await agent.fleet.refresh()

    play(cluster, story)


def test_an_agent_leads_on_after_somebody_deleted_its_lease(cluster: ControlPlane) -> None:
    async def story(api: kube.KubeApi) -> None:
        await make(api, "leaseless")
        for pod in ("first", "second"):
            agent = await leading(api, "leaseless", pod)
            await agent.leadership.lease.release()
        await api.delete(kube.LEASE, trainer_name("leaseless"), namespace=NAMESPACE)
        await make_lease(api, "leaseless")
        third = Agent(api, "leaseless", "third")
        await third.leads()
        await third.writes(2)
        there = await written(api, "leaseless")
        assert there is not None
        assert (there.holder, there.fence) == ("third", 3)

    play(cluster, story)
