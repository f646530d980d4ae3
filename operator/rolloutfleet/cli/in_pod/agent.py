"""PATH: what the agent of this container answers to a GET of it. Its API is on localhost."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

SECONDS = 15.0


def main() -> None:
    port = os.environ.get("ROLLOUTFLEET_AGENT_PORT", "")
    url = f"http://127.0.0.1:{port if port.isdigit() else 8477}{sys.argv[1]}"
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(url, timeout=SECONDS) as answer:
            sys.stdout.buffer.write(answer.read())
    except urllib.error.HTTPError as error:
        sys.exit(f"the agent answered {error.code}: {error.read(500).decode(errors='replace')}")
    except OSError as error:
        sys.exit(f"the agent does not answer: {error}")


if __name__ == "__main__":
    main()
