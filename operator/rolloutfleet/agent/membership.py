"""One fleet as this agent sees it: the RolloutServer and its ServerGroups, read by name.

A trainer names few servers, so the agent reads them once a second and before each operation: a handful of requests
that no watch can leave stale. It may read exactly these objects (their names are in its Role) and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from datetime import UTC, datetime

from pydantic import ValidationError

from rolloutfleet.agent.errors import unavailable
from rolloutfleet.api.agent import EngineView, FleetState, FleetView
from rolloutfleet.api.common import EnginePhase
from rolloutfleet.api.names import API_VERSION
from rolloutfleet.api.rollout_server import GroupChecksum, RolloutServer, TrainingStatus
from rolloutfleet.api.server_group import EngineStatus, ServerGroup
from rolloutfleet.api.weight_labels import fleet_id
from rolloutfleet.kube import client as kube
from rolloutfleet.kube.events import event_manifest

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
APART = ("Encoder", "Placeholder")
"""Roles of groups that no request is sent to and no weights are."""


class Fleet:
    """What is known of one server; `refresh` reads it anew."""

    def __init__(self, *, api: kube.KubeApi, namespace: str, role: str, name: str, pod_name: str, pod_uid: str) -> None:
        self._api = api
        self._namespace = namespace
        self._pod_name = pod_name
        self._pod_uid = pod_uid
        self.role = role
        self.name = name
        self.state = FleetState.WAITING_FOR_SERVER
        self.message = f"RolloutServer {namespace}/{name} is not read yet"
        self.server: RolloutServer | None = None
        self.uid = ""
        """Of the server; kept while it cannot be read, as is `id`."""
        self.id = ""
        """By what name labels of weights know the fleet."""
        self.groups: tuple[ServerGroup, ...] = ()
        self._announced: FleetState | None = None

    async def watch(self) -> None:
        """For ever; cancelled with the process."""
        while True:
            await self.refresh()
            await asyncio.sleep(POLL_SECONDS)

    async def refresh(self) -> None:
        try:
            # At once: an update waits for it.
            known = self.server.server_groups if self.server is not None else ()
            server, groups = await asyncio.gather(self._read_server(), self._read_groups(known))
            groups |= await self._read_groups(set(server.server_groups) - groups.keys())
            found = (groups[name] for name in server.server_groups)
            self.groups = tuple(group for group in found if group is not None)
            self.server = server
            self.uid, self.id = server.uid, fleet_id(server.uid)
            state, message = FleetState.CONNECTED, ""
        except kube.NotFound:
            self.server, self.groups = None, ()
            state = FleetState.WAITING_FOR_SERVER
            message = f"RolloutServer {self._namespace}/{self.name} does not exist; waiting for it"
        except kube.Forbidden as error:
            # Also the answer while the server does not exist: its Role is made with it.
            self.server, self.groups = None, ()
            state = FleetState.FORBIDDEN
            message = (
                f"this pod's service account may not read RolloutServer {self._namespace}/{self.name}: it does not "
                f"exist, or its spec.trainers.serviceAccounts does not name the account ({error.message})"
            )
        except (kube.ApiError, ValidationError) as error:
            state, message = FleetState.UNREACHABLE, str(error)
        self.state, self.message = state, message
        await self._announce()

    async def _read_server(self) -> RolloutServer:
        return RolloutServer.model_validate(
            await self._api.get(kube.ROLLOUT_SERVER, self.name, namespace=self._namespace)
        )

    async def _read_groups(self, names: Iterable[str]) -> dict[str, ServerGroup | None]:
        """None where the operator has not made it yet."""

        async def read(name: str) -> ServerGroup | None:
            try:
                body = await self._api.get(kube.SERVER_GROUP, name, namespace=self._namespace)
            except kube.NotFound:
                return None
            return ServerGroup.model_validate(body)

        named = list(names)
        return dict(zip(named, await asyncio.gather(*map(read, named)), strict=True))

    async def _announce(self) -> None:
        """One event on this pod when the state changes."""
        if self.state == self._announced or self.state is FleetState.UNREACHABLE:
            return
        first, self._announced = self._announced is None, self.state
        if first and self.state is FleetState.CONNECTED:
            return
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": self._pod_name,
            "namespace": self._namespace,
            "uid": self._pod_uid,
        }
        await self._emit(
            pod,
            warning=self.state is not FleetState.CONNECTED,
            reason=f"RolloutServer{self.state.value}",
            note=self.message or f"connected to RolloutServer {self.name}",
            action="Connect",
        )

    async def warn_on_server(self, reason: str, note: str) -> None:
        """What an SRE should see who looks at the RolloutServer."""
        if self.server is not None:
            about = {
                "apiVersion": API_VERSION,
                "kind": "RolloutServer",
                "name": self.name,
                "namespace": self._namespace,
                "uid": self.server.uid,
            }
            await self._emit(about, warning=True, reason=reason, note=note, action="UpdateWeights")

    async def _emit(self, regarding: dict[str, str], *, warning: bool, reason: str, note: str, action: str) -> None:
        event = event_manifest(
            regarding=regarding,
            warning=warning,
            reason=reason,
            note=note,
            action=action,
            controller="rolloutfleet.dev/agent",
            instance=self._pod_name,
            now=datetime.now(UTC),
        )
        try:
            await self._api.create(kube.EVENT, event)
        except kube.ApiError as error:
            logger.warning("%s (no event written: %s)", event["note"], error)

    # What operations ask

    def connected(self) -> RolloutServer:
        if self.server is None:
            raise unavailable(self.state.value, self.message)
        return self.server

    @property
    def training(self) -> TrainingStatus:
        server = self.connected()
        return server.status.training or TrainingStatus()

    @property
    def committed_version(self) -> int:
        weights = self.training.weights
        return weights.version if weights else 0

    @property
    def weights_key(self) -> str:
        """Another one after each update, also where a version comes again."""
        weights = self.server.status.training.weights if self.server and self.server.status.training else None
        return f"{weights.version}.{weights.transaction}" if weights else "0.0"

    def committed_checksums(self) -> list[GroupChecksum]:
        """Of the committed version by layout: from the last update, or measured by the operator."""
        weights = self.training.weights
        if weights is not None and weights.checksums:
            return list(weights.checksums)
        return [
            GroupChecksum(group=group.name, revision=entry.revision, checksum=entry.checksum)
            for group in self.groups
            for entry in group.status.measured
            if entry.version == self.committed_version
        ]

    def engines(self) -> list[tuple[ServerGroup, EngineStatus]]:
        return [(group, engine) for group in self.groups for engine in group.status.engines]

    def trained_engines(self) -> list[tuple[ServerGroup, EngineStatus]]:
        """Those that have the weights that a trainer updates: encoders hold the vision tower alone."""
        return [(group, engine) for group, engine in self.engines() if group.spec.role not in APART]

    def routable_urls(self) -> list[str]:
        """Of engines that take requests by themselves: a prefill or a decode engine needs the router's pairing."""
        return [
            engine.url
            for group, engine in self.engines()
            if group.spec.role == "Regular" and engine.phase is EnginePhase.SERVING and engine.url
        ]

    @property
    def routable(self) -> int:
        """Engines that routers send requests to."""
        return sum(group.status.routable for group in self.groups if group.spec.role not in APART)

    def view(self, *, leading: bool, holder: str, fence: int) -> FleetView:
        server = self.server
        if server is None:
            return FleetView(role=self.role, server=self.name, state=self.state, message=self.message)
        conditions = {condition.type: condition for condition in server.status.conditions}
        ready = conditions.get("Ready")
        return FleetView(
            role=self.role,
            server=self.name,
            state=self.state,
            message=self.message or (ready.message if ready else ""),
            ready=ready is not None and ready.status == "True",
            router_url=server.status.router.url if server.status.router else "",
            weight_version=self.committed_version,
            desired=sum(group.spec.replicas for group in self.groups if group.spec.role not in APART),
            routable=self.routable,
            leading=leading,
            holder=holder,
            fence=fence,
            engines=[
                EngineView(
                    name=engine.pod,
                    group=group.name,
                    index=engine.index,
                    phase=engine.phase.value,
                    reason=engine.reason,
                    url=engine.url,
                    weight_version=engine.weight_version,
                )
                for group, engine in self.engines()
            ],
        )
