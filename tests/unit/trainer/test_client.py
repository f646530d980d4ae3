"""The trainer's client asks its pod's agent, and tells a fleet that is not ready from a request that was refused."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.trainer import client as client_module
from rolloutfleet.trainer.client import Fleet, connect
from rolloutfleet.trainer.errors import AgentUnreachable, FleetError, NotReady, Refused

VIEW = {"role": "actor", "server": "qwen", "state": "Connected", "ready": True, "weight_version": 3, "routable": 2}
SAMPLE = {
    "response_tokens": [7],
    "rollout_log_probs": [-0.5],
    "status": "truncated",
    "weight_versions": [{"version": 3, "start": 0, "end": 1}],
    "error": "",
    "attempts": 1,
    "seconds": 0.1,
}


class Agent(ThreadingHTTPServer):
    """Stands in for the agent: answers what it is given, in order; the last answer again and again."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: list[tuple[int, Any]] = [(200, VIEW)]
        self.asked: list[tuple[str, str, Any]] = []
        """Method, path with query, body."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Agent

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path, json.loads(text) if text else None))
        replies = self.server.replies
        status, body = replies.pop(0) if len(replies) > 1 else replies[0]
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def agent() -> Iterator[Agent]:
    with Agent() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def fleet(agent: Agent) -> Iterator[Fleet]:
    fleet = connect("actor", url=agent.url)
    yield fleet
    fleet.close()


@pytest.fixture
def nobody() -> Iterator[str]:
    """A URL at which nobody answers and nobody else can begin to."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def error(code: str, message: str = "why", details: list[str] | None = None) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, "details": details or []}}


# Where the agent is


