"""What the agent answers about samples, and to whom."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator

import httpx
import pytest

from browser.agent import Agent, serving
from rolloutfleet.api.samples_view import SamplesView
from rolloutfleet.trainer import connect
from unit.agent.test_observations import sample

ROLE = "/v1/servers/actor"


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with serving() as agent:
        agent.ended(*(sample(number) for number in range(3)))
        yield agent


def get(agent: Agent, path: str, **headers: str) -> httpx.Response:
    return httpx.get(agent.url.partition("/v1/")[0] + path, headers=headers, trust_env=False, timeout=10)


def test_samples_are_told_from_a_number_on_and_no_more_than_asked_for(agent: Agent) -> None:
    answer = get(agent, f"{ROLE}/samples.json?after=1&limit=1")
    view = SamplesView.model_validate_json(answer.content)
    assert (view.role, view.server, view.number) == ("actor", "qwen", 3)
    assert [found.id for found in view.samples] == ["0/2/0"]
    assert answer.headers["Cache-Control"] == "no-store"


def test_the_trainer_library_has_the_same(agent: Agent) -> None:
    fleet = connect("actor", url=agent.url.partition("/v1/")[0])
    assert [found.id for found in fleet.observed(samples=2).samples] == ["0/2/0", "0/1/0"]
    assert fleet.observed().samples == []
    fleet.close()


@pytest.mark.parametrize("query", ["after=-1", "after=x", "limit=1e3", "after=", "after=٣", f"after={'9' * 40}"])
def test_a_number_that_is_none_is_refused_by_name(agent: Agent, query: str) -> None:
    answer = get(agent, f"{ROLE}/samples.json?{query}")
    assert answer.status_code == 422
    assert query.partition("=")[0] in answer.json()["error"]["message"]


def test_a_role_that_is_not_there_has_no_samples(agent: Agent) -> None:
    for kind in ("html", "json"):
        assert get(agent, f"/v1/servers/judge/samples.{kind}").status_code == 404


def test_the_page_is_one_file_and_its_policy_lets_nothing_else_in(agent: Agent) -> None:
    answer = get(agent, f"{ROLE}/samples.html")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["Content-Security-Policy"].split(";"))
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert (policy["default-src"], policy["connect-src"]) == ("'none'", "'self'")
    assert (policy["frame-ancestors"], policy["base-uri"], policy["form-action"]) == ("'none'", "'none'", "'none'")
    assert re.findall(r"(?:src|href)=([^ >]*)", answer.text) == ['"data:,"']
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", answer.text)


def test_pages_of_other_sites_are_refused_whatever_they_ask_for(agent: Agent) -> None:
    here = agent.url.partition("/v1/")[0]
    assert get(agent, f"{ROLE}/samples.json", Origin=here).status_code == 200
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://[", here[:-1]):
        refused = get(agent, f"{ROLE}/samples.json", Origin=origin)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "OtherSite")
    order = httpx.post(f"{here}{ROLE}/generate", headers={"Origin": "https://evil.example"}, content=b"{}", timeout=10)
    assert order.json()["error"]["code"] == "OtherSite"


def test_a_name_that_somebody_pointed_at_this_machine_shows_no_samples(agent: Agent) -> None:
    for host in ("localhost:8477", "127.0.0.1", "[::1]:9000", "10.1.2.3:8477"):
        assert get(agent, f"{ROLE}/samples.json", Host=host).status_code == 200
    for host in ("evil.example", "evil.example:8477", "localhost.evil.example", "127.0.0.1.evil.example"):
        for kind in ("html", "json"):
            refused = get(agent, f"{ROLE}/samples.{kind}", Host=host)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "OtherSite")
    # Whoever reaches the agent by a name of a Service still gets everything else.
    assert get(agent, "/healthz", Host="agent.rl.svc").status_code == 200
