"""`resume NAME [ENGINE ...]`: start engines that are Failed at once, and forget their failures in a row."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rolloutfleet.api.common import EnginePhase
from rolloutfleet.api.names import ANNOTATION_RESUME
from rolloutfleet.cli.fleet import Engine, Fleet, read_fleet
from rolloutfleet.cli.requests import ask
from rolloutfleet.cli.restart import not_ours, refuse_others
from rolloutfleet.cli.session import Refused, Session, Verbs, add_verb


def add_to(verbs: Verbs) -> None:
    parser = add_verb(verbs, "resume", run, summary="start engines that are Failed at once")
    parser.add_argument("engines", metavar="ENGINE", nargs="*", help="default: all that are Failed")


async def run(session: Session, options: argparse.Namespace) -> int:
    fleet = await read_fleet(session, options.name)
    chosen = choose(fleet, options.engines)
    await ask(session, chosen, annotation=ANNOTATION_RESUME)
    for engine in chosen:
        print(f"{engine.life}: resume asked for (it was Failed: {engine.record.reason})")
    print(f"watch: kubectl rolloutfleet status {fleet.server.name} -n {session.namespace}")
    return 0


def choose(fleet: Fleet, named: Sequence[str]) -> list[Engine]:
    """Raises Refused."""
    if not named:
        failed = [e for e in fleet.engines if e.record.phase is EnginePhase.FAILED and not not_ours(e)]
        if not failed:
            raise Refused(f"{fleet.server.name}: nothing to resume, no engine is Failed")
        return failed
    chosen = [fleet.find(text) for text in dict.fromkeys(named)]
    for engine in chosen:
        refuse_others(engine)
        if engine.record.phase is not EnginePhase.FAILED:
            raise Refused(f"{engine.name}: nothing to resume, it is {engine.record.phase}; see restart")
    return chosen
