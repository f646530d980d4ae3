"""Which prefill and decode engines may serve together, and which are known to.

A router pairs any prefill with any decode that it lists, and reports both as healthy while requests through them hang
(smg#2382, smg#2491). So an engine is listed only after a real request went through it and a peer, and again after it
has lost a peer; and engines of two revisions are never listed together unless they were meant to be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from rolloutfleet.api.common import Role
from rolloutfleet.api.server_group import Failure, ServerGroup
from rolloutfleet.plan.actions import PairCheck
from rolloutfleet.plan.engines import EngineView, Pairing, Weights, started_at
from rolloutfleet.plan.observed import EnginePod
from rolloutfleet.plan.revision import group_revision
from rolloutfleet.plan.training import Training

OTHER: dict[Role, Role] = {"Prefill": "Decode", "Decode": "Prefill"}

ATTEMPTS = 3
"""Requests that must fail before an engine counts as stuck."""


def peer_revisions(role: Role, groups: Iterable[ServerGroup]) -> frozenset[str]:
    """Revisions of the other role's groups, as the user wants them now."""
    return frozenset(group_revision(group.spec) for group in groups if group.spec.role == OTHER.get(role))


def with_pairing(views: Sequence[EngineView]) -> list[EngineView]:
    """The same engines, with what is known of their peers."""
    if not any(view.role in OTHER for view in views):
        return list(views)
    apart = _apart(views)
    marked = [replace(view, aside=(view.group, view.record.index) in apart) for view in views]
    return [replace(view, pairing=_pairing(view, marked)) for view in marked]


def pair_checks(views: Sequence[EngineView], busy: Iterable[str], training: Training) -> list[PairCheck]:
    """Requests to send, at most one an engine."""
    if training.held:
        return []
    taken = set(busy)
    checks = []
    for view in views:
        if view.pairing is not Pairing.UNPROVED or not _can_try(view) or _uid(view) in taken:
            continue
        partners = [peer for peer in _partners(view, views) if _uid(peer) not in taken]
        if not partners:
            continue
        partner = min(partners, key=lambda peer: _preference(view, peer))
        prefill, decode = (view, partner) if view.role == "Prefill" else (partner, view)
        taken |= {_uid(prefill), _uid(decode)}
        checks.append(
            PairCheck(
                prefill_uid=_uid(prefill),
                prefill_url=_url(prefill),
                bootstrap_host=bootstrap_host(_url(prefill)),
                bootstrap_port=prefill.worker.bootstrap_port,
                decode_uid=_uid(decode),
                decode_url=_url(decode),
                prefill_peers=frozenset(_uid(peer) for peer in _partners(prefill, views)),
                decode_peers=frozenset(_uid(peer) for peer in _partners(decode, views)),
                training_key=training.key,
            )
        )
    return checks


def stuck(view: EngineView, views: Sequence[EngineView]) -> Failure | None:
    """The engine to replace when requests through a pair fail: the one without success elsewhere, else the older."""
    if view.pairing is not Pairing.UNPROVED or view.pod is None:
        return None
    failed = [peer for peer in _partners(view, views) if view.probe.pair_failures.get(_uid(peer))]
    if sum(view.probe.pair_failures[_uid(peer)] for peer in failed) < ATTEMPTS:
        return None
    if not any(peer.pairing is Pairing.PROVED or _older(view, peer) for peer in failed):
        return None
    text = f"{ATTEMPTS} requests through it and a peer failed; the last one: {view.probe.pair_error}"
    return Failure(reason="PairStuck", message=text[:1024], pod=view.pod.name)


def bootstrap_host(url: str) -> str:
    """The host of a prefill's URL as the router sends it to decode engines: IPv6 keeps its brackets."""
    return urlsplit(url).netloc.rsplit(":", 1)[0]


def _pairing(view: EngineView, views: Sequence[EngineView]) -> Pairing:
    if view.role not in OTHER:
        return Pairing.PROVED
    there = {pod.uid for peer in views if peer.role == OTHER[view.role] for pod in peer.pods if pod.alive}
    if not there:
        return Pairing.ALONE
    if view.probe.paired_with is not None and view.probe.paired_with <= there:
        return Pairing.PROVED
    return Pairing.UNPROVED if _partners(view, views) else Pairing.WAITING


def _partners(view: EngineView, views: Sequence[EngineView]) -> list[EngineView]:
    """Engines of the other role with which a request can be tried now."""
    return [
        peer
        for peer in views
        if peer.role == OTHER.get(view.role) and _can_try(peer) and not peer.leaving and _compatible(view, peer)
    ]


def _can_try(view: EngineView) -> bool:
    return view.answering and view.fits and view.weights is Weights.CURRENT and not view.probe.paused


def _preference(view: EngineView, peer: EngineView) -> tuple[int, bool, str, int]:
    """Least failed first, then known to work, so that a failure says something about one of them only."""
    failures = view.probe.pair_failures.get(_uid(peer), 0)
    return failures, peer.pairing is not Pairing.PROVED, peer.group, peer.record.index


def _older(view: EngineView, peer: EngineView) -> bool:
    return (_age_rank(view), view.role == "Decode") < (_age_rank(peer), peer.role == "Decode")


def _age_rank(view: EngineView) -> float:
    started = started_at(view.pods)
    return started.timestamp() if started is not None else math.inf


def _apart(views: Sequence[EngineView]) -> set[tuple[str, int]]:
    """Engines that must not be listed now, since some that are listed were not meant to work with them."""
    up = [view for view in views if view.role in OTHER and view.answering]
    old = [view for view in up if view.outdated]
    new = [view for view in up if not view.outdated]
    clashing = [(one, other) for one in old for other in new if one.role != other.role and not _compatible(one, other)]
    if not clashing:
        return set()
    proved = {view.role for view in new if _pairing(view, new) is Pairing.PROVED}
    waiting = old if len(proved) == len(OTHER) else [other for _, other in clashing]
    return {(view.group, view.record.index) for view in waiting}


def _compatible(one: EngineView, other: EngineView) -> bool:
    """Both of the revisions wanted now, or one was made to work with the other."""
    if not one.outdated and not other.outdated:
        return True
    mine, theirs = one.pod, other.pod
    if mine is None or theirs is None:
        return False
    # Whoever runs an external engine has chosen what it works with.
    return mine.external or theirs.external or _meant_for(mine, theirs) or _meant_for(theirs, mine)


def _meant_for(pod: EnginePod, peer: EnginePod) -> bool:
    return peer.revision in pod.peers


def _uid(view: EngineView) -> str:
    return view.pod.uid if view.pod is not None else ""


def _url(view: EngineView) -> str:
    return view.pod.url if view.pod is not None else ""
