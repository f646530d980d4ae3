"""`python -m rolloutfleet.worker`: what the operator adds to engine pods of fleets with spec.weights.localCopy."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

from aiohttp import web

from rolloutfleet.api.names import WORKER_PORT
from rolloutfleet.worker.copies import Copies
from rolloutfleet.worker.server import application


async def run() -> None:
    # A copy that is being made may take minutes, and nothing is lost with it: end at once.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, os._exit, 0)
    limit = os.environ.get("ROLLOUTFLEET_COPY_LIMIT_BYTES")
    copies = Copies(
        Path(os.environ["ROLLOUTFLEET_COPY_PATH"]),
        weights=Path(os.environ["ROLLOUTFLEET_WEIGHTS_PATH"]),
        limit_bytes=int(limit) if limit else None,
    )
    runner = web.AppRunner(application(copies), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, os.environ.get("ROLLOUTFLEET_BIND_ADDRESS", "0.0.0.0"), WORKER_PORT).start()
    await asyncio.Event().wait()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(run())


if __name__ == "__main__":
    main()
