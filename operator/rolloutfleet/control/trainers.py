"""Tells a trainer's pod that the RolloutServer it names is missing, and when it appears.

The agent cannot: its rights come from the Role that is made with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from rolloutfleet.api.names import ANNOTATION_ROLLOUT_SERVERS
from rolloutfleet.control.events import event_manifest
from rolloutfleet.control.freshness import NotLeading
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.kube import client as kube
from rolloutfleet.plan.actions import Emit
from rolloutfleet.plan.injection import InjectionError, parse_rollout_servers

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0


class TrainerPods:
    def __init__(self, *, api: kube.KubeApi, store: FleetStore) -> None:
        self._api = api
        self._store = store
        self._pods: dict[str, dict[str, Any]] = {}
        self._missing: set[tuple[str, str]] = set()
        """(pod UID, server) that were told to be missing."""

    def saw(self, body: Mapping[str, Any], *, deleted: bool) -> None:
        uid = body["metadata"]["uid"]
        if deleted or (body.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            self._pods.pop(uid, None)
            self._missing = {entry for entry in self._missing if entry[0] != uid}
        else:
            self._pods[uid] = {"metadata": dict(body["metadata"])}

    def listed(self, bodies: Iterable[Mapping[str, Any]]) -> None:
        """A full list: who is not in it is gone."""
        found = {body["metadata"]["uid"]: body for body in bodies}
        for uid in self._pods.keys() - found.keys():
            self.saw({"metadata": {"uid": uid}}, deleted=True)
        for body in found.values():
            self.saw(body, deleted=False)

    async def run(self) -> None:
        """For ever; cancelled when the term ends."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for uid, pod in list(self._pods.items()):
                for server in _servers(pod):
                    exists = self._store.server(FleetKey(pod["metadata"]["namespace"], server)) is not None
                    if exists == ((uid, server) in self._missing):
                        with contextlib.suppress(NotLeading):
                            await self._tell(pod, server, exists)

    async def _tell(self, pod: dict[str, Any], server: str, exists: bool) -> None:
        metadata = pod["metadata"]
        entry = (metadata["uid"], server)
        emit = Emit(
            kind="Pod",
            name=metadata["name"],
            uid=metadata["uid"],
            warning=not exists,
            reason="RolloutServerFound" if exists else "RolloutServerMissing",
            message=f"RolloutServer {server} exists now"
            if exists
            else f"RolloutServer {server} does not exist in namespace {metadata['namespace']}; the agent waits for it",
        )
        try:
            await self._api.create(kube.EVENT, event_manifest(metadata["namespace"], emit, datetime.now(UTC)))
        except kube.ApiError as error:
            logger.warning("event %s for pod %s not written: %s", emit.reason, metadata["name"], error)
        (self._missing.discard if exists else self._missing.add)(entry)


def _servers(pod: Mapping[str, Any]) -> list[str]:
    value = (pod["metadata"].get("annotations") or {}).get(ANNOTATION_ROLLOUT_SERVERS, "")
    try:
        return list(parse_rollout_servers(value).values())
    except InjectionError:
        return []
