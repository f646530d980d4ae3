"""aiohttp's connection pool under httpx, for processes that keep many connections open.

httpcore, on which httpx stands, looks at every connection of its pool before each request and after it, with system
calls: a request costs 1 ms with one open connection and 2.4 ms with 128 (tests/bench/scale); through aiohttp 0.3 ms.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import aiohttp
import httpx
from yarl import URL

_OURS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp would add: what httpx decided counts."""


class AiohttpTransport(httpx.AsyncBaseTransport):
    """`keep_seconds`: how long an idle connection stays; less than the peers keep theirs, or a request meets one that
    they are about to close."""

    def __init__(
        self, *, max_connections: int, keep_seconds: float, tls: ssl.SSLContext | None = None, per_host: int = 0
    ) -> None:
        self._max_connections = max_connections
        self._per_host = per_host
        self._keep_seconds = keep_seconds
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:  # aiohttp wants a running loop
            connector = aiohttp.TCPConnector(
                limit=self._max_connections,
                limit_per_host=self._per_host,
                keepalive_timeout=self._keep_seconds,
                ssl=self._tls if self._tls is not None else True,
            )
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            )
        return self._session

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        wanted = request.extensions.get("timeout", {})
        timeout = aiohttp.ClientTimeout(
            total=None, connect=wanted.get("pool"), sock_connect=wanted.get("connect"), sock_read=wanted.get("read")
        )
        with _errors_of_httpx(request):
            response = await self._opened().request(
                request.method,
                URL(str(request.url), encoded=True),
                headers=[(name.decode("ascii"), value.decode("latin-1")) for name, value in request.headers.raw],
                skip_auto_headers=_OURS,
                data=await request.aread() or None,
                allow_redirects=False,
                timeout=timeout,
            )
        return httpx.Response(
            response.status,
            headers=list(response.raw_headers),
            stream=_Body(request, response),
            extensions={"reason_phrase": (response.reason or "").encode("latin-1", errors="replace")},
        )

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


class _Body(httpx.AsyncByteStream):
    def __init__(self, request: httpx.Request, response: aiohttp.ClientResponse) -> None:
        self._request = request
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _errors_of_httpx(self._request):
            async for chunk in self._response.content.iter_any():
                yield chunk

    async def aclose(self) -> None:
        self._response.close()  # one that was read to its end has given its connection back already


@contextmanager
def _errors_of_httpx(request: httpx.Request) -> Iterator[None]:
    """A ConnectError says that the request was certainly not sent: callers repeat on it."""
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise httpx.ConnectTimeout(str(error), request=request) from error
    except (TimeoutError, aiohttp.SocketTimeoutError) as error:
        raise httpx.ReadTimeout(str(error), request=request) from error
    except aiohttp.ClientConnectorError as error:
        raise httpx.ConnectError(str(error), request=request) from error
    except aiohttp.InvalidURL as error:
        raise httpx.UnsupportedProtocol(str(error), request=request) from error
    except (aiohttp.ClientError, OSError) as error:
        raise httpx.RemoteProtocolError(f"{type(error).__name__} {error}", request=request) from error
