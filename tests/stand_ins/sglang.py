"""What an SGLang server (0.5.23) answers, without a model: the part of its HTTP API that the operator, the router and
the agent use. Needs the standard library alone; who serves it is another matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Answer = tuple[int, Any]
"""Status and JSON body."""


def value(flags: Sequence[str], flag: str, otherwise: str = "") -> str:
    return flags[flags.index(flag) + 1] if flag in flags else otherwise


def checksum_of(path: str) -> str:
    """Equal for equal checkpoints, and for nothing else."""
    return f"sum-of-{path}"


class Engine:
    """One process of SGLang, started with these flags."""

    def __init__(self, flags: Sequence[str]) -> None:
        self.mode = value(flags, "--disaggregation-mode", "null")
        self.bootstrap_port = value(flags, "--disaggregation-bootstrap-port")
        self.path = value(flags, "--model-path")
        """Of the checkpoint that is loaded: what the weights really are."""
        self.label = value(flags, "--weight-version", "default")
        self.paused = False
        self.generated = 0
        """Requests answered."""
        self.refuses_loads = False
        """As if each checkpoint were broken."""

    @property
    def role(self) -> str:
        return "regular" if self.mode == "null" else self.mode

    def answer(self, method: str, path: str, body: Any) -> Answer:
        route = f"{method} {path.partition('?')[0]}"
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
                return self._load(body)
            case "POST /update_weight_version":
                self.label = str(body["new_version"])
                return 200, {"success": True}
            case "POST /generate":
                self.generated += 1
                meta = {"finish_reason": {"type": "length"}, "weight_version": self.label, "completion_tokens": 1}
                return 200, {"text": "", "meta_info": meta}
        return 404, {"error": route}

    def _server_info(self) -> dict[str, Any]:
        return {
            "disaggregation_mode": self.mode,
            "disaggregation_bootstrap_port": int(self.bootstrap_port) if self.bootstrap_port else None,
            "tp_size": 1,
            "pp_size": 1,
            "version": "stand-in",
        }

    def _load(self, body: Any) -> Answer:
        if self.refuses_loads:
            return 400, {"success": False, "message": f"{body['model_path']}: broken"}
        self.path = body["model_path"]
        self.label = str(body["weight_version"])
        return 200, {"success": True, "message": "Succeeded to update model weights."}
