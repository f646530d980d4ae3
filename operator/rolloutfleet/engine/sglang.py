"""The HTTP API of one SGLang server (0.5.23), as far as the operator and the agent use it.

Every POST carries a JSON body, since SGLang answers 400 without one. Nothing is retried here: what is safe to repeat
is the caller's knowledge (a second release or resume of memory may kill SGLang's scheduler).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import ValidationError

from rolloutfleet.api.common import EngineFacts
from rolloutfleet.api.weight_labels import belongs_elsewhere
from rolloutfleet.engine.errors import EngineRefused
from rolloutfleet.engine.http import HttpPeer

FLAG_SECONDS = 3.0
ENCODE_SECONDS = 15.0
INFO_SECONDS = 10.0
CONTROL_SECONDS = 60.0
CHECKSUM_SECONDS = 30.0
"""48 ms for 3.55 GB on an H100; longer than this only a scheduler takes that is stuck."""
LOAD_SECONDS = 1800.0
NO_CHECKPOINT = "Failed to get weights iterator"
"""SGLang's words (0.5.23) for a folder that is not there, or in which it finds no file; the old weights are whole."""
MARKER_TOKENS = 16
FIRST_ABORT_SECONDS = 0.005
NO_PEER = "2.2.2.2"
"""SGLang's FAKE_BOOTSTRAP_HOST."""
ABORTED_WITHOUT_PEER = "Fake KV"
"""Of an engine's answer (0.5.23, status 500) for a request that was aborted before the peer that is none had answered:
"Prefill bootstrap failed ... Fake KVSender Exception", "Decode handshake failed ... Fake KVReceiver Exception"."""

PauseMode = Literal["abort", "retract", "in_place"]
_ROLES = {"null": "Regular", "prefill": "Prefill", "decode": "Decode"}
MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]


