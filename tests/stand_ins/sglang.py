"""What an SGLang server (0.5.23) answers, without a model: the part of its HTTP API that the operator, the router and
the agent use. Needs the standard library alone, so that it runs in any pod; who serves it is another matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Answer = tuple[int, Any]
"""Status and JSON body."""


def checksum_of(path: str) -> str:
    """Equal for equal checkpoints, and for nothing else."""
    return f"of-{path}"


TAGS = frozenset({"weights", "kv_cache", "cuda_graph"})
"""Of memory that can be released."""


class Died(Exception):
    """In place of an answer: the scheduler is dead, and the server with it."""


class Engine:
    """One process of SGLang, started with these flags."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._flags = flags
        self.encoder = "--encoder-only" in flags
        self.mode = self.value("--disaggregation-mode", "null")
        self.path = self.value("--model-path")
        """Of the checkpoint that is loaded: what the weights really are."""
        self.label = self.value("--weight-version", "default")
        self.paused = False
        self.released: frozenset[str] = frozenset()
        self.dead = False
        self.served: list[str] = []
        """Requests, by their `rid`."""

    def value(self, flag: str, otherwise: str = "") -> str:
        return self._flags[self._flags.index(flag) + 1] if flag in self._flags else otherwise

    @property
    def token(self) -> int:
        """What it generates: the last character of its checkpoint's path, so that checkpoints are told apart."""
        return ord(self.path[-1])

    def answer(self, method: str, path: str, body: Any) -> Answer:
        if self.dead:
            raise Died
        route = f"{method} {path.partition('?')[0]}"
        if self.encoder and route != "GET /health":
            return 404, {"error": route}
        match route:
            case "GET /ping" | "GET /health" | "GET /health_generate":
                return 200, {}
            case "GET /ready":
                return (503 if self.paused else 200), {}
            case "GET /model_info":
                return 200, {"model_path": self.path, "weight_version": self.label}
            case "GET /server_info":
                return 200, self._server_info()
            case "GET /v1/loads":
                return 200, {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}
            case "GET /requests":  # not SGLang's: for tests that count
                return 200, {"count": len(self.served)}
            case "POST /weights_checker":
                return 200, {"success": True, "per_engine_checksum": checksum_of(self.path)}
            case "POST /pause_generation":
                self.paused = True
                return 200, {}
            case "POST /continue_generation":
                self.paused = False
                return 200, {}
            case "POST /flush_cache" | "POST /abort_request":
                return 200, {}
            case "POST /update_weights_from_disk":
                self.path, self.label = str(body["model_path"]), str(body["weight_version"])
                return 200, {"success": True, "message": "Succeeded to update model weights."}
            case "POST /release_memory_occupation":
                return self._move_memory(frozenset(body.get("tags") or TAGS), release=True)
            case "POST /resume_memory_occupation":
                return self._move_memory(frozenset(body.get("tags") or TAGS), release=False)
            case "POST /update_weight_version":
                self.label = str(body["new_version"])
                return 200, {"success": True}
            case "POST /generate":
                return 200, self._generated(body)
        return 404, {"error": route}

    def _move_memory(self, tags: frozenset[str], *, release: bool) -> Answer:
        """Not idempotent; without the memory saver nothing happens, and the answer is the same."""
        if "--enable-memory-saver" in self._flags:
            if (tags & self.released) if release else (tags - self.released):
                self.dead = True
                raise Died
            self.released = self.released | tags if release else self.released - tags
            if release and "weights" in tags and "--enable-weights-cpu-backup" not in self._flags:
                self.path = "/garbage"
        return 200, None

    def _server_info(self) -> dict[str, Any]:
        port = self.value("--disaggregation-bootstrap-port")
        return {
            "disaggregation_mode": self.mode,
            "disaggregation_bootstrap_port": int(port) if port else None,
            "tp_size": 1,
            "pp_size": 1,
            "enable_memory_saver": "--enable-memory-saver" in self._flags,
            "version": "stand-in",
        }

    def _generated(self, body: Any) -> dict[str, Any]:
        self.served.append(str(body["rid"]))
        tokens = int(body["sampling_params"]["max_new_tokens"])
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, self.token, None]] * tokens,
            "completion_tokens": tokens,
            "weight_version": self.label,
        }
        return {"text": "", "meta_info": meta}
