"""Requests of a pair are stopped by what their ids begin with, and keep their tokens; those of others go on."""

from __future__ import annotations

import asyncio
import secrets

from with_engine.conftest import Server

TOKENS = 512
STORY_SECONDS = 60.0


def test_what_a_pair_generates_is_aborted_by_prefix(
    runner: asyncio.Runner, pair: tuple[Server, Server], bootstrap_port: str
) -> None:
    async def story() -> None:
        await asyncio.gather(*(server.start() for server in pair))
        prefill, decode = (server.client for server in pair)

        async def asked(rid: str) -> tuple[str, int]:
            """How it ended, and how many tokens it has."""
            payload = {
                "rid": rid,
                "input_ids": [5, 6, 7],
                "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 0},
                "return_logprob": True,
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": int(bootstrap_port),
                "bootstrap_room": secrets.randbits(63),
            }
            halves = [engine.generate(payload, seconds=STORY_SECONDS) for engine in (prefill, decode)]
            _, answer = await asyncio.gather(*halves)
            return answer["meta_info"]["finish_reason"]["type"], answer["meta_info"]["completion_tokens"]

        async with asyncio.timeout(STORY_SECONDS):
            others = asyncio.create_task(asked("others-1"))
            ours = [asyncio.create_task(asked(f"ours-{number}")) for number in range(2)]
            while (await decode.load()).running < 3:
                await asyncio.wait([others], timeout=0.05)
            while not all(task.done() for task in ours):
                await asyncio.gather(*(engine.abort("ours", paired=True) for engine in (prefill, decode)))
            for task in ours:
                kind, tokens = task.result()
                assert kind == "abort"
                assert 0 < tokens < TOKENS
            assert await others == ("length", TOKENS)
            assert await asked("again") == ("length", TOKENS), "the pair goes on"

    runner.run(story())
