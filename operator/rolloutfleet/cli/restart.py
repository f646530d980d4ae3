"""`restart NAME [ENGINE ...]`: end the life of engines in good order; the next one begins by itself."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rolloutfleet.api.names import ANNOTATION_RESTART
from rolloutfleet.cli.fleet import Engine, Fleet, read_fleet
from rolloutfleet.cli.requests import ask
from rolloutfleet.cli.session import Refused, Session, Verbs, add_verb


def add_to(verbs: Verbs) -> None:
    parser = add_verb(verbs, "restart", run, summary="let engines finish their requests, then start them anew")
    parser.add_argument("engines", metavar="ENGINE", nargs="*", help="as `status` prints it, or a pod of it")
    parser.add_argument("--all", action="store_true", help="every engine that the operator runs")


async def run(session: Session, options: argparse.Namespace) -> int:
    fleet = await read_fleet(session, options.name)
    chosen = choose(fleet, options.engines, everything=options.all)
    await ask(session, chosen, annotation=ANNOTATION_RESTART)
    for engine in chosen:
        print(f"{engine.life}: restart asked for")
    print(f"watch: kubectl rolloutfleet timeline {fleet.server.name} -n {session.namespace}")
    return 0


def choose(fleet: Fleet, named: Sequence[str], *, everything: bool) -> list[Engine]:
    """Raises Refused."""
    if everything:
        if named:
            raise Refused(f"--all and {' '.join(named)}: one of the two")
        chosen = [engine for engine in fleet.engines if not not_ours(engine)]
        if not chosen:
            raise Refused(f"{fleet.server.name} has no engine that can be restarted")
        return sorted(chosen, key=lambda engine: (engine.group.name, engine.record.index))
    if not named:
        raise Refused("name the engines, or say --all for every one")
    chosen = [fleet.find(text) for text in dict.fromkeys(named)]
    for engine in chosen:
        refuse_others(engine)
    return chosen


def refuse_others(engine: Engine) -> None:
    """Raises Refused for what is no engine of ours."""
    why = not_ours(engine)
    if why:
        raise Refused(f"{engine.name}: {why}")


def not_ours(engine: Engine) -> str:
    """Why there is no SGLang of ours to do anything with; empty when there is."""
    if engine.group.spec.external is not None:
        return f"an external engine; ask who runs {engine.record.url}"
    if engine.group.spec.role == "Placeholder":
        return "a placeholder: it runs no engine. Delete its pod to have another one"
    return ""
