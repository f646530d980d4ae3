"""Fill the memory of this container until its limit is reached and the kernel kills for it.

What is written to a memfd counts for the container and for none of its processes, so the kernel takes the largest one,
the engine's, and not this.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

BLOCK = 1 << 20
"""Bytes. This process must stay small."""
KEEP = 1 << 30
"""Bytes that the node keeps, should the container turn out to have no limit."""


def available() -> int:
    """Bytes that the node has left."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def main() -> None:
    held = os.memfd_create("fault")
    block = b"\1" * BLOCK
    while available() > KEEP:
        os.write(held, block)
    sys.exit("nobody was killed, and the node has no more memory to give")


if __name__ == "__main__":
    main()
