"""Plays kubelet, scheduler and the ReplicaSet controller for all pods of the cluster: they run where `Hosts` serves.

Pods go through the API as real ones do: bound by `binding`, run by their status, and gone only when a node has
confirmed their end.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from rolloutfleet.api.names import COMPONENT_ROUTER, ENGINE_CONTAINER, LABEL_COMPONENT
from rolloutfleet.kube import client as kube
from rolloutfleet.kube.resources import Resource
from stand_ins.hosts import Hosts, Program

KUBELET = "kubelet"
EXIT_SECONDS = 0.05
NODE = "node0"


class Unwanted(Exception):
    """Nobody waits for this pod any more: its test has ended."""


class Node:
    def __init__(self, api: kube.KubeApi, hosts: Hosts, program: Callable[[dict[str, Any], str], Program]) -> None:
        """`program(pod, address)`: what runs in that pod. Raises Unwanted."""
        self._api = api
        self._hosts = hosts
        self._program = program
        self._addresses: dict[str, str] = {}
        """Of pods that run, by UID."""
        self._begun: set[str] = set()
        self._ending: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.holding: set[str] = set()
        """Namespaces in which no pod is scheduled for now."""
        self.apart: set[str] = set()
        """Namespaces in which each pod has a node of its own."""
        self.lost: set[str] = set()
        """UIDs of pods whose node is gone: nobody confirms their end."""
        self._joined: set[str] = set()
        self.errors: list[BaseException] = []

    def saw(self, kind: str, type_of_event: str | None, body: dict[str, Any]) -> None:
        if kind == "ReplicaSet" and type_of_event != "DELETED":
            self._do(self._replicate(body))
        if kind != "Pod":
            return
        uid = body["metadata"]["uid"]
        if type_of_event == "DELETED":
            self._do(self._end_program(uid))
        elif body["metadata"].get("deletionTimestamp"):
            if uid not in self._ending and uid not in self.lost:
                self._ending.add(uid)
                self._do(self._finish(body))
        elif uid not in self._begun and body["metadata"]["namespace"] not in self.holding:
            self._begun.add(uid)
            self._do(self._begin(body))

    def release(self, namespace: str, pods: list[dict[str, Any]]) -> None:
        self.holding.discard(namespace)
        for pod in pods:
            self.saw("Pod", "MODIFIED", pod)

    async def fail(self, pod: dict[str, Any], exit_code: int) -> None:
        """The program in the pod ends."""
        await self._end_program(pod["metadata"]["uid"])
        terminated = {"exitCode": exit_code, "reason": "Error", "message": "RuntimeError: told to fail"}
        await self._set_status(pod, "Failed", {"terminated": terminated})

    async def lose(self, pod: dict[str, Any]) -> None:
        """Its node goes, as a cloud takes it: nobody will confirm the end of the pod."""
        self.lost.add(pod["metadata"]["uid"])
        await self._end_program(pod["metadata"]["uid"])
        await self._api.delete(kube.NODE, pod["spec"]["nodeName"])

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except (kube.NotFound, kube.Conflict, Unwanted):
                pass  # the pod went meanwhile
            except Exception as error:
                self.errors.append(error)
                raise

        task = asyncio.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        node = metadata["name"] + "." + metadata["namespace"] if metadata["namespace"] in self.apart else NODE
        await self._join(node)
        binding = Resource("", "v1", f"pods/{metadata['name']}/binding", "Binding")
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        names = {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]}
        await self._api.create(binding, {"apiVersion": "v1", "kind": "Binding", "metadata": names, "target": target})
        address = self._hosts.new_address()
        self._addresses[metadata["uid"]] = address
        await self._hosts.start(address, self._program(pod, address))
        await self._set_status(pod, "Running", {"running": {"startedAt": _stamp()}})

    async def _join(self, node: str) -> None:
        if node in self._joined:
            return
        self._joined.add(node)
        names = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}
        try:
            await self._api.create(kube.NODE, names)
        except kube.AlreadyExists:
            return  # by an earlier test
        conditions = [{"type": "Ready", "status": "True"}]
        await self._api.apply(
            kube.NODE, {**names, "status": {"conditions": conditions}}, field_manager=KUBELET, subresource="status"
        )

    async def _set_status(self, pod: dict[str, Any], phase: str, state: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        address = self._addresses.get(metadata["uid"], "")
        container = {
            "name": pod["spec"]["containers"][0]["name"],
            "image": "image",
            "imageID": "image",
            "ready": phase == "Running",
            "restartCount": 0,
            "state": state,
        }
        status = {
            "phase": phase,
            "containerStatuses": [container],
            "conditions": [{"type": "PodScheduled", "status": "True"}],
            **({"podIP": address, "podIPs": [{"ip": address}]} if address else {}),
        }
        names = {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]}
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": names, "status": status}
        await self._api.apply(kube.POD, manifest, field_manager=KUBELET, subresource="status")

    async def _finish(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        await asyncio.sleep(EXIT_SECONDS)
        await self._end_program(metadata["uid"])
        await self._api.delete(
            kube.POD, metadata["name"], namespace=metadata["namespace"], uid=metadata["uid"], grace_seconds=0
        )

    async def _end_program(self, uid: str) -> None:
        address = self._addresses.get(uid)
        if address is not None:
            await self._hosts.end(address)

    async def _replicate(self, replica_set: dict[str, Any]) -> None:
        """Replica n of a ReplicaSet has its name and n, so that making it twice is refused."""
        metadata, spec = replica_set["metadata"], replica_set["spec"]
        for number in range(spec["replicas"]):
            template = spec["template"]
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": f"{metadata['name']}-{number}",
                    "namespace": metadata["namespace"],
                    "labels": template["metadata"]["labels"],
                    "annotations": {"serial": uuid.uuid4().hex},
                },
                "spec": template["spec"],
            }
            await self._api.create(kube.POD, pod)


def is_router(pod: dict[str, Any]) -> bool:
    return bool(pod["metadata"]["labels"].get(LABEL_COMPONENT) == COMPONENT_ROUTER)


def engine_flags(pod: dict[str, Any]) -> list[str]:
    container = next(c for c in pod["spec"]["containers"] if c["name"] == ENGINE_CONTAINER)
    return list(container["args"])


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
