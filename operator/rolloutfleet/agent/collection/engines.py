"""What a user's `generate` is given to reach the engines: pickled into the process of plug-ins, it asks the agent."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from pydantic import JsonValue

from rolloutfleet.api.agent import SamplingParams, Wire
from rolloutfleet.api.sample_codec import decode, encode
from rolloutfleet.api.samples import Sample

_sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}
"""One pool for the one loop of a process."""


class Turn(Wire):
    """What stands before the sample in the request, with its length (u32, little-endian) before it."""

    sampling_params: SamplingParams
    inputs: dict[str, JsonValue] = {}


def read_turn(body: bytes) -> tuple[Turn, Sample]:
    """Raises ValueError, DamagedSample."""
    (length,) = struct.unpack_from("<I", body)
    return Turn.model_validate_json(body[4 : 4 + length]), decode(body[4 + length :])


@dataclass(frozen=True)
class Engines:
    url: str
    """Of the agent, with the role."""
    ticket: str
    """Of the collection or evaluation that the sample belongs to."""
    inputs: Mapping[str, JsonValue] = field(default_factory=dict)
    """Of the prompt: fields that go to the engine with each request, for example image_data."""

    async def complete(self, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        """The sample after one more turn: to its end, its max_new_tokens (all of its response counts), or aborted.

        Return an aborted sample as it is: the collection was stopped, and goes on with it later. Raises ValueError for
        parameters that engines do not know, RuntimeError where the agent refuses.
        """
        turn = Turn(sampling_params=SamplingParams.model_validate(sampling_params), inputs=dict(self.inputs))
        told = turn.model_dump_json(exclude_unset=True).encode()
        body = struct.pack("<I", len(told)) + told + encode(sample)
        async with _session().post(f"{self.url}/collection/complete/{self.ticket}", data=body) as response:
            content = await response.read()
            if response.status != 200:
                raise RuntimeError(f"the agent refused: {response.status} {content[:500].decode(errors='replace')}")
            return decode(content)


def _session() -> aiohttp.ClientSession:
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        # Bounded by the plug-in's own time-out, and by the agent, which ends what it is asked for.
        _sessions[loop] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=5)
        )
    return _sessions[loop]
