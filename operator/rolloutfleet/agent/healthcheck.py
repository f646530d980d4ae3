"""Exit 0 if the agent in this container answers. The kubelet runs it: the agent listens on localhost only."""

from __future__ import annotations

import os
import sys
import urllib.request

from rolloutfleet.agent.settings import agent_port


def main() -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{agent_port(os.environ)}/healthz", timeout=2) as answer:
            return 0 if answer.status == 200 else 1
    except OSError:
        return 1


if __name__ == "__main__":
    sys.exit(main())
