"""The worker in an engine's pod, as operator and agent ask it (api/worker.py)."""

from __future__ import annotations

from pydantic import ValidationError

from rolloutfleet.api.names import WORKER_PORT
from rolloutfleet.api.worker import CopyVersion, LocalCopy
from rolloutfleet.engine.errors import EngineRefused
from rolloutfleet.engine.http import HttpPeer

COPY_SECONDS = 1800.0


def worker_url(engine_url: str) -> str:
    """It is in the pod of the engine's rank 0."""
    return f"{engine_url.rpartition(':')[0]}:{WORKER_PORT}"


class WorkerClient(HttpPeer):
    async def copy(self, path: str, *, seconds: float = COPY_SECONDS) -> LocalCopy:
        """Where the engine finds the version at `path` as a full checkpoint of its own. Raises EngineError; a refusal
        with status 404 means that the version, or one that it rests on, is not there."""
        answer = await self._ask("POST", "/v1/copies", seconds=seconds, body=CopyVersion(path=path).model_dump())
        try:
            return LocalCopy.model_validate(answer)
        except ValidationError as error:
            raise EngineRefused(f"{self.url}/v1/copies: no worker of ours: {error}", status=200) from error
