"""`make chaos`: random faults on a fleet under load. The last line is one JSON object; exit code 1 if all is not well.

The same `--seed` picks the same faults in the same order; what they hit depends on what is alive by then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from pathlib import Path

from chaos.faults import FAULTS
from chaos.run import Options, run, say_to_stderr
from e2e.conftest import find_kubectl, install_operator
from e2e.support import Kubectl


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="of faults (default: 5)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="default: by chance")
    parser.add_argument("--stand-ins", action="store_true", help="stand-ins for engines: they start in two seconds")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--only", choices=sorted(FAULTS), action="append", default=[], help="may be repeated")
    chosen = parser.parse_args()
    if not os.environ.get("KUBECONFIG"):
        sys.exit("KUBECONFIG is not set: `make up`, then KUBECONFIG=/var/lib/rolloutfleet-cluster/admin.kubeconfig")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    say_to_stderr(f"seed {chosen.seed}")
    kubectl = Kubectl(binary=find_kubectl(), kubeconfig=Path(os.environ["KUBECONFIG"]))
    install_operator(kubectl)
    verdict = run(kubectl, Options(**vars(chosen)), say_to_stderr)
    for sentence in verdict.wrong:
        say_to_stderr(f"WRONG: {sentence}")
    print(json.dumps({**verdict.figures, "wrong": len(verdict.wrong)}), flush=True)
    return 1 if verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
