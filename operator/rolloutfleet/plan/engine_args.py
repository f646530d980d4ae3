"""The command line of an engine, from typed fields and the user's `args`.

The kubelet expands `$(NAME)` and `$$` in container args; SGLang's argparse reads a word that starts with '-' as an
option and wants several words for some flags. All of that is settled here, so that what the user wrote is what
SGLang's process receives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rolloutfleet.api.names import (
    BOOTSTRAP_PORT,
    ENCODER_TABLE_PORT,
    ENGINE_PORT,
    INITIAL_WEIGHT_VERSION,
    RENDEZVOUS_PORT,
    ROUTER_METRICS_PORT,
    ROUTER_PORT,
    rendezvous_host,
)
from rolloutfleet.api.rollout_server import RouterSpec
from rolloutfleet.api.server_group import ServerGroup
from rolloutfleet.api.weight_labels import fleet_id, weight_label

MULTI_VALUE_FLAGS = frozenset(
    {
        "allowed-media-domains",
        "bucket-e2e-request-latency",
        "bucket-inter-token-latency",
        "bucket-time-to-first-token",
        "cuda-graph-bs",
        "cuda-graph-bs-decode",
        "cuda-graph-bs-prefill",
        "custom-weight-loader",
        "debug-tensor-dump-layers",
        "flashinfer-autotune-skip-ops",
        "gc-threshold",
        "generation-tokens-buckets",
        "log-requests-target",
        "lora-paths",
        "lora-target-modules",
        "numa-node",
        "prefill-delayer-forward-passes-buckets",
        "prefill-delayer-wait-seconds-buckets",
        "prompt-tokens-buckets",
        "return-aux-hidden-state-layer-ids",
        "tokenizer-metrics-allowed-custom-labels",
        "uvicorn-access-log-exclude-prefixes",
    }
)
"""Flags of SGLang 0.5.12 to 0.5.23 that take several words (nargs other than one in its parser)."""


def escape_for_kubelet(word: str) -> str:
    """A '$' that the kubelet hands on as it is (container args expand `$(NAME)`, and `$$` stands for '$')."""
    return word.replace("$", "$$")


def flag_words(args: Mapping[str, str], multi_value: frozenset[str] = frozenset()) -> list[str]:
    """Words of a command line, in the order of flag names: the order in a manifest means nothing."""
    words: list[str] = []
    for flag in sorted(args):
        value = args[flag]
        if value == "":
            words.append(f"--{flag}")
        elif flag in multi_value:
            words += [f"--{flag}", *value.split()]
        elif value.startswith("-"):
            words.append(f"--{flag}={value}")
        else:
            words += [f"--{flag}", value]
    return words


def escaped(words: Sequence[str]) -> list[str]:
    return [escape_for_kubelet(word) for word in words]


def engine_arguments(group: ServerGroup, *, index: int, epoch: int, rank: int, bind: str) -> list[str]:
    """Arguments of `sglang.launch_server` for one pod of an engine, ready for a container's `args`."""
    spec, engine = group.spec, group.spec.own_engine
    ours = {
        "model-path": spec.model.path,
        "host": bind,
        "port": str(ENGINE_PORT),
        "tp-size": str(engine.tensor_parallel),
        "pp-size": str(engine.pipeline_parallel),
        "weight-version": weight_label(INITIAL_WEIGHT_VERSION, fleet_id(group.server_uid)),
    }
    if spec.model.served_name is not None:
        ours["served-model-name"] = spec.model.served_name
    if spec.offload:
        ours["enable-memory-saver"] = ""
    if engine.nodes > 1:
        host = rendezvous_host(group.name, group.namespace, index, epoch)
        ours |= {
            "nnodes": str(engine.nodes),
            "node-rank": str(rank),
            "dist-init-addr": f"{host}:{RENDEZVOUS_PORT}",
        }
    if spec.role == "Prefill":
        ours |= {"disaggregation-mode": "prefill", "disaggregation-bootstrap-port": str(BOOTSTRAP_PORT)}
    elif spec.role == "Decode":
        ours["disaggregation-mode"] = "decode"
    elif spec.role == "Encoder":
        ours["encoder-only"] = ""
    if spec.language_only:
        ours |= {"language-only": "", "encoder-bootstrap-port": str(ENCODER_TABLE_PORT)}
    defaults = dict(ENCODER_DEFAULTS) if spec.language_only or spec.role == "Encoder" else {}
    if spec.offload and not spec.update_weights:
        # Nobody sends frozen weights again after a release, which would leave garbage.
        defaults["enable-weights-cpu-backup"] = ""
    return escaped(flag_words(ours) + flag_words({**defaults, **engine.args}, MULTI_VALUE_FLAGS))


ENCODER_DEFAULTS: Mapping[str, str] = {
    # With SGLang's own choice (zmq_to_scheduler) a language server dies of a request whose encoder is dead, and of a
    # client that hangs up while it waits for one; with this one they are answered 503 (run, 0.5.23).
    "encoder-transfer-backend": "zmq_to_tokenizer",
}

ROUTER_DEFAULTS: Mapping[str, str] = {
    # Measured, docs/adr/0011: with the breaker, ten requests that an engine rightly refuses take it out for a minute.
    "disable-circuit-breaker": "",
    # Without it, a dead engine that owns a prefix gets all retries. Three tries in 3 s outlast its removal at the
    # pod's event (1 s) and the checks below (2 s). Each try of a request that kills engines takes one more: so few.
    "retry-max-retries": "3",
    "retry-initial-backoff-ms": "1000",
    "retry-backoff-multiplier": "2",
    # /health of an engine generates a token and fails while the trainer holds it; /ping is a flag.
    "health-check-endpoint": "/ping",
    "health-check-interval-secs": "1",
    # What is accepted and never answered costs requests that wait for long: out after 8 s.
    "health-check-timeout-secs": "3",
    "health-failure-threshold": "2",
    "health-success-threshold": "1",
    # Registrations of addresses that do not answer hold job slots (34 s with this), and removals wait behind ten.
    "worker-startup-timeout-secs": "10",
    # Rollouts may generate for hours, and a request held by a pause must not run out.
    "request-timeout-secs": "14400",
}


def router_arguments(spec: RouterSpec, *, disaggregated: bool, bind: str) -> list[str]:
    """Arguments of `sglang_router.launch_router`, ready for a container's `args`."""
    ours = {
        "host": bind,
        "port": str(ROUTER_PORT),
        "policy": spec.policy,
        "prometheus-host": bind,
        "prometheus-port": str(ROUTER_METRICS_PORT),
    }
    if disaggregated:
        ours["pd-disaggregation"] = ""
    return escaped(flag_words({**ROUTER_DEFAULTS, **ours, **spec.args}))
