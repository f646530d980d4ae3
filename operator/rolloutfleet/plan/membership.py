"""Which engines a router may send requests to, and how far each router's table is from that.

Registration is the publication boundary: an engine enters a table only with proven weights, and leaves it before
anything else happens to it. A router's table is compared as a whole, so a ghost (an address that now belongs to
nobody, or to somebody else) is removed like any other surplus entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rolloutfleet.plan.actions import Action, Deregister, Register
from rolloutfleet.plan.engines import EngineView, Pairing, Weights
from rolloutfleet.plan.observed import NodeState, RouterPod, WorkerKind
from rolloutfleet.plan.training import Training


@dataclass(frozen=True)
class Membership:
    """URLs by what routers should do with them."""

    wanted: Mapping[str, WorkerKind]
    """To be listed by every router, as what."""
    tolerated: frozenset[str]
    """To be left as they are: the trainer holds them, or their proof is being renewed."""


def membership_of(engines: Iterable[EngineView], training: Training) -> Membership:
    wanted: dict[str, WorkerKind] = {}
    tolerated: set[str] = set()
    engines = list(engines)
    # Requests of a fleet that is offloaded as a whole wait for it; where others go on they would wait in vain.
    others_go_on = any(not engine.offload and engine.role not in ("Encoder", "Placeholder") for engine in engines)
    for engine in engines:
        pod = engine.pod
        if pod is None or not pod.url or engine.leaving or engine.aside or not engine.fits:
            continue
        if _lost(engine) or engine.probe.closed:
            continue  # before a router's own check finds out: whoever is sent there meanwhile waits for nothing
        if pod.external and not engine.answering:
            continue  # no pod's event will say that it has ended
        if engine.role == "Encoder" or (engine.lacks_encoder and engine.answering):
            continue
        if training.updating:
            tolerated.add(pod.url)
        elif training.holds(offload=engine.offload) or pod.identity in training.memory_held:
            if not others_go_on:
                tolerated.add(pod.url)
        elif engine.weights is Weights.CURRENT and engine.pairing is not Pairing.PROVED:
            # It has lost a peer: a request through it is tried while what the routers list stays.
            tolerated.add(pod.url)
        elif engine.weights is Weights.CURRENT and engine.probe.facts is None:
            tolerated.add(pod.url)
        elif engine.weights is Weights.CURRENT and (engine.probe.answering or engine.listed):
            # One that stops answering stays listed: the router's own health check takes it out and in again.
            wanted[pod.url] = engine.worker
        elif (
            engine.weights is Weights.UNPROVED
            and (not engine.probe.label or training.claimed_by(engine.probe.label))
            and pod.identity not in training.distrusted_pods
        ):
            # It was listed on proof; an operator that has just started reads the checksum again meanwhile.
            tolerated.add(pod.url)
    return Membership(wanted=wanted, tolerated=frozenset(tolerated))


def _lost(engine: EngineView) -> bool:
    """One of its pods has ended or is about to, or its node is silent and so is it."""
    unreachable = any(pod.node_state is NodeState.NOT_READY for pod in engine.pods) and not engine.answering
    return unreachable or not all(pod.alive for pod in engine.pods)


def table_actions(routers: Sequence[RouterPod], membership: Membership, training: Training) -> list[Action]:
    removals: list[Action] = []
    additions: list[Action] = []
    for router in routers:
        if router.workers is None:
            continue
        removals += [
            Deregister(router=router.name, router_uid=router.uid, router_url=router.url, url=url, worker_id=worker.id)
            for url, worker in sorted(router.workers.items())
            if url not in membership.tolerated and membership.wanted.get(url) != worker.kind
        ]
        additions += [
            Register(
                router=router.name,
                router_uid=router.uid,
                router_url=router.url,
                url=url,
                kind=membership.wanted[url],
                training_key=training.key,
            )
            for url in sorted(membership.wanted.keys() - router.workers.keys() - router.registering)
        ]
    return removals + additions


def table_complete(router: RouterPod, membership: Membership) -> bool:
    return router.workers is not None and all(
        url in router.workers and router.workers[url].kind == kind for url, kind in membership.wanted.items()
    )


def serves(router: RouterPod, membership: Membership) -> bool:
    """It had a complete table once, and knows at least some of what it should: an engine that joins takes no router
    out of its Service, a router process that started anew does."""
    return router.workers is not None and (
        not membership.wanted or any(url in router.workers for url in membership.wanted)
    )


def takes_traffic(router: RouterPod, membership: Membership, engines: Sequence[EngineView]) -> bool:
    """Whether its gate should be open."""
    if router.gate:
        return serves(router, membership)
    empty = bool(engines) and not membership.wanted  # nothing to send requests to: it would be taken out again
    return router.running and table_complete(router, membership) and not empty


def deciding_routers(routers: Sequence[RouterPod]) -> list[RouterPod]:
    """Routers whose word counts: those that take traffic, or while none does, those that answer.

    One that lists nothing has started anew and is about to lose its gate: the others' engines serve on.
    """
    known = [router for router in routers if router.running and router.workers is not None]
    return [router for router in known if router.gate and router.workers] or known


def listed_anywhere(url: str, routers: Sequence[RouterPod]) -> bool:
    return any(url in (router.workers or ()) or url in router.registering for router in routers)


def acknowledged_everywhere(url: str, routers: Sequence[RouterPod]) -> bool:
    deciding = deciding_routers(routers)
    tables = [router.workers or {} for router in deciding]
    return bool(url) and bool(tables) and all(url in table and table[url].healthy for table in tables)