def test_the_injected_variable_says_where_the_agent_is(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUTFLEET_AGENT_URL", agent.url)
    fleet = connect("reward")
    fleet.view()
    fleet.close()
    assert agent.asked == [("GET", "/v1/servers/reward", None)]


def test_connecting_asks_nobody(nobody: str) -> None:
    connect(url=nobody).close()


def test_proxies_of_the_environment_are_not_for_the_agent(
    agent: Agent, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, nobody)
    fleet = connect(url=agent.url)
    assert fleet.view().server == "qwen"
    fleet.close()


def test_no_agent_is_told_with_what_to_look_at(nobody: str) -> None:
    fleet = connect(url=nobody)
    with pytest.raises(AgentUnreachable, match=r"rolloutfleet\.dev/rollout-servers") as unreachable:
        fleet.view()
    fleet.close()
    assert unreachable.value.code == "AgentUnreachable"


# What is asked


def test_the_view_is_typed(fleet: Fleet) -> None:
    view = fleet.view()
    assert (view.server, view.ready, view.routable, view.weight_version) == ("qwen", True, 2, 3)
    assert fleet.weight_version == 3


def test_a_server_that_is_not_there_has_no_weight_version(agent: Agent, fleet: Fleet) -> None:
    agent.replies = [(200, {"role": "actor", "server": "qwen", "state": "WaitingForServer"})]
    with pytest.raises(NotReady):
        _ = fleet.weight_version


def test_samples_are_asked_for_with_prompts_and_parameters_and_come_back_in_groups(agent: Agent, fleet: Fleet) -> None:
    groups = [{"prompt": [1, 2], "samples": [SAMPLE, SAMPLE]}, {"prompt": [3], "samples": [SAMPLE, SAMPLE]}]
    agent.replies = [(200, {"groups": groups, "seconds": 0.2})]
    found = fleet.generate([(1, 2), [3]], n=2, timeout=9.0, temperature=0.5, max_new_tokens=4)
    assert [(group.prompt, len(group.samples)) for group in found] == [([1, 2], 2), ([3], 2)]
    assert found[0].samples[0].weight_versions[0].version == 3
    ((method, path, body),) = agent.asked
    assert (method, path) == ("POST", "/v1/servers/actor/generate")
    assert (body["prompts"], body["n"], body["timeout_seconds"]) == ([[1, 2], [3]], 2, 9.0)
    assert (body["sampling_params"]["temperature"], body["sampling_params"]["max_new_tokens"]) == (0.5, 4)


@pytest.mark.parametrize(
    ("prompts", "sampling", "said"),
    [
        ([[1]], {"max_tokens": 8}, "max_new_tokens is meant"),
        ([[1]], {"temprature": 1.0}, "temprature"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
        ([[]], {}, "prompts"),
        ([], {}, "prompts"),
    ],
)
def test_a_bad_request_for_samples_is_refused_before_it_is_sent(
    agent: Agent, fleet: Fleet, prompts: list[list[int]], sampling: dict[str, Any], said: str
) -> None:
    with pytest.raises(Refused, match=said) as refusal:
        fleet.generate(prompts, **sampling)
    assert refusal.value.code == "BadRequest"
    assert agent.asked == []


def test_an_update_is_sent_with_path_and_version(agent: Agent, fleet: Fleet) -> None:
    verdict = {"pod": "qwen-main-0-e1-r0", "outcome": "Committed", "message": ""}
    agent.replies = [(200, {"version": 4, "committed": True, "engines": [verdict], "seconds": {"total": 1.0}})]
    result = fleet.update_weights(Path("/weights/w4"), version=4, timeout=60.0)
    assert (result.version, result.committed, result.engines[0].outcome) == (4, True, "Committed")
    fleet.update_weights("/weights/w5")
    (method, path, body), (_, _, unnumbered) = agent.asked
    assert (method, path) == ("POST", "/v1/servers/actor/update-weights")
    assert body == {
        "path": "/weights/w4",
        "version": 4,
        "timeout_seconds": 60.0,
        "rollback": False,
        "pause_mode": "Retract",
    }
    assert "version" not in unnumbered, "the agent counts"


@pytest.mark.parametrize("verb", ["offload", "onload"])
def test_memory_is_released_and_resumed_by_tag_or_as_a_whole(agent: Agent, fleet: Fleet, verb: str) -> None:
    agent.replies = [(200, {"released": ["weights"], "engines": ["p"], "failed": {}, "seconds": 0.1})]
    call = getattr(fleet, verb)
    assert call("weights", timeout=7.0).released == ["weights"]
    call()
    (_, path, named), (_, _, whole) = agent.asked
    assert path == f"/v1/servers/actor/{verb}"
    assert named == {"tags": ["weights"], "timeout_seconds": 7.0}
    assert whole["tags"] == ["weights", "kv_cache", "cuda_graph"]


# What goes wrong


@pytest.mark.parametrize(
    ("status", "kind"),
    [(503, NotReady), (409, Refused), (422, Refused), (404, Refused), (502, Refused), (500, Refused)],
)
def test_errors_of_the_agent_keep_their_code_and_details(
    agent: Agent, fleet: Fleet, status: int, kind: type[FleetError]
) -> None:
    agent.replies = [(status, error("VersionNotNewer", "version 3 is not newer", ["one", "two"]))]
    with pytest.raises(FleetError) as refusal:
        fleet.update_weights("/weights/w3", version=3)
    assert type(refusal.value) is kind
    assert (refusal.value.code, refusal.value.details) == ("VersionNotNewer", ["one", "two"])
    assert str(refusal.value) == "VersionNotNewer: version 3 is not newer\n  one\n  two"
    assert len(agent.asked) == 1, "an update is never sent twice"


def test_an_error_that_is_not_the_agents_is_told_as_it_is(agent: Agent, fleet: Fleet) -> None:
    agent.replies = [(502, "<html>bad gateway</html>")]
    with pytest.raises(Refused, match="502 <html>bad gateway") as refusal:
        fleet.view()
    assert refusal.value.code == "Http"


# Waiting


def test_waiting_goes_on_until_the_fleet_is_ready(agent: Agent, fleet: Fleet) -> None:
    agent.replies = [(503, error("NotReady")), (503, error("NotReady")), (200, VIEW)]
    assert fleet.wait_ready(engines=2).routable == 2
    assert [path for _, path, _ in agent.asked] == ["/v1/servers/actor/ready?routable=2&timeout=20.0"] * 3


def test_waiting_has_an_end_and_tells_the_last_reason(agent: Agent, fleet: Fleet) -> None:
    agent.replies = [(503, error("NotReady", "0 of 2 engines routable"))]
    with pytest.raises(NotReady, match="0 of 2 engines routable"):
        fleet.wait_ready(timeout=0.0)
    assert len(agent.asked) == 1


def test_the_last_question_waits_no_longer_than_what_is_left(
    agent: Agent, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter([0.0, 0.0, 20.0, 40.0])
    monkeypatch.setattr(client_module, "time", type("Time", (), {"monotonic": staticmethod(lambda: next(moments))}))
    agent.replies = [(503, error("NotReady"))]
    with pytest.raises(NotReady):
        fleet.wait_ready(timeout=45.0)
    assert [path.rpartition("=")[2] for _, path, _ in agent.asked] == ["20.0", "20.0", "5.0"]


def test_a_refusal_ends_the_wait_at_once(agent: Agent, fleet: Fleet) -> None:
    agent.replies = [(404, error("UnknownRole", "role actor: this pod's annotation names reward"))]
    with pytest.raises(Refused, match="UnknownRole"):
        fleet.wait_ready(timeout=1000.0)
    assert len(agent.asked) == 1
