"""A fleet's memory as a state machine: any order of offload, onload, update, faults and deaths of agent and engines.

The agent's code is the real one, over a Kubernetes API in memory; engines are stand-ins or real servers (`Life`). What
must hold after every step is in `Machine.check`: no scheduler dies of our calls, and what is recorded is what is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import aiohttp
from hypothesis import strategies as st
from yarl import URL

from rolloutfleet.agent.errors import AgentError
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.memory import Memory
from rolloutfleet.agent.memory_record import TAGS
from rolloutfleet.agent.updates import Updater
from rolloutfleet.api.agent import MemoryRequest, MemoryTag, UpdateWeights
from rolloutfleet.api.rollout_server import RolloutServer, TrainingStatus
from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.api.weight_labels import claims, weight_label
from rolloutfleet.engine.http import Answer, Http
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.engine.worker import WorkerClient
from rolloutfleet.kube.client import KubeApi, Resource
from rolloutfleet.kube.lease import LeaseHolder
from rolloutfleet.plan.observed import Fleet as ObservedFleet
from rolloutfleet.plan.observed import LeaseView
from rolloutfleet.plan.training import Training, training_of
from stand_ins.kubernetes import Cluster, Object
from unit.agent.world import FLEET, SERVER_UID

GENERATE = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}


class Life(Protocol):
    """An engine's process."""

    @property
    def url(self) -> str: ...

    async def memory_paused(self) -> frozenset[str]:
        """Tags that its memory saver has paused. Raises AssertionError if its scheduler is dead."""
        ...

    async def begin_anew(self) -> None:
        """As a process that has just started: version 0, everything resident, nothing paused."""
        ...


@dataclass(frozen=True)
class Fault:
    """The next call to a path of an engine goes wrong."""

    engine: int
    path: str
    kind: Literal["refused", "unsent", "unheard"]
    """Answered 400 and not done; not done and no answer; done and no answer."""


@dataclass(frozen=True)
class Step:
    what: Literal[
        "offload", "onload", "update", "watch", "generate", "pause", "engine restarts", "agent restarts", "operator"
    ]
    tags: tuple[MemoryTag, ...] = TAGS
    twice: bool = False
    """A second request for the same comes while the first one runs."""
    dies_at: int | None = None
    """The agent dies before or after its how-manieth call to anybody."""
    fault: Fault | None = None
    engine: int = 0
    version: int = 1
    """Of the checkpoint."""


def steps(engines: int, *, least: int = 0) -> st.SearchStrategy[list[Step]]:
    tags = st.just(TAGS) | st.lists(st.sampled_from(TAGS), min_size=1, unique=True).map(tuple)
    memory = ("release_memory_occupation", "resume_memory_occupation")
    others = ("pause_generation", "flush_cache", "continue_generation", "weights_checker", "model_info")
    faults = st.builds(
        Fault,
        engine=st.integers(0, engines - 1),
        path=st.sampled_from(memory) | st.sampled_from(memory) | st.sampled_from(others),
        kind=st.sampled_from(("unheard", "unsent", "refused")),
    )
    what = st.sampled_from(("offload", "onload")) | st.sampled_from(("offload", "onload", "update", "watch"))
    asked = {"tags": tags, "twice": st.booleans(), "version": st.integers(0, 1)}
    return st.lists(
        st.builds(Step, what=what, **asked)
        | st.builds(Step, what=what, **asked, fault=faults)
        | st.builds(Step, what=what, **asked, dies_at=st.integers(0, 12 * engines))
        | st.builds(
            Step,
            what=st.sampled_from(("operator", "generate", "pause", "engine restarts", "agent restarts")),
            engine=st.integers(0, engines - 1),
        ),
        min_size=least,
        max_size=12,
    )


class Died(BaseException):
    """The agent's process is no more: nothing of it goes on, no cleaning up either."""


@dataclass
class Process:
    """What the agent calls the world through. A process that has died calls nobody."""

    dies_at: int | None = None
    calls: int = 0
    under_way: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def dead(self) -> bool:
        return self.dies_at is not None and self.calls > self.dies_at

    def step(self) -> None:
        self.calls += self.dies_at is not None and not self.dead
        if self.dead:
            raise Died

    async def call(self, call: Awaitable[Any]) -> Any:
        try:
            self.step()
        except Died:
            if isinstance(call, Coroutine):
                call.close()
            raise
        self.under_way += 1
        self.idle.clear()
        try:
            answer = await call
        finally:
            self.under_way -= 1
            if not self.under_way:
                self.idle.set()
        self.step()
        return answer


