"""The API client speaks Kubernetes' paths and patches, maps errors, and repeats only what was not performed."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from rolloutfleet.kube import client as client_module
from rolloutfleet.kube.client import (
    ATTEMPTS,
    LEASE,
    MUTATING_WEBHOOK,
    POD,
    ROLLOUT_SERVER,
    SERVER_GROUP,
    AlreadyExists,
    ApiError,
    Conflict,
    Expired,
    Forbidden,
    Invalid,
    KubeApi,
    NotFound,
    Observer,
    TooManyRequests,
    Unreachable,
    nobody,
)
from rolloutfleet.kube.config import Credentials
from rolloutfleet.kube.errors import error_from

Reply = tuple[int, Any, Mapping[str, str]]


class Server:
    """Stands in for an API server: answers what it is given, in order; the last answer again and again."""

    def __init__(self, *replies: tuple[int, Any] | Reply) -> None:
        self._replies = list(replies)
        self.requests: list[tuple[str, str, dict[str, str], Any, dict[str, str]]] = []
        """Method, path, query, body, headers."""

    async def handle(self, request: web.Request) -> web.Response:
        text = await request.text()
        body = json.loads(text) if text else None
        self.requests.append((request.method, request.path, dict(request.query), body, dict(request.headers)))
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        status, answer = reply[0], reply[1]
        headers = reply[2] if len(reply) == 3 else {}
        if isinstance(answer, str):
            return web.Response(status=status, text=answer, headers=headers)
        return web.json_response(answer, status=status, headers=headers)

    @property
    def asked(self) -> list[tuple[str, str]]:
        return [(method, path) for method, path, *_ in self.requests]


def credentials(url: str, token: Callable[[], str | None] = lambda: "t-1") -> Credentials:
    return Credentials(server=url, tls=ssl.create_default_context(), token=token, namespace="rl")


@asynccontextmanager
async def served(server: Server) -> AsyncIterator[str]:
    """Its URL while it answers."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def ask(
    server: Server,
    question: Callable[[KubeApi], Awaitable[Any]],
    token: Callable[[], str | None] = lambda: "t-1",
    *,
    before_write: Callable[[], None] | None = None,
    observe: Observer = nobody,
) -> Any:
    async def scenario() -> Any:
        async with served(server) as url:
            api = KubeApi(credentials(url, token), before_write=before_write, observe=observe)
            try:
                return await question(api)
            finally:
                await api.close()

    return asyncio.run(scenario())


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The client's pauses take no time and are written down."""
    taken: list[float] = []

    async def pause(seconds: float) -> None:
        taken.append(seconds)

    monkeypatch.setattr(client_module, "asyncio", SimpleNamespace(sleep=pause))
    return taken


def status(code: int, reason: str, message: str = "told") -> tuple[int, dict[str, Any]]:
    return code, {"kind": "Status", "code": code, "reason": reason, "message": message}


# Errors


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (status(400, "BadRequest"), Invalid),
        (status(403, "Forbidden"), Forbidden),
        (status(404, "NotFound"), NotFound),
        (status(409, "Conflict"), Conflict),
        (status(409, "AlreadyExists"), AlreadyExists),
        (status(410, "Expired"), Expired),
        (status(422, "Invalid"), Invalid),
        (status(500, "InternalError"), ApiError),
    ],
)
def test_each_error_status_has_its_kind_and_is_asked_once(
    reply: tuple[int, Any], kind: type[ApiError], pauses: list[float]
) -> None:
    server = Server(reply)
    with pytest.raises(ApiError) as error:
        ask(server, lambda api: api.get(POD, "p", namespace="rl"))
    assert type(error.value) is kind
    assert (error.value.status, error.value.reason, error.value.message) == (reply[0], reply[1]["reason"], "told")
    assert len(server.requests) == 1
    assert pauses == []


def test_an_answer_of_a_proxy_in_between_is_told_as_it_is() -> None:
    error = error_from(502, None, "<html>bad gateway</html>")
    assert type(error) is ApiError
    assert (str(error), error.status) == ("<html>bad gateway</html>", 502)
    assert str(error_from(500, None, "")) == "HTTP 500"
    assert str(error_from(500, ["a list"], "[...]")) == "[...]"


# Retries


