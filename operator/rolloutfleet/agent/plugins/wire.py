"""What agent and host say to each other: pickles, each after its length (u64). Both are the same program."""

from __future__ import annotations

import asyncio
import pickle
import struct
from dataclasses import dataclass
from typing import Any

from rolloutfleet.agent.plugins.errors import PluginError
from rolloutfleet.agent.plugins.kinds import Kind

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Request:
    id: int
    reference: str
    kind: Kind
    arguments: tuple[Any, ...] | None
    """None: only load it."""
    timeout_seconds: float


@dataclass(frozen=True)
class Cancel:
    id: int


@dataclass(frozen=True)
class Reply:
    id: int
    result: Any = None
    error: PluginError | None = None
    stuck: bool = False
    """A thread of the host will never come back."""


def framed(message: Request | Cancel | Reply) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader) -> Any:
    """Raises asyncio.IncompleteReadError when the other side has gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))  # noqa: S301 - from a process that this one has started
