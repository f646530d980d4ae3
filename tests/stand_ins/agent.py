"""The real agent, whole, on a fleet that is given by hand: no cluster, no operator, real engines.

`python -m stand_ins.agent FLEET.json` serves until it is told to stop. The file says which engines there are, and is
read at each look: {"port": 8477, "address": "127.0.0.1", "model": path, "volume": path, "checksum": of version 0,
"engines": [{"pod": name, "uid": uid, "url": url, "phase": "Serving"}], "ranks": 1, "router": url, "frozen": false,
"name": of the agent's pod, "colocated": on the GPUs that this machine has}.
What the agent writes about the training goes to FLEET.json.training.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import Any

from rolloutfleet.agent import __main__ as agent
from rolloutfleet.agent.settings import Settings
from rolloutfleet.api.weight_labels import fleet_id, weight_label
from rolloutfleet.kube.client import LEASE, ROLLOUT_SERVER, SERVER_GROUP, Resource
from stand_ins.kubernetes import Cluster, Object

SERVER_UID = "5e1f0a27-8c4b-4f7e-9d3a-000000000001"
FIRST_LABEL = weight_label(0, fleet_id(SERVER_UID))
"""What engines are started with: --weight-version."""
SERVER, GROUP = "qwen", "qwen-main"


class ByHand(Cluster):
    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        told = self._told()
        self.put(ROLLOUT_SERVER.plural, _rollout_server(told))
        self.put(LEASE.plural, {"metadata": {"name": f"{SERVER}-trainer", "namespace": "rl"}, "spec": {}})

    async def get(self, resource: Resource, name: str, *, namespace: str | None = None, cached: bool = False) -> Object:
        if resource is SERVER_GROUP:
            self.put(SERVER_GROUP.plural, _server_group(self._told()))
        return await super().get(resource, name, namespace=namespace, cached=cached)

    async def apply(self, *arguments: Any, **named: Any) -> Object:
        body = await super().apply(*arguments, **named)
        written = self._file.with_suffix(".training")
        written.write_text(json.dumps(body["status"]["training"]))
        return body

    async def close(self) -> None:
        pass

    def _told(self) -> Object:
        told: Object = json.loads(self._file.read_text())
        return told


def _rollout_server(told: Object) -> Object:
    group = {"name": "main", "replicas": len(told["engines"]), "engine": {"image": "engine:1"}, "offload": True}
    return {
        "metadata": {"name": SERVER, "namespace": "rl", "uid": SERVER_UID},
        "spec": {
            "model": {"path": told["model"]},
            "groups": [group],
            "weights": {"volume": {"emptyDir": {}}, "mountPath": told["volume"]},
            "updateWeights": not told.get("frozen", False),
        },
        "status": {"router": {"url": told["router"], "replicas": 1, "ready": 1}} if told.get("router") else {},
    }


def _server_group(told: Object) -> Object:
    engine = {"image": "engine:1", "tensorParallel": told.get("ranks", 1)}
    return {
        "metadata": {"name": GROUP, "namespace": "rl", "uid": "uid-main"},
        "spec": {
            "server": SERVER,
            "model": {"path": told["model"]},
            "engine": engine,
            "offload": True,
            **({"colocation": {}} if told.get("colocated") else {}),
        },
        "status": {
            "routable": len(told["engines"]),
            "measured": [{"revision": "r1", "version": 0, "checksum": told["checksum"]}],
            "engines": [
                {
                    "index": index,
                    "epoch": 1,
                    "revision": "r1",
                    "phase": engine.get("phase", "Serving"),
                    "url": engine["url"],
                    "pod": engine["pod"],
                    "podUid": engine["uid"],
                    "weightVersion": engine.get("weight_version", 0),
                }
                for index, engine in enumerate(told["engines"])
            ],
        },
    }


def main(file: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    told = json.loads(file.read_text())
    cluster = ByHand(file)
    vars(agent).update(KubeApi=lambda *_, **__: cluster, load_credentials=lambda: None)
    settings = Settings(
        servers={"actor": SERVER},
        pod_name=told.get("name", "train"),
        pod_uid="uid-train",
        pod_ip=told["address"],
        namespace="rl",
        host="127.0.0.1",
        port=told["port"],
        metrics_port=0,
    )
    asyncio.run(agent.run(settings))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