@pytest.mark.parametrize("code", [429, 503])
def test_what_was_not_performed_is_repeated_after_the_pause_that_the_server_asks_for(
    code: int, pauses: list[float]
) -> None:
    busy: Reply = (code, {"message": "busy"}, {"Retry-After": "3"})
    server = Server(busy, busy, (200, {"metadata": {"name": "p"}}))
    assert ask(server, lambda api: api.get(POD, "p", namespace="rl")) == {"metadata": {"name": "p"}}
    assert len(server.requests) == 3
    assert pauses == [3.0, 3.0]


def test_a_server_cannot_make_us_wait_for_ever(pauses: list[float]) -> None:
    server = Server((429, {}, {"Retry-After": "3600"}), (200, {}))
    ask(server, lambda api: api.get(POD, "p", namespace="rl"))
    assert pauses == [10.0]


def test_repeating_has_an_end(pauses: list[float]) -> None:
    server = Server(status(429, "TooManyRequests"))
    with pytest.raises(TooManyRequests):
        ask(server, lambda api: api.create(POD, {"metadata": {"name": "p", "namespace": "rl"}}))
    assert len(server.requests) == ATTEMPTS
    assert pauses == sorted(pauses)
    assert len(set(pauses)) == ATTEMPTS - 1, "later and later"


def test_a_refused_connection_is_tried_again_and_then_unreachable(pauses: list[float]) -> None:
    async def scenario() -> None:
        with socket.socket() as bound:  # bound and not listening
            bound.bind(("127.0.0.1", 0))
            api = KubeApi(credentials(f"http://127.0.0.1:{bound.getsockname()[1]}"))
            with pytest.raises(Unreachable, match="GET /api/v1/namespaces/rl/pods/p"):
                await api.get(POD, "p", namespace="rl")
            await api.close()

    asyncio.run(scenario())
    assert len(pauses) == ATTEMPTS - 1


def test_a_connection_that_breaks_after_the_request_is_not_repeated(pauses: list[float]) -> None:
    heard = 0

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        await reader.readuntil(b"\r\n\r\n")
        heard += 1
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            api = KubeApi(credentials(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
            with pytest.raises(Unreachable, match="ServerDisconnectedError"):
                await api.create(POD, {"metadata": {"generateName": "p-", "namespace": "rl"}})
            await api.close()

    asyncio.run(scenario())
    assert heard == 1, "the server may have performed it"
    assert pauses == []


# Verbs


def test_leave_is_asked_for_before_each_attempt_to_write_and_for_no_read(pauses: list[float]) -> None:
    class NoMore(Exception):
        pass

    given = [None, NoMore()]

    def leave() -> None:
        refusal = given.pop(0)
        if refusal is not None:
            raise refusal

    async def read_then_write(api: KubeApi) -> None:
        await api.get(POD, "p", namespace="rl")
        with pytest.raises(NoMore):
            await api.create(POD, {"metadata": {"name": "p", "namespace": "rl"}})

    server = Server((200, {}), status(429, "TooManyRequests"))
    ask(server, read_then_write, before_write=leave)
    assert [method for method, _ in server.asked] == ["GET", "POST"], "the repetition was not sent"


def test_the_token_is_asked_for_with_each_request() -> None:
    tokens = iter(["t-1", "t-2", None])
    server = Server((200, {}))

    async def thrice(api: KubeApi) -> None:
        for _ in range(3):
            await api.get(POD, "p", namespace="rl")

    ask(server, thrice, lambda: next(tokens))
    assert [headers.get("Authorization") for *_, headers in server.requests] == ["Bearer t-1", "Bearer t-2", None]


def test_objects_are_found_where_the_api_has_them() -> None:
    server = Server((200, {"metadata": {}}))

    async def several(api: KubeApi) -> None:
        await api.get(POD, "p", namespace="rl")
        await api.get(ROLLOUT_SERVER, "qwen", namespace="rl")
        await api.get(MUTATING_WEBHOOK, "hook")
        await api.list(LEASE)

    ask(server, several)
    assert server.asked == [
        ("GET", "/api/v1/namespaces/rl/pods/p"),
        ("GET", "/apis/rolloutfleet.dev/v1alpha1/namespaces/rl/rolloutservers/qwen"),
        ("GET", "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/hook"),
        ("GET", "/apis/coordination.k8s.io/v1/leases"),
    ]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ((200, {"kind": "APIResourceList", "resources": [{"name": "podgroups/status"}, {"name": "podgroups"}]}), True),
        ((200, {"kind": "APIResourceList", "resources": [{"name": "elasticquotas"}]}), False),
        ((200, {"kind": "APIResourceList"}), False),
        (status(404, "NotFound"), False),
        ((404, "404 page not found"), False),
    ],
)
def test_what_the_cluster_does_not_have_is_no_error(reply: tuple[int, Any], expected: bool) -> None:
    server = Server(reply)
    assert ask(server, lambda api: api.serves("scheduling.x-k8s.io", "v1alpha1", "podgroups")) is expected
    assert server.asked == [("GET", "/apis/scheduling.x-k8s.io/v1alpha1")]


