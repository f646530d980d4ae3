"""The least that an operator could do: what the objects of a fleet cost this machine, whoever makes them.

It makes the objects that our operator had made for one fleet, and writes the statuses that it had written last, each
once; gates open when containers are ready, and a fleet is Ready when its pods are. It asks no engine and no router
anything, keeps nothing, repairs nothing. `recorded` runs in the harness, `python -m bench.scale.least FILE` in place of
the operator.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Coroutine
from pathlib import Path

from bench.scale.control_plane import NAMESPACE
from rolloutfleet.api.names import COMPONENT_ENGINE, LABEL_COMPONENT, LABEL_SERVER
from rolloutfleet.kube import client as kube
from rolloutfleet.kube.config import load_credentials

IN_FLIGHT = 64
MADE_AT_ONCE = (
    kube.SERVER_GROUP,
    kube.SERVICE,
    kube.REPLICA_SET,
    kube.ROLE,
    kube.ROLE_BINDING,
    kube.LEASE,
)
SET_BY_SERVER = ("uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "selfLink")
PLACES = ("nodeName", "clusterIP", "clusterIPs")


async def recorded(api: kube.KubeApi, name: str) -> kube.Object:
    """What the operator has made of the fleet of this name."""
    server = await api.get(kube.ROLLOUT_SERVER, name, namespace=NAMESPACE)
    groups = (await api.list(kube.SERVER_GROUP, namespace=NAMESPACE)).items
    pods = (await api.list(kube.POD, namespace=NAMESPACE, label_selector=f"{LABEL_COMPONENT}={COMPONENT_ENGINE}")).items
    made = [_bare(item) for kind in MADE_AT_ONCE for item in (await api.list(kind, namespace=NAMESPACE)).items]
    return {
        "server": {"name": name, "uid": server["metadata"]["uid"], "status": server["status"]},
        "group": {"name": groups[0]["metadata"]["name"], "uid": groups[0]["metadata"]["uid"]},
        "group_status": groups[0]["status"],
        "objects": [item for item in made if not item["metadata"]["name"].startswith("kube-")],
        "budgets": [_bare(item) for item in (await api.list(kube.DISRUPTION_BUDGET, namespace=NAMESPACE)).items],
        "pods": [_bare(pod) for pod in pods],
    }


def _bare(found: kube.Object) -> kube.Object:
    """As it was sent, but for defaults: without what the server has set, or where it has put it."""
    metadata = {key: value for key, value in found["metadata"].items() if key not in SET_BY_SERVER}
    bare = {key: value for key, value in found.items() if key != "status"} | {"metadata": metadata}
    if "spec" in found:
        bare["spec"] = {key: value for key, value in found["spec"].items() if key not in PLACES}
    return bare


class Least:
    def __init__(self, api: kube.KubeApi, record: kube.Object) -> None:
        self._api = api
        self._record = record
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._server_uid: dict[str, str] = {}
        self._group_uid: dict[str, str] = {}
        self._opened: set[str] = set()
        self._ready: dict[str, set[str]] = defaultdict(set)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        await asyncio.gather(self._watch(kube.ROLLOUT_SERVER, self._saw_server), self._watch(kube.POD, self._saw_pod))

    async def _watch(self, resource: kube.Resource, saw: Callable[[kube.Object], None]) -> None:
        listed = await self._api.list(resource, namespace=NAMESPACE)
        for item in listed.items:
            saw(item)
        version = listed.resource_version
        while True:
            async for event in self._api.watch(resource, resource_version=version, namespace=NAMESPACE):
                version = event.object["metadata"]["resourceVersion"]
                if event.type in ("ADDED", "MODIFIED"):
                    saw(event.object)

    def _begin(self, doing: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(self._in_turn(doing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_turn(self, doing: Coroutine[None, None, None]) -> None:
        async with self._slots:
            await doing

    def _saw_server(self, body: kube.Object) -> None:
        name = body["metadata"]["name"]
        if name not in self._group_uid:
            self._group_uid[name] = ""
            self._server_uid[name] = body["metadata"]["uid"]
            self._begin(self._make(name))

    async def _make(self, name: str) -> None:
        created = await self._api.create(kube.SERVER_GROUP, self._for(name)["objects"][0])
        self._group_uid[name] = created["metadata"]["uid"]
        mine = self._for(name)
        objects = mine["objects"][1:] + mine["pods"]
        await asyncio.gather(*(self._api.create(kube.by_kind(made["kind"]), made) for made in objects))

    def _for(self, name: str) -> kube.Object:
        """The record as of this fleet."""
        text = json.dumps(self._record)
        old = self._record["server"]
        text = text.replace(old["uid"], self._server_uid[name]).replace(old["name"], name)
        if self._group_uid[name]:
            text = text.replace(self._record["group"]["uid"], self._group_uid[name])
        found: kube.Object = json.loads(text)
        return found

    def _saw_pod(self, pod: kube.Object) -> None:
        conditions = {one["type"]: one["status"] for one in (pod.get("status") or {}).get("conditions") or []}
        name, uid = pod["metadata"]["labels"].get(LABEL_SERVER, ""), pod["metadata"]["uid"]
        gates = [gate["conditionType"] for gate in pod["spec"].get("readinessGates") or []]
        if gates and conditions.get("ContainersReady") == "True" and uid not in self._opened:
            self._opened.add(uid)
            self._begin(self._open(pod, gates))
        if conditions.get("Ready") == "True" and uid not in self._ready[name]:
            self._ready[name].add(uid)
            if len(self._ready[name]) == len(self._record["pods"]):
                self._begin(self._tell(name))

    async def _open(self, pod: kube.Object, gates: list[str]) -> None:
        identity = {key: pod["metadata"][key] for key in ("name", "namespace", "uid")}
        conditions = [{"type": gate, "status": "True"} for gate in gates]
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": identity, "status": {"conditions": conditions}}
        await self._api.apply(kube.POD, manifest, field_manager="least", subresource="status")

    async def _tell(self, name: str) -> None:
        mine = self._for(name)
        for resource, about, status in (
            (kube.SERVER_GROUP, mine["group"]["name"], mine["group_status"]),
            (kube.ROLLOUT_SERVER, name, mine["server"]["status"]),
        ):
            await self._api.patch(resource, about, {"status": status}, namespace=NAMESPACE, subresource="status")
        for budget in mine["budgets"]:  # one made before its pods is counted anew with each of them
            await self._api.create(kube.DISRUPTION_BUDGET, budget)


async def main(record: kube.Object) -> None:
    await Least(kube.KubeApi(load_credentials()), record).run()


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
