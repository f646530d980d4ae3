"""What sglang-router (0.3.2) answers about its worker table. A registration is asked for at once and listed later."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stand_ins.sglang import Answer

REGISTRATION_SECONDS = 0.02


@dataclass
class Entry:
    url: str
    type: str
    bootstrap_port: int | None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


class Router:
    """One process. `answers(url)`: whether an engine is there; `listed(url)` is told of each new entry."""

    def __init__(self, *, answers: Callable[[str], bool], listed: Callable[[str], None]) -> None:
        self._answers = answers
        self._listed = listed
        self._jobs: set[asyncio.TimerHandle] = set()
        self.table: dict[str, Entry] = {}

    def answer(self, method: str, path: str, body: Any) -> Answer:
        match (method, path.strip("/").split("/")):
            case ("GET", ["workers"]):
                return 200, {"workers": [self._shown(entry) for entry in self.table.values()]}
            case ("POST", ["workers"]):
                entry = Entry(body["url"], body["worker_type"], body.get("bootstrap_port"))
                asyncio.get_running_loop().call_later(REGISTRATION_SECONDS, self._list, entry)
                return 202, {"status": "accepted", "worker_id": entry.id}
            case ("DELETE", ["workers", worker_id]):
                return self._remove(worker_id)
            case ("GET", ["liveness"]):
                return 200, {}
        return 404, {"error": f"{method} {path}"}

    def _list(self, entry: Entry) -> None:
        if entry.url not in self.table and self._answers(entry.url):
            self.table[entry.url] = entry
            self._listed(entry.url)

    def _remove(self, worker_id: str) -> Answer:
        entry = next((entry for entry in self.table.values() if entry.id == worker_id), None)
        if entry is None:
            return 404, {"error": "no such worker"}
        del self.table[entry.url]
        return 202, {"status": "accepted", "worker_id": worker_id}

    def _shown(self, entry: Entry) -> dict[str, Any]:
        return {
            "id": entry.id,
            "url": entry.url,
            "worker_type": entry.type,
            "bootstrap_port": entry.bootstrap_port,
            "is_healthy": self._answers(entry.url),
        }