def test_what_could_not_be_asked_is_not_taken_for_an_answer(pauses: list[float]) -> None:
    with pytest.raises(ApiError):
        ask(Server(status(503, "ServiceUnavailable")), lambda api: api.serves("g", "v1", "things"))


def test_a_list_is_read_in_chunks_to_its_end() -> None:
    server = Server(
        (200, {"metadata": {"continue": "more", "resourceVersion": "8"}, "items": [{"n": 1}]}),
        (200, {"metadata": {"resourceVersion": "9"}, "items": [{"n": 2}]}),
    )
    listed = ask(server, lambda api: api.list(POD, namespace="rl", label_selector="a=b", field_selector="c=d"))
    what = {"apiVersion": "v1", "kind": "Pod"}  # which the server leaves out
    assert listed.items == [{**what, "n": 1}, {**what, "n": 2}]
    assert listed.resource_version == "9"
    first, second = (query for _, _, query, _, _ in server.requests)
    assert (first["labelSelector"], first["fieldSelector"]) == ("a=b", "c=d")
    assert "continue" not in first
    assert second["continue"] == "more"


def test_an_apply_names_its_manager_and_its_subresource() -> None:
    server = Server((200, {}))
    manifest = {"metadata": {"name": "qwen", "namespace": "rl"}}
    ask(server, lambda api: api.apply(ROLLOUT_SERVER, manifest, field_manager="m", subresource="status"))
    ((method, path, query, body, headers),) = server.requests
    assert method == "PATCH"
    assert path == "/apis/rolloutfleet.dev/v1alpha1/namespaces/rl/rolloutservers/qwen/status"
    assert query == {"fieldManager": "m", "force": "true"}
    assert (body, headers["Content-Type"]) == (manifest, "application/apply-patch+yaml")


def test_a_list_is_a_json_patch_and_anything_else_a_merge_patch() -> None:
    server = Server((200, {}))

    async def both(api: KubeApi) -> None:
        await api.patch(POD, "p", [{"op": "remove", "path": "/a"}], namespace="rl")
        await api.patch(POD, "p", {"a": None}, namespace="rl")

    ask(server, both)
    kinds = [headers["Content-Type"] for *_, headers in server.requests]
    assert kinds == ["application/json-patch+json", "application/merge-patch+json"]


def test_a_deletion_may_be_bound_to_one_life_of_the_object() -> None:
    server = Server((200, {}))

    async def both(api: KubeApi) -> None:
        await api.delete(POD, "p", namespace="rl", uid="u-1", grace_seconds=0)
        await api.delete(POD, "p", namespace="rl")

    ask(server, both)
    bound, plain = (body for _, _, _, body, _ in server.requests)
    assert (bound["preconditions"], bound["gracePeriodSeconds"]) == ({"uid": "u-1"}, 0)
    assert "preconditions" not in plain
    assert "gracePeriodSeconds" not in plain


# Observed


class Observations:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []
        self.seconds: list[float] = []

    def __call__(self, verb: str, resource: str, code: str, seconds: float) -> None:
        self.seen.append((verb, resource, code))
        self.seconds.append(seconds)


