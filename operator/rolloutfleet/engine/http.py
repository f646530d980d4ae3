"""One way to call an engine or a router: a JSON body, a time-out, a typed error."""

from __future__ import annotations

import socket
from typing import Any

import httpx

from rolloutfleet.engine.errors import EngineRefused, EngineTimeout, EngineUnreachable

CONNECT_SECONDS = 5.0

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A generation may be silent for hours; a machine that has vanished is silent for ever, and is known after 45 s."""


def generating_http(*, max_connections: int) -> httpx.AsyncClient:
    """The connection pool of who waits for generations."""
    limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=512)
    transport = httpx.AsyncHTTPTransport(trust_env=False, limits=limits, socket_options=KEEPALIVE)
    return httpx.AsyncClient(trust_env=False, transport=transport)


class HttpPeer:
    """A base URL and a shared connection pool."""

    def __init__(self, url: str, *, http: httpx.AsyncClient) -> None:
        self.url = url
        self._http = http

    async def _call(
        self,
        method: str,
        path: str,
        *,
        seconds: float,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """Raises EngineUnreachable, EngineTimeout, EngineRefused."""
        target = f"{self.url}{path}"
        timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
        try:
            response = await self._http.request(method, target, json=body, timeout=timeout, headers=headers)
        except httpx.TimeoutException as error:
            raise EngineTimeout(f"{method} {target}: no answer in {seconds:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise EngineUnreachable(f"{method} {target}: {type(error).__name__} {error}".rstrip()) from error
        if response.is_success:
            return response
        raise EngineRefused(
            f"{method} {target}: {response.status_code} {_reason(response)}", status=response.status_code
        )

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        seconds: float,
        body: Any = None,
        headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Like `_call`, for an answer that is a JSON object; anything else is a refusal."""
        response = await self._call(method, path, seconds=seconds, body=body, headers=headers)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            text = response.text[:200]
            raise EngineRefused(f"{method} {self.url}{path}: not a JSON object: {text}", status=response.status_code)
        return answer


def _reason(response: httpx.Response) -> str:
    """SGLang answers {"error": {"message"}}, {"error": text}, or {"success": false, "message": text}."""
    try:
        body = response.json()
    except ValueError:
        return response.text[:500]
    if isinstance(body, dict):
        error = body.get("error") or body.get("message") or body
        return str(error.get("message") or error)[:500] if isinstance(error, dict) else str(error)[:500]
    return str(body)[:500]
