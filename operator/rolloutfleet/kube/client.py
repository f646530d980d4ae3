"""The few verbs of the Kubernetes API that we need, on raw objects.

Raw mappings keep what we do not know, cost nothing to decode, and are what server-side apply wants. Retries have one
owner: this client repeats a request that the server has certainly not performed (429, 503, refused connection);
everything else is told to the caller, whose level-based loop comes again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from rolloutfleet.kube.config import Credentials
from rolloutfleet.kube.errors import (
    AlreadyExists,
    ApiError,
    Conflict,
    Expired,
    Forbidden,
    Invalid,
    NotFound,
    TooManyRequests,
    Unreachable,
    error_from,
)
from rolloutfleet.kube.http import NotSent, Unanswered, Wire
from rolloutfleet.kube.resources import (
    DISRUPTION_BUDGET,
    EVENT,
    LEASE,
    MUTATING_WEBHOOK,
    NODE,
    POD,
    POD_GROUPS,
    REPLICA_SET,
    ROLE,
    ROLE_BINDING,
    ROLLOUT_SERVER,
    SECRET,
    SERVER_GROUP,
    SERVICE,
    Resource,
    by_kind,
)

Object = dict[str, Any]

REQUEST_SECONDS = 30.0
WATCH_SECONDS = 300
SILENCE_SECONDS = 90.0
"""Of a watch. The server sends a bookmark about every minute: a longer silence is a dead connection."""
CHUNK = 100
"""Objects a page: parsed, a pod takes 50 KB before it is trimmed."""
ATTEMPTS = 4
_PERFORMED_NOT = frozenset({429, 503})
_METHODS = {
    "get": "GET",
    "list": "GET",
    "create": "POST",
    "update": "PUT",
    "apply": "PATCH",
    "patch": "PATCH",
    "delete": "DELETE",
}

NO_ANSWER = "NoAnswer"
Observer = Callable[[str, str, str, float], None]
"""(verb, resource, code, seconds) of each request: verbs as above, pods or pods/status, 200 or NO_ANSWER."""


def nobody(verb: str, resource: str, code: str, seconds: float) -> None:
    """Observes nothing."""


def whole(found: Object) -> Object:
    return found


@dataclass(frozen=True)
class Listed:
    items: list[Object]
    resource_version: str


@dataclass(frozen=True)
class WatchEvent:
    type: str
    """ADDED, MODIFIED, DELETED or BOOKMARK."""
    object: Object


class KubeApi:
    """Raises ApiError and its kinds (kube/errors.py)."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        max_connections: int = 64,
        before_write: Callable[[], None] | None = None,
        observe: Observer = nobody,
        wire: Wire | None = None,
    ) -> None:
        """`before_write` is called just before anything but a read is sent, repetitions too; what it raises is raised
        instead. `wire` replaces the way to the API server."""
        self.credentials = credentials
        self._before_write = before_write
        self._observe = observe
        self._wire = wire or Wire(tls=credentials.tls, max_connections=max_connections)

    async def close(self) -> None:
        await self._wire.close()

    async def get(self, resource: Resource, name: str, *, namespace: str | None = None, cached: bool = False) -> Object:
        """`cached`: as the API server has it in memory, which may be a moment old and does not ask etcd."""
        parameters = {"resourceVersion": "0"} if cached else None
        return await self._request("get", resource.plural, resource.path(namespace, name), parameters=parameters)

    async def serves(self, group: str, version: str, plural: str) -> bool:
        """Whether the cluster has such objects at all."""
        try:
            found = await self._request("get", "apis", f"/apis/{group}/{version}")
        except NotFound:
            return False
        return any(resource.get("name") == plural for resource in found.get("resources") or [])

    async def list(
        self,
        resource: Resource,
        *,
        namespace: str | None = None,
        label_selector: str | None = None,
        field_selector: str | None = None,
        keep: Callable[[Object], Object] = whole,
    ) -> Listed:
        """Everything, read in chunks; of each object what `keep` makes of it, so that a long list need not be held."""
        items: list[Object] = []
        token = ""
        # In lists of its own kinds Kubernetes leaves out what each object is.
        what = {"apiVersion": resource.api_version, "kind": resource.kind}
        while True:
            parameters = _selectors(label_selector, field_selector) | {"limit": str(CHUNK)}
            if token:
                parameters["continue"] = token
            page = await self._request("list", resource.plural, resource.path(namespace), parameters=parameters)
            items += [keep({**what, **item}) for item in page.get("items") or []]
            token = page["metadata"].get("continue") or ""
            if not token:
                return Listed(items=items, resource_version=page["metadata"].get("resourceVersion", ""))

    async def watch(
        self,
        resource: Resource,
        *,
        resource_version: str,
        namespace: str | None = None,
        label_selector: str | None = None,
        field_selector: str | None = None,
        seconds: int = WATCH_SECONDS,
    ) -> AsyncIterator[WatchEvent]:
        """Changes since that version, until the server ends the watch. Raises Expired when it must be listed again."""
        parameters = _selectors(label_selector, field_selector) | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(seconds),
        }
        path = resource.path(namespace)
        try:
            async with self._wire.follow(
                self._url(path, parameters), headers=self._headers(), seconds=SILENCE_SECONDS
            ) as (status, lines):
                if status != HTTPStatus.OK:
                    text = b"\n".join([line async for line in lines]).decode(errors="replace")
                    raise error_from(status, _parsed(text), text)
                async for line in lines:
                    event = _parsed(line)
                    if not isinstance(event, dict):
                        raise Unreachable(f"watch {path}: broken off within an event")
                    if event["type"] == "ERROR":
                        told = event["object"]
                        raise error_from(int(told.get("code") or 0), told, line.decode(errors="replace"))
                    yield WatchEvent(type=event["type"], object=event["object"])
        except (NotSent, Unanswered) as error:
            raise Unreachable(f"watch {path}: {error}") from error

    async def create(self, resource: Resource, manifest: Object) -> Object:
        namespace = manifest["metadata"].get("namespace")
        return await self._request("create", resource.plural, resource.path(namespace), body=manifest)

    async def update(self, resource: Resource, manifest: Object) -> Object:
        """Replace; metadata.resourceVersion makes it conditional (Conflict)."""
        metadata = manifest["metadata"]
        path = resource.path(metadata.get("namespace"), metadata["name"])
        return await self._request("update", resource.plural, path, body=manifest)

    async def apply(
        self,
        resource: Resource,
        manifest: Object,
        *,
        field_manager: str,
        force: bool = True,
        subresource: str | None = None,
    ) -> Object:
        """Server-side apply. It creates what is absent: give metadata.uid to touch only the object that was seen."""
        metadata = manifest["metadata"]
        return await self._request(
            "apply",
            _with_subresource(resource, subresource),
            resource.path(metadata.get("namespace"), metadata["name"], subresource),
            parameters={"fieldManager": field_manager, "force": "true" if force else "false"},
            body=manifest,
            content_type="application/apply-patch+yaml",
        )

    async def patch(
        self, resource: Resource, name: str, body: Any, *, namespace: str | None = None, subresource: str | None = None
    ) -> Object:
        """A JSON patch if `body` is a list, else a merge patch."""
        kind = "application/json-patch+json" if isinstance(body, list) else "application/merge-patch+json"
        path = resource.path(namespace, name, subresource)
        what = _with_subresource(resource, subresource)
        return await self._request("patch", what, path, body=body, content_type=kind)

    async def delete(
        self,
        resource: Resource,
        name: str,
        *,
        namespace: str | None = None,
        uid: str | None = None,
        grace_seconds: int | None = None,
    ) -> None:
        """In the background; with `uid` only that very object (Conflict otherwise)."""
        options: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        await self._request("delete", resource.plural, resource.path(namespace, name), body=options)

    async def ask_pod(
        self, pod: str, port: int, path: str, *, namespace: str, body: Object | None = None, seconds: float
    ) -> Object:
        """What a server in a pod answers through the API server's proxy: GET, or POST of a body as JSON.

        The server's own refusals are told as if they were Kubernetes'. Raises Unreachable after `seconds`.
        """
        address = POD.path(namespace, f"{pod}:{port}", f"proxy{path}")
        verb = "get" if body is None else "create"
        return await self._request(verb, "pods/proxy", address, body=body, seconds=seconds)

    def _headers(self) -> dict[str, str]:
        token = self.credentials.token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    async def _request(
        self,
        verb: str,
        resource: str,
        path: str,
        *,
        parameters: dict[str, str] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        seconds: float = REQUEST_SECONDS,
    ) -> Object:
        """`resource`: its plural and subresource, for the observer."""
        method = _METHODS[verb]
        url = self._url(path, parameters)
        content = json.dumps(body).encode() if body is not None else None
        for attempt in range(1, ATTEMPTS + 1):
            headers = self._headers() | ({"Content-Type": content_type} if content is not None else {})
            if method != "GET" and self._before_write is not None:
                self._before_write()
            began = time.monotonic()
            try:
                answer = await self._wire.ask(method, url, headers=headers, body=content, seconds=seconds)
            except NotSent as error:
                self._observe(verb, resource, NO_ANSWER, time.monotonic() - began)
                if attempt == ATTEMPTS:
                    raise Unreachable(f"{method} {path}: {error}") from error
                await asyncio.sleep(0.2 * 2**attempt)
                continue
            except Unanswered as error:
                self._observe(verb, resource, NO_ANSWER, time.monotonic() - began)
                raise Unreachable(f"{method} {path}: {error}") from error
            self._observe(verb, resource, str(answer.status), time.monotonic() - began)
            if answer.status in _PERFORMED_NOT and attempt < ATTEMPTS:
                await asyncio.sleep(_pause(answer.retry_after, 0.2 * 2**attempt))
                continue
            found = _parsed(answer.body)
            if not 200 <= answer.status < 300:
                raise error_from(answer.status, found, answer.text)
            if not isinstance(found, dict):
                raise ApiError(f"{method} {path}: not a JSON object: {answer.text[:200]}")
            return found
        raise AssertionError("unreachable")

    def _url(self, path: str, parameters: dict[str, str] | None) -> str:
        query = f"?{urlencode(parameters)}" if parameters else ""
        return f"{self.credentials.server}{path}{query}"


def _with_subresource(resource: Resource, subresource: str | None) -> str:
    return f"{resource.plural}/{subresource}" if subresource else resource.plural


def _selectors(label: str | None, field: str | None) -> dict[str, str]:
    return ({"labelSelector": label} if label else {}) | ({"fieldSelector": field} if field else {})


def _pause(retry_after: str, otherwise: float) -> float:
    """Seconds; a date, which RFC 9110 allows as well, is not worth reading."""
    return min(float(retry_after) if retry_after.isdigit() else otherwise, 10.0)


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


__all__ = [
    "DISRUPTION_BUDGET",
    "EVENT",
    "LEASE",
    "MUTATING_WEBHOOK",
    "NODE",
    "POD",
    "POD_GROUPS",
    "REPLICA_SET",
    "ROLE",
    "ROLE_BINDING",
    "ROLLOUT_SERVER",
    "SECRET",
    "SERVER_GROUP",
    "SERVICE",
    "AlreadyExists",
    "ApiError",
    "Conflict",
    "Expired",
    "Forbidden",
    "Invalid",
    "KubeApi",
    "Listed",
    "NotFound",
    "Object",
    "Resource",
    "TooManyRequests",
    "Unreachable",
    "WatchEvent",
    "by_kind",
]
