"""SIGNAL [SECONDS]: send it to every other process of this container, and SIGCONT after so many seconds."""

from __future__ import annotations

import os
import signal
import sys
import time


def others() -> list[int]:
    """Of this container, the first one first. Its processes share a mount namespace; those of sidecars, which the pod's
    shared process namespace shows as well, have another one, or may not be looked at."""
    mine = os.readlink("/proc/self/ns/mnt")
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if os.readlink(f"/proc/{name}/ns/mnt") == mine:
                    found.append(int(name))
            except OSError:
                continue  # gone, or somebody else's
    return sorted(found)


def send(number: signal.Signals, processes: list[int]) -> int:
    sent = 0
    for process in processes:
        try:
            os.kill(process, number)
            sent += 1
        except ProcessLookupError:
            continue
    return sent


def wake_later(processes: list[int], seconds: float) -> None:
    """In a process that outlives this one: whoever asked may have gone by then."""
    if os.fork():
        return
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    time.sleep(seconds)
    send(signal.SIGCONT, processes)
    os._exit(0)


def main() -> None:
    number = signal.Signals[sys.argv[1]]
    processes = others()
    print(f"{number.name} to {len(processes)} processes", flush=True)
    if not send(number, processes):
        sys.exit("no process of this container may be sent a signal")
    if len(sys.argv) > 2:
        wake_later(processes, float(sys.argv[2]))


if __name__ == "__main__":
    main()
