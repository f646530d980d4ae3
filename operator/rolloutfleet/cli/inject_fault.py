"""`inject-fault NAME ENGINE --fault KIND`: break one engine of a test fleet."""

from __future__ import annotations

import argparse

from rolloutfleet.cli import faults
from rolloutfleet.cli.session import Refused, Session, Verbs, add_verb

KINDS = ("kill", "hang", "network", "memory", "weights")


def add_to(verbs: Verbs) -> None:
    parser = add_verb(verbs, "inject-fault", run, summary="break one engine of a test fleet")
    parser.add_argument("engine", metavar="ENGINE", help="as `status` prints it, or a pod of it")
    parser.add_argument("--fault", required=True, choices=KINDS)
    parser.add_argument("--rank", type=int, default=0, help="which pod of an engine of several pods; default: 0")
    parser.add_argument("--seconds", type=float, help="of hang and network; default: until the pod is gone")
    parser.add_argument("--path", help="of weights: a checkpoint as the engine sees it, other than the fleet's")


async def run(session: Session, options: argparse.Namespace) -> int:
    check(options.fault, seconds=options.seconds, path=options.path)
    target = await faults.find_target(session, options.name, options.engine, rank=options.rank)
    match options.fault:
        case "kill":
            done = await faults.kill(session, target)
        case "hang":
            done = await faults.hang(session, target, seconds=options.seconds)
        case "network":
            done = await faults.cut_network(session, target, seconds=options.seconds)
        case "memory":
            done = await faults.fill_memory(session, target)
        case _:
            done = await faults.load_wrong_weights(session, target, path=options.path)
    print(f"pod {target.name}: {done}")
    print(f"watch: kubectl rolloutfleet timeline {options.name} -n {session.namespace}")
    return 0


def check(fault: str, *, seconds: float | None, path: str | None) -> None:
    """Raises Refused for options that the fault does not have."""
    if seconds is not None and fault not in ("hang", "network"):
        raise Refused(f"--seconds: only hang and network end by themselves, not {fault}")
    if seconds is not None and seconds <= 0:
        raise Refused(f"--seconds {seconds:g}: must be above 0")
    if (fault == "weights") is not (path is not None):
        raise Refused("--path: the checkpoint that the fault weights loads; needed there, and nowhere else")
