"""Process groups of one sender with engines: one for each engine, in which the sender is rank 0.

Whoever dies takes its own group along: the sender aborts that one and goes on with the others. In one group for all, a
dead engine would leave the others in a broadcast that nobody ends (docs/adr/0014).

SGLang joins by torch's TCP rendezvous and a store prefixed with the group's name (its init_custom_process_group); the
sender opens that store. Closing it frees an engine that waits for the group to become whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

CUMEM = "NCCL_CUMEM_ENABLE"
SGLANG_CUMEM = "0"


class GroupError(RuntimeError):
    """Process groups cannot be made in this process; the text says what to change."""


def require_matching_nccl() -> None:
    """SGLang sets NCCL_CUMEM_ENABLE=0 in its engines. With another value here the first broadcast would hang for good,
    without a word (measured). Set here where NCCL has not read it yet. Raises GroupError."""
    import torch.distributed as dist

    value = os.environ.get(CUMEM)
    if value == SGLANG_CUMEM:
        return
    if value is not None or dist.is_initialized():
        raise GroupError(
            f"{CUMEM} is {value or 'not set'} in the trainer and {SGLANG_CUMEM} in SGLang's engines: a broadcast "
            f"between them hangs. Start the trainer with {CUMEM}={SGLANG_CUMEM}"
        )
    os.environ[CUMEM] = SGLANG_CUMEM


class Groups:
    """Kept from one update to the next. Not for several threads at once."""

    def __init__(self) -> None:
        self._whole: dict[str, tuple[str, Any]] = {}
        """Name and process group by engine's UID."""
        self._stores: dict[str, Any] = {}
        """They answer ranks that join, so they live as long as their group."""

    @property
    def names(self) -> dict[str, str]:
        return {uid: name for uid, (name, _) in self._whole.items()}

    def open(self, uid: str, *, seconds: float) -> int:
        """Open the store in which this engine is awaited; returns its port."""
        import torch.distributed as dist

        self.abort(uid)
        store = dist.TCPStore(
            "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds), use_libuv=True
        )
        self._stores[uid] = store
        return int(store.port)

    def joining(self, uid: str, name: str, *, ranks: int, backend: str, seconds: float) -> Future[None]:
        """Make the group with an engine of so many ranks, in a thread: done when all have joined."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d

        store = dist.PrefixStore(name, self._stores[uid])

        def join() -> None:
            group, _ = c10d._new_process_group_helper(
                ranks + 1,
                0,
                [],
                c10d.Backend(backend),
                store,
                group_name=c10d.GroupName(name) if hasattr(c10d, "GroupName") else name,
                timeout=timedelta(seconds=seconds),
            )
            self._whole[uid] = (name, group)

        return _in_thread(join, f"joins {name}")

    def broadcasting(self, flat: torch.Tensor) -> dict[str, Future[None]]:
        """Send to every engine at once, each in a thread of its own; done when it has been sent."""
        import torch

        stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        return {
            uid: _in_thread(partial(_broadcast, group, flat, stream), f"sends to {name}")
            for uid, (name, group) in self._whole.items()
        }

    def abort(self, uid: str) -> None:
        """Forget the group with an engine that is no more, or is stuck; whatever waits in it ends."""
        _, group = self._whole.pop(uid, ("", None))
        self._stores.pop(uid, None)
        if group is not None:
            # In a thread: with some backends an abort waits for what it aborts.
            _in_thread(lambda: _abort(group), "aborts a group")

    def keep(self, uids: Mapping[str, str]) -> None:
        """Abort all groups but these (name by UID): those engines are gone."""
        for uid, name in list(self.names.items()):
            if uids.get(uid) != name:
                self.abort(uid)

    def close(self) -> None:
        self.keep({})


def _broadcast(group: Any, flat: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
    import torch
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    if stream is None:
        group.broadcast([flat], options).wait()
        return
    with torch.cuda.device(flat.device):
        # A stream of its own: what is stuck with a dead engine must not hold up the trainer's.
        side = torch.cuda.Stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            group.broadcast([flat], options).wait()
        side.synchronize()


def _abort(group: Any) -> None:
    try:
        group.abort()
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.info("group not aborted: %s", error)


def _in_thread(work: Callable[[], None], name: str) -> Future[None]:
    """A thread that does not keep the process alive, unlike those of an executor."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            with contextlib.suppress(Exception):
                future.set_exception(error)
        else:
            with contextlib.suppress(Exception):
                future.set_result(None)

    threading.Thread(target=run, name=f"rolloutfleet {name}", daemon=True).start()
    return future
