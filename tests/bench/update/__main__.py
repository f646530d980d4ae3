"""What a weight update costs beside the same sequence done by hand: real SGLang on the CPU, the agent's and the trainer
library's own code, a real API server for what the agent records. See README.md.

usage: python -m bench.update [--engines 1,2,4] [--sizes small,large] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from api_server.control_plane import control_plane
from bench.telling import numbers, say, words
from rolloutfleet.agent.collection.collections import Collections
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.memory import Memory
from rolloutfleet.agent.observing.observations import Observations
from rolloutfleet.agent.sampling import Sampler
from rolloutfleet.agent.server import Role, application
from rolloutfleet.agent.sessions import Sessions
from rolloutfleet.agent.updates import Updater
from rolloutfleet.api.names import API_VERSION, trainer_name
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.engine.worker import WorkerClient, worker_url
from rolloutfleet.kube import client as kube
from servers import CpuEngine, Engine

NAMESPACE, SERVER, GROUP = "default", "bench", "bench-main"
AGENT_PORT = 18477
RECORDS = 21
HERE = Path(__file__).parent
ENGINE_PYTHON = os.environ.get("ENGINE_PYTHON", sys.executable)


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="bench-update-") as folder:
        work = Path(folder)
        models = {size: work / size for size in arguments.sizes}
        for size, models_folder in models.items():
            say(f"making two {size} checkpoints")
            make = [ENGINE_PYTHON, str(HERE / "checkpoints.py"), str(models_folder), size]
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)
        (work / "control").mkdir()
        with control_plane(work / "control") as plane:
            results = asyncio.run(_runs(arguments, models, work, kube.KubeApi(plane.credentials, max_connections=8)))
    print(json.dumps(summary(results)))
    return 0


async def _runs(
    arguments: argparse.Namespace, models: dict[str, Path], work: Path, api: kube.KubeApi
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    try:
        for size, mount in models.items():
            engines = [_engine(number, mount, work) for number in range(max(arguments.engines))]
            try:
                for engine in engines:
                    say(f"{size}: engine {engine.name} serves after {engine.wait()} s")
                    engine.ask("/freeze_gc", {})  # what SGLang does itself after the warm-up that these leave out
                for count in arguments.engines:
                    found += await _measure(api, engines[:count], mount, arguments.rounds, size)
                if len(engines) > 1:
                    found += await _measure(api, engines[:2], mount, 0, size)
            finally:
                for engine in engines:
                    engine.kill()
    finally:
        await api.close()
    return found


async def _measure(
    api: kube.KubeApi, engines: Sequence[Engine], mount: Path, rounds: int, size: str
) -> list[dict[str, Any]]:
    """`rounds` of each transport; with none, the death of the last engine in the middle of one."""
    for engine in engines:  # another fleet's, from now on
        body = {"model_path": f"{mount}/m0", "weight_version": "default"}
        await asyncio.to_thread(engine.ask, "/update_weights_from_disk", body)
    async with agent(api, engines, mount) as (fleet, leadership):
        options = {
            "mount": str(mount),
            "agent": f"http://127.0.0.1:{AGENT_PORT}",
            "urls": [engine.url for engine in engines],
            "rounds": rounds,
            "victim": engines[-1].members() if not rounds else [],
        }
        process = await asyncio.create_subprocess_exec(
            *(ENGINE_PYTHON, "-m", "bench.update.trainer", json.dumps(options)),
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{HERE.parents[2] / 'operator'}:{HERE.parents[1]}"},
        )
        told, _ = await process.communicate()
        if process.returncode:
            raise SystemExit(f"the trainer ended with {process.returncode}")
        told_of_all = {"size": size, "engines": len(engines), "record_s": await _record_seconds(fleet, leadership)}
    found = [told_of_all | json.loads(line) for line in told.decode().splitlines()]
    for result in found:
        say(json.dumps(result))
    return found


async def _record_seconds(fleet: Fleet, leadership: Leadership) -> float:
    """Of one of the two that an update writes, while nothing else runs."""
    seconds = []
    for _ in range(RECORDS):
        began = time.perf_counter()
        await leadership.write(fleet.training)
        seconds.append(time.perf_counter() - began)
    return round(statistics.median(seconds), 4)


def _engine(number: int, mount: Path, work: Path) -> CpuEngine:
    return CpuEngine(mount / "m0", name=f"e{number}", logs=work, label="default")


@asynccontextmanager
async def agent(api: kube.KubeApi, engines: Sequence[Engine], mount: Path) -> AsyncIterator[tuple[Fleet, Leadership]]:
    """The agent of a fleet that stands in a real API server as an operator would have written it."""
    await _write_fleet(api, engines, mount)
    http = Http(max_connections=64)

    def engine(url: str) -> EngineClient:
        return EngineClient(url, http=http)

    fleet = Fleet(api=api, namespace=NAMESPACE, role="actor", name=SERVER, pod_name="train", pod_uid="train")
    leadership = Leadership(api=api, namespace=NAMESPACE, fleet=fleet, identity="train")
    sampler = Sampler(fleet=fleet, router=lambda url: RouterClient(url, http=http), engine=engine)
    observations = Observations()
    role = Role(
        fleet=fleet,
        leadership=leadership,
        updater=Updater(
            fleet=fleet,
            leadership=leadership,
            engine=engine,
            worker=lambda url: WorkerClient(worker_url(url), http=http),
        ),
        sessions=Sessions(fleet=fleet, leadership=leadership, engine=engine, address="127.0.0.1"),
        memory=Memory(fleet=fleet, leadership=leadership, engine=engine),
        sampler=sampler,
        collections=Collections(
            fleet=fleet,
            leadership=leadership,
            sampler=sampler,
            http=http,
            agent="train",
            url="http://127.0.0.1:1/v1/servers/actor",
            observer=observations,
        ),
        observations=observations,
    )
    runner = web.AppRunner(application({"actor": role}), access_log=None, handler_cancellation=True)
    await runner.setup()
    await fleet.refresh()
    await leadership.lease.acquire()
    tasks = [asyncio.create_task(fleet.watch()), asyncio.create_task(leadership.lease.keep())]
    await web.TCPSite(runner, "127.0.0.1", AGENT_PORT).start()
    try:
        yield fleet, leadership
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await runner.cleanup()
        await http.close()
        for resource, name in (
            (kube.ROLLOUT_SERVER, SERVER),
            (kube.SERVER_GROUP, GROUP),
            (kube.LEASE, trainer_name(SERVER)),
        ):
            await api.delete(resource, name, namespace=NAMESPACE)


async def _write_fleet(api: kube.KubeApi, engines: Sequence[Engine], mount: Path) -> None:
    metadata = {"namespace": NAMESPACE}
    spec = {"model": {"path": f"{mount}/m0"}}
    group = {"name": "main", "replicas": len(engines), "engine": {"image": "engine"}}
    weights = {"volume": {"emptyDir": {}}, "mountPath": str(mount)}
    head = {"apiVersion": API_VERSION}
    server = {**head, "kind": "RolloutServer", "metadata": {**metadata, "name": SERVER}}
    await api.create(kube.ROLLOUT_SERVER, {**server, "spec": {**spec, "groups": [group], "weights": weights}})
    owned = {**head, "kind": "ServerGroup", "metadata": {**metadata, "name": GROUP}}
    await api.create(
        kube.SERVER_GROUP,
        {**owned, "spec": {**spec, "server": SERVER, "replicas": len(engines), "engine": {"image": "engine"}}},
    )
    records = [
        {
            "index": index,
            "epoch": 1,
            "revision": "r1",
            "phase": "Serving",
            "url": engine.url,
            "pod": engine.name,
            "podUid": f"{engine.name}-{engine.port}",
        }
        for index, engine in enumerate(engines)
    ]
    measured = [{"revision": "r1", "version": 0, "checksum": engines[0].checksum()}]
    status = {"routable": len(engines), "engines": records, "measured": measured}
    await api.apply(kube.SERVER_GROUP, {**owned, "status": status}, field_manager="bench", subresource="status")
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
    await api.create(kube.LEASE, {**lease, "metadata": {**metadata, "name": trainer_name(SERVER)}, "spec": {}})


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    compared = [result for result in results if "total_ratio" in result]
    deaths = [result["casualty_to_continue_s"] for result in results if "casualty_to_continue_s" in result]
    return {
        "updates": compared,
        "total_ratio": max((result["total_ratio"] for result in compared), default=None),
        "pause_ratio": max((result["pause_ratio"] for result in compared), default=None),
        "casualty_to_continue_s": max(deaths, default=None),
        "load": round(os.getloadavg()[0], 1),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.update")
    parser.add_argument("--engines", type=numbers, default=[1, 2, 4])
    parser.add_argument("--sizes", type=words, default=["small", "large"])
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
