"""[SECONDS]: drop all that this pod sends, and so all its connections; for ever, or for so long.

By a queueing discipline (`tc qdisc add dev eth0 root blackhole`): to take the link down would lose its routes for good.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
import time
from pathlib import Path

NEW_QDISC, DELETE_QDISC = 36, 37
REQUEST, ACKNOWLEDGE, REPLACE, CREATE = 0x1, 0x4, 0x100, 0x400
ROOT = 0xFFFFFFFF
KIND = 1


def interface() -> str:
    """The one with the default route."""
    rows = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    return next((row[0] for row in rows if row[1] == "00000000"), "eth0")


def ask(kind: int, flags: int, device: str, discipline: bytes = b"") -> None:
    """One message of rtnetlink(7): a tcmsg, and the discipline's name as its attribute."""
    message = struct.pack("=BxHiIII", socket.AF_UNSPEC, 0, socket.if_nametoindex(device), 0, ROOT, 0)
    if discipline:
        word = discipline + b"\0"
        message += struct.pack("=HH", 4 + len(word), KIND) + word + b"\0" * (-len(word) % 4)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(10)
        kernel.send(struct.pack("=IHHII", 16 + len(message), kind, REQUEST | ACKNOWLEDGE | flags, 1, 0) + message)
        (code,) = struct.unpack_from("=i", kernel.recv(4096), 16)
    if code:
        raise OSError(-code, f"{os.strerror(-code)}: queueing discipline of {device}")


def main() -> None:
    device = interface()
    try:
        ask(NEW_QDISC, CREATE | REPLACE, device, b"blackhole")
    except OSError as error:
        sys.exit("needs NET_ADMIN" if error.errno == errno.EPERM else str(error))
    if len(sys.argv) > 1:
        time.sleep(float(sys.argv[1]))
        ask(DELETE_QDISC, 0, device)


if __name__ == "__main__":
    main()
