"""Changes to the tables that routers and language engines keep in memory, by their REST APIs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from rolloutfleet.control.freshness import require_same_training
from rolloutfleet.control.probes import Prober
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.engine.errors import EngineError
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.engine.sglang import EncoderTable
from rolloutfleet.kube import client as kube
from rolloutfleet.plan.actions import Deregister, Register, RegisterEncoder, UnregisterEncoder

logger = logging.getLogger(__name__)

REGISTRATION_SECONDS = 60
"""After which a registration that no router lists is asked for again."""
RETRY_PAUSE_SECONDS = 3.0


class Tables:
    def __init__(
        self,
        *,
        api: kube.KubeApi,
        store: FleetStore,
        prober: Prober,
        router: Callable[[str], RouterClient],
        encoder_table: Callable[[str], EncoderTable],
        enqueue_after: Callable[[FleetKey, float], None],
        clock: Callable[[], datetime],
    ) -> None:
        self._api = api
        self._store = store
        self._prober = prober
        self._router = router
        self._encoder_table = encoder_table
        self._enqueue_after = enqueue_after
        self._clock = clock
        self._looks: dict[FleetKey, asyncio.Future[None]] = {}

    async def register(self, key: FleetKey, action: Register) -> None:
        await self._require_same_training(key)
        try:
            await self._router(action.router_url).add_worker(
                action.url, worker_type=action.kind.type, bootstrap_port=action.kind.bootstrap_port
            )
        except EngineError as error:
            logger.warning("router %s did not take %s: %s", action.router, action.url, error)
            self._enqueue_after(key, RETRY_PAUSE_SECONDS)
            return
        uid = self._router_uid(key, action.router)
        until = self._clock() + timedelta(seconds=REGISTRATION_SECONDS)
        self._store.registering.setdefault(uid, {})[action.url] = until
        self._prober.look_soon(uid)

    async def _require_same_training(self, key: FleetKey) -> None:
        """One look for all registrations that begin while it is under way: each is made after it."""
        look = self._looks.get(key)
        if look is None:
            look = asyncio.ensure_future(require_same_training(self._api, self._store, key))
            self._looks[key] = look
            look.add_done_callback(lambda _: self._looks.pop(key, None))
        await asyncio.shield(look)

    async def deregister(self, key: FleetKey, action: Deregister) -> None:
        client = self._router(action.router_url)
        try:
            for worker in await client.list_workers():
                if worker.url == action.url:
                    await client.remove_worker(worker.id)
        except EngineError as error:
            logger.warning("router %s did not forget %s: %s", action.router, action.url, error)
            self._enqueue_after(key, RETRY_PAUSE_SECONDS)
        self._prober.look_soon(self._router_uid(key, action.router))

    async def register_encoder(self, key: FleetKey, action: RegisterEncoder) -> None:
        await self._change_table(key, action, self._encoder_table(action.table).add(action.url))

    async def unregister_encoder(self, key: FleetKey, action: UnregisterEncoder) -> None:
        await self._change_table(key, action, self._encoder_table(action.table).remove(action.url))

    async def _change_table(
        self, key: FleetKey, action: RegisterEncoder | UnregisterEncoder, change: Awaitable[None]
    ) -> None:
        try:
            await change
        except EngineError as error:
            logger.warning("%s", error)
            self._enqueue_after(key, RETRY_PAUSE_SECONDS)
        self._prober.look_soon(action.pod_uid)

    def _router_uid(self, key: FleetKey, name: str) -> str:
        pod = self._store.object(key, "Pod", name)
        return str(pod["metadata"]["uid"]) if pod is not None else ""
