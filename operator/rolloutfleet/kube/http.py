"""The way to the API server: connections of aiohttp, answers in whole or line by line.

httpx would tell errors as well, but takes 1 ms of CPU for a request with one open connection and 2.4 ms with 128, since
it looks at every connection of its pool; aiohttp takes 0.2 ms whatever is open (tests/bench/scale).
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import aiohttp
from yarl import URL

CONNECT_SECONDS = 10.0
KEEP_SECONDS = 60.0
"""How long an idle connection stays: API servers keep theirs longer."""


class NotSent(Exception):
    """There was no connection: the server has certainly not heard of the request."""


class Unanswered(Exception):
    """The request was sent, and nothing is known of what became of it."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    retry_after: str = ""
    """The header of that name."""

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class Wire:
    """Connections to one API server."""

    def __init__(self, *, tls: ssl.SSLContext, max_connections: int) -> None:
        self._tls = tls
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def ask(
        self, method: str, url: str, *, headers: Mapping[str, str], body: bytes | None, seconds: float
    ) -> Answer:
        """`seconds`: without a byte of the answer. Raises NotSent, Unanswered."""
        with _errors_told():
            async with self._opened().request(
                method,
                URL(url, encoded=True),
                headers=headers,
                data=body,
                allow_redirects=False,
                timeout=_timeout(seconds),
            ) as response:
                return Answer(response.status, await response.read(), response.headers.get("Retry-After", ""))

    @asynccontextmanager
    async def follow(
        self, url: str, *, headers: Mapping[str, str], seconds: float
    ) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """(status, lines of the answer as they come). `seconds`: of silence. Raises as `ask` does."""
        with _errors_told():
            async with self._opened().request(
                "GET", URL(url, encoded=True), headers=headers, allow_redirects=False, timeout=_timeout(seconds)
            ) as response:
                yield response.status, _lines(response.content)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:  # aiohttp wants a running loop
            connector = aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=KEEP_SECONDS, ssl=self._tls)
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                # A list of thousands of pods would be compressed and unpacked again for a way of no distance.
                headers={"Accept-Encoding": "identity"},
            )
        return self._session


def _timeout(seconds: float) -> aiohttp.ClientTimeout:
    # A place in the pool is waited for as long as an answer.
    return aiohttp.ClientTimeout(total=None, connect=seconds, sock_connect=CONNECT_SECONDS, sock_read=seconds)


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Of any length: an object may have a megabyte, aiohttp's own lines have 128 KiB."""
    begun: list[bytes] = []
    async for chunk in content.iter_any():
        first, *rest = chunk.split(b"\n")
        begun.append(first)
        for line in rest:
            yield b"".join(begun)
            begun = [line]
    if last := b"".join(begun):
        yield last


@contextmanager
def _errors_told() -> Iterator[None]:
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        raise NotSent(str(error)) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:  # the last: an URL that is none
        raise Unanswered(f"{type(error).__name__} {error}".rstrip()) from error
