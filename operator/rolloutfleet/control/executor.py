"""Performs one planned action at a time: on Kubernetes objects, on tables in routers and engines, on engines."""

from __future__ import annotations

from collections.abc import Callable

from rolloutfleet.control.engine_work import EngineWork
from rolloutfleet.control.object_writer import EXIT_SECONDS, ObjectWriter
from rolloutfleet.control.store import FleetKey
from rolloutfleet.control.tables import Tables
from rolloutfleet.kube import client as kube
from rolloutfleet.plan.actions import (
    Action,
    Adopt,
    Apply,
    ApplyStatus,
    CatchUp,
    Continue,
    CreatePod,
    CreatePodGroup,
    DeleteObject,
    DeletePod,
    Deregister,
    Drain,
    Emit,
    PairCheck,
    Register,
    RegisterEncoder,
    SetGate,
    UnregisterEncoder,
    Verify,
)


class Executor:
    def __init__(
        self, *, objects: ObjectWriter, tables: Tables, engines: EngineWork, require: Callable[[], None]
    ) -> None:
        self._objects = objects
        self._tables = tables
        self._engines = engines
        self._require = require

    async def perform(self, key: FleetKey, action: Action) -> None:
        """Raises Stop when the plan is outdated or another replica may lead, ApiError when the API server refuses."""
        self._require()
        match action:
            case Apply():
                await self._objects.apply(key, action.manifest)
            case ApplyStatus():
                await self._objects.apply_status(key, action)
            case CreatePod():
                await self._objects.create_pod(key, action.manifest)
            case DeletePod():
                grace = 0 if action.force else EXIT_SECONDS
                await self._objects.delete(kube.POD, key.namespace, action.name, action.uid, grace_seconds=grace)
            case CreatePodGroup():
                await self._objects.create_pod_group(key, action.manifest)
            case DeleteObject(kind="PodGroup"):
                await self._objects.delete_pod_group(key, action)
            case DeleteObject():
                await self._objects.delete(kube.by_kind(action.kind), key.namespace, action.name, action.uid)
            case SetGate():
                await self._objects.set_gate(key, action)
            case Emit():
                await self._objects.emit(key, action)
            case Register() | Deregister() | RegisterEncoder() | UnregisterEncoder():
                self._tables.start(key, action)
            case Verify() | Adopt() | CatchUp() | Continue() | PairCheck() | Drain():
                self._engines.start(key, action)
            case _:
                raise TypeError(f"no way to perform {type(action).__name__}")
