"""One request through a prefill and a decode engine, as sglang-router sends it, but without a router.

Both get the same body at once; they meet by `bootstrap_room` at the prefill's bootstrap server, and the decode's answer
is the request's (facts/sglang.md §3.5).
"""

from __future__ import annotations

import asyncio
import secrets
import uuid

from rolloutfleet.engine.sglang import EngineClient

PAIR_SECONDS = 120.0
"""A pair under full load answers late; one that is stuck would not answer at all."""


async def generate_through(
    prefill: EngineClient,
    decode: EngineClient,
    *,
    bootstrap_host: str,
    bootstrap_port: int | None,
    seconds: float = PAIR_SECONDS,
) -> None:
    """One token. Raises EngineError: the first that either of them says."""
    payload = {
        "rid": uuid.uuid4().hex,
        "input_ids": [1],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "bootstrap_host": bootstrap_host,
        "bootstrap_port": bootstrap_port,
        "bootstrap_room": secrets.randbits(63),
    }
    halves = [asyncio.ensure_future(engine.generate(payload, seconds=seconds)) for engine in (prefill, decode)]
    try:
        await asyncio.gather(*halves)
    finally:
        for half in halves:
            half.cancel()  # closing the connection makes an engine abort what it still holds
