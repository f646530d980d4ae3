"""What broke others' sidecars, tried here: docs/cases-samples.md and, for 7, docs/cases-operator.md say what it was.
Numbers are the cases'."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from rolloutfleet.agent.errors import AgentError
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.memory import Memory
from rolloutfleet.agent.sampling import Sampler
from rolloutfleet.agent.settings import agent_port, load_settings
from rolloutfleet.agent.updates import Updater
from rolloutfleet.api.agent import FleetState, Generate, MemoryRequest
from rolloutfleet.api.names import AGENT_METRICS_PORT, AGENT_PORT
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.kube.client import ROLLOUT_SERVER, KubeApi, Resource
from rolloutfleet.kube.errors import Forbidden
from rolloutfleet.kube.lease import DURATION_SECONDS, HeldBy, LeaseHolder
from stand_ins.kubernetes import Object
from unit.agent.world import World, answer, play, wanted
from unit.engine.stand_in import StandIn


def test_7_what_services_put_into_the_environment_of_a_trainers_pod_is_no_setting_of_the_agent() -> None:
    links = {
        f"ROLLOUTFLEET_{name}_{what}": value
        for name in ("AGENT", "AGENT_METRICS")
        for what, value in {
            "SERVICE_HOST": "10.96.0.9",
            "SERVICE_PORT": "80",
            "PORT": "tcp://10.96.0.9:80",
            "PORT_80_TCP_ADDR": "10.96.0.9",
        }.items()
    }
    ours = {"ROLLOUTFLEET_SERVERS": "actor=qwen", "POD_NAME": "trainer", "POD_NAMESPACE": "rl"}
    settings = load_settings({**links, "POD_PORT": "tcp://10.96.0.9:80", **ours})
    assert (settings.host, settings.port, settings.metrics_port) == ("127.0.0.1", AGENT_PORT, AGENT_METRICS_PORT)
    assert settings == load_settings(ours)
    assert agent_port(links) == AGENT_PORT, "of the health check, too"


def test_28_an_account_that_the_server_does_not_name_is_told_so_once_in_the_events_of_its_pod(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        allowed, read = False, world.cluster.get

        async def get(resource: Resource, name: str, **options: Any) -> Object:
            if resource is ROLLOUT_SERVER and not allowed:
                account = "system:serviceaccount:rl:default"
                raise Forbidden(f'User "{account}" cannot get resource "rolloutservers"', status=403)
            return await read(resource, name, **options)

        world.cluster.get = get  # type: ignore[method-assign]
        world.restart_agent()
        for _ in range(3):
            await world.fleet.refresh()
        assert world.fleet.state is FleetState.FORBIDDEN
        (event,) = world.cluster.events
        assert (event["reason"], event["type"]) == ("RolloutServerForbidden", "Warning")
        assert event["regarding"] | {"kind": "Pod", "name": "train", "uid": "uid-train"} == event["regarding"]
        for said in ("rl/qwen", "spec.trainers.serviceAccounts", "system:serviceaccount:rl:default"):
            assert said in event["note"]
        with pytest.raises(AgentError, match=r"spec\.trainers\.serviceAccounts"):
            world.fleet.connected()
        allowed = True
        await world.fleet.refresh()
        assert world.fleet.connected().name == "qwen"
        assert world.cluster.events[-1]["type"] == "Normal"

    play(tmp_path, story, engines=1)


class Rank:
    """The agent of another pod of the fleet's trainers."""

    def __init__(self, world: World, pod: str) -> None:
        api = cast(KubeApi, world.cluster)
        fleet = Fleet(api=api, namespace="rl", role="actor", name="qwen", pod_name=pod, pod_uid=f"uid-{pod}")
        self.fleet, self.leadership = fleet, Leadership(api=api, namespace="rl", fleet=fleet, identity=pod)
        self.lease = self.leadership.lease = LeaseHolder(
            api=api, namespace="rl", name="qwen-trainer", identity=pod, monotonic=world.clock
        )
        self.updater = Updater(fleet=fleet, leadership=self.leadership, engine=world.client, worker=world.worker)
        self.memory = Memory(fleet=fleet, leadership=self.leadership, engine=world.client)
        self.sampler = Sampler(fleet=fleet, router=lambda url: RouterClient(url, http=world.http), engine=world.client)

    async def contends(self) -> bool:
        await self.fleet.refresh()
        try:
            await self.lease.acquire()
        except HeldBy:
            return False
        return True


def test_30_of_the_ranks_of_a_job_one_leads_and_when_it_dies_exactly_one_of_the_others_does(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        followers = [Rank(world, pod) for pod in ("train-1", "train-2", "train-3", "other-job-0")]
        assert [await rank.contends() for rank in followers] == [False] * 4
        for rank in followers:
            for order in (
                rank.updater.update(wanted(world)),
                rank.memory.offload(MemoryRequest()),
            ):
                with pytest.raises(AgentError, match="pod train leads it") as refusal:
                    await order
                assert refusal.value.code == "NotLeading"
        assert world.untouched

        world.clock.now += DURATION_SECONDS - 1
        assert not any([await rank.contends() for rank in followers]), "it may still act"
        world.clock.now += 2
        taken = [await rank.contends() for rank in followers]
        assert taken.count(True) == 1
        (leader,) = [rank for rank, leads in zip(followers, taken, strict=True) if leads]
        result = await leader.updater.update(wanted(world))
        assert result.committed
        assert (world.training.holder, world.training.fence) == (leader.lease.holder, leader.lease.fence)
        with pytest.raises(AgentError) as refusal:
            await world.updater.update(wanted(world))
        assert refusal.value.code == "NotLeading", "the first one, thawed"

    play(tmp_path, story)


def test_30_ranks_that_follow_serve_samples_to_their_trainers(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        async with StandIn.always(200, answer([1, 2])) as router:
            body = world.cluster.seen("rolloutservers", "qwen")
            body["status"]["router"] = {"url": router.url}
            world.cluster.put("rolloutservers", body)
            rank = Rank(world, "train-1")
            assert not await rank.contends()
            generated = await rank.sampler.generate(Generate(prompts=[[1]], n=2, timeout_seconds=5.0))
        assert [sample.response_tokens for sample in generated.groups[0].samples] == [[1, 2]] * 2

    play(tmp_path, story)
