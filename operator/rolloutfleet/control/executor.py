"""Performs one planned action at a time against the Kubernetes API, routers and engines.

Kubernetes writes are awaited in order. Work on an engine (reading a checksum, loading a checkpoint) may take minutes
for a large model, so it runs beside the reconciles; `busy` keeps a second one from starting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from rolloutfleet.api.names import API_VERSION, GATE_ROUTABLE, OPERATOR_MANAGER, SCALE_MANAGER
from rolloutfleet.control.events import event_manifest
from rolloutfleet.control.probes import Prober
from rolloutfleet.control.store import FleetKey, FleetStore, owned_by
from rolloutfleet.engine.errors import EngineError
from rolloutfleet.engine.pair import generate_through
from rolloutfleet.engine.router import RouterClient
from rolloutfleet.engine.sglang import EncoderTable, EngineClient
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
from rolloutfleet.plan.failures import Trouble, refusal, shorten
from rolloutfleet.plan.observed import EngineProbe

logger = logging.getLogger(__name__)

REGISTRATION_SECONDS = 60
"""After which a registration that no router lists is asked for again."""
RETRY_PAUSE_SECONDS = 3.0
EXIT_SECONDS = 10
"""For a pod that we delete: its engine is drained or dead, and a rank that hangs must not keep the GPUs that its
successor waits for."""
CATCH_UP_PAUSE_SECONDS = 15.0


class Stop(Exception):
    """The rest of the plan must not be performed: it was made for a world that has moved."""


class Executor:
    def __init__(
        self,
        *,
        api: kube.KubeApi,
        store: FleetStore,
        prober: Prober,
        enqueue: Callable[[FleetKey], None],
        enqueue_after: Callable[[FleetKey, float], None],
        engine: Callable[[str], EngineClient],
        router: Callable[[str], RouterClient],
        encoder_table: Callable[[str], EncoderTable],
        clock: Callable[[], datetime],
    ) -> None:
        self._api = api
        self._store = store
        self._prober = prober
        self._enqueue = enqueue
        self._enqueue_after = enqueue_after
        self._engine = engine
        self._router = router
        self._encoder_table = encoder_table
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    async def perform(self, key: FleetKey, action: Action) -> None:
        """Raises Stop when the plan is outdated, ApiError when the API server refuses."""
        match action:
            case Apply():
                await self._apply(key, action.manifest)
            case ApplyStatus():
                await self._apply_status(key, action)
            case CreatePod():
                await self._create_pod(key, action.manifest)
            case DeletePod():
                await self._delete(kube.POD, key.namespace, action.name, action.uid, grace_seconds=EXIT_SECONDS)
            case CreatePodGroup():
                await self._create_pod_group(key, action.manifest)
            case DeleteObject(kind="PodGroup"):
                await self._delete_pod_group(key, action)
            case DeleteObject():
                await self._delete(kube.by_kind(action.kind), key.namespace, action.name, action.uid)
            case SetGate():
                await self._set_gate(key, action)
            case Register():
                await self._register(key, action)
            case Deregister():
                await self._deregister(key, action)
            case Verify():
                self._start(key, (action.pod_uid,), "verify", self._verify(key, action))
            case Adopt():
                self._start(key, (action.pod_uid,), "adoption", self._adopt(key, action))
            case CatchUp():
                self._start(key, (action.pod_uid,), "catch-up", self._catch_up(key, action))
            case Continue():
                self._start(key, (action.pod_uid,), "continue", self._continue(key, action))
            case PairCheck():
                self._start(key, (action.prefill_uid, action.decode_uid), "pair check", self._check_pair(key, action))
            case Drain():
                self._start(key, (action.pod_uid,), "drain", self._drain(action))
            case RegisterEncoder():
                await self._change_table(key, action, self._encoder_table(action.table).add(action.url))
            case UnregisterEncoder():
                await self._change_table(key, action, self._encoder_table(action.table).remove(action.url))
            case Emit():
                await self._emit(key, action)
            case _:
                raise TypeError(f"no way to perform {type(action).__name__}")

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Kubernetes objects

    async def _apply(self, key: FleetKey, manifest: Mapping[str, Any]) -> None:
        resource = kube.by_kind(manifest["kind"])
        if await self._name_taken(key, resource, manifest):
            return
        if manifest["kind"] == "ServerGroup" and "replicas" not in manifest["spec"]:
            await self._hand_over_scale(key, manifest["metadata"]["name"])
        applied = await self._api.apply(resource, dict(manifest), field_manager=OPERATOR_MANAGER, force=True)
        self._store.upsert(manifest["kind"], applied)
        generation = applied["metadata"].get("generation")
        if generation is not None:
            name = f"{manifest['kind']}/{manifest['metadata']['name']}"
            self._store.applied_generations.setdefault(key, {})[name] = int(generation)

    async def _name_taken(self, key: FleetKey, resource: kube.Resource, manifest: Mapping[str, Any]) -> bool:
        """Whether an object of that name belongs to somebody else: an apply would take it from them.

        Two servers can derive one name: `a` with a group `b-c`, and `a-b` with a group `c`.
        """
        metadata = manifest["metadata"]
        place, owner = f"{manifest['kind']}/{metadata['name']}", metadata["ownerReferences"][0]["uid"]
        failures = self._store.create_failures.setdefault(key, {})
        found = self._store.object(key, manifest["kind"], metadata["name"])
        try:
            found = found or await self._api.get(resource, metadata["name"], namespace=key.namespace)
        except kube.NotFound:
            found = None
        if found is None or owned_by(found, owner):
            failures.pop(place, None)
            return False
        trouble = Trouble("NameTaken", f"{place} exists and is not of this RolloutServer; rename one of them")
        if failures.get(place) != trouble:
            failures[place] = trouble
            self._enqueue(key)
        self._enqueue_after(key, 10.0)
        return True

    async def _hand_over_scale(self, key: FleetKey, name: str) -> None:
        """Keep the count of a group whose `replicas` was left out of the server's spec.

        A field that its only manager stops applying falls back to its default: a group of 8 engines would shrink to 1
        before any autoscaler has looked. So a manager of its own takes it first, unless another one has it already.
        """
        held = self._store.object(key, "ServerGroup", name)
        if held is None:
            return
        manifest = {
            "apiVersion": API_VERSION,
            "kind": "ServerGroup",
            "metadata": {"name": name, "namespace": key.namespace, "uid": held["metadata"]["uid"]},
            "spec": {"replicas": held["spec"]["replicas"]},
        }
        try:
            await self._api.apply(kube.SERVER_GROUP, manifest, field_manager=SCALE_MANAGER, force=False)
        except (kube.Conflict, kube.NotFound):
            return

    async def _apply_status(self, key: FleetKey, action: ApplyStatus) -> None:
        manifest = {
            "apiVersion": API_VERSION,
            "kind": action.kind,
            # The UID keeps an apply from bringing a vanished object back to life.
            "metadata": {"name": action.name, "namespace": key.namespace, "uid": action.uid},
            "status": action.status,
        }
        try:
            applied = await self._api.apply(
                kube.by_kind(action.kind), manifest, field_manager=OPERATOR_MANAGER, force=True, subresource="status"
            )
        except (kube.NotFound, kube.Conflict) as error:
            raise Stop from error
        self._store.upsert(action.kind, applied)

    async def _create_pod(self, key: FleetKey, manifest: Mapping[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        failures = self._store.create_failures.setdefault(key, {})
        try:
            created = await self._api.create(kube.POD, dict(manifest))
        except kube.AlreadyExists:
            failures.pop(name, None)
            return
        except (kube.Forbidden, kube.Invalid) as error:
            if "is being terminated" in error.message:
                return  # the namespace goes, and everything in it
            # A quota, a missing PriorityClass or ServiceAccount, a template the API server cannot take.
            trouble = refusal(error.reason, error.message)
            if failures.get(name) != trouble:
                failures[name] = trouble
                self._enqueue(key)
            self._enqueue_after(key, 10.0)
            return
        failures.pop(name, None)
        self._store.upsert("Pod", created)

    async def _create_pod_group(self, key: FleetKey, manifest: Mapping[str, Any]) -> None:
        """No watch tells about PodGroups: the store learns of this one here, and the next plan makes its pods."""
        name, owner = manifest["metadata"]["name"], manifest["metadata"]["ownerReferences"][0]["uid"]
        resource = kube.by_kind(manifest["kind"], manifest["apiVersion"])
        failures = self._store.create_failures.setdefault(key, {})
        try:
            try:
                held = await self._api.create(resource, dict(manifest))
            except kube.AlreadyExists:
                held = await self._api.get(resource, name, namespace=key.namespace)
        except kube.Unreachable:
            raise
        except kube.ApiError as error:
            if "is being terminated" in error.message:
                return  # the namespace goes, and everything in it
            # Not only Forbidden and Invalid: a scheduler's webhook that is down must not stop the rest of the plan.
            trouble = Trouble(f"PodGroup{error.reason or 'Refused'}", shorten(error.message))
        else:
            if owned_by(held, owner):
                failures.pop(name, None)
                self._store.upsert("PodGroup", held)
                self._enqueue(key)
                return
            trouble = Trouble("NameTaken", f"PodGroup/{name} exists and is not of this ServerGroup")
        if failures.get(name) != trouble:
            failures[name] = trouble
            self._enqueue(key)
        self._enqueue_after(key, 10.0)

    async def _delete_pod_group(self, key: FleetKey, action: DeleteObject) -> None:
        await self._delete(kube.by_kind(action.kind, action.api_version), key.namespace, action.name, action.uid)
        held = self._store.object(key, action.kind, action.name)
        if held is not None and held["metadata"]["uid"] == action.uid:
            self._store.remove(action.kind, held)

    async def _delete(
        self, resource: kube.Resource, namespace: str, name: str, uid: str, *, grace_seconds: int | None = None
    ) -> None:
        try:
            await self._api.delete(resource, name, namespace=namespace, uid=uid, grace_seconds=grace_seconds)
        except (kube.NotFound, kube.Conflict):
            return  # gone, or another object of that name

    async def _set_gate(self, key: FleetKey, action: SetGate) -> None:
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": action.pod, "namespace": key.namespace, "uid": action.uid},
            "status": {
                "conditions": [
                    {
                        "type": GATE_ROUTABLE,
                        "status": "True" if action.routable else "False",
                        "reason": action.reason,
                        "message": shorten(action.message),
                        "lastTransitionTime": self._clock().strftime("%Y-%m-%dT%H:%M:%SZ"),
                    }
                ]
            },
        }
        try:
            applied = await self._api.apply(
                kube.POD, manifest, field_manager=OPERATOR_MANAGER, force=True, subresource="status"
            )
        except (kube.NotFound, kube.Conflict):
            return
        self._store.upsert("Pod", applied)

    async def _emit(self, key: FleetKey, action: Emit) -> None:
        try:
            await self._api.create(kube.EVENT, event_manifest(key.namespace, action, self._clock()))
        except kube.ApiError as error:
            logger.warning("event %s for %s not written: %s", action.reason, action.name, error)

    async def _require_same_training(self, key: FleetKey) -> None:
        """Raises Stop if the trainer has begun or ended something since the store last heard of it.

        A watch may lag: without this look an engine could be registered or resumed in the middle of an update.
        """
        fresh = await self._api.get(kube.ROLLOUT_SERVER, key.name, namespace=key.namespace)
        held = self._store.server(key) or {}
        if (fresh.get("status") or {}).get("training") != (held.get("status") or {}).get("training"):
            self._store.upsert("RolloutServer", fresh)
            raise Stop

    # Routers

    async def _register(self, key: FleetKey, action: Register) -> None:
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

    async def _deregister(self, key: FleetKey, action: Deregister) -> None:
        client = self._router(action.router_url)
        try:
            for worker in await client.list_workers():
                if worker.url == action.url:
                    await client.remove_worker(worker.id)
        except EngineError as error:
            logger.warning("router %s did not forget %s: %s", action.router, action.url, error)
            self._enqueue_after(key, RETRY_PAUSE_SECONDS)
        self._prober.look_soon(self._router_uid(key, action.router))

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
        pods = self._store.pods("router")
        return next((p["metadata"]["uid"] for k, p in pods if k == key and p["metadata"]["name"] == name), "")

    # Engines

    def _start(self, key: FleetKey, pods: tuple[str, ...], what: str, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            pause = 0.0
            try:
                await work
            except (Stop, kube.ApiError) as error:
                logger.info("%s/%s: %s of pods %s put off: %s", key.namespace, key.name, what, pods, error)
            except EngineError as error:
                logger.warning("%s/%s: %s of pods %s failed: %s", key.namespace, key.name, what, pods, error)
                pause = CATCH_UP_PAUSE_SECONDS if what == "catch-up" else RETRY_PAUSE_SECONDS
                if what == "catch-up":
                    self._store.catch_up_failures[pods[0]] = shorten(str(error))
                    self._enqueue(key)
            finally:
                if pause:
                    await asyncio.sleep(pause)
                for uid in pods:
                    self._store.busy.pop(uid, None)
                self._enqueue(key)

        self._store.busy.update(dict.fromkeys(pods, what))
        task = asyncio.create_task(run(), name=f"{what} {' '.join(pods)}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _verify(self, key: FleetKey, action: Verify) -> None:
        await self._read_weights(action.pod_uid, action.url, action.training_key)

    async def _adopt(self, key: FleetKey, action: Adopt) -> None:
        await self._require_same_training(key)
        await self._engine(action.url).label_weights(action.version)
        self._prober.look_soon(action.pod_uid)

    async def _read_weights(self, pod_uid: str, url: str, training_key: str, *, loaded: bool = False) -> EngineProbe:
        engine = self._engine(url)
        checksum = await engine.checksum()
        info = await engine.model_info()
        probe = replace(
            self._store.probes.get(pod_uid, EngineProbe(answering=True)),
            answering=True,
            label=info.weight_version,
            checksum=checksum,
            read_under=training_key,
            loaded_under=training_key if loaded else "",
        )
        self._store.probes[pod_uid] = probe
        return probe

    async def _catch_up(self, key: FleetKey, action: CatchUp) -> None:
        """No router lists the engine: whatever still runs there is aborted, then the checkpoint is loaded."""
        await self._require_same_training(key)
        engine = self._engine(action.url)
        await engine.pause(mode="abort")
        await engine.update_weights_from_disk(action.path, version=action.version)
        probe = await self._read_weights(action.pod_uid, action.url, action.training_key, loaded=True)
        if action.expected and probe.checksum != action.expected:
            raise EngineError(
                f"{action.url}: loaded {action.path}, but its checksum {probe.checksum[:12]} is not the "
                f"{action.expected[:12]} that was committed as version {action.version}"
            )
        await engine.continue_generation()
        self._store.catch_up_failures.pop(action.pod_uid, None)

    async def _continue(self, key: FleetKey, action: Continue) -> None:
        await self._require_same_training(key)
        await self._engine(action.url).continue_generation()
        self._update_probe(action.pod_uid, lambda probe: replace(probe, paused=False))

    async def _check_pair(self, key: FleetKey, action: PairCheck) -> None:
        await self._require_same_training(key)
        prefill, decode = action.prefill_uid, action.decode_uid
        try:
            await generate_through(
                self._engine(action.prefill_url),
                self._engine(action.decode_url),
                bootstrap_host=action.bootstrap_host,
                bootstrap_port=action.bootstrap_port,
            )
        except EngineError as error:
            await self._require_same_training(key)  # else the trainer has paused it meanwhile
            text = shorten(str(error))
            self._update_probe(prefill, lambda probe: probe.pair_failed(decode, text))
            self._update_probe(decode, lambda probe: probe.pair_failed(prefill, text))
            raise
        self._update_probe(prefill, lambda probe: probe.pair_proved(action.prefill_peers))
        self._update_probe(decode, lambda probe: probe.pair_proved(action.decode_peers))

    async def _drain(self, action: Drain) -> None:
        engine = self._engine(action.url)
        if action.abort:
            await engine.abort_all()
        else:
            load = await engine.load()
            if load.running + load.waiting:
                return
        self._update_probe(action.pod_uid, lambda probe: replace(probe, drained=action.until))
        for uid in list(self._store.probes):
            self._update_probe(uid, lambda probe: probe.peer_left(action.pod_uid))

    def _update_probe(self, pod_uid: str, change: Callable[[EngineProbe], EngineProbe]) -> None:
        probe = self._store.probes.get(pod_uid)
        if probe is not None:
            self._store.probes[pod_uid] = change(probe)
