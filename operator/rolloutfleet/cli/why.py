"""`why NAME`: what keeps a fleet from serving, and what to do next."""

from __future__ import annotations

import argparse

from rolloutfleet.cli.explain import explain
from rolloutfleet.cli.fleet import read_fleet
from rolloutfleet.cli.session import Session, Verbs, add_verb


def add_to(verbs: Verbs) -> None:
    parser = add_verb(verbs, "why", run, summary="say in a sentence what keeps a fleet from serving")
    parser.epilog = "Exit code: 0 it serves in full, 1 partly, 2 not at all, 3 it could not be told."


async def run(session: Session, options: argparse.Namespace) -> int:
    fleet = await read_fleet(session, options.name)
    explanation = explain(fleet.server, fleet.groups)
    print(explanation.sentence)
    if explanation.next_step:
        print(f"next: {explanation.next_step}")
    return explanation.serves