@dataclass
class MortalCluster:
    """The Kubernetes API as one process of the agent reaches it."""

    cluster: Cluster
    process: Process

    async def get(self, resource: Resource, name: str, **options: Any) -> Object:
        return cast(Object, await self.process.call(self.cluster.get(resource, name, **options)))

    async def apply(self, resource: Resource, manifest: Object, **options: Any) -> Object:
        return cast(Object, await self.process.call(self.cluster.apply(resource, manifest, **options)))

    async def update(self, resource: Resource, manifest: Object) -> Object:
        return cast(Object, await self.process.call(self.cluster.update(resource, manifest)))

    async def create(self, resource: Resource, manifest: Object) -> Object:
        return cast(Object, await self.process.call(self.cluster.create(resource, manifest)))


@dataclass
class Machine:
    lives: Sequence[Life]
    models: Path
    """Holds the checkpoints m0, which engines start with, and m1."""
    http: Http
    checksums: dict[str, str] = field(default_factory=dict)
    """By path of the checkpoint."""
    numbers: list[int] = field(default_factory=list)
    """How many lives each engine has had."""
    frozen: bool = False
    roles: Sequence[str] = ()
    """Of the engines, where they are no Regular ones."""

    async def begin(self) -> None:
        self.cluster = Cluster()
        self.numbers = [1 for _ in self.lives]
        self.faults: list[Fault] = []
        self.routed = {self.uid(index) for index in range(len(self.lives))}
        """Lives that the operator has proved, so that requests reach them."""
        self.generating: list[asyncio.Task[Any]] = []
        for life in self.lives:
            await life.begin_anew()
        for version in (1, 0):
            path = str(self.models / f"m{version}")
            if path not in self.checksums:
                await self._load(0, path, 0)
                self.checksums[path] = await self._client(0).checksum()
        self.cluster.put("rolloutservers", self._server())
        self.cluster.put("leases", {"metadata": {"name": "qwen-trainer", "namespace": "rl"}, "spec": {}})
        self._write_engines("Serving")
        await self._restart_agent()

    async def run(self, story: Sequence[Step]) -> None:
        await self.begin()
        try:
            for step in story:
                await self.perform(step)
                await self.check()
            await self.perform(Step("operator"))
            await self.check()
        finally:
            for life in self.lives:
                await life.begin_anew()  # which ends what it has been holding
            await asyncio.gather(*self.generating, return_exceptions=True)

    # Invariants

    async def check(self) -> None:
        memory = self.training.memory
        # What fell out of an update is taken out of the routers, whether or not it could be paused.
        training = self._training()
        assert not training.updating, "no update runs, and the fleet is held by one"
        self.routed -= training.distrusted_pods
        entries = {entry.uid: entry for entry in memory.engines} if memory else {}
        for index, life in enumerate(self.lives):
            paused = await life.memory_paused()
            entry = entries.get(self.uid(index))
            if entry is None:
                assert not paused, f"engine {index} has released {sorted(paused)}, and nothing is recorded"
            elif entry.state == "Known":
                assert set(entry.released) == paused, f"engine {index}: recorded {entry.released}, is {sorted(paused)}"
            else:
                assert memory is not None
                ours = memory.fence == self.leadership.lease.fence and not self.process.dead
                assert entry.state == "Unknown" or not ours, "a call is under way, and nobody makes it"
            if await self._client(index).ready():
                assert not paused, f"engine {index} takes requests without {sorted(paused)}"
                if self.uid(index) in self.routed:
                    checksum = await self._client(index).checksum()
                    assert checksum == self.checksums[self._training().path], f"engine {index} serves wrong weights"

    async def check_healed(self, training: Training) -> None:
        """What nobody holds serves the committed weights."""
        for index in range(len(self.lives)):
            if training.holds(offload=True) or self.uid(index) in training.memory_held:
                continue
            client = self._client(index)
            assert await client.ready(), f"engine {index} was left paused"
            assert await client.checksum() == self.checksums[training.path]
            answer = await client.generate(GENERATE, seconds=30)
            label = str(answer["meta_info"]["weight_version"])
            assert claims(label, training.version, FLEET), f"engine {index} answers as {label}"
            self.routed.add(self.uid(index))

    # Steps

    async def perform(self, step: Step) -> None:
        match step.what:
            case "operator":
                await self._operator_looks()
            case "agent restarts":
                await self._restart_agent()
            case "engine restarts":
                await self._new_life(step.engine)
                self._write_engines("Starting", only=step.engine)
            case "pause":
                # Whoever left it so: the operator, or somebody by hand.
                if self._nobody_holds(step.engine):
                    await self._client(step.engine).pause("retract")
            case "generate":
                for index in range(len(self.lives)):
                    request = self._client(index).generate(GENERATE, seconds=60)
                    self.generating.append(asyncio.create_task(request))
            case _:
                if self.process.dead:
                    await self._restart_agent()
                await self._ask_agent(step)

    async def _ask_agent(self, step: Step) -> None:
        self.process.dies_at, self.process.calls = step.dies_at, 0
        self.faults = [step.fault] if step.fault else []
        asked = [asyncio.create_task(self._operation(step)) for _ in range(1 + step.twice)]
        try:
            for outcome in await asyncio.gather(*asked, return_exceptions=True):
                if isinstance(outcome, BaseException) and not isinstance(outcome, AgentError | Died):
                    raise outcome
        finally:
            await self.process.idle.wait()
            self.faults = []
            if not self.process.dead:
                self.process.dies_at = None

    async def _operation(self, step: Step) -> Any:
        request = MemoryRequest(tags=list(step.tags), timeout_seconds=20)
        match step.what:
            case "offload":
                return await self.memory.offload(request)
            case "onload":
                return await self.memory.onload(request)
            case "update":
                path = str(self.models / f"m{step.version}")
                return await self.updater.update(UpdateWeights(path=path, timeout_seconds=20))
        return await self.leadership.alone(self.memory.look())

    async def _restart_agent(self) -> None:
        """A new process of the same agent: it knows what the cluster knows, and takes the lease."""
        self.process = Process()
        api = cast(KubeApi, MortalCluster(self.cluster, self.process))
        http = Http(max_connections=1, send=self._send(self.process))
        fleet = Fleet(api=api, namespace="rl", role="actor", name="qwen", pod_name="train", pod_uid="uid-train")
        self.leadership = Leadership(api=api, namespace="rl", fleet=fleet, identity="train")
        self.leadership.lease = LeaseHolder(
            api=api, namespace="rl", name="qwen-trainer", identity="train", monotonic=lambda: 0.0
        )

        def engine(url: str) -> EngineClient:
            return EngineClient(url, http=http)

        def worker(url: str) -> WorkerClient:
            return WorkerClient(url, http=http)  # there is none, and nobody asks it

        self.updater = Updater(fleet=fleet, leadership=self.leadership, engine=engine, worker=worker)
        self.memory = Memory(fleet=fleet, leadership=self.leadership, engine=engine)
        await fleet.refresh()
        await self.leadership.lease.acquire()

    def _send(self, process: Process) -> Callable[..., Awaitable[Answer]]:
        """To the process behind an engine's address, while this life of it lasts; with the faults of the step."""

        async def send(method: str, url: URL, body: Any, timeout: Any, headers: Any) -> Answer:
            return cast(Answer, await process.call(self._deliver(method, url, body, timeout)))

        return send

    async def _deliver(self, method: str, url: URL, body: Any, timeout: aiohttp.ClientTimeout) -> Answer:
        index = next((index for index in range(len(self.lives)) if self.url(index) == str(url.origin())), None)
        if index is None:
            raise aiohttp.ClientConnectionError("no such pod any more")
        fault = next((fault for fault in self.faults if (fault.engine, f"/{fault.path}") == (index, url.path)), None)
        if fault is not None:
            self.faults.remove(fault)
        if fault is not None and fault.kind == "refused":
            return Answer(status=400, body=b'{"error": "not now"}')
        if fault is not None and fault.kind == "unsent":
            raise aiohttp.ClientConnectionError("reset by peer")
        target = f"{self.lives[index].url}{url.path_qs}"
        answer = await self.http.ask(method, target, body=body, timeout=timeout, headers=None)
        if fault is not None:
            raise aiohttp.ClientConnectionError("reset by peer")
        return answer

    async def _new_life(self, index: int) -> None:
        self.numbers[index] += 1
        await self.lives[index].begin_anew()

    # The operator, as far as it touches memory and weights: decided by its own plan code

    def _nobody_holds(self, index: int) -> bool:
        training = self._training()
        return not training.holds(offload=True) and self.uid(index) not in training.memory_held

    def _training(self) -> Training:
        server = RolloutServer.model_validate(self.cluster.seen("rolloutservers", "qwen"))
        spec = self.cluster.seen("leases", "qwen-trainer")["spec"]
        now = datetime.now(UTC)
        alive = timedelta(seconds=-1 if self.process.dead else 15)
        lease = LeaseView(holder="train", fence=int(spec.get("leaseTransitions", 0)), expires_at=now + alive)
        return training_of(ObservedFleet(server=server, lease=lease), now)

    async def _operator_looks(self) -> None:
        training = self._training()
        for index in range(len(self.lives)):
            if self.uid(index) in training.ambiguous_pods:
                await self._new_life(index)
        held = training.holds(offload=True)
        for index in range(len(self.lives)):
            if not self._nobody_holds(index):
                continue
            client = self._client(index)
            info = await client.model_info()
            right = claims(info.weight_version, training.version, FLEET)
            if not right or await client.checksum() != self.checksums[training.path]:
                await client.pause("abort")
                await self._load(index, training.path, training.version)
            await client.continue_generation()
        await self.check_healed(training)
        self._write_engines("Held" if held else "Serving")

    async def _load(self, index: int, path: str, version: int) -> None:
        await self._client(index).update_weights_from_disk(path, label=weight_label(version, FLEET))

    # The world

    def uid(self, index: int) -> str:
        return f"uid-{index}-{self.numbers[index]}"

    def url(self, index: int) -> str:
        return f"http://life-{self.numbers[index]}.engine-{index}"

    def _client(self, index: int) -> EngineClient:
        return EngineClient(self.lives[index].url, http=self.http)

    @property
    def training(self) -> TrainingStatus:
        server = RolloutServer.model_validate(self.cluster.seen("rolloutservers", "qwen"))
        return server.status.training or TrainingStatus()

    def _server(self) -> Object:
        group = {"name": "main", "replicas": len(self.lives), "engine": {"image": "engine:1"}, "offload": True}
        return {
            "metadata": {"name": "qwen", "namespace": "rl", "uid": SERVER_UID},
            "spec": {
                "model": {"path": str(self.models / "m0")},
                "updateWeights": not self.frozen,
                "groups": [group],
                "weights": {"volume": {"emptyDir": {}}, "mountPath": str(self.models)},
            },
            "status": {},
        }

    def _write_engines(self, phase: str, *, only: int | None = None) -> None:
        """ServerGroup.status, as the operator would write it."""
        known = self.cluster.objects.get(("servergroups", "qwen-main"))
        before = {e["index"]: e["phase"] for e in known["status"]["engines"]} if known else {}
        engines = [
            {
                "index": index,
                "epoch": self.numbers[index],
                "revision": "r1",
                "phase": phase if only in (None, index) else before[index],
                "url": self.url(index),
                "pod": f"qwen-main-{index}-e{self.numbers[index]}-r0",
                "podUid": self.uid(index),
                "facts": {
                    "role": self.roles[index] if self.roles else "Regular",
                    "tensorParallel": 1,
                    "pipelineParallel": 1,
                    "memorySaver": True,
                },
            }
            for index in range(len(self.lives))
        ]
        path = str(self.models / "m0")
        measured = [{"revision": "r1", "version": 0, "checksum": self.checksums[path]}]
        body = {
            "metadata": {"name": "qwen-main", "namespace": "rl"},
            "spec": {"server": "qwen", "model": {"path": path}, "engine": {"image": "engine:1"}, "offload": True},
            "status": {"engines": engines, "measured": measured},
        }
        ServerGroup.model_validate(body)
        self.cluster.put("servergroups", body)
