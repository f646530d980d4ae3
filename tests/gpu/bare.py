"""The same updates by hand: bare HTTP and torch, no agent and no library. What the others are compared with."""

from __future__ import annotations

import base64
import io
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gpu.machine import Bare
from servers import Engine

State = Mapping[str, torch.Tensor]
Transfer = Callable[[Bare, State, int], None]


def flat_buckets(state: State, limit: int) -> Iterator[tuple[list[tuple[str, torch.Tensor]], torch.Tensor]]:
    waiting: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in state.items():
        waiting.append((name, tensor))
        size += tensor.nbytes
        if size >= limit:
            yield waiting, torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in waiting])
            waiting, size = [], 0
    if waiting:
        yield waiting, torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in waiting])


class Nccl:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        joining = threading.Thread(
            target=lambda: Bare(engine).sure(
                "/init_weights_update_group",
                master_address="127.0.0.1",
                master_port=store.port,
                rank_offset=1,
                world_size=2,
                group_name="bare",
                backend="nccl",
            )
        )
        joining.start()
        self._group, _ = c10d._new_process_group_helper(
            2,
            0,
            [],
            c10d.Backend("nccl"),
            dist.PrefixStore("bare", store),
            group_name="bare",
            timeout=timedelta(hours=1),
        )
        c10d._world.pg_group_ranks[self._group] = {0: 0, 1: 1}
        joining.join()
        self._store = store

    def transfer(self, http: Bare, state: State, bucket_bytes: int) -> None:
        for tensors, flat in flat_buckets(state, bucket_bytes):
            body = {
                "names": [name for name, _ in tensors],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
                "shapes": [list(tensor.shape) for _, tensor in tensors],
                "group_name": "bare",
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            telling = threading.Thread(target=lambda body=body: http.sure("/update_weights_from_distributed", **body))
            telling.start()
            dist.broadcast(flat, 0, group=self._group)
            telling.join()
        torch.cuda.synchronize()

    def close(self) -> None:
        Bare(self._engine).sure("/destroy_weights_update_group", group_name="bare")
        self._group.abort()


class Ipc:
    def transfer(self, http: Bare, state: State, bucket_bytes: int) -> None:
        for tensors, flat in flat_buckets(state, bucket_bytes):
            metadata, start = [], 0
            for name, tensor in tensors:
                end = start + tensor.nbytes
                metadata.append(
                    SimpleNamespace(
                        name=name,
                        shape=tensor.shape,
                        dtype=tensor.dtype,
                        start_idx=start,
                        end_idx=end,
                        numel=end - start,
                    )
                )
                start = end
            buffer = io.BytesIO()
            ForkingPickler(buffer).dump({"flattened_tensor": flat, "metadata": metadata})
            payload = base64.b64encode(buffer.getvalue()).decode()
            http.sure(
                "/update_weights_from_tensor",
                serialized_named_tensors=[payload],
                load_format="flattened_bucket",
                flush_cache=False,
            )
        torch.cuda.synchronize()


def whole(engine: Engine, transfer: Transfer, state: State, bucket_bytes: int) -> dict[str, float]:
    """Seconds of what any careful update does: pause, flush, transfer, label, checksum, continue."""
    http = Bare(engine)
    torch.cuda.synchronize()
    began = time.perf_counter()
    http.sure("/pause_generation", mode="retract")
    http.sure("/flush_cache")
    sessions = http.post("/begin_weight_update")[0] != 404
    loading = time.perf_counter()
    transfer(http, state, bucket_bytes)
    loaded = time.perf_counter()
    if sessions:
        http.sure("/end_weight_update")
    http.sure("/update_weight_version", new_version="bare", abort_all_requests=False)
    http.sure("/weights_checker", action="checksum")
    http.sure("/continue_generation")
    return {"transfer": loaded - loading, "total": time.perf_counter() - began}
