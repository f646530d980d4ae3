"""`python -m rolloutfleet.agent`: the sidecar's process."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal

from aiohttp import web

from rolloutfleet.agent.collection.collections import Collections
from rolloutfleet.agent.leadership import Leadership
from rolloutfleet.agent.membership import Fleet
from rolloutfleet.agent.memory import Memory
from rolloutfleet.agent.observing.metrics import serve_metrics
from rolloutfleet.agent.observing.observations import Observations
from rolloutfleet.agent.sampling import Sampler
from rolloutfleet.agent.server import Role, application
from rolloutfleet.agent.sessions import Sessions
from rolloutfleet.agent.settings import Settings, load_settings
from rolloutfleet.agent.store.errors import StoreError
from rolloutfleet.agent.updates import Updater
from rolloutfleet.agent.volume import announce
from rolloutfleet.engine.http import Http
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.engine.worker import WorkerClient, worker_url
from rolloutfleet.kube.client import ApiError, KubeApi
from rolloutfleet.kube.config import load_credentials

logger = logging.getLogger(__name__)


async def run(settings: Settings) -> None:
    # An answer of 8,000 tokens is 8,000 small lists that live for milliseconds. With Python's thresholds the collector
    # looks at the whole heap for them several times, which is most of what such an answer costs.
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
    api = KubeApi(load_credentials(), max_connections=16)
    http = Http(max_connections=4096)

    def engine(url: str) -> EngineClient:
        return EngineClient(url, http=http)

    def worker(url: str) -> WorkerClient:
        return WorkerClient(worker_url(url), http=http)

    def router(url: str) -> RouterClient:
        return RouterClient(url, http=http)

    roles: dict[str, Role] = {}
    for name, server in settings.servers.items():
        fleet = Fleet(
            api=api,
            namespace=settings.namespace,
            role=name,
            name=server,
            pod_name=settings.pod_name,
            pod_uid=settings.pod_uid,
        )
        leadership = Leadership(api=api, namespace=settings.namespace, fleet=fleet, identity=settings.pod_name)
        sampler = Sampler(fleet=fleet, router=router, engine=engine)
        observations = Observations()
        roles[name] = Role(
            fleet=fleet,
            leadership=leadership,
            updater=Updater(fleet=fleet, leadership=leadership, engine=engine, worker=worker),
            sessions=Sessions(fleet=fleet, leadership=leadership, engine=engine, address=settings.pod_ip),
            memory=Memory(fleet=fleet, leadership=leadership, engine=engine),
            sampler=sampler,
            collections=Collections(
                fleet=fleet,
                leadership=leadership,
                sampler=sampler,
                http=http,
                agent=settings.pod_name,
                url=f"http://{settings.host}:{settings.port}/v1/servers/{name}",
                observer=observations,
            ),
            observations=observations,
        )

    runner = web.AppRunner(application(roles), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, settings.host, settings.port).start()
    observed = {name: (role.server_name, role.observations) for name, role in roles.items()}
    metrics = await serve_metrics(settings.namespace, observed, port=settings.metrics_port)
    logger.info("serving %s on %s:%d", settings.servers, settings.host, settings.port)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tasks = [asyncio.create_task(role.fleet.watch()) for role in roles.values()]
    tasks += [asyncio.create_task(role.leadership.run()) for role in roles.values()]
    tasks += [asyncio.create_task(role.memory.watch()) for role in roles.values()]
    tasks += [asyncio.create_task(role.sampler.watch()) for role in roles.values()]
    announcing = [asyncio.create_task(announce(role.fleet)) for role in roles.values()]
    waiting = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)

    for role in roles.values():
        await role.sessions.abandon("the agent is told to stop")
        await role.updater.finish()
        try:
            await role.collections.end()
        except StoreError as error:
            logger.warning("collection of %s: %s", role.fleet.name, error)
    for task in (waiting, *tasks, *announcing):
        task.cancel()
    for role in roles.values():
        try:
            await role.leadership.lease.release()
        except ApiError as error:
            logger.warning("lease of %s not released: %s", role.fleet.name, error)
    await runner.cleanup()
    await metrics.cleanup()
    await http.close()
    await api.close()
    for task in done - {waiting}:
        task.result()  # a loop that ended by an error: exit with it, and be restarted


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = load_settings()
    except ValueError as error:
        raise SystemExit(str(error)) from error
    asyncio.run(run(settings))


if __name__ == "__main__":
    main()
