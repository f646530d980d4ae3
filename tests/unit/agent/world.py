"""A fleet on loopback: the real agent between stand-ins of the Kubernetes API (in memory) and of engines (HTTP)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from rolloutfleet.agent.collection.collections import Collections
from rolloutfleet.agent.errors import AgentError
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.memory import Memory
from rolloutfleet.agent.observing.observations import Observations
from rolloutfleet.agent.sampling import Sampler
from rolloutfleet.agent.sessions import Sessions
from rolloutfleet.agent.updates import Updater
from rolloutfleet.api.agent import UpdateWeights
from rolloutfleet.api.rollout_server import TrainingStatus
from rolloutfleet.api.weight_labels import fleet_id, weight_label
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.engine.worker import WorkerClient
from rolloutfleet.kube.client import KubeApi
from rolloutfleet.kube.lease import LeaseHolder
from stand_ins.kubernetes import Cluster, Object
from unit.engine.stand_in import Answer, Asked, HangUp, StandIn

SERVER_UID = "5e1f0a27-8c4b-4f7e-9d3a-000000000001"
FLEET = fleet_id(SERVER_UID)
LIMIT = 10.0
"""Seconds after which a test has hung."""


def signed(version: int, fleet: str = FLEET) -> str:
    """What an engine of a fleet, by default this one, calls these weights."""
    return weight_label(version, fleet)


INITIAL_LABEL = signed(0)


class Clock:
    """The lease holder's clock: it stands still until a test moves it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """Stands in for one SGLang server: it holds weights, can be paused, and dies of a second release as SGLang does."""

    def __init__(self, pod: str) -> None:
        self.pod, self.uid = pod, f"uid-{pod}"
        self.label, self.checksum = signed(0), "sum-of-m0"
        self.paused = False
        self.dead = False
        self.released: set[str] = set()
        self.delta = False
        """What the worker beside it says of the version that it copies."""
        self.updating = False
        """Between begin_weight_update and end_weight_update."""
        self.groups: set[str] = set()
        self.refuses: dict[str, Answer] = {}
        """By path: what is answered instead."""
        self.breaks_at = ""
        """Path at which it dies."""
        self.answers: int | None = None
        """How many calls it answers, where it dies at the next one."""
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        """By path: what happens first."""
        self.stand_in = StandIn(self._answer)

    @property
    def asked(self) -> list[str]:
        return [asked.path.partition("?")[0].strip("/") for asked in self.stand_in.asked]

    async def _answer(self, asked: Asked) -> Answer:
        path = asked.path.partition("?")[0].strip("/")
        if path in self.before:
            await self.before[path]()
        self.dead = self.dead or path == self.breaks_at or self.answers == 0
        if self.answers:
            self.answers -= 1
        if self.dead:
            raise HangUp
        if path in self.refuses:
            return self.refuses[path]
        return self._obey(path, asked.body or {})

    def _obey(self, path: str, body: Object) -> Answer:
        match path:
            case "pause_generation":
                self.paused = True
            case "continue_generation":
                self.paused = False
            case "flush_cache" if not self.paused:
                return 400, {"error": "not idle"}
            case "update_weights_from_disk":
                self.label, self.checksum = body["weight_version"], f"sum-of-{Path(body['model_path']).name}"
            case "init_weights_update_group":
                self.groups.add(body["group_name"])
            case "destroy_weights_update_group":
                self.groups.discard(body["group_name"])
            case "begin_weight_update" if self.updating:
                return 400, {"success": False, "message": "a session is open"}
            case "begin_weight_update" | "end_weight_update":
                self.updating = path == "begin_weight_update"
            case "update_weights_from_distributed" | "update_weights_from_tensor" if not self.updating:
                return 400, {"success": False, "message": "must run between begin and end"}
            case "update_weights_from_distributed" if body["group_name"] not in self.groups:
                return 400, {"success": False, "message": "no such group"}
            case "update_weights_from_distributed":
                self.checksum = f"{self.checksum}+{'+'.join(body['names'])}"
            case "update_weights_from_tensor":
                self.checksum = f"{self.checksum}+{'+'.join(body['serialized_named_tensors'])}"
            case "update_weight_version":
                assert body["abort_all_requests"] is False
                self.label = body["new_version"]
            case "v1/copies":
                copy = {"path": f"/copies/{Path(body['path']).name}", "version": None, "delta": self.delta, "deltas": 0}
                return 200, {**copy, "bytes_read": 1, "seconds": 0.0}
            case "weights_checker":
                return 200, {"success": True, "per_engine_checksum": self.checksum}
            case "model_info":
                return 200, {"model_path": "/m", "weight_version": self.label}
            case "release_memory_occupation":
                self._move_memory(set(body["tags"]), self.released, release=True)
            case "resume_memory_occupation":
                self._move_memory(set(body["tags"]), self.released, release=False)
        return 200, {"success": True, "message": ""}

    def _move_memory(self, tags: set[str], released: set[str], *, release: bool) -> None:
        if (tags & released) if release else (tags - released):
            self.dead = True
            raise HangUp
        self.released = released | tags if release else released - tags


