"""The watch of pods lists, follows, goes on where it was, and lists again when the server has forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rolloutfleet.control import watches
from rolloutfleet.control.watches import Watch
from rolloutfleet.kube import client as kube


def pod(name: str, version: int) -> kube.Object:
    return {"metadata": {"name": name, "namespace": "rl", "uid": f"uid-{name}", "resourceVersion": str(version)}}


def event(kind: str, name: str, version: int) -> kube.WatchEvent:
    return kube.WatchEvent(kind, pod(name, version))


class Cluster(kube.KubeApi):
    """Answers each watch with the next script: events, and the error that ends it, if any; the last one never ends."""

    def __init__(self, *watched: list[kube.WatchEvent | kube.ApiError]) -> None:
        self._watched = list(watched)
        self.lists: list[list[kube.Object] | kube.ApiError] = []
        self.asked: list[str] = []

    async def list(self, resource: kube.Resource, **_: Any) -> kube.Listed:
        self.asked.append("list")
        answer = self.lists.pop(0)
        if isinstance(answer, kube.ApiError):
            raise answer
        return kube.Listed(answer, str(100 * len(self.asked)))

    async def watch(
        self, resource: kube.Resource, *, resource_version: str, **_: Any
    ) -> AsyncIterator[kube.WatchEvent]:
        self.asked.append(f"watch {resource_version}")
        if not self._watched:
            await asyncio.Event().wait()
        for entry in self._watched.pop(0):
            if isinstance(entry, kube.ApiError):
                raise entry
            yield entry


class Heard:
    def __init__(self, api: Cluster) -> None:
        self.lists: list[list[str]] = []
        self.events: list[tuple[str, str]] = []
        self.watch = Watch(
            api=api,
            resource=kube.POD,
            namespace=None,
            selector=None,
            keep=lambda pod: pod,
            listed=lambda listed: self.lists.append([item["metadata"]["name"] for item in listed.items]),
            saw=lambda kind, body: self.events.append((kind, body["metadata"]["name"])),
            jitter=lambda: 0.0,
        )

    def run_until(self, condition: Callable[[], bool]) -> None:
        async def scenario() -> None:
            task = asyncio.create_task(self.watch.run())
            async with asyncio.timeout(5):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        asyncio.run(scenario())


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "FIRST_PAUSE_SECONDS", 0.0)


def test_it_lists_and_follows_from_there() -> None:
    api = Cluster([event("ADDED", "b", 101), event("BOOKMARK", "", 105)])
    api.lists = [[pod("a", 90)]]
    heard = Heard(api)
    heard.run_until(lambda: len(api.asked) == 3)
    assert heard.lists == [["a"]]
    assert heard.events == [("ADDED", "b")]
    assert api.asked == ["list", "watch 100", "watch 105"], "a watch that ended goes on at its last bookmark"


def test_after_a_broken_connection_it_goes_on_where_it_was() -> None:
    api = Cluster([event("ADDED", "a", 101), kube.Unreachable("reset")], [event("DELETED", "a", 102)])
    api.lists = [[]]
    heard = Heard(api)
    heard.run_until(lambda: len(heard.events) == 2)
    assert api.asked[:3] == ["list", "watch 100", "watch 101"]


def test_what_the_server_has_forgotten_is_listed_again() -> None:
    api = Cluster([event("ADDED", "a", 101), kube.Expired("too old", status=410)])
    api.lists = [[], [pod("b", 300)]]
    heard = Heard(api)
    heard.run_until(lambda: len(api.asked) == 4)
    assert heard.lists == [[], ["b"]]
    assert api.asked == ["list", "watch 100", "list", "watch 300"]


def test_a_list_that_fails_is_tried_again() -> None:
    api = Cluster()
    api.lists = [kube.TooManyRequests("slow down", status=429), kube.ApiError("broken", status=500), [pod("a", 1)]]
    heard = Heard(api)
    heard.run_until(lambda: len(api.asked) == 4)
    assert heard.lists == [["a"]]
