"""All that happens in the cluster, watched once for everybody: subscribers get the events of their namespace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rolloutfleet.control.operator import WATCHED, Watched
from rolloutfleet.kube import client as kube

Seen = Callable[[str, str | None, dict[str, Any]], None]
"""Kind, type of the event (None: an object of a list), object."""


class Hub:
    def __init__(self, api: kube.KubeApi) -> None:
        self._api = api
        self._objects: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
        """By kind, then (namespace, name)."""
        self._subscribers: dict[str, list[Seen]] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for watched in WATCHED:
                group.create_task(self._follow(watched))

    @contextmanager
    def subscribed(self, namespace: str, seen: Seen) -> Iterator[None]:
        """`namespace` "" for all of them."""
        self._subscribers.setdefault(namespace, []).append(seen)
        try:
            yield
        finally:
            self._subscribers[namespace].remove(seen)

    def objects(self, kind: str, namespace: str) -> list[dict[str, Any]]:
        """`namespace` "" for objects that are in none."""
        return [body for (place, _), body in self._objects.get(kind, {}).items() if place == namespace]

    def object(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        return self._objects.get(kind, {}).get((namespace, name))

    async def _follow(self, watched: Watched) -> None:
        resource = watched.resource
        while True:
            listed = await self._api.list(resource, label_selector=watched.selector)
            held = self._objects.setdefault(resource.kind, {})
            kept = {_place(item) for item in listed.items}
            for place in held.keys() - kept:
                self._tell(resource.kind, "DELETED", held[place])
            for item in listed.items:
                self._tell(resource.kind, "ADDED", item)
            version = listed.resource_version
            try:
                while True:
                    async for event in self._api.watch(
                        resource, resource_version=version, label_selector=watched.selector
                    ):
                        version = event.object["metadata"]["resourceVersion"]
                        if event.type != "BOOKMARK":
                            self._tell(resource.kind, event.type, event.object)
            except kube.ApiError:
                continue

    def _tell(self, kind: str, type_of_event: str, body: dict[str, Any]) -> None:
        # Items of a list lack what their kind is; so do kopf's.
        held = self._objects.setdefault(kind, {})
        if type_of_event == "DELETED":
            held.pop(_place(body), None)
        else:
            held[_place(body)] = body
        namespace = _place(body)[0]
        told = (namespace, "") if namespace else list(self._subscribers)
        for seen in [seen for place in told for seen in self._subscribers.get(place, [])]:
            seen(kind, type_of_event, body)


def _place(body: dict[str, Any]) -> tuple[str, str]:
    return body["metadata"].get("namespace", ""), body["metadata"]["name"]
