"""A request through a prefill and a decode engine ends when either half of it has failed."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from rolloutfleet.engine.errors import EngineError
from rolloutfleet.engine.pair import generate_through
from rolloutfleet.engine.sglang import EngineClient


class Half:
    """Answers, fails, or waits for its peer for ever."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.payloads: list[dict[str, Any]] = []
        self.given_up = False

    async def generate(self, payload: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        self.payloads.append(payload)
        if self.answer == "fails":
            raise EngineError("no memory for the KV cache")
        try:
            await asyncio.sleep(0 if self.answer == "answers" else 3600)
        except asyncio.CancelledError:
            self.given_up = True
            raise
        return {}


def through(prefill: Half, decode: Half) -> None:
    async def scenario() -> None:
        await generate_through(
            cast(EngineClient, prefill), cast(EngineClient, decode), bootstrap_host="10.0.0.1", bootstrap_port=8998
        )

    asyncio.run(scenario())


@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_when_one_half_fails_the_other_is_not_waited_for(failing: str) -> None:
    halves = {"prefill": Half("hangs"), "decode": Half("hangs")}
    halves[failing].answer = "fails"
    with pytest.raises(EngineError, match="no memory"):
        through(halves["prefill"], halves["decode"])
    (other,) = halves.keys() - {failing}
    assert halves[other].given_up, "its connection is closed, so the engine aborts what it holds"


def test_both_halves_get_one_request_with_the_room_in_which_they_meet() -> None:
    prefill, decode = Half("answers"), Half("answers")
    through(prefill, decode)
    assert prefill.payloads == decode.payloads
    (payload,) = prefill.payloads
    assert (payload["bootstrap_host"], payload["bootstrap_port"]) == ("10.0.0.1", 8998)
    through(prefill, decode)
    assert len({sent["bootstrap_room"] for sent in prefill.payloads}) == 2, "a room is used once"
