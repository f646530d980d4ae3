"""The cluster of a test: one API server, one node, one network, and a fleet in each namespace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from typing import Any, Protocol

from api_server.hub import Hub
from api_server.node import Node, Unwanted
from api_server.process import count_tasks_of_processes
from api_server.wire import Network
from rolloutfleet.kube import client as kube
from rolloutfleet.kube.config import Credentials
from stand_ins.hosts import Hosts, Program


class Tenant(Protocol):
    """A fleet, as far as the cluster cares."""

    @property
    def addresses(self) -> Container[str]: ...

    def program(self, pod: dict[str, Any], address: str) -> Program: ...

    def look_at_tables(self, when: str) -> None: ...


class World:
    """The cluster: one API server, one node, and all fleets of a test."""

    def __init__(self, credentials: Credentials, hosts: Hosts) -> None:
        self.network = Network(credentials)
        self.hosts = hosts
        self.api = self.network.api()
        self._watching = kube.KubeApi(credentials)
        self.hub = Hub(self._watching)
        self.node = Node(self.api, hosts, self._program)
        self.fleets: dict[str, Tenant] = {}
        """By namespace."""

    async def close(self) -> None:
        await self._watching.close()
        await self.network.close()

    def _program(self, pod: dict[str, Any], address: str) -> Program:
        fleet = self.fleets.get(pod["metadata"]["namespace"])
        if fleet is None:
            raise Unwanted
        return fleet.program(pod, address)

    def asked(self, address: str, path: str) -> None:
        for fleet in self.fleets.values():
            if address in fleet.addresses:
                fleet.look_at_tables(f"after {path} to {address}")


@asynccontextmanager
async def world(credentials: Credentials) -> AsyncIterator[World]:
    count_tasks_of_processes(asyncio.get_running_loop())
    made: list[World] = []
    async with Hosts(lambda address, path: made[0].asked(address, path)) as hosts:
        made.append(World(credentials, hosts))
        one = made[0]
        watching = asyncio.create_task(one.hub.run())
        with one.hub.subscribed("", one.node.saw):
            try:
                yield one
            finally:
                watching.cancel()
                await one.node.close()
                await asyncio.gather(watching, return_exceptions=True)
                await one.close()
    assert not one.node.errors, one.node.errors
