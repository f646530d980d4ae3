"""What happens in a cluster, with the moment at which it was seen: pods by a watch, routers and engines by short polls.

Moments are of `time.monotonic()`, in seconds. Pod addresses must be reachable from here, as those of tests/cluster are.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from rolloutfleet.api.names import COMPONENT_ENGINE, LABEL_COMPONENT, LABEL_ENGINE_INDEX, LABEL_EPOCH
from rolloutfleet.kube.config import load_credentials

POLL_SECONDS = 0.02
CALL_SECONDS = 2.0
WATCH_SECONDS = 290


@dataclass
class Life:
    """One pod of an engine, as the watch told it."""

    name: str
    uid: str
    index: int
    epoch: int
    created: float
    """When the watch told of it."""
    address: str = ""
    node: str = ""
    phase: str = ""
    reason: str = ""
    deleting: bool = False
    disrupted: bool = False
    gone: bool = False

    @property
    def url(self) -> str:
        return f"http://{self.address}:30000" if self.address else ""

    @property
    def ending(self) -> bool:
        return self.deleting or self.disrupted or self.gone or self.phase in ("Failed", "Succeeded")


class PodWatch:
    """Engine pods of one namespace, from now on. A context manager."""

    def __init__(self, namespace: str) -> None:
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._selector = f"{LABEL_COMPONENT}={COMPONENT_ENGINE}"
        credentials = load_credentials()
        self._http = httpx.Client(base_url=credentials.server, verify=credentials.tls, trust_env=False)
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="pod watch")
        self.lives: dict[str, Life] = {}
        """Every pod that ever was, by UID."""

    def __enter__(self) -> PodWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()  # the thread is a daemon and may be waiting for the next event

    def seen(self) -> list[Life]:
        with self._changed:
            return list(self.lives.values())

    def wait(self, wanted: Callable[[Life], bool], *, seconds: float) -> Life | None:
        """The first pod of which `wanted` holds; None if there is none within `seconds`."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while True:
                for life in self.lives.values():
                    if wanted(life):
                        return life
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def delete(self, name: str, *, grace_seconds: int | None = None) -> None:
        """Ask for a pod's end; without `grace_seconds` with its own grace period."""
        body = {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        self._http.request("DELETE", f"{self._path}/{name}", json=body, timeout=10.0).raise_for_status()

    def evict(self, name: str) -> bool:
        """By the Eviction API, as `kubectl drain` does it; False if a disruption budget forbids it now."""
        namespace = self._path.split("/")[-2]
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
        answer = self._http.post(f"{self._path}/{name}/eviction", json=body, timeout=10.0)
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            return False
        answer.raise_for_status()
        return True

    def _follow(self) -> None:
        version = ""
        while not self._stop.is_set():
            try:
                version = version or self._list()
                for event in self._events(version):
                    if event["type"] == "ERROR":
                        version = ""  # too old: what has ended meanwhile is found by the list
                        break
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self._take(event["object"], gone=event["type"] == "DELETED")
            except httpx.HTTPError:
                self._stop.wait(0.1)

    def _list(self) -> str:
        answer = self._http.get(self._path, params={"labelSelector": self._selector}, timeout=10.0).raise_for_status()
        listed = answer.json()
        for pod in listed["items"]:
            self._take(pod, gone=False)
        there = {pod["metadata"]["uid"] for pod in listed["items"]}
        with self._changed:
            for uid, life in self.lives.items():
                life.gone |= uid not in there
            self._changed.notify_all()
        return str(listed["metadata"]["resourceVersion"])

    def _events(self, version: str) -> Iterator[dict[str, Any]]:
        parameters: dict[str, str] = {
            "watch": "1",
            "labelSelector": self._selector,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = httpx.Timeout(10.0, read=WATCH_SECONDS + 30.0)
        with self._http.stream("GET", self._path, params=parameters, timeout=timeout) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if self._stop.is_set():
                    return
                yield json.loads(line)

    def _take(self, pod: Mapping[str, Any], *, gone: bool) -> None:
        moment = time.monotonic()
        metadata, status = pod["metadata"], pod.get("status") or {}
        with self._changed:
            life = self.lives.get(metadata["uid"])
            if life is None:
                life = Life(
                    name=metadata["name"],
                    uid=metadata["uid"],
                    index=int(metadata["labels"][LABEL_ENGINE_INDEX]),
                    epoch=int(metadata["labels"][LABEL_EPOCH]),
                    created=moment,
                )
                self.lives[life.uid] = life
            life.address = status.get("podIP") or life.address
            life.node = (pod.get("spec") or {}).get("nodeName") or ""
            life.phase, life.reason = status.get("phase") or "", status.get("reason") or ""
            life.deleting |= bool(metadata.get("deletionTimestamp"))
            life.disrupted |= any(
                condition["type"] == "DisruptionTarget" and condition["status"] == "True"
                for condition in status.get("conditions") or []
            )
            life.gone |= gone
            self._changed.notify_all()


@dataclass
class Change:
    """What a router listed from this moment on: URL to whether it is healthy; None: no answer."""

    moment: float
    workers: Mapping[str, bool] | None


class RouterPoll:
    """The worker table of one router replica, every 20 ms. A context manager."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="router poll")
        self.changes: list[Change] = []

    def __enter__(self) -> RouterPoll:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=CALL_SECONDS + 1)

    def since(self, moment: float, wanted: Callable[[Mapping[str, bool]], bool], *, seconds: float) -> float | None:
        """When the table, as it was at `moment` or later, was first as `wanted`; None if not within `seconds`."""
        deadline = moment + seconds
        with self._changed:
            while True:
                for change, after in zip(self.changes, [*self.changes[1:], None], strict=True):
                    lasted = after is None or after.moment > moment
                    if lasted and change.workers is not None and wanted(change.workers):
                        return max(change.moment, moment)
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)

    def _follow(self) -> None:
        with httpx.Client(trust_env=False, timeout=CALL_SECONDS) as http:
            while not self._stop.is_set():
                begun = time.monotonic()
                workers: dict[str, bool] | None
                try:
                    listed = http.get(f"{self._url}/workers").raise_for_status().json()["workers"]
                    workers = {worker["url"].rstrip("/"): bool(worker["is_healthy"]) for worker in listed}
                except (httpx.HTTPError, ValueError, KeyError):
                    workers = None
                with self._changed:
                    if not self.changes or self.changes[-1].workers != workers:
                        self.changes.append(Change(time.monotonic(), workers))
                        self._changed.notify_all()
                self._stop.wait(max(POLL_SECONDS - (time.monotonic() - begun), 0.0))


def first_ping(url: str, *, seconds: float) -> float | None:
    """When an engine first answered /ping with 200, asked every 20 ms; None if not within `seconds`."""
    deadline = time.monotonic() + seconds
    with httpx.Client(trust_env=False, timeout=CALL_SECONDS) as http:
        while time.monotonic() < deadline:
            begun = time.monotonic()
            try:
                if http.get(f"{url}/ping").status_code == httpx.codes.OK:
                    return time.monotonic()
            except httpx.HTTPError:
                pass
            time.sleep(max(POLL_SECONDS - (time.monotonic() - begun), 0.0))
    return None
