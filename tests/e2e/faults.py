"""Faults on the local cluster of tests/cluster, from outside and at once: its pods' processes are processes of this
machine, and its nodes hang on links of this machine. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ENGINE_PROCESS = b"sglang"
SCHEDULER_PROCESS = b"sglang::scheduler"
WORKER_PROCESS = b"rolloutfleet.worker"
AGENT_PROCESS = b"rolloutfleet.agent"
STAND_IN_PROCESS = b"/stand-in/engine.py"
OPERATOR_PROCESS = b"rolloutfleet"
CONTROL_PLANE = b"--advertise-address=10.89.0.10"
"""Of the local cluster, among the words of its API server."""


class NotFound(AssertionError):
    """There is nothing to break: the pod has no such process on this machine."""


def processes(pod_uid: str, *, part: bytes = b"", group: str = "") -> list[int]:
    """Processes of a pod whose command line has `part` in it, without the one that only holds the pod together.

    `group`: only those of the container of this id.
    """
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            place = (process / "cgroup").read_text()
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended meanwhile
        if pod_uid in place and group in place and words and not words.startswith(b"/pause") and part in words:
            found.append(int(process.name))
    return found


def send(pod_uid: str, number: signal.Signals, *, part: bytes = b"", group: str = "") -> list[int]:
    """Send a signal to those processes, and say which they are. Raises NotFound."""
    found = processes(pod_uid, part=part, group=group)
    if not found:
        raise NotFound(f"pod {pod_uid}: no process with {part!r} in its command line runs on this machine")
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
    return found


def exits(found: Sequence[int], *, seconds: float) -> float | None:
    """When the last of these processes had ended, and the kernel had closed what it had open; None: not in time."""
    deadline = time.monotonic() + seconds
    while any(_runs(process) for process in found):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.005)
    return time.monotonic()


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@contextlib.contextmanager
def cut_off(node: str) -> Iterator[None]:
    """The node's link is down inside the block. It comes up again however this process ends, SIGKILL included."""
    link = f"rf-{node}"
    guard = subprocess.Popen(
        ["sh", "-c", f"read line; ip link set {link} up"], stdin=subprocess.PIPE, start_new_session=True
    )
    assert guard.stdin is not None
    try:
        subprocess.run(["ip", "link", "set", link, "down"], check=True, timeout=10)
        yield
    finally:
        guard.stdin.close()  # the guard reads the end of its input: of our own accord, or since we have died
        if guard.wait(timeout=10) != 0:
            raise RuntimeError(f"link {link} is not up again: ip link set {link} up")


@contextlib.contextmanager
def stopped(found: Sequence[int]) -> Iterator[None]:
    """These processes stand still inside the block. They go on when it ends, however this process ends."""
    guard = subprocess.Popen(
        ["sh", "-c", f"read line; kill -CONT {' '.join(map(str, found))}"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # who has been killed meanwhile
        start_new_session=True,
    )
    assert guard.stdin is not None
    try:
        for process in found:
            os.kill(process, signal.SIGSTOP)
        yield
    finally:
        guard.stdin.close()
        guard.wait(timeout=10)


@contextlib.contextmanager
def without_api_server(seconds: float = 0.0) -> Iterator[None]:
    """The local cluster's API server stands still inside the block, and for so long at least."""
    (server,) = [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if b"kube-apiserver" in (words := _words(process)) and CONTROL_PLANE in words
    ]
    began = time.monotonic()
    with stopped([server]):
        yield
        time.sleep(max(began + seconds - time.monotonic(), 0.0))  # that is the fault


def touch(pod_uid: str, file: str, *, part: bytes) -> None:
    """Make a file as a process of the pod sees it, without the API server."""
    for process in processes(pod_uid, part=part):
        place = Path(f"/proc/{process}/root") / file.removeprefix("/")
        place.touch()
        os.chown(place, os.stat(f"/proc/{process}").st_uid, -1)


def _words(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""  # it has ended meanwhile
