"""A RolloutServer with its groups and engines as they stand in the API, and how users name an engine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rolloutfleet.api.names import LABEL_SERVER, engine_name
from rolloutfleet.api.rollout_server import RolloutServer
from rolloutfleet.api.server_group import EngineStatus, ServerGroup
from rolloutfleet.cli.session import Refused, Session
from rolloutfleet.kube.client import ROLLOUT_SERVER, SERVER_GROUP, NotFound
from rolloutfleet.plan.status import worst_first

_ENGINE = re.compile(r"(?P<name>.+?-\d+)(?:-e(?P<epoch>\d+)(?:-r\d+)?)?")


@dataclass(frozen=True)
class Engine:
    group: ServerGroup
    record: EngineStatus

    @property
    def name(self) -> str:
        """Of all its lives."""
        return f"{self.group.name}-{self.record.index}"

    @property
    def life(self) -> str:
        """As status, events and logs call it."""
        return engine_name(self.group.name, self.record.index, self.record.epoch)


@dataclass(frozen=True)
class Fleet:
    server: RolloutServer
    groups: tuple[ServerGroup, ...]

    @property
    def engines(self) -> list[Engine]:
        """The worst first."""
        return engines_of(self.groups)

    def find(self, text: str) -> Engine:
        """By the engine's name, the name of its life, or that of a pod of it. Raises Refused."""
        return find(text, self.engines, server=self.server.name)


def engines_of(groups: Iterable[ServerGroup]) -> list[Engine]:
    engines = [Engine(group, record) for group in groups for record in group.status.engines]
    return sorted(engines, key=lambda engine: (*worst_first(engine.record)[:2], engine.group.name, engine.record.index))


def find(text: str, engines: Iterable[Engine], *, server: str) -> Engine:
    known = {engine.name: engine for engine in engines}
    asked = _ENGINE.fullmatch(text)
    engine = known.get(asked["name"]) if asked is not None else None
    if asked is None or engine is None:
        there = ", ".join(sorted(known)) or "none"
        raise Refused(f"{text}: {server} has no such engine; it has: {there}")
    if asked["epoch"] is not None and int(asked["epoch"]) != engine.record.epoch:
        raise Refused(f"{text}: this life has ended; the engine is {engine.life} now")
    return engine


async def read_fleet(session: Session, name: str) -> Fleet:
    """Raises Refused, ApiError."""
    try:
        server = await session.api.get(ROLLOUT_SERVER, name, namespace=session.namespace)
    except NotFound as error:
        raise Refused(await _absent(session, name)) from error
    label = f"{LABEL_SERVER}={name}"
    groups = (await session.api.list(SERVER_GROUP, namespace=session.namespace, label_selector=label)).items
    return Fleet(
        server=RolloutServer.model_validate(server),
        groups=tuple(ServerGroup.model_validate(group) for group in groups),
    )


async def _absent(session: Session, name: str) -> str:
    found = (await session.api.list(ROLLOUT_SERVER, namespace=session.namespace)).items
    there = ", ".join(server["metadata"]["name"] for server in found) or "none"
    return f"{name}: no such RolloutServer in namespace {session.namespace}; there are: {there}"
