"""Process groups of one sender with engines: one for each engine, in which the sender is rank 0.

Whoever dies takes its own group along: the sender aborts that one and goes on with the others. In one group for all, a
dead engine would leave the others in a broadcast that nobody ends (docs/adr/0014).

SGLang joins by torch's TCP rendezvous and a store prefixed with the group's name (its init_custom_process_group); the
sender opens that store. Closing it frees an engine that waits for the group to become whole. The groups are none of
torch.distributed's own: a trainer's default group need not be there, and is not split or touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Backend = Literal["nccl", "gloo"]

CUMEM = "NCCL_CUMEM_ENABLE"
SGLANG_CUMEM = "0"
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
ENDLESS = timedelta(days=1)
"""NCCL's own time-out of a broadcast: the agent watches the engines, and says when one is lost."""
CLOSE_SECONDS = 10.0

_environment = threading.Lock()


class GroupError(RuntimeError):
    """Process groups cannot be made in this process; the text says what to change."""


def require_matching_nccl() -> None:
    """SGLang sets NCCL_CUMEM_ENABLE=0 in its engines. With another value here the first broadcast would hang for good,
    without a word (measured). Set here where NCCL has not read it yet. Raises GroupError."""
    import torch.distributed as dist

    value = os.environ.get(CUMEM)
    if value == SGLANG_CUMEM:
        return
    if value is not None or (dist.is_initialized() and "nccl" in dist.get_backend_config()):
        raise GroupError(
            f"{CUMEM} is {value or 'not set'} in the trainer and {SGLANG_CUMEM} in SGLang's engines: a broadcast "
            f"between them hangs. Start the trainer with {CUMEM}={SGLANG_CUMEM}"
        )
    os.environ[CUMEM] = SGLANG_CUMEM


class Group:
    """With one engine."""

    def __init__(self, name: str, backend: Backend, end: Any) -> None:
        """`end`: ours, a torch ProcessGroupNCCL or ProcessGroupGloo."""
        self.name = name
        self.backend = backend
        self.end = end
        self.given_up = False
        self._last = threading.Event()
        """Set when the last broadcast is under way: the next one follows, but does not overtake it."""
        self._last.set()

    def sending(self, flat: torch.Tensor, made: torch.cuda.Event | None, *, seconds: float) -> Future[None]:
        """In a thread, after what is sent already; done when it has been sent. `made`: when a GPU has the tensor."""
        before, self._last = self._last, threading.Event()
        return _in_thread(partial(self._send, flat, made, seconds, before, self._last), f"sends to {self.name}")

    def _send(
        self,
        flat: torch.Tensor,
        made: torch.cuda.Event | None,
        seconds: float,
        before: threading.Event,
        under_way: threading.Event,
    ) -> None:
        try:
            if not before.wait(seconds) or self.given_up:
                raise GroupError(f"{self.name} was given up before this was sent")
            wait = _broadcast(self.end, flat, made, seconds)
        finally:
            under_way.set()
        wait()


