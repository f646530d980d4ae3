"""One fleet in a namespace of its own, with an operator that is started anew whenever it dies, and what must hold."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from api_server.faults import Mangle
from api_server.node import engine_flags, is_router
from api_server.process import Process
from api_server.wire import Disturb, Wires, undisturbed
from api_server.world import World
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet as AgentsFleet
from rolloutfleet.agent.updates import Updater
from rolloutfleet.api.agent import UpdateWeights
from rolloutfleet.api.names import (
    API_VERSION,
    GATE_ROUTABLE,
    LABEL_ENGINE_INDEX,
    LABEL_EPOCH,
    LABEL_GROUP_UID,
    LABEL_RANK,
    engine_pod_name,
)
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.engine.worker import WorkerClient, worker_url
from rolloutfleet.kube import client as kube
from rolloutfleet.kube.resources import Resource
from rolloutfleet.plan.observed import pod_url
from stand_ins.hosts import Program
from stand_ins.router import Router
from stand_ins.sglang import Engine

NAMESPACE = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
MODEL = "/models/m0"
CONVERGED_SECONDS = 300.0
"""Far more than is needed where the machine has something else to do: never is what fails here, not slow."""
POLL_SECONDS = 0.25
"""How often is looked although nothing has been told: engines and tables change silently."""
DELETED: dict[str, Any] = {"metadata": {"deletionTimestamp": "long ago"}}
USER = "user"


def regular(replicas: int = 2, *, name: str = "main", image: str = "engine:1", **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "replicas": replicas,
        "engine": {"image": image},
        "drainTimeoutSeconds": 5,
        "recovery": {"backoff": {"initialSeconds": 1, "maxSeconds": 1}},
        **fields,
    }


@dataclass
class Fleet:
    """`async with fleet(...)`: the operator of its namespace runs."""

    world: World
    namespace: str
    resync: float = 60.0
    name: str = "qwen"
    process: Process = field(init=False)
    deaths: int = 0
    broken: list[str] = field(default_factory=list)
    """What must never be, and was."""
    routers: list[Router] = field(default_factory=list)
    addresses: dict[str, Engine] = field(default_factory=dict)
    allowed: set[str] = field(default_factory=lambda: {MODEL})
    """Checkpoints that may serve: that of the committed version, and while an update runs, that of the next."""
    created: dict[str, str] = field(default_factory=dict)
    """UID of each engine pod that ever was, by name."""
    before: dict[tuple[str, int], str] = field(default_factory=dict)
    """By group and epoch of each life: its engine's index and last failure, as status told them first."""
    disturb: Disturb = undisturbed
    mangle: Mangle = lambda deliver: deliver
    _pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    # The operator

    async def supervise(self) -> None:
        while True:
            await self.process.ended()
            await self.process.kill()
            self.deaths += 1
            await asyncio.sleep(0.02)
            self.start()

    async def restart(self) -> None:
        """Kill -9; until its successor runs."""
        old = self.process
        old.wires.dead.set()
        await self.until(lambda: self.process is not old, "a successor is started")

    def start(self) -> None:
        wires = Wires()
        wires.disturb = self.disturb
        self.process = Process(
            network=self.world.network,
            hub=self.world.hub,
            namespace=self.namespace,
            wires=wires,
            resync=self.resync,
        )
        self.process.feed = self.mangle(self.process.operator.saw)
        self.process.start()

    # What runs in pods

    def program(self, pod: dict[str, Any], address: str) -> Program:
        if is_router(pod):
            router = Router(answers=self._answers, listed=self._listed)
            self.routers.append(router)
            return router
        engine = Engine(engine_flags(pod))
        self.addresses[address] = engine
        return engine

    def _answers(self, url: str) -> bool:
        return self.world.hosts.program(url) is not None

    def _listed(self, url: str) -> None:
        self.look_at_tables(f"{url} was listed")

    # What must hold at all times

    def saw(self, kind: str, type_of_event: str | None, pod: dict[str, Any]) -> None:
        self._news.set()
        if kind == "ServerGroup":
            self._chronicle(pod)
        if kind != "Pod" or is_router(pod):
            return
        metadata = pod["metadata"]
        uid, name = metadata["uid"], metadata["name"]
        if type_of_event == "DELETED":
            self._pods.pop(uid, None)
            return
        if self.created.setdefault(name, uid) != uid:
            self.broken.append(f"the name {name} was used twice")
        self._pods[uid] = pod
        owners: dict[tuple[str, ...], str] = {}
        epochs: dict[tuple[str, str], str] = {}
        for other in self._pods.values():
            labels = other["metadata"]["labels"]
            group, index, epoch = labels[LABEL_GROUP_UID], labels[LABEL_ENGINE_INDEX], labels[LABEL_EPOCH]
            if epochs.setdefault((group, epoch), index) != index:
                self.broken.append(f"epoch {epoch} was given to indexes {index} and {epochs[group, epoch]}")
            if not _live(other):
                continue
            place = (group, index, labels[LABEL_RANK])
            if place in owners:
                self.broken.append(f"{owners[place]} and {other['metadata']['name']} live at once")
            owners[place] = other["metadata"]["name"]

    def _chronicle(self, group: dict[str, Any]) -> None:
        for record in (group.get("status") or {}).get("engines") or []:
            last = record.get("lastFailure") or {}
            why = f"{record['index']}: {last.get('reason')}: {last.get('message')} ({last.get('pod')})"
            self.before.setdefault((group["metadata"]["name"], record["epoch"]), why)

    def look_at_tables(self, when: str) -> None:
        for router in self.routers:
            for url in router.table:
                engine = self.world.hosts.program(url)
                if not isinstance(engine, Engine) or engine.paused:
                    continue
                if engine.path not in self.allowed:
                    self.broken.append(f"{when}: a router lists {url} with {engine.path}, not {self.allowed}")
                if engine.mode != "null" and not engine.served:
                    self.broken.append(f"{when}: a router lists {url}, and no request ever went through it")

    # What is there

    @property
    def engine_pods(self) -> list[dict[str, Any]]:
        pods = self.world.hub.objects("Pod", self.namespace)
        return sorted((pod for pod in pods if not is_router(pod)), key=lambda pod: str(pod["metadata"]["name"]))

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.world.hub.objects("ServerGroup", self.namespace)

    @property
    def records(self) -> list[dict[str, Any]]:
        return [record for group in self.groups for record in group.get("status", {}).get("engines", [])]

    @property
    def server(self) -> dict[str, Any]:
        return self.world.hub.object("RolloutServer", self.namespace, self.name) or {}

    def live_pod(self, index: int) -> dict[str, Any]:
        label = str(index)
        return next(
            pod for pod in self.engine_pods if _live(pod) and pod["metadata"]["labels"][LABEL_ENGINE_INDEX] == label
        )

    def lives(self, index: int) -> int:
        """How many pods of rank 0 an engine ever had."""
        return sum(bool(re.search(rf"-{index}-e\d+-r0$", name)) for name in self.created)

    def engine(self, pod: dict[str, Any]) -> Engine:
        return self.addresses[pod["status"]["podIP"]]

    def unsettled(self) -> str:
        """Why the fleet is not yet as its spec wants it; empty when it is, with nothing left over."""
        server = self.server
        status = server.get("status") or {}
        if status.get("observedGeneration") != server["metadata"]["generation"]:
            return "status speaks of another generation"
        conditions = {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}
        wanted = {
            "Ready": ("True", "Serving"),
            "Progressing": ("False", "Stable"),
            "Degraded": ("False", "AsExpected"),
            "WeightsCurrent": ("True", "Verified"),
        }
        if conditions != wanted:
            return f"conditions: {conditions}"
        count = sum(group["replicas"] for group in server["spec"]["groups"])
        engines = {"desired": count, "ready": count, "routable": count}
        if status["engines"] != {**status["engines"], **engines, "stale": 0, "failed": 0}:
            return f"engines: {status['engines']}"
        if any(record["phase"] != "Serving" for record in self.records) or len(self.records) != count:
            return f"records: {self.records}"
        return self._leftovers()

    def _leftovers(self) -> str:
        names = {
            engine_pod_name(group["metadata"]["name"], record["index"], record["epoch"], rank)
            for group in self.groups
            for record in group["status"]["engines"]
            for rank in range(group["spec"]["engine"].get("nodes", 1))
        }
        expected = [pod for pod in self.engine_pods if pod["metadata"]["uid"] not in self.world.node.lost]
        if {pod["metadata"]["name"] for pod in expected} != names:
            return f"pods: {[pod['metadata']['name'] for pod in expected]}, wanted {sorted(names)}"
        for pod in self.world.hub.objects("Pod", self.namespace):
            if pod["metadata"]["uid"] not in self.world.node.lost and not (_live(pod) and _gate(pod)):
                return f"pod {pod['metadata']['name']} is not alive and routable"
        urls = {
            pod_url(pod["status"]["podIP"], 30000) for pod in expected if pod["metadata"]["labels"][LABEL_RANK] == "0"
        }
        for router in self.routers:
            if set(router.table) != urls:
                return f"a router lists {sorted(router.table)}, wanted {sorted(urls)}"
        paused = [url for url in urls if self.addresses[url[7:-6]].paused]
        return f"paused: {paused}" if paused else ""

    # What a user, a trainer and time do

    async def apply(self, *groups: dict[str, Any], **spec: Any) -> None:
        manifest = {
            "apiVersion": API_VERSION,
            "kind": "RolloutServer",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {
                "model": {"path": MODEL},
                "groups": list(groups),
                "weights": {"volume": {"emptyDir": {}}, "mountPath": "/weights"},
                **spec,
            },
        }
        applied = await self.world.api.apply(kube.ROLLOUT_SERVER, manifest, field_manager=USER)
        generation = applied["metadata"]["generation"]
        await self.until(lambda: self.server["metadata"]["generation"] == generation, "the new spec is seen")

    async def delete_pod(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        await self.world.api.delete(kube.POD, metadata["name"], namespace=self.namespace, uid=metadata["uid"])
        await self.until(lambda: not _live(self._pods.get(metadata["uid"], DELETED)), "the deletion is seen")

    async def fail(self, pod: dict[str, Any], *, exit_code: int) -> None:
        """What runs in the pod ends."""
        await self.world.node.fail(pod, exit_code)
        await self.until(lambda: not _live(self._pods.get(pod["metadata"]["uid"], DELETED)), "the end is seen")

    async def until(self, condition: Callable[[], Any], what: str, *, seconds: float = CONVERGED_SECONDS) -> None:
        """`condition` may raise LookupError for not yet."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if condition():
                    return
            except LookupError:
                pass
            assert not self.world.node.errors, self.world.node.errors
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.namespace}: not within {seconds:g} s: {what}; {self.report()}")
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._news.wait()

    async def settled(self, *, idle: float) -> None:
        """Until the fleet is as its spec wants it and the operator has written nothing for `idle` seconds."""
        await self.until(lambda: not self.unsettled(), "it settles")
        while True:
            process, count = self.process, len(self.process.wires.writes)
            await asyncio.sleep(idle)
            if self.process is process and len(process.wires.writes) == count and not self.unsettled():
                break
            await self.until(lambda: not self.unsettled(), "it stays settled")
        assert not self.broken, f"{self.namespace}: {self.broken}; {self.report()}"

    def report(self) -> str:
        try:
            why = self.unsettled()
        except LookupError as error:
            why = repr(error)
        pods = [
            (p["metadata"]["name"], (p.get("status") or {}).get("phase"), bool(p["metadata"].get("deletionTimestamp")))
            for p in self.world.hub.objects("Pod", self.namespace)
        ]
        tables = [sorted(router.table) for router in self.routers]
        writes = [write.partition("?")[0] for write in self.process.wires.writes[-20:]]
        records = [{name: value for name, value in record.items() if value} for record in self.records]
        return (
            f"unsettled: {why}\nbroken: {self.broken}\npods: {pods}\ntables: {tables}\nrecords: {records}\n"
            f"deaths: {self.deaths}\nlives: {self.before}\nlast writes: {writes}"
        )

    def trainer(self) -> AbstractAsyncContextManager[Updater]:
        return trainer(self)

    async def update_weights(self, updater: Updater, path: str) -> None:
        before = set(self.allowed)
        self.allowed = before | {path}
        result = await updater.update(UpdateWeights(path=path))
        assert result.committed
        await self.until(lambda: self.server["status"]["training"]["weights"]["path"] == path, "the commit is seen")
        part = {verdict.uid for verdict in result.engines if verdict.outcome == "Committed"}
        urls = {record["url"] for record in self.records if record.get("podUid") in part}
        assert {self.loaded(url) for url in urls} <= {path, ""}
        # One that missed a look as the update began took no part in it; the operator takes it out of the routers next.
        await self.until(lambda: self.listed_weights() <= {path}, "only the new weights are listed")
        self.allowed = {path}
        self.look_at_tables(f"{path} was committed")

    def listed_weights(self) -> set[str]:
        return {self.loaded(url) for router in self.routers for url in router.table} - {""}

    def loaded(self, url: str) -> str:
        """Path of the weights that an engine has; empty where none is any more."""
        engine = self.world.hosts.program(url)
        return engine.path if isinstance(engine, Engine) else ""


@asynccontextmanager
async def running(world: World, namespace: str, **options: Any) -> AsyncIterator[Fleet]:
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    await world.api.create(NAMESPACE, manifest)
    fleet = Fleet(world=world, namespace=namespace, **options)
    world.fleets[namespace] = fleet
    with world.hub.subscribed(namespace, fleet.saw):
        fleet.start()
        supervising = asyncio.create_task(fleet.supervise())
        try:
            yield fleet
        finally:
            supervising.cancel()
            await asyncio.gather(supervising, return_exceptions=True)
            await fleet.process.kill()
            for address in fleet.addresses:
                await world.hosts.end(address)
            del world.fleets[namespace]


@asynccontextmanager
async def trainer(fleet: Fleet) -> AsyncIterator[Updater]:
    """The agent of a trainer: the real one, beside the operator that is under test."""
    network = fleet.world.network
    api, http = network.api(), Http(max_connections=1, send=network.to_engines(Wires()))
    view = AgentsFleet(
        api=api, namespace=fleet.namespace, role="actor", name=fleet.name, pod_name="trainer", pod_uid="trainer"
    )
    leadership = Leadership(api=api, namespace=fleet.namespace, fleet=view, identity="trainer")
    await leadership.lease.acquire()
    keeping = asyncio.create_task(leadership.lease.keep())
    try:
        yield Updater(
            fleet=view,
            leadership=leadership,
            engine=lambda url: EngineClient(url, http=http),
            worker=lambda url: WorkerClient(worker_url(url), http=http),
        )
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await http.close()


def _live(pod: dict[str, Any]) -> bool:
    ended = (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")
    return not ended and not pod["metadata"].get("deletionTimestamp")


def _gate(pod: dict[str, Any]) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c["type"] == GATE_ROUTABLE and c["status"] == "True" for c in conditions)