def test_each_request_is_observed_by_verb_resource_and_code_without_names() -> None:
    observed = Observations()
    body = {"metadata": {"name": "qwen-main", "namespace": "rl"}}

    async def all_verbs(api: KubeApi) -> None:
        await api.get(POD, "p", namespace="rl")
        await api.list(POD)
        await api.create(POD, body)
        await api.update(LEASE, body)
        await api.apply(SERVER_GROUP, body, field_manager="m", subresource="status")
        await api.patch(MUTATING_WEBHOOK, "hook", {})
        await api.delete(POD, "p", namespace="rl")
        await api.serves("scheduling.x-k8s.io", "v1alpha1", "podgroups")
        await api.ask_pod("p", 8477, "/v1/fleets", namespace="rl", seconds=5)

    ask(Server((200, {"metadata": {}})), all_verbs, observe=observed)
    assert observed.seen == [
        ("get", "pods", "200"),
        ("list", "pods", "200"),
        ("create", "pods", "200"),
        ("update", "leases", "200"),
        ("apply", "servergroups/status", "200"),
        ("patch", "mutatingwebhookconfigurations", "200"),
        ("delete", "pods", "200"),
        ("get", "apis", "200"),
        ("get", "pods/proxy", "200"),
    ]
    assert all(0 <= seconds < 60 for seconds in observed.seconds)


def test_repetitions_and_refusals_are_observed_too(pauses: list[float]) -> None:
    observed = Observations()
    server = Server((429, {}), status(404, "NotFound"))
    with pytest.raises(NotFound):
        ask(server, lambda api: api.get(POD, "p", namespace="rl"), observe=observed)
    assert observed.seen == [("get", "pods", "429"), ("get", "pods", "404")]


def test_no_answer_is_observed_as_such(pauses: list[float]) -> None:
    observed = Observations()

    async def scenario() -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            api = KubeApi(credentials(f"http://127.0.0.1:{bound.getsockname()[1]}"), observe=observed)
            with pytest.raises(Unreachable):
                await api.get(POD, "p", namespace="rl")
            await api.close()

    asyncio.run(scenario())
    assert observed.seen == [("get", "pods", "NoAnswer")] * ATTEMPTS


# Watches


def watched(server: Server) -> list[tuple[str, Any]]:
    async def collect(api: KubeApi) -> list[tuple[str, Any]]:
        return [(e.type, e.object) async for e in api.watch(POD, namespace="rl", resource_version="7")]

    found: list[tuple[str, Any]] = ask(server, collect)
    return found


def test_a_watch_tells_changes_since_the_version_until_the_server_ends_it() -> None:
    lines = [{"type": "ADDED", "object": {"n": 1}}, {"type": "BOOKMARK", "object": {"n": 2}}]
    server = Server((200, "".join(json.dumps(line) + "\n" for line in lines)))
    assert watched(server) == [("ADDED", {"n": 1}), ("BOOKMARK", {"n": 2})]
    ((_, _, query, _, headers),) = server.requests
    assert (query["watch"], query["resourceVersion"], query["allowWatchBookmarks"]) == ("1", "7", "true")
    assert headers["Authorization"] == "Bearer t-1"


@pytest.mark.parametrize(
    "server",
    [
        Server(status(410, "Expired")),
        Server((200, json.dumps({"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}) + "\n")),
    ],
)
def test_a_watch_that_is_too_old_has_expired_whether_told_by_status_or_by_event(server: Server) -> None:
    with pytest.raises(Expired):
        watched(server)


# Servers in pods


def test_a_server_in_a_pod_is_asked_through_the_proxy_and_its_refusal_is_an_error() -> None:
    server = Server((200, {"weight_version": "3"}), (200, {"success": True}), (400, {"message": "no such folder"}))

    async def question(api: KubeApi) -> tuple[Any, Any]:
        info = await api.ask_pod("qwen-main-0-e1-r0", 30000, "/model_info", namespace="rl", seconds=5)
        loaded = await api.ask_pod("p", 30000, "/load", namespace="rl", body={"path": "/m"}, seconds=5)
        with pytest.raises(Invalid, match="no such folder"):
            await api.ask_pod("p", 30000, "/load", namespace="rl", body={}, seconds=5)
        return info, loaded

    assert ask(server, question) == ({"weight_version": "3"}, {"success": True})
    path = "/api/v1/namespaces/rl/pods/p:30000/proxy/load"
    assert server.asked == [
        ("GET", "/api/v1/namespaces/rl/pods/qwen-main-0-e1-r0:30000/proxy/model_info"),
        ("POST", path),
        ("POST", path),
    ]
    assert server.requests[1][3] == {"path": "/m"}