class Groups:
    """Kept from one update to the next. Not for several threads at once."""

    def __init__(self) -> None:
        self._whole: dict[str, Group] = {}
        """By engine's UID."""
        self._stores: dict[str, Any] = {}
        """They answer ranks that join, so they live as long as their group."""
        self._threads: set[Future[None]] = set()
        """In torch's code: a process that ends beside one of them ends by a signal, whatever it has done."""
        weakref.finalize(self, _end_at_exit, self._whole, self._threads)

    def names(self, backend: Backend) -> dict[str, str]:
        return {uid: group.name for uid, group in self._whole.items() if group.backend == backend}

    def open(self, uid: str, *, seconds: float) -> int:
        """Open the store in which this engine is awaited, on all addresses; returns its port."""
        import torch.distributed as dist

        self.abort(uid)
        store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds), use_libuv=True
        )
        self._stores[uid] = store
        return int(store.port)

    def joining(self, uid: str, name: str, *, ranks: int, backend: Backend, seconds: float) -> Future[None]:
        """Make the group with an engine of so many ranks, in a thread: done when all have joined, with gloo; NCCL's
        ranks meet in their first broadcast."""
        opened = self._stores[uid]

        def join() -> None:
            group = Group(name, backend, _end(opened, name, size=ranks + 1, backend=backend, seconds=seconds))
            if self._stores.get(uid) is opened:  # else it has been given up meanwhile
                self._whole[uid] = group

        return self._noted(_in_thread(join, f"joins {name}"))

    def broadcasting(self, flat: torch.Tensor, *, seconds: float) -> dict[str, Future[None]]:
        """Send to every engine at once; done when it has been sent. The next one may be sent before that."""
        import torch

        made = None
        if flat.is_cuda:
            made = torch.cuda.Event()
            made.record(torch.cuda.current_stream(flat.device))
        return {uid: self._noted(group.sending(flat, made, seconds=seconds)) for uid, group in self._whole.items()}

    def _noted(self, thread: Future[None]) -> Future[None]:
        self._threads.add(thread)
        thread.add_done_callback(self._threads.discard)
        return thread

    def abort(self, uid: str) -> None:
        """Forget the group with an engine that is no more, or is stuck. NCCL ends what waits in it; gloo's end of it
        lives on in the thread that waits, until the engine's is gone or the broadcast's time is over."""
        group = self._whole.pop(uid, None)
        self._stores.pop(uid, None)
        if group is None:
            return
        group.given_up = True
        if group.backend == "nccl":
            # In a thread: an abort waits for a communicator that is being made.
            self._noted(_in_thread(group.end.abort, "aborts a group"))

    def keep(self, uids: Mapping[str, str]) -> None:
        """Abort all groups but these (name by UID): those engines are gone."""
        for uid, group in list(self._whole.items()):
            if uids.get(uid) != group.name:
                self.abort(uid)

    def close(self) -> None:
        """Waits for what is still under way, though not for ever."""
        self.keep({})
        wait(list(self._threads), timeout=CLOSE_SECONDS)


def _end_at_exit(whole: dict[str, Group], threads: set[Future[None]]) -> None:
    for group in whole.values():
        if group.backend == "nccl":
            group.end.abort()
    whole.clear()
    wait(list(threads), timeout=CLOSE_SECONDS)


def _end(store: Any, name: str, *, size: int, backend: Backend, seconds: float) -> Any:
    """Rank 0, as torch's _new_process_group_helper makes it on the engine's side, under the same keys of the store."""
    import torch.distributed as dist

    device = "cuda" if backend == "nccl" else "cpu"
    prefixed = dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
    if backend == "gloo":
        return dist.ProcessGroupGloo(prefixed, 0, size, timedelta(seconds=seconds))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = ENDLESS
    with _errors_left_to_us():
        return dist.ProcessGroupNCCL(prefixed, 0, size, options)


@contextlib.contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """torch reads this when a group is made; by default it ends the whole trainer when a peer has died."""
    with _environment:
        before = os.environ.get(ERROR_HANDLING)
        os.environ[ERROR_HANDLING] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[ERROR_HANDLING]
            else:
                os.environ[ERROR_HANDLING] = before


def _broadcast(end: Any, flat: torch.Tensor, made: torch.cuda.Event | None, seconds: float) -> Callable[[], Any]:
    """Begin it; what is returned waits until it has been sent."""
    import torch
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timedelta(seconds=seconds)
    if made is None:
        return partial(end.broadcast([flat], options).wait)
    with torch.cuda.device(flat.device):
        # A stream of its own: what is stuck with a dead engine must not hold up the trainer's.
        side = torch.cuda.Stream()
        side.wait_event(made)
        with torch.cuda.stream(side):
            end.broadcast([flat], options).wait()
    return partial(side.synchronize)


def _in_thread(work: Callable[[], None], name: str) -> Future[None]:
    """A thread that does not keep the process alive, unlike those of an executor."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name=f"rolloutfleet {name}", daemon=True).start()
    return future