class World:
    def __init__(self, volume: Path, engines: int, http: Http) -> None:
        self.volume = volume
        self.http = http
        self.cluster = Cluster()
        self.engines = [Engine(f"qwen-main-{index}-e1-r0") for index in range(engines)]
        self.clock = Clock()

    def build(self) -> None:
        self.cluster.put("rolloutservers", rollout_server(self.volume))
        self.cluster.put("servergroups", server_group(self.engines))
        self.cluster.put("leases", {"metadata": {"name": "qwen-trainer", "namespace": "rl"}, "spec": {}})
        self.restart_agent()

    def restart_agent(self, *, api: Any = None, http: Http | None = None) -> None:
        """A new process of the same agent: it knows what the cluster knows and leads nothing yet. `api` and `http`:
        through which it calls, where it is not to reach everything at once."""
        api = cast(KubeApi, api or self.cluster)
        through = http or self.http

        def client(url: str) -> EngineClient:
            return EngineClient(url, http=through)

        def worker(url: str) -> WorkerClient:
            """The engines' stand-ins answer for the workers beside them."""
            return WorkerClient(url, http=through)

        self.client, self.worker = client, worker
        self.fleet = Fleet(api=api, namespace="rl", role="actor", name="qwen", pod_name="train", pod_uid="uid-train")
        self.leadership = Leadership(api=api, namespace="rl", fleet=self.fleet, identity="train")
        self.leadership.lease = LeaseHolder(
            api=api, namespace="rl", name="qwen-trainer", identity="train", monotonic=self.clock
        )
        self.updater = Updater(fleet=self.fleet, leadership=self.leadership, engine=self.client, worker=self.worker)
        self.sessions = Sessions(fleet=self.fleet, leadership=self.leadership, engine=self.client, address="127.0.0.1")
        self.memory = Memory(fleet=self.fleet, leadership=self.leadership, engine=self.client)
        self.observations = Observations()

    def collections(self, sampler: Sampler, url: str = "http://127.0.0.1:1/v1/servers/actor") -> Collections:
        return Collections(
            fleet=self.fleet,
            leadership=self.leadership,
            sampler=sampler,
            http=self.http,
            agent="train",
            url=url,
            observer=self.observations,
        )

    def keep_copies(self) -> None:
        """From now on engines load what the workers beside them copy."""
        spec = self.cluster.seen("rolloutservers", "qwen")["spec"]
        self.change_server(weights={**spec["weights"], "localCopy": {"sizeLimit": "1Gi"}})

    def change_server(self, **spec: Any) -> None:
        body = self.cluster.seen("rolloutservers", "qwen")
        body["spec"] |= spec
        self.cluster.put("rolloutservers", body)

    def change_training(self, **training: Any) -> None:
        body = self.cluster.seen("rolloutservers", "qwen")
        body["status"]["training"] = {**body["status"].get("training", {}), **training}
        self.cluster.put("rolloutservers", body)

    def change_engine(self, index: int, **status: Any) -> None:
        body = self.cluster.seen("servergroups", "qwen-main")
        body["status"]["engines"][index] |= status
        self.cluster.put("servergroups", body)

    def change_group(self, **spec: Any) -> None:
        body = self.cluster.seen("servergroups", "qwen-main")
        body["spec"] |= spec
        self.cluster.put("servergroups", body)

    @property
    def training(self) -> TrainingStatus:
        return TrainingStatus.model_validate(self.cluster.seen("rolloutservers", "qwen")["status"].get("training", {}))

    def lose_the_lease(self) -> None:
        self.clock.now += 3600.0

    def be_overtaken(self) -> None:
        """Another agent leads by now and has written; this one does not know it yet."""
        self.change_training(holder="train-2", fence=self.leadership.lease.fence + 1)

    @property
    def untouched(self) -> bool:
        """No engine was asked anything and nothing was written."""
        return not any(engine.asked for engine in self.engines) and not self.cluster.written


