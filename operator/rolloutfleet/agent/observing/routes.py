"""The page with a role's samples, and what it reads.

A user reaches it by `kubectl port-forward`, with a browser in which other sites are open too: those may neither read
samples nor send orders to the agent.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from aiohttp import web

from rolloutfleet.agent.errors import AgentError, invalid
from rolloutfleet.agent.observing.observations import Observations
from rolloutfleet.agent.observing.recent import MAX_SAMPLES

PAGE = "/v1/servers/{role}/samples.html"
DATA = "/v1/servers/{role}/samples.json"
LOCAL_NAMES = frozenset({"localhost"})


class Observed(Protocol):
    @property
    def observations(self) -> Observations: ...
    @property
    def server_name(self) -> str: ...


def observing_routes(role_of: Callable[[web.Request], Observed]) -> list[web.RouteDef]:
    """`role_of` raises AgentError where the pod has no such role."""
    page, policy = _page()

    async def html(request: web.Request) -> web.Response:
        role_of(request)
        headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        return web.Response(text=page, content_type="text/html", charset="utf-8", headers=headers)

    async def data(request: web.Request) -> web.Response:
        role = role_of(request)
        view = role.observations.view(
            role=request.match_info["role"],
            server=role.server_name,
            after=_number(request, "after", 0),
            limit=_number(request, "limit", MAX_SAMPLES),
        )
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        response = web.Response(text=view.model_dump_json(), content_type="application/json", headers=headers)
        response.enable_compression()
        return response

    return [web.get(PAGE, html), web.get(DATA, data)]


@web.middleware
async def refuse_other_sites(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Browsers name the page that a request comes of in Origin, but not when it only reads from what it takes for its
    own host: a name that others have pointed at 127.0.0.1."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        raise AgentError("OtherSite", f"Origin {origin}: pages of other sites have no business here", status=403)
    if request.path.endswith((".html", ".json")) and not _local(request.url.host or ""):
        raise AgentError("OtherSite", f"Host {request.host}: samples are shown at localhost or an address", status=403)
    return await handler(request)


def _local(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host in LOCAL_NAMES
    return True


def _number(request: web.Request, name: str, default: int) -> int:
    value = request.query.get(name, str(default))
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise invalid("BadRequest", f"{name}: {value[:40]!r} is not a number from 0 on")
    return int(value)


def _page() -> tuple[str, str]:
    """The page in one file, and the policy that lets nothing but its own script and style in."""
    here = Path(__file__).parent
    style, script = (here / "page.css").read_text(), (here / "page.js").read_text()
    page = (here / "page.html").read_text().replace("/* style */", style).replace("/* script */", script)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
