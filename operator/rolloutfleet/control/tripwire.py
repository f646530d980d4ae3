"""A silent connection to every engine that runs: the kernel closes it in the moment in which its server ends.

A kubelet looks at its containers once a second, and a look of ours comes every few seconds; this costs one idle socket
an engine and tells in a millisecond. Nothing is ever sent. A connection that ends proves nothing by itself, proxies and
idle limits end some; that nobody listens at the port any more does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from rolloutfleet.control.store import FleetKey, FleetStore

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
CONNECT_SECONDS = 2.0
AT_ONCE = 3
"""So many connections are made without a pause where one after the other ends."""
AGAIN_SECONDS = 5.0
"""Before the next connection to an engine that ended ours and lives on."""


@dataclass(frozen=True)
class Wire:
    """Whom to be connected with."""

    uid: str
    url: str
    fleet: FleetKey


class Tripwire:
    def __init__(
        self, *, store: FleetStore, enqueue: Callable[[FleetKey], None], look_soon: Callable[[str], None]
    ) -> None:
        self._store = store
        self._enqueue = enqueue
        self._look_soon = look_soon
        self.held: dict[str, asyncio.Task[None]] = {}
        """Connections, by pod UID."""

    async def run(self) -> None:
        """For ever; cancelled with the process."""
        try:
            while True:
                self.tick()
                await asyncio.sleep(TICK_SECONDS)
        finally:
            for task in self.held.values():
                task.cancel()
            await asyncio.gather(*self.held.values(), return_exceptions=True)

    def tick(self) -> None:
        """Connect with engines that are new, and let go of those that are not ours to watch any more."""
        wanted = {wire.uid: wire for wire in wires(self._store)}
        for uid in [uid for uid in self.held if uid not in wanted]:
            self.held.pop(uid).cancel()
        for uid, wire in wanted.items():
            if uid not in self.held:
                self.held[uid] = asyncio.create_task(self._hold(wire), name=f"tripwire {uid}")

    async def _hold(self, wire: Wire) -> None:
        """Until the server has ended."""
        while not await _end_of_server(wire):  # noqa: ASYNC110 not a poll: it waits for the end of a connection
            await asyncio.sleep(AGAIN_SECONDS)
        probe = self._store.probes.get(wire.uid)
        if probe is not None:
            logger.info("nobody listens at %s any more", wire.url)
            self._store.probes[wire.uid] = replace(probe, closed=True)
            self._enqueue(wire.fleet)
            self._look_soon(wire.uid)


async def _end_of_server(wire: Wire) -> bool:
    """Wait until nobody listens where a connection of ours has stood. False where that cannot be heard at the moment:
    none could be made, or one after the other ended.

    The kernel closes what a dying process had open piece by piece, connections before the port if it so happens: so
    the next connection is made at once, and ends with the port.
    """
    address = urlsplit(wire.url)
    for number in range(1 + AT_ONCE):
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
        except ConnectionRefusedError:
            return number > 0
        except ConnectionResetError:
            continue  # the port took it, and closed before we knew
        except (OSError, TimeoutError):
            return False
        try:
            while await reader.read(4096):
                pass  # a proxy may greet
        except OSError:
            pass  # reset: the same
        finally:
            writer.close()
    return False


def wires(store: FleetStore) -> Iterator[Wire]:
    """Engines of ours that have answered in this life."""
    for key, _, engines in store.own_engines():
        for record, probe in engines:
            if record.get("url") and record.get("started") and not probe.closed:
                yield Wire(uid=record["podUid"], url=record["url"], fleet=key)
