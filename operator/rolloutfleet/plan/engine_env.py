"""Environment of an engine's container: what reinforcement learning needs that SGLang does not do by itself.

Each default has its reason; `engine.env` replaces any of them but those that are owned.
"""

from __future__ import annotations

from typing import Any

from rolloutfleet.api.server_group import ServerGroupSpec

CACHE_PATH = "/var/cache/rolloutfleet"

DEFAULTS: dict[str, str] = {
    # Images run under any user: home and compile caches must be writable.
    "HOME": CACHE_PATH,
    "XDG_CACHE_HOME": CACHE_PATH,
    "TRITON_CACHE_DIR": f"{CACHE_PATH}/triton",
    # The router registers through /health. With a generation in it, a paused engine would not answer, and SGLang would
    # then call itself unhealthy for good (measured, 0.5.23).
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # Whoever asks for a token (our health check does) judges the answer himself: after 20 s without one SGLang would
    # call itself unhealthy, also if the trainer has paused it meanwhile, and routers would drop it when it goes on.
    "SGLANG_HEALTH_CHECK_TIMEOUT": "86400",
    # A cuMem setting that differs from the trainer's makes a broadcast of weights hang without a word.
    "NCCL_CUMEM_ENABLE": "0",
    # Engines start while the trainer still holds part of the GPUs: unequal free memory is no error then.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    # Memory that was released looks like a leak to the check that runs while idle.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
    # Without it a release of the tag cuda_graph frees nothing.
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1",
    # A request whose peer died is given up after a minute instead of five: it would keep its engine from being idle.
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
}

ONLY_WITH_OFFLOAD = frozenset({"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "SGLANG_MEMORY_SAVER_CUDA_GRAPH"})
ONLY_IN_PAIRS = frozenset({"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"})


def engine_environment(spec: ServerGroupSpec) -> list[dict[str, Any]]:
    """The container's `env`; `$` is escaped, since the kubelet expands `$(NAME)` in values."""
    unused = frozenset() if spec.offload else ONLY_WITH_OFFLOAD
    if spec.role not in ("Prefill", "Decode"):
        unused |= ONLY_IN_PAIRS
    plain = {name: value for name, value in DEFAULTS.items() if name not in unused} | spec.own_engine.env
    # The address that other ranks and decode engines are told: the pod's, whatever interfaces there are.
    address = {"name": "SGLANG_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return [address, *({"name": name, "value": value.replace("$", "$$")} for name, value in sorted(plain.items()))]
