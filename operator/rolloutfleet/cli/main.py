"""`rolloutfleet VERB`, and the same as a plugin of kubectl: `kubectl rolloutfleet VERB`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rolloutfleet.cli import inject, inject_fault, restart, resume, samples, status, timeline, why

VERBS = (status, why, timeline, samples, restart, resume, inject_fault, inject)


def main(arguments: Sequence[str] | None = None) -> int:
    plugin = Path(sys.argv[0]).name.startswith("kubectl-")
    parser = argparse.ArgumentParser(
        prog="kubectl rolloutfleet" if plugin else "rolloutfleet",
        description="Rollout fleets of SGLang engines on Kubernetes.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        verb.add_to(verbs)
    options, rest = parser.parse_known_args(arguments)
    # argparse gives a list of names its chance only once: `restart NAME -n NAMESPACE ENGINE` leaves ENGINE over.
    if rest and not (hasattr(options, "engines") and all(not word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.engines += rest
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