class Tensor(Protocol):
    """What there is to know of a tensor but its values."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class ModelInfo:
    model_path: str
    weight_version: str
    """A label (api/weight_labels.py): a failed update may leave it wrong either way."""


@dataclass(frozen=True)
class Load:
    """Summed over data-parallel ranks."""

    running: int
    waiting: int


@dataclass(frozen=True)
class MemoryFigures:
    """What one rank has allocated for each tag, in bytes, as counted at its start: a release does not change it."""

    weights: int
    kv_cache: int
    cuda_graph: int


class EngineClient(HttpPeer):
    async def ping(self) -> bool:
        """True while the server is up, paused or not. A flag: asks no scheduler."""
        return await self._flag("/ping")

    async def ready(self) -> bool:
        """True while the server is up and not paused."""
        return await self._flag("/ready")

    async def _flag(self, path: str) -> bool:
        try:
            await self._call("GET", path, seconds=FLAG_SECONDS)
        except EngineRefused:
            return False
        return True

    async def generates(self, *, seconds: float) -> bool:
        """True if a token comes out within that time, of this request or of any other; after a second at best."""
        try:
            await self._call("GET", "/health_generate", seconds=seconds)
        except EngineRefused:
            return False
        return True

    async def model_info(self, *, seconds: float = FLAG_SECONDS) -> ModelInfo:
        info = await self._ask("GET", "/model_info", seconds=seconds)
        return ModelInfo(model_path=str(info.get("model_path", "")), weight_version=str(info.get("weight_version", "")))

    async def require_fleet(self, fleet: str, *, seconds: float = CONTROL_SECONDS) -> None:
        """Before anything that would harm another fleet's engine: this address may have passed to one.

        Raises EngineRefused if it has.
        """
        label = (await self.model_info(seconds=seconds)).weight_version
        if belongs_elsewhere(label, fleet):
            text = f"{self.url}: an engine of another fleet answers: its weights are labelled {label}, ours @{fleet}"
            raise EngineRefused(text, status=200)

    async def server_info(self) -> EngineFacts:
        info = await self._ask("GET", "/server_info", seconds=INFO_SECONDS)
        role = _ROLES.get(str(info.get("disaggregation_mode") or "null"))
        try:
            return EngineFacts.model_validate(
                {
                    "role": role,
                    "bootstrap_port": info.get("disaggregation_bootstrap_port") if role == "Prefill" else None,
                    "tensor_parallel": info.get("tp_size"),
                    "pipeline_parallel": info.get("pp_size", 1),
                    "memory_saver": info.get("enable_memory_saver", False),
                    "version": str(info.get("version", "")),
                }
            )
        except ValidationError as error:
            raise EngineRefused(f"{self.url}/server_info: not SGLang's: {error}", status=200) from error

    async def load(self) -> Load:
        answer = await self._ask("GET", "/v1/loads?include=core", seconds=FLAG_SECONDS)
        ranks = answer.get("loads") or []
        return Load(
            running=sum(int(rank.get("num_running_reqs", 0)) for rank in ranks),
            waiting=sum(int(rank.get("num_waiting_reqs", 0)) for rank in ranks),
        )

    async def memory_figures(self) -> MemoryFigures:
        answer = await self._ask("GET", "/v1/loads?include=memory", seconds=FLAG_SECONDS)
        ranks = [rank.get("memory") or {} for rank in answer.get("loads") or []]

        def least(name: str) -> int:
            return int(min((float(rank.get(name) or 0.0) for rank in ranks), default=0.0) * (1 << 30))

        return MemoryFigures(weights=least("weight_gb"), kv_cache=least("kv_cache_gb"), cuda_graph=least("graph_gb"))

    async def checksum(self, *, seconds: float = CHECKSUM_SECONDS) -> str:
        """Digest of the weights as loaded, over all ranks: equal for equal weights in an equal parallel layout."""
        answer = await self._ask("POST", "/weights_checker", seconds=seconds, body={"action": "checksum"})
        digest = answer.get("per_engine_checksum")
        if not answer.get("success", True) or not digest:
            raise EngineRefused(f"{self.url}: no weights checksum: {answer.get('message')}", status=200)
        return str(digest)

    async def pause(self, mode: PauseMode, *, seconds: float = CONTROL_SECONDS) -> None:
        """abort: running requests end with finish reason abort. retract: they wait and are computed anew.
        in_place: they freeze with their KV cache."""
        await self._call("POST", "/pause_generation", seconds=seconds, body={"mode": mode})

    async def continue_generation(self, *, seconds: float = CONTROL_SECONDS) -> None:
        await self._call("POST", "/continue_generation", seconds=seconds, body={})

    async def abort_all(self, *, seconds: float = CONTROL_SECONDS) -> None:
        await self._call("POST", "/abort_request", seconds=seconds, body={"abort_all": True})

    async def abort(self, prefix: str, *, paired: bool = False, seconds: float = FLAG_SECONDS) -> None:
        """Requests whose id begins so end with finish reason abort and the tokens that they have. To be repeated until
        they have: one that is on its way comes late, and a busy engine may miss the word.

        SGLang's scheduler aborts by prefix, but (0.5.23) its HTTP process passes on no id that it does not know. So it
        is given a request of a few tokens whose id is the prefix, and told to abort that one. `paired`: of a prefill or
        a decode engine, which takes it as its own check of health, without a peer.
        """
        if not prefix:
            raise ValueError("prefix: empty, which SGLang ignores")
        sampling = {"max_new_tokens": MARKER_TOKENS, "ignore_eos": True}
        known: dict[str, Any] = {"rid": prefix, "input_ids": [0], "sampling_params": sampling}
        if paired:
            known |= {"bootstrap_host": NO_PEER, "bootstrap_room": 0}
        marker = asyncio.ensure_future(self.generate(known, seconds=seconds))
        try:
            pause = FIRST_ABORT_SECONDS
            while not marker.done():  # bounded by its time-out; once is enough where it arrives after the marker
                await self._call("POST", "/abort_request", seconds=seconds, body={"rid": prefix})
                await asyncio.wait([marker], timeout=pause)
                pause *= 2
            try:
                marker.result()
            except EngineRefused as ended:
                if not (paired and ABORTED_WITHOUT_PEER in str(ended)):
                    raise
        finally:
            marker.cancel()
            await asyncio.gather(marker, return_exceptions=True)

    async def flush_cache(self, *, wait_seconds: int = 0) -> None:
        """Drop the KV cache. Refused (400) unless idle; with `wait_seconds` the engine waits for idleness that long.
        After pause('retract') call it without waiting."""
        path = f"/flush_cache?timeout={wait_seconds}" if wait_seconds else "/flush_cache"
        await self._call("POST", path, seconds=CONTROL_SECONDS + wait_seconds, body={})

    async def update_weights_from_disk(
        self, path: str, *, label: str, flush_cache: bool = True, seconds: float = LOAD_SECONDS
    ) -> None:
        """Load a checkpoint that the engine sees at `path`. A checkpoint of another shape kills the scheduler, and so
        does a file that it may not read."""
        body = {"model_path": path, "weight_version": label, "flush_cache": flush_cache}
        try:
            await self._sure("/update_weights_from_disk", body, seconds)
        except EngineRefused as refused:
            if NO_CHECKPOINT not in str(refused):
                raise
            # A folder that is not there SGLang looks for on the network, by that name: its words mislead. Where packets
            # are dropped it takes 13 s to give up (0.5.23, measured).
            raise EngineRefused(
                f"{self.url}: sees no checkpoint at {path}: is the volume mounted in its pod, is the folder there, and "
                f"may the user that it runs as read it? ({refused})",
                status=refused.status,
            ) from refused

    async def begin_weight_update(self) -> None:
        """Tensors are about to come. A server that knows no such session (before 0.5.17) answers 404: it needs none.
        One that a dead sender has left open is closed first."""
        try:
            await self._call("POST", "/begin_weight_update", seconds=CONTROL_SECONDS, body={})
        except EngineRefused as refused:
            if refused.status == 404:
                return
            await self.end_weight_update()
            await self._call("POST", "/begin_weight_update", seconds=CONTROL_SECONDS, body={})

    async def end_weight_update(self, *, seconds: float = CONTROL_SECONDS) -> None:
        """Tensors have come, all or not: what the model derives from its weights is made anew."""
        try:
            await self._call("POST", "/end_weight_update", seconds=seconds, body={})
        except EngineRefused as refused:
            if refused.status != 404:
                raise

    async def join_group(
        self, *, address: str, port: int, world_size: int, name: str, backend: str, seconds: float
    ) -> None:
        """Ranks 1 and up of a process group with a trainer, rank 0, whose TCP store is there. The scheduler waits
        until all have joined, or the store is closed."""
        body = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._sure("/init_weights_update_group", body, seconds)

    async def leave_group(self, name: str, *, seconds: float = CONTROL_SECONDS) -> None:
        await self._sure("/destroy_weights_update_group", {"group_name": name}, seconds)

    async def receive_broadcast(self, tensors: Sequence[Tensor], *, group: str, seconds: float) -> None:
        """Take tensors that rank 0 of the group broadcasts as one flat tensor of bytes. Refused with some of them
        loaded, perhaps."""
        body = {
            "names": [tensor.name for tensor in tensors],
            "dtypes": [tensor.dtype for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        await self._sure("/update_weights_from_distributed", body, seconds)

    async def receive_tensors(self, payloads: Sequence[str], *, load_format: str | None, seconds: float) -> None:
        """Take tensors over memory that the sender shares; for each rank a pickle in base64 (SGLang's
        MultiprocessingSerializer)."""
        body = {"serialized_named_tensors": list(payloads), "load_format": load_format, "flush_cache": False}
        await self._sure("/update_weights_from_tensor", body, seconds)

    async def _sure(self, path: str, body: dict[str, Any], seconds: float) -> None:
        answer = await self._ask("POST", path, seconds=seconds, body=body)
        if not answer.get("success", False):
            raise EngineRefused(f"{self.url}{path}: {answer.get('message')}", status=200)

    async def label_weights(self, label: str) -> None:
        """Change what the engine calls its weights, and nothing else: requests go on."""
        body = {"new_version": label, "abort_all_requests": False}
        await self._call("POST", "/update_weight_version", seconds=CONTROL_SECONDS, body=body)

    async def release_memory(self, tags: Sequence[MemoryTag], *, seconds: float = CONTROL_SECONDS) -> None:
        """Only on an idle engine: otherwise the scheduler dies. A second call is undefined: never repeat it."""
        _require_some(tags)
        await self._call("POST", "/release_memory_occupation", seconds=seconds, body={"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[MemoryTag], *, seconds: float = CONTROL_SECONDS) -> None:
        """Not idempotent: a tag that is not released kills the scheduler."""
        _require_some(tags)
        await self._call("POST", "/resume_memory_occupation", seconds=seconds, body={"tags": list(tags)})

    async def generate(self, payload: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        return await self._ask("POST", "/generate", seconds=seconds, body=payload)


def _require_some(tags: Sequence[MemoryTag]) -> None:
    if not tags:
        raise ValueError("tags: none named, which SGLang takes for all of them")


class EncoderClient(HttpPeer):
    """An encoder-only server: it has no /ping and no weights to update."""

    async def healthy(self) -> bool:
        """Encodes a tiny image, unless it is busy with others."""
        try:
            await self._call("GET", "/health", seconds=ENCODE_SECONDS)
        except EngineRefused:
            return False
        return True


class EncoderTable(HttpPeer):
    """The encoders that a language-only server knows (its --encoder-bootstrap-port)."""

    async def urls(self) -> frozenset[str]:
        answer = await self._ask("GET", "/list_encoder_urls", seconds=FLAG_SECONDS)
        return frozenset(str(url) for url in answer.get("encoder_urls") or [])

    async def add(self, url: str) -> None:
        await self._call("POST", "/register_encoder_url", seconds=FLAG_SECONDS, body={"url": url})

    async def remove(self, url: str) -> None:
        """One that is not there is success."""
        await self._call("DELETE", "/unregister_encoder_url", seconds=FLAG_SECONDS, body={"url": url})
