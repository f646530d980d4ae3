"""What goes wrong between an operator and everybody else, short of its death. Each fault is one function."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import httpx

from api_server.hub import Seen
from api_server.wire import Disturb, Pass

Mangle = Callable[[Seen], Seen]
"""What becomes of watch events on their way to the operator."""


def late(seconds: float) -> Mangle:
    """Each event comes so much later: answers to our own writes are always seen first."""

    def mangle(deliver: Seen) -> Seen:
        def saw(kind: str, type_of_event: str | None, body: dict[str, Any]) -> None:
            asyncio.get_running_loop().call_later(seconds, deliver, kind, type_of_event, body)

        return saw

    return mangle


def reordered(chance: random.Random, *, most: float) -> Mangle:
    """Each event comes up to `most` seconds late, whatever came before it: kinds and objects overtake each other."""

    def mangle(deliver: Seen) -> Seen:
        def saw(kind: str, type_of_event: str | None, body: dict[str, Any]) -> None:
            asyncio.get_running_loop().call_later(chance.random() * most, deliver, kind, type_of_event, body)

        return saw

    return mangle


def doubled(seconds: float) -> Mangle:
    """Each event comes at once and again later."""

    def mangle(deliver: Seen) -> Seen:
        def saw(kind: str, type_of_event: str | None, body: dict[str, Any]) -> None:
            deliver(kind, type_of_event, body)
            asyncio.get_running_loop().call_later(seconds, deliver, kind, type_of_event, body)

        return saw

    return mangle


def dropped(chance: random.Random, *, share: float) -> Mangle:
    """That share of all events is never told, deletions among them."""

    def mangle(deliver: Seen) -> Seen:
        def saw(kind: str, type_of_event: str | None, body: dict[str, Any]) -> None:
            if type_of_event is None or chance.random() >= share:
                deliver(kind, type_of_event, body)

        return saw

    return mangle


def untold(kind: str, type_of_event: str) -> Mangle:
    """No such event is told: what it would have said is found in the next list."""

    def mangle(deliver: Seen) -> Seen:
        def saw(seen: str, what: str | None, body: dict[str, Any]) -> None:
            if (seen, what) != (kind, type_of_event):
                deliver(seen, what, body)

        return saw

    return mangle


def broken_off(*, seconds: float) -> Mangle:
    """Time and again the watches end in 410 Gone: what happened meanwhile is listed, and deletions are not told."""

    def mangle(deliver: Seen) -> Seen:
        missed: dict[tuple[str, str], dict[str, Any]] = {}
        deaf = False

        def turn() -> None:
            nonlocal deaf
            deaf = not deaf
            if not deaf:
                for (kind, _), body in list(missed.items()):
                    deliver(kind, None, body)
                missed.clear()
            asyncio.get_running_loop().call_later(seconds, turn)

        def saw(kind: str, type_of_event: str | None, body: dict[str, Any]) -> None:
            if not deaf or type_of_event is None:
                deliver(kind, type_of_event, body)
            elif type_of_event == "DELETED":
                missed.pop((kind, body["metadata"]["uid"]), None)
            else:
                missed[kind, body["metadata"]["uid"]] = body

        asyncio.get_running_loop().call_later(seconds, turn)
        return saw

    return mangle


def failing(chance: random.Random, *, share: float) -> Disturb:
    """That share of calls, to the API server as to engines and routers, fails in one of these ways."""

    async def disturb(request: httpx.Request, send: Pass) -> httpx.Response:
        if chance.random() >= share:
            return await send(request)
        match chance.choice(("429", "500", "503", "reset", "refused", "answer lost")):
            case "answer lost":
                await (await send(request)).aread()
                raise httpx.ReadTimeout("the answer was lost", request=request)
            case "reset":
                raise httpx.ReadError("connection reset by peer", request=request)
            case "refused":
                raise httpx.ConnectError("connection refused", request=request)
            case "429":
                return httpx.Response(429, headers={"Retry-After": "1"}, json=_status(429, "TooManyRequests"))
            case code:
                return httpx.Response(int(code), json=_status(int(code), "InternalError"))

    return disturb


def stale_lists() -> Disturb:
    """Every second full list is answered with what the same question got before, as if it had been long on its way."""
    before: dict[str, bytes] = {}

    async def disturb(request: httpx.Request, send: Pass) -> httpx.Response:
        if request.method != "GET" or "limit" not in request.url.params:
            return await send(request)
        question = str(request.url)
        stale = before.pop(question, None)
        if stale is not None:
            return httpx.Response(200, content=stale)
        answer = await send(request)
        before[question] = await answer.aread()
        return answer

    return disturb


def _status(code: int, reason: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": "injected"}
