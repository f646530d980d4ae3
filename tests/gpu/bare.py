"""The same transfers by hand, straight to one server: what ours are compared with. `whole` is all that an update does
to an engine: pause, flush, transfer, label, checksum, continue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.common import init_custom_process_group
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from gpu.engines import call

State = Mapping[str, torch.Tensor]
GROUP = "by-hand"


class Bare:
    def __init__(self, url: str, *, device: str, bucket_bytes: int) -> None:
        self._url = url
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._group: Any = None
        if device == "cpu":
            torch.multiprocessing.set_sharing_strategy("file_system")

    def whole(self, transfer: Callable[[], float], label: str) -> dict[str, float]:
        """Seconds by step, of an update without a session, in which nothing can fail."""
        began = time.perf_counter()
        self._ask("/pause_generation", {"mode": "retract"})
        self._ask("/flush_cache", {})
        paused = time.perf_counter()
        call(self._url, "/begin_weight_update")
        load = transfer()
        call(self._url, "/end_weight_update")
        self._ask("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        loaded = time.perf_counter()
        self._ask("/weights_checker", {"action": "checksum"})
        verified = time.perf_counter()
        self._ask("/continue_generation", {})
        ended = time.perf_counter()
        return {
            "pause": paused - began,
            "load": load,
            "verify": verified - loaded,
            "paused": ended - began,
            "unverified": ended - verified + loaded - began,
        }

    def join(self, port: int) -> float:
        began = time.perf_counter()
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        backend = "gloo" if self._device == "cpu" else "nccl"
        body |= {"group_name": GROUP, "backend": backend}
        asked = threading.Thread(target=self._ask, args=("/init_weights_update_group", body))
        asked.start()
        self._group = init_custom_process_group(
            backend=backend,
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=2,
            rank=0,
            group_name=GROUP,
            timeout=timedelta(seconds=60),
        )
        asked.join()
        return time.perf_counter() - began

    def leave(self) -> None:
        self._ask("/destroy_weights_update_group", {"group_name": GROUP})
        dist.destroy_process_group(self._group)

    def distributed(self, state: State) -> float:
        self._settle()
        began = time.perf_counter()
        for names in self._buckets(state):
            body = {
                "names": names,
                "dtypes": [str(state[name].dtype).split(".")[1] for name in names],
                "shapes": [list(state[name].shape) for name in names],
                "group_name": GROUP,
                "flush_cache": False,
                "load_format": "flattened_bucket",
            }
            bucket = FlattenedTensorBucket(named_tensors=[(name, state[name]) for name in names])
            asked = threading.Thread(target=self._ask, args=("/update_weights_from_distributed", body))
            asked.start()
            dist.broadcast(bucket.flattened_tensor, 0, group=self._group)
            asked.join()
        self._settle()
        return time.perf_counter() - began

    def tensor(self, state: State) -> float:
        self._settle()
        began = time.perf_counter()
        kept = []
        for names in self._buckets(state):
            bucket = FlattenedTensorBucket(named_tensors=[(name, state[name]) for name in names])
            kept.append(bucket)
            payload = MultiprocessingSerializer.serialize(
                {"flattened_tensor": bucket.flattened_tensor, "metadata": bucket.metadata}, output_str=True
            )
            body = {
                "serialized_named_tensors": [payload],
                "load_format": "flattened_bucket",
                "flush_cache": False,
            }
            self._ask("/update_weights_from_tensor", body)
        self._settle()
        return time.perf_counter() - began

    def disk(self, path: str) -> float:
        began = time.perf_counter()
        self._ask("/update_weights_from_disk", {"model_path": path, "flush_cache": False})
        return time.perf_counter() - began

    def _buckets(self, state: State) -> Iterator[list[str]]:
        waiting: list[str] = []
        size = 0
        for name, tensor in state.items():
            if waiting and size + tensor.nbytes > self._bucket_bytes:
                yield waiting
                waiting, size = [], 0
            waiting.append(name)
            size += tensor.nbytes
        yield waiting

    def _settle(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()

    def _ask(self, path: str, body: dict[str, Any]) -> None:
        status, answer = call(self._url, path, body)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {answer}")