@asynccontextmanager
async def fleet_on_loopback(tmp_path: Path, engines: int = 3, *, seconds: float = LIMIT) -> AsyncIterator[World]:
    """Engines that serve version 0, an agent that leads, and a volume with the checkpoint w1."""
    volume = tmp_path / "weights"
    volume.mkdir()
    write_checkpoint(tmp_path / "m0", [2, 3])
    write_checkpoint(volume / "w1", [2, 3])
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(Http(max_connections=100))
        world = World(volume, engines, http)
        for engine in world.engines:
            await stack.enter_async_context(engine.stand_in)
        world.build()
        await world.fleet.refresh()
        await world.leadership.lease.acquire()
        async with asyncio.timeout(seconds):
            yield world


def rollout_server(volume: Path, *, router: str = "http://router") -> Object:
    group = {"name": "main", "replicas": 3, "engine": {"image": "engine:1"}, "offload": True}
    return {
        "metadata": {"name": "qwen", "namespace": "rl", "uid": SERVER_UID},
        "spec": {
            "model": {"path": str(volume.parent / "m0")},
            "groups": [group],
            "weights": {"volume": {"emptyDir": {}}, "mountPath": str(volume)},
        },
        "status": {"router": {"url": router, "replicas": 1, "ready": 1}},
    }


def server_group(engines: list[Engine]) -> Object:
    return {
        "metadata": {"name": "qwen-main", "namespace": "rl", "uid": "uid-main"},
        "spec": {"server": "qwen", "model": {"path": "/m"}, "engine": {"image": "engine:1"}, "offload": True},
        "status": {
            "routable": len(engines),
            "measured": [{"revision": "r1", "version": 0, "checksum": "sum-of-m0"}],
            "engines": [
                {
                    "index": index,
                    "epoch": 1,
                    "revision": "r1",
                    "phase": "Serving",
                    "url": engine.stand_in.url,
                    "pod": engine.pod,
                    "podUid": engine.uid,
                }
                for index, engine in enumerate(engines)
            ],
        },
    }


def write_checkpoint(folder: Path, shape: list[int], *, name: str = "weight") -> Path:
    """One safetensors file with one tensor of 2-byte elements."""
    folder.mkdir()
    size = 2
    for dimension in shape:
        size *= dimension
    header = json.dumps({name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    return folder


def answer(tokens: list[int], *, version: Any = INITIAL_LABEL, kind: str = "length", **meta: Any) -> dict[str, Any]:
    """As SGLang answers /generate with return_logprob."""
    return {
        "text": "",
        "meta_info": {
            "finish_reason": {"type": kind, **meta.pop("finish", {})},
            "output_token_logprobs": [[-0.5 * token, token, None] for token in tokens],
            "weight_version": version,
            **meta,
        },
    }


ABORT = answer([9], kind="abort", finish={"message": "aborted by a pause"})


Story = Callable[[World], Awaitable[None]]


def play(tmp_path: Path, story: Story, *, engines: int = 3) -> None:
    """Run a story in a world of its own."""

    async def scenario() -> None:
        async with fleet_on_loopback(tmp_path, engines) as world:
            await story(world)

    asyncio.run(scenario())


def wanted(world: World, name: str = "w1", **request: Any) -> UpdateWeights:
    return UpdateWeights(path=str(world.volume / name), **request)


async def refused(call: Awaitable[Any]) -> AgentError:
    with pytest.raises(AgentError) as refusal:
        await call
    return refusal.value


async def refused_update(world: World, request: UpdateWeights) -> AgentError:
    return await refused(world.updater.update(request))
