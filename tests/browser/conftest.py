"""One browser for all tests; an agent with nothing observed for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from browser.agent import Agent, serving
from browser.chromium import Tab, browser


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("chromium")) as tab:
        tab.size(1280, 1000)
        yield tab


@pytest.fixture
def agent() -> Iterator[Agent]:
    with serving() as agent:
        yield agent


@pytest.fixture
def tab(chromium: Tab, agent: Agent) -> Iterator[Tab]:
    """It shows the agent's page. Nothing may be wrong with it in the end, and nothing but the agent was asked."""
    chromium.problems.clear()
    chromium.requests.clear()
    chromium.scheme("light")
    chromium.open(agent.url)
    yield chromium
    assert chromium.problems == []
    assert {url.partition("?")[0] for url in chromium.requests} == {agent.url, agent.url.replace(".html", ".json")}
    chromium.open("about:blank")
