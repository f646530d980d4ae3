"""Memory of the GPUs that this container sees, asked of the driver, and whether engines have given theirs back.

NVML by ctypes: four functions of a library that comes with the driver and is there exactly where it can answer; a
package would bring nothing but its name. https://docs.nvidia.com/deploy/nvml-api
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rolloutfleet.agent.errors import AgentError

logger = logging.getLogger(__name__)

LIBRARY = "libnvidia-ml.so.1"
UUID_BYTES = 96
SHARE = 0.9
"""Of what an engine says that it holds. Its figures are rounded, and allocators keep a rest."""
GIB = 1 << 30
FREE_SECONDS = 10.0
"""For GPUs to be seen free after a release: tens of milliseconds, unless something is wrong."""
FREE_POLL_SECONDS = 0.02


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def used_bytes(library: str = LIBRARY) -> dict[str, int]:
    """By UUID of the GPU, whoever uses it. Empty where there is no driver or no GPU. May take a second: not for a loop
    of events."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return {}
    if nvml.nvmlInit_v2():
        return {}
    try:
        count = ctypes.c_uint()
        _check(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), "nvmlDeviceGetCount_v2")
        return dict(_device(nvml, index) for index in range(count.value))
    except OSError as error:
        logger.warning("GPU memory is not known: %s", error)
        return {}
    finally:
        nvml.nvmlShutdown()


def _device(nvml: ctypes.CDLL, index: int) -> tuple[str, int]:
    handle, uuid, memory = ctypes.c_void_p(), ctypes.create_string_buffer(UUID_BYTES), _Memory()
    _check(nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)), "nvmlDeviceGetHandleByIndex_v2")
    _check(nvml.nvmlDeviceGetUUID(handle, uuid, UUID_BYTES), "nvmlDeviceGetUUID")
    _check(nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)), "nvmlDeviceGetMemoryInfo")
    return uuid.value.decode(), int(memory.used)


def _check(error: int, function: str) -> None:
    if error:
        raise OSError(f"{function}: NVML error {error}")


@dataclass(frozen=True)
class Release:
    """What a release of memory is to free, on GPUs that trainer and engines share."""

    before: Mapping[str, int]
    """`used_bytes` just before it."""
    engines: Mapping[str, Sequence[int]]
    """By pod: what each of its ranks is to give back, in bytes."""

    def freed(self, now: Mapping[str, int]) -> dict[str, int]:
        return {uuid: max(used - now.get(uuid, used), 0) for uuid, used in self.before.items()}

    def lacking(self, now: Mapping[str, int]) -> str:
        """Which GPUs are not free yet; empty when all are.

        Which rank is on which GPU is not known, and some may be on other nodes: so of the ranks as many as there are
        GPUs here must be seen to have left, those with the least memory if in doubt.
        """
        ranks = sorted(size for sizes in self.engines.values() for size in sizes)
        wanted = sorted(ranks[: len(self.before)], reverse=True)
        freed = sorted(self.freed(now).items(), key=lambda entry: -entry[1])
        short = [
            f"GPU {uuid}: {_gib(self.before[uuid])} GiB used before the release and {_gib(now.get(uuid, 0))} GiB after "
            f"it, {_gib(size)} GiB less were to be expected"
            for (uuid, less), size in zip(freed, wanted, strict=False)
            if less < SHARE * size
        ]
        if not short:
            return ""
        held = ", ".join(
            f"{pod} ({_gib(max(sizes))} GiB a GPU)" for pod, sizes in sorted(self.engines.items()) if sizes
        )
        return f"{'; '.join(short)}; engines that released there: {held}"


class SharedGpus:
    """The trainer's GPUs, as far as this container sees them, around a release."""

    def __init__(self, used: Callable[[], Mapping[str, int]] = used_bytes) -> None:
        self._used = used
        self._before: Mapping[str, int] = {}
        self._release: Release | None = None
        """After which they were not seen to be free yet."""

    async def look(self) -> bool:
        """Before a release. False where no GPU is seen, and nothing can be confirmed."""
        self._before = await asyncio.to_thread(self._used)
        return bool(self._before)

    def expect(self, engines: Mapping[str, Sequence[int]]) -> None:
        """By pod: what each rank is about to give back, in bytes. Nothing: whatever was expected before is void."""
        self._release = Release(before=self._before, engines=engines) if any(engines.values()) else None

    async def freed(self) -> dict[str, int]:
        """Bytes that have become free, by UUID. Raises AgentError if they have not in time: an engine answers when its
        rank 0 is done, which says nothing of other ranks, nor of what a driver still holds."""
        release = self._release
        if release is None:
            return {}
        end = time.monotonic() + FREE_SECONDS
        while lacking := release.lacking(now := await asyncio.to_thread(self._used)):
            if time.monotonic() > end:
                text = f"the engines have released it, but {FREE_SECONDS:g} s later it is not free: {lacking}"
                raise AgentError("MemoryNotFree", text, status=504)
            await asyncio.sleep(FREE_POLL_SECONDS)
        self._release = None
        return release.freed(now)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
