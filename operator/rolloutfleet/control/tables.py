"""Changes to the tables that routers and language engines keep in memory, by their REST APIs.

They run beside the reconciles, each on its own: a router that hangs delays neither another router nor the recovery of
its fleet. Two changes of one entry never overlap; the second is left out, and planned again when the first has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakValueDictionary

from rolloutfleet.control.freshness import Stop, require_same_training
from rolloutfleet.control.probes import Prober
from rolloutfleet.control.store import FleetKey, FleetStore, Registration
from rolloutfleet.engine.errors import EngineError
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.engine.sglang import EncoderTable
from rolloutfleet.kube import client as kube
from rolloutfleet.plan.actions import Deregister, Register, RegisterEncoder, UnregisterEncoder

logger = logging.getLogger(__name__)

RETRY_PAUSE_SECONDS = 1.0
REGISTRATION_PATIENCE = timedelta(seconds=120)
"""After which a registration that the router still works on is asked for again: its own limit is well below."""
LISTED_AFTER_SECONDS = (0.1, 0.4)
"""When to look for a new worker: a router needs about 50 ms for one that is well."""
ADDED_AT_ONCE = 16
"""Registrations under way at one router: a fleet that starts must not take all connections of this process."""

TableChange = Register | Deregister | RegisterEncoder | UnregisterEncoder


class _Entry(NamedTuple):
    table: str
    """UID of the pod that keeps it."""
    url: str


class Tables:
    def __init__(
        self,
        *,
        api: kube.KubeApi,
        store: FleetStore,
        prober: Prober,
        router: Callable[[str], RouterClient],
        encoder_table: Callable[[str], EncoderTable],
        enqueue: Callable[[FleetKey], None],
        enqueue_after: Callable[[FleetKey, float], None],
    ) -> None:
        self._api = api
        self._store = store
        self._prober = prober
        self._router = router
        self._encoder_table = encoder_table
        self._enqueue = enqueue
        self._enqueue_after = enqueue_after
        self._running: dict[_Entry, asyncio.Task[None]] = {}
        self._left_out: set[_Entry] = set()
        self._adding: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By UID of the router's pod, as long as somebody adds to its table."""
        self._checks: dict[tuple[FleetKey, str], asyncio.Task[None]] = {}

    def start(self, key: FleetKey, action: TableChange) -> None:
        """Returns at once. Whatever becomes of it, the table is looked at again."""
        table = action.router_uid if isinstance(action, Register | Deregister) else action.pod_uid
        entry = _Entry(table, action.url)
        if isinstance(action, Register) and self._is_there(entry):
            return  # asked for by another one that was under way when this one was planned
        if entry in self._running:
            self._left_out.add(entry)
        else:
            name = f"{type(action).__name__} {entry.url}"
            self._store.table_changes[entry.table] += 1
            self._running[entry] = asyncio.create_task(self._run(key, entry, action), name=name)

    async def close(self) -> None:
        tasks = [*self._running.values(), *self._checks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: FleetKey, entry: _Entry, action: TableChange) -> None:
        try:
            match action:
                case Register():
                    await self._register(key, action)
                case Deregister():
                    await self._router(action.router_url).remove_worker(action.worker_id)
                case RegisterEncoder():
                    await self._encoder_table(action.table).add(action.url)
                case UnregisterEncoder():
                    await self._encoder_table(action.table).remove(action.url)
        except Stop:
            self._enqueue(key)
        except (EngineError, kube.ApiError) as error:
            logger.warning("%s/%s: %s of %s: %s", key.namespace, key.name, type(action).__name__, entry.url, error)
            self._enqueue_after(key, RETRY_PAUSE_SECONDS)
        finally:
            del self._running[entry]
            self._ended(entry.table)
            if entry in self._left_out:
                self._left_out.discard(entry)
                self._enqueue(key)
        self._prober.look_soon(entry.table)

    def _is_there(self, entry: _Entry) -> bool:
        listed, asked_for = self._store.tables.get(entry.table) or {}, self._store.registering.get(entry.table, {})
        return entry.url in listed or entry.url in asked_for

    def _ended(self, table: str) -> None:
        self._store.table_changes[table] -= 1
        if self._store.table_changes[table] <= 0:
            del self._store.table_changes[table]

    async def _register(self, key: FleetKey, action: Register) -> None:
        slots = self._adding.setdefault(action.router_uid, asyncio.Semaphore(ADDED_AT_ONCE))
        async with slots:
            await asyncio.shield(self._check(key, action.training_key))
            worker_id = await self._router(action.router_url).add_worker(
                action.url, worker_type=action.kind.type, bootstrap_port=action.kind.bootstrap_port
            )
        registration = Registration(worker_id=worker_id, until=self._store.now() + REGISTRATION_PATIENCE)
        self._store.registering.setdefault(action.router_uid, {})[action.url] = registration
        for seconds in LISTED_AFTER_SECONDS:
            asyncio.get_running_loop().call_later(seconds, self._prober.look_soon, action.router_uid)

    def _check(self, key: FleetKey, planned: str) -> asyncio.Task[None]:
        """One look at the trainer's state for all registrations of a plan that are about to be sent: the look for a
        later plan, or for those that still wait for others, is another one."""

        async def look() -> None:
            del self._checks[key, planned]
            await require_same_training(self._api, self._store, key, planned)

        if (key, planned) not in self._checks:
            name = f"trainer of {key.namespace}/{key.name}"
            self._checks[key, planned] = asyncio.create_task(look(), name=name)
        return self._checks[key, planned]
