"""The agent's real code over a fleet that is described by hand in a file, without a cluster.

usage: python -m gpu.agent FLEET.json PORT

FLEET.json is what the operator would say and is read anew at every look: {"mount": folder of checkpoints, "model": the
served one, "checksum": of version 0, "engines": [{"pod", "uid", "url", "phase"}]}. What the agent writes to
status.training is kept beside it as FLEET.training.json.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any, cast

from aiohttp import web

from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.memory import Memory
from rolloutfleet.agent.sampling import Sampler
from rolloutfleet.agent.server import Role, application
from rolloutfleet.agent.sessions import Sessions
from rolloutfleet.agent.updates import Updater
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.engine.worker import WorkerClient, worker_url
from rolloutfleet.kube.client import KubeApi
from unit.agent.world import SERVER_UID, Cluster

Object = dict[str, Any]


class ByHand(Cluster):
    """The Kubernetes API, as far as the agent asks it."""

    def __init__(self, described: Path) -> None:
        super().__init__()
        self._described = described
        view = self._read()
        group = {"name": "main", "replicas": len(view["engines"]), "engine": {"image": "engine:1"}, "offload": True}
        server = {
            "metadata": {"name": "qwen", "namespace": "rl", "uid": SERVER_UID},
            "spec": {
                "model": {"path": view["model"]},
                "groups": [group],
                "weights": {"volume": {"emptyDir": {}}, "mountPath": view["mount"]},
            },
            "status": {"conditions": []},
        }
        self.put("rolloutservers", server)
        self.put("servergroups", self._group())
        self.put("leases", {"metadata": {"name": "qwen-trainer", "namespace": "rl"}, "spec": {}})

    def seen(self, plural: str, name: str) -> Object:
        return self._group() if plural == "servergroups" else super().seen(plural, name)

    async def apply(self, *args: Any, **options: Any) -> Object:
        applied = await super().apply(*args, **options)
        told = self._described.with_suffix(".training.json")
        told.write_text(json.dumps(applied["status"]["training"], indent=1))
        return applied

    def _read(self) -> Object:
        view: Object = json.loads(self._described.read_text())
        return view

    def _group(self) -> Object:
        view = self._read()
        engines = [
            {
                "index": index,
                "epoch": 1,
                "revision": "r1",
                "phase": engine["phase"],
                "url": engine["url"],
                "pod": engine["pod"],
                "podUid": engine["uid"],
            }
            for index, engine in enumerate(view["engines"])
        ]
        return {
            "metadata": {"name": "qwen-main", "namespace": "rl", "uid": "uid-main", "resourceVersion": "1"},
            "spec": {
                "server": "qwen",
                "model": {"path": view["model"]},
                "engine": {"image": "engine:1"},
                "offload": True,
            },
            "status": {
                "routable": len(engines),
                "measured": [{"revision": "r1", "version": 0, "checksum": view["checksum"]}],
                "engines": engines,
            },
        }


async def serve(described: Path, port: int) -> None:
    """As rolloutfleet.agent.__main__ does, with another API."""
    api = cast(KubeApi, ByHand(described))
    http = Http(max_connections=64)

    def engine(url: str) -> EngineClient:
        return EngineClient(url, http=http)

    def worker(url: str) -> WorkerClient:
        return WorkerClient(worker_url(url), http=http)

    fleet = Fleet(api=api, namespace="rl", role="actor", name="qwen", pod_name="train", pod_uid="uid-train")
    leadership = Leadership(api=api, namespace="rl", fleet=fleet, identity="train")
    role = Role(
        fleet=fleet,
        leadership=leadership,
        updater=Updater(fleet=fleet, leadership=leadership, engine=engine, worker=worker),
        sessions=Sessions(fleet=fleet, leadership=leadership, engine=engine, address="127.0.0.1"),
        memory=Memory(fleet=fleet, leadership=leadership, engine=engine),
        sampler=Sampler(fleet=fleet, router=lambda url: RouterClient(url, http=http)),
    )
    runner = web.AppRunner(application({"actor": role}), access_log=None, handler_cancellation=True)
    await runner.setup()
    await fleet.refresh()
    await leadership.lease.acquire()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.gather(fleet.watch(), leadership.run())


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
