"""An offload is told to the trainer when its GPUs are seen to be free."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.agent import gpu_memory
from rolloutfleet.agent.gpu_memory import GIB, Release, SharedGpus, used_bytes
from rolloutfleet.agent.memory import Memory
from rolloutfleet.api.agent import MemoryRequest
from unit.agent.world import World, play, refused

DRIVER = """
typedef struct { unsigned long long total, free, used; } memory;
int nvmlInit_v2(void) { return %d; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  *handle = (void *)(0x7f0000000000ul + index);
  return 0;
}
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
  __builtin_strcpy(uuid, (unsigned long)handle & 1 ? "GPU-b" : "GPU-a");
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, memory *told) {
  if (!handle) return 2;
  *told = (memory){80ul << 30, 30ul << 30, (50ul << 30) + ((unsigned long)handle & 1)};
  return %d;
}
"""


def driver(folder: Path, *, init: int = 0, told: int = 0) -> str:
    """A library with the functions of NVML that are asked: two GPUs of 80 GiB."""
    source, library = folder / "nvml.c", folder / "libnvidia-ml.so.1"
    source.write_text(DRIVER % (init, told))
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True)
    return str(library)


def test_the_driver_is_asked_for_each_gpu(tmp_path: Path) -> None:
    assert used_bytes(driver(tmp_path)) == {"GPU-a": 50 * GIB, "GPU-b": 50 * GIB + 1}


def test_a_driver_that_fails_or_is_missing_means_that_no_gpu_is_seen(tmp_path: Path) -> None:
    assert used_bytes(driver(tmp_path, init=9)) == {}
    assert used_bytes(driver(tmp_path, told=15)) == {}
    assert used_bytes(str(tmp_path / "none.so")) == {}


@pytest.mark.parametrize(
    ("engines", "now", "short"),
    [
        ({"e0": [40], "e1": [40]}, {"a": 12, "b": 12}, []),
        ({"e0": [40], "e1": [40]}, {"a": 12, "b": 50}, ["b"]),
        ({"e0": [40, 40]}, {"a": 50, "b": 50}, ["a", "b"]),
        ({"e0": [40]}, {"a": 50, "b": 10}, []),
        ({"e0": [40], "e1": [40], "elsewhere": [40]}, {"a": 10, "b": 10}, []),
        ({"small": [5], "e1": [40]}, {"a": 45, "b": 10}, []),
        ({"e0": [40]}, {"a": 15, "b": 50}, ["a"]),
        ({}, {"a": 50, "b": 50}, []),
    ],
)
def test_as_many_ranks_as_there_are_gpus_must_be_seen_to_have_left(
    engines: dict[str, Sequence[int]], now: dict[str, int], short: list[str]
) -> None:
    text = Release(before={"a": 50, "b": 50}, engines=engines).lacking(now)
    assert [uuid for uuid in ("a", "b") if f"GPU {uuid}:" in text] == short


class Gpu:
    """One that the stand-in engine and the trainer share."""

    def __init__(self, world: World, *, late: int = 0) -> None:
        self._engine, self._late = world.engines[0], late

    def used(self) -> dict[str, int]:
        self._late -= bool(self._engine.released)
        freed = 40 if self._engine.released and self._late < 0 else 0
        return {"GPU-a": (42 - freed) * GIB}


def colocated(world: World, gpu: Gpu) -> Memory:
    body = world.cluster.seen("servergroups", "qwen-main")
    body["spec"]["colocation"] = {}
    world.cluster.put("servergroups", body)
    world.engines[0].refuses["v1/loads"] = (
        200,
        {"loads": [{"memory": {"weight_gb": 3.5, "kv_cache_gb": 36.0, "graph_gb": 0.5}}]},
    )
    return Memory(fleet=world.fleet, leadership=world.leadership, engine=world.client, gpus=SharedGpus(gpu.used))


def test_an_offload_waits_until_the_memory_is_free(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        memory = colocated(world, Gpu(world, late=3))
        assert (await memory.offload(MemoryRequest())).freed_bytes == {"GPU-a": 40 * GIB}
        await memory.onload(MemoryRequest())
        assert not world.engines[0].paused

    play(tmp_path, story, engines=1)


def test_memory_that_is_not_free_in_time_is_an_error_with_engine_and_bytes_and_can_be_waited_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_memory, "FREE_SECONDS", 0.05)

    async def story(world: World) -> None:
        gpu = Gpu(world, late=10**9)
        memory = colocated(world, gpu)
        error = await refused(memory.offload(MemoryRequest()))
        assert (error.code, error.status) == ("MemoryNotFree", 504)
        assert "42.00 GiB used before the release and 42.00 GiB after it" in error.message
        assert f"{world.engines[0].pod} (40.00 GiB a GPU)" in error.message
        record: Any = world.training.memory
        assert record.phase == "Released"
        assert (await refused(memory.offload(MemoryRequest()))).code == "MemoryNotFree"
        gpu._late = 0
        assert (await memory.offload(MemoryRequest())).freed_bytes == {"GPU-a": 40 * GIB}
        assert world.engines[0].asked.count("release_memory_occupation") == 1

    play(tmp_path, story, engines=1)


def test_engines_on_gpus_of_their_own_free_nothing_for_the_trainer(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        gpus = SharedGpus(lambda: {"GPU-a": 1})
        memory = Memory(fleet=world.fleet, leadership=world.leadership, engine=world.client, gpus=gpus)
        assert (await memory.offload(MemoryRequest())).freed_bytes == {}
        assert "v1/loads" not in world.engines[0].asked

    play(tmp_path, story, engines=1)
