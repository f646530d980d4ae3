"""Whom to ask how it is: running engines (rank 0), routers, and external engines; kept as objects come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rolloutfleet.api.names import (
    COMPONENT_ENGINE,
    COMPONENT_ROUTER,
    ENGINE_PORT,
    LABEL_COMPONENT,
    LABEL_LANGUAGE_ONLY,
    LABEL_RANK,
    LABEL_ROLE,
    ROUTER_PORT,
)
from rolloutfleet.plan.observed import canonical_url, containers_ready, external_uid, pod_url


class FleetKey(NamedTuple):
    namespace: str
    name: str


@dataclass(frozen=True)
class Target:
    """Somebody to look at, and whose fleets care."""

    uid: str
    url: str
    fleets: tuple[FleetKey, ...]
    router: bool = False
    external: bool = False
    encoder: bool = False
    language_only: bool = False
    """It keeps a table of encoders."""
    deleting: bool = False


def nobody(uid: str) -> None:
    """Is told nothing."""


class Targets:
    """By UID."""

    def __init__(self) -> None:
        self._found: dict[str, Target] = {}
        self._external: dict[str, list[FleetKey]] = {}
        """Fleets by URL: one engine may serve several."""
        self.changed: Callable[[str], None] = nobody
        """Told the UID of a target that is new, changed or gone, or of which the kubelet's probes have news."""

    def __contains__(self, uid: str) -> bool:
        return uid in self._found

    def __iter__(self) -> Iterator[Target]:
        return iter(list(self._found.values()))

    def __len__(self) -> int:
        return len(self._found)

    def get(self, uid: str) -> Target | None:
        return self._found.get(uid)

    def saw_pod(self, key: FleetKey, pod: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
        uid, component = pod["metadata"]["uid"], component_of(pod)
        port = {COMPONENT_ENGINE: ENGINE_PORT, COMPONENT_ROUTER: ROUTER_PORT}.get(component)
        if port is None or not _answers(pod):
            self.remove(uid)
            return
        target = Target(
            uid=uid,
            url=pod_url(pod["status"]["podIP"], port),
            fleets=(key,),
            router=component == COMPONENT_ROUTER,
            encoder=label(pod, LABEL_ROLE) == "Encoder",
            language_only=label(pod, LABEL_LANGUAGE_ONLY) == "true",
            deleting=bool(pod["metadata"].get("deletionTimestamp")),
        )
        readiness = [containers_ready((body or {}).get("status") or {}) for body in (before, pod)]
        self._put(target, news=readiness[0] is not readiness[1])

    def saw_server(self, key: FleetKey, server: Mapping[str, Any] | None) -> list[str]:
        """Take its external engines, or of one that is gone (None) none; UIDs of those that nobody names any more."""
        wanted = _external_urls(server)
        changed = [url for url, fleets in self._external.items() if key in fleets and url not in wanted]
        changed += [url for url in wanted if key not in self._external.get(url, ())]
        gone = []
        for url in changed:
            fleets = [fleet for fleet in self._external.get(url, []) if fleet != key] + ([key] if url in wanted else [])
            uid = external_uid(url)
            if fleets:
                self._external[url] = fleets
                self._put(Target(uid=uid, url=url, fleets=tuple(fleets), external=True))
            else:
                del self._external[url]
                self.remove(uid)
                gone.append(uid)
        return gone

    def remove(self, uid: str) -> None:
        if self._found.pop(uid, None) is not None:
            self.changed(uid)

    def _put(self, target: Target, *, news: bool = False) -> None:
        known = self._found.get(target.uid)
        self._found[target.uid] = target
        if news or known != target:
            self.changed(target.uid)


def _answers(pod: Mapping[str, Any]) -> bool:
    """Of an engine rank 0 alone, of a fleet all routers; placeholders answer nobody."""
    status = pod.get("status") or {}
    running = bool(status.get("podIP")) and status.get("phase") == "Running"
    return running and label(pod, LABEL_RANK) in ("", "0") and label(pod, LABEL_ROLE) != "Placeholder"


def _external_urls(server: Mapping[str, Any] | None) -> list[str]:
    engines = ((server or {}).get("spec", {}).get("external") or {}).get("engines") or []
    return list(dict.fromkeys(canonical_url(engine["url"]) for engine in engines))


def component_of(pod: Mapping[str, Any]) -> str:
    return label(pod, LABEL_COMPONENT)


def label(body: Mapping[str, Any], name: str) -> str:
    return str((body["metadata"].get("labels") or {}).get(name, ""))
