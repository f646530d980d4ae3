"""The worker's HTTP API (api/worker.py)."""

from __future__ import annotations

import asyncio
import errno
import logging
from pathlib import Path

from aiohttp import web
from pydantic import ValidationError

from rolloutfleet.api.worker import CopyVersion
from rolloutfleet.engine.errors import CheckpointError, CheckpointGone
from rolloutfleet.worker.copies import Copies

logger = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT)


def application(copies: Copies) -> web.Application:
    one_at_a_time = asyncio.Lock()

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def copy(request: web.Request) -> web.Response:
        try:
            wanted = CopyVersion.model_validate_json(await request.read())
        except ValidationError as error:
            problem = error.errors()[0]
            return _refused(400, f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}")
        try:
            # Whoever asked may be gone before it ends: what was made is there for the next who asks.
            async with one_at_a_time:
                made = await asyncio.to_thread(copies.bring_to, Path(wanted.path))
        except CheckpointGone as error:
            return _refused(404, str(error))
        except CheckpointError as error:
            return _refused(422, str(error))
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, type(error).__name__)
            status = 507 if error.errno in FULL else 500
            return _refused(status, f"{error.filename or wanted.path}: {name}: {error.strerror or error}")
        logger.info("%s is at %s: %d deltas, %.3f s", wanted.path, made.path, made.deltas, made.seconds)
        return web.Response(text=made.model_dump_json(), content_type="application/json")

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.post("/v1/copies", copy)])
    return app


def _refused(status: int, message: str) -> web.Response:
    logger.warning("refused with %d: %s", status, message)
    return web.json_response({"error": {"message": message}}, status=status)
