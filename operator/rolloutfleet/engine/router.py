"""The REST API of one sglang-router replica (0.3.2).

Its registry lives in memory only, and a 202 to a registration promises nothing: the list of workers is the truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rolloutfleet.engine.errors import EngineRefused
from rolloutfleet.engine.http import HttpPeer

TABLE_SECONDS = 5.0


@dataclass(frozen=True)
class Worker:
    id: str
    url: str
    worker_type: str
    is_healthy: bool
    bootstrap_port: int | None = None


class RouterClient(HttpPeer):
    async def list_workers(self) -> list[Worker]:
        """Registered workers; registrations that are pending or have failed are not among them."""
        answer = await self._ask("GET", "/workers", seconds=TABLE_SECONDS)
        return [
            Worker(
                id=str(worker["id"]),
                url=str(worker["url"]).rstrip("/"),
                worker_type=str(worker.get("worker_type", "")),
                is_healthy=bool(worker.get("is_healthy")),
                bootstrap_port=worker.get("bootstrap_port"),
            )
            for worker in answer.get("workers") or []
        ]

    async def add_worker(self, url: str, *, worker_type: str, bootstrap_port: int | None = None) -> str:
        """Ask for a registration as regular, prefill or decode; look for it in `list_workers`. The id of its worker.

        The router checks neither type nor port: an unknown type becomes regular.
        """
        body: dict[str, Any] = {"url": url, "worker_type": worker_type}
        if bootstrap_port is not None:
            body["bootstrap_port"] = bootstrap_port
        answer = await self._ask("POST", "/workers", seconds=TABLE_SECONDS, body=body)
        return str(answer.get("worker_id") or "")

    async def registration_failure(self, worker_id: str) -> str:
        """Why a registration that was accepted leads to nothing any more; empty while it may, or has led to a worker.

        What the router works on cannot be cancelled: a DELETE of such a worker fails and the worker is listed later.
        """
        try:
            answer = await self._ask("GET", f"/workers/{worker_id}", seconds=TABLE_SECONDS)
        except EngineRefused as error:
            if error.status == 404:
                return "the router does not know of it: it started anew"
            raise
        job = answer.get("job_status") or {}
        return str(job.get("message") or "no reason given") if job.get("status") == "failed" else ""

    async def remove_worker(self, worker_id: str) -> None:
        """Requests in flight on it complete. One that is gone already is success."""
        try:
            await self._call("DELETE", f"/workers/{worker_id}", seconds=TABLE_SECONDS)
        except EngineRefused as error:
            if error.status != 404:
                raise

    async def generate(
        self, payload: dict[str, Any], *, seconds: float, routing_key: str | None = None
    ) -> dict[str, Any]:
        headers = {"X-SMG-Routing-Key": routing_key} if routing_key else None
        return await self._ask("POST", "/generate", seconds=seconds, body=payload, headers=headers)
