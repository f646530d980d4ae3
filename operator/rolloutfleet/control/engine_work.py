"""Work on engines: reading a checksum, loading a checkpoint, a request through a pair, the end of a drain.

Any of it may take minutes for a large model, so it runs beside the reconciles; `busy` keeps a second one from starting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from rolloutfleet.api.weight_labels import weight_label
from rolloutfleet.control.freshness import Stop, require_same_training
from rolloutfleet.control.probes import Prober
from rolloutfleet.control.store import FleetKey, FleetStore
from rolloutfleet.engine.errors import EngineError, EngineRefused, EngineTimeout
from rolloutfleet.engine.pair import generate_through
from rolloutfleet.engine.sglang import EngineClient
from rolloutfleet.engine.worker import WorkerClient
from rolloutfleet.kube import client as kube
from rolloutfleet.plan.actions import Adopt, CatchUp, Continue, Drain, PairCheck, Verify
from rolloutfleet.plan.failures import shorten
from rolloutfleet.plan.observed import EngineProbe

logger = logging.getLogger(__name__)

RETRY_PAUSE_SECONDS = 3.0
CATCH_UP_PAUSE_SECONDS = 15.0
SECOND_LOOK_SECONDS = 1.0
SILENCE_SECONDS = 5.0
"""A scheduler that is stuck is silent for as long as it is waited for. An answer that a network lost says nothing."""

Work = Verify | Adopt | CatchUp | Continue | PairCheck | Drain


class EngineWork:
    def __init__(
        self,
        *,
        api: kube.KubeApi,
        store: FleetStore,
        prober: Prober,
        engine: Callable[[str], EngineClient],
        worker: Callable[[str], WorkerClient],
        enqueue: Callable[[FleetKey], None],
        enqueue_soon: Callable[[FleetKey], None],
    ) -> None:
        """`enqueue_soon`: for what ends while other work on the same fleet goes on."""
        self._api = api
        self._store = store
        self._prober = prober
        self._engine = engine
        self._worker = worker
        self._enqueue = enqueue
        self._enqueue_soon = enqueue_soon
        self._under_way: Counter[FleetKey] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, key: FleetKey, action: Work) -> None:
        match action:
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

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, key: FleetKey, pods: tuple[str, ...], what: str, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            pause, began = 0.0, time.monotonic()
            try:
                await work
            except (Stop, kube.ApiError) as error:
                logger.info("%s/%s: %s of pods %s put off: %s", key.namespace, key.name, what, pods, error)
            except EngineError as error:
                logger.warning("%s/%s: %s of pods %s failed: %s", key.namespace, key.name, what, pods, error)
                if isinstance(error, EngineTimeout) and time.monotonic() - began >= SILENCE_SECONDS:
                    # Of whatever work: while it is paused its scheduler is asked nothing else.
                    self._update_probe(pods[0], lambda probe: replace(probe, deaf=probe.deaf + 1))
                pause = CATCH_UP_PAUSE_SECONDS if what == "catch-up" else RETRY_PAUSE_SECONDS
                if what == "catch-up":
                    self._store.catch_up_failures[pods[0]] = shorten(str(error))
                    self._enqueue(key)
            finally:
                if pause:
                    await asyncio.sleep(pause)
                for uid in pods:
                    self._store.busy.pop(uid, None)
                self._ended(key)

        self._store.busy.update(dict.fromkeys(pods, what))
        self._under_way[key] += 1
        task = asyncio.create_task(run(), name=f"{what} {' '.join(pods)}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ended(self, key: FleetKey) -> None:
        self._under_way[key] -= 1
        if self._under_way[key]:
            self._enqueue_soon(key)
        else:
            del self._under_way[key]
            self._enqueue(key)

    async def _verify(self, key: FleetKey, action: Verify) -> None:
        await self._read_weights(action.pod_uid, action.url, action.training_key)

    async def _adopt(self, key: FleetKey, action: Adopt) -> None:
        await require_same_training(self._api, self._store, key, action.training_key)
        label = weight_label(action.version, action.fleet)
        await self._engine(action.url).label_weights(label)
        # Said by us: what was proved about the weights under the old label stands.
        self._update_probe(action.pod_uid, lambda probe: replace(probe, label=label))
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
            recheck=False,
            deaf=0,
            loaded_under=training_key if loaded else "",
        )
        self._store.probes[pod_uid] = probe
        return probe

    async def _catch_up(self, key: FleetKey, action: CatchUp) -> None:
        """No router lists the engine: whatever still runs there is aborted, then the checkpoint is loaded."""
        await require_same_training(self._api, self._store, key, action.training_key)
        engine = self._engine(action.url)
        await engine.require_fleet(action.fleet)
        path = await self._copied(action) if action.copied else action.path
        await require_same_training(self._api, self._store, key, action.training_key)
        await engine.pause(mode="abort")
        await engine.update_weights_from_disk(path, label=weight_label(action.version, action.fleet))
        probe = await self._read_weights(action.pod_uid, action.url, action.training_key, loaded=True)
        if action.expected and probe.checksum != action.expected:
            raise EngineError(
                f"{action.url}: loaded {action.path}, but its checksum {probe.checksum[:12]} is not the "
                f"{action.expected[:12]} that was committed as version {action.version}"
            )
        # A large checkpoint takes minutes: the trainer may have released the engine's memory meanwhile.
        await require_same_training(self._api, self._store, key, action.training_key)
        await engine.continue_generation()
        self._store.catch_up_failures.pop(action.pod_uid, None)

    async def _copied(self, action: CatchUp) -> str:
        """Meanwhile nothing is asked of the engine. Never raises EngineTimeout, which would speak of its scheduler."""
        try:
            return (await self._worker(action.url).copy(action.path)).path
        except EngineRefused as error:
            gone = f"; waits for the version after {action.version}" if error.status == HTTPStatus.NOT_FOUND else ""
            raise EngineError(f"{error}{gone}") from error
        except EngineTimeout as error:
            raise EngineError(str(error)) from error

    async def _continue(self, key: FleetKey, action: Continue) -> None:
        await require_same_training(self._api, self._store, key, action.training_key)
        await self._engine(action.url).continue_generation()
        self._update_probe(action.pod_uid, lambda probe: replace(probe, paused=False))

    async def _check_pair(self, key: FleetKey, action: PairCheck) -> None:
        await require_same_training(self._api, self._store, key, action.training_key)
        prefill, decode = action.prefill_uid, action.decode_uid
        try:
            await generate_through(
                self._engine(action.prefill_url),
                self._engine(action.decode_url),
                bootstrap_host=action.bootstrap_host,
                bootstrap_port=action.bootstrap_port,
            )
        except EngineError as error:
            # Else the trainer has paused it meanwhile.
            await require_same_training(self._api, self._store, key, action.training_key)
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
            # Twice: figures are written every few steps only, and a request may just have begun.
            for pause in (0.0, SECOND_LOOK_SECONDS):
                await asyncio.sleep(pause)
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
