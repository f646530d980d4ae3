"""Parts that both custom resources share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from rolloutfleet.api.schema import ListMap, Model, Opaque, Rule

Role = Literal["Regular", "Prefill", "Decode", "Encoder", "Placeholder", "External"]
"""What a group is for. Regular: engines that do everything. Prefill, Decode: one half each of disaggregated serving.
Encoder: images to embeddings, for the other groups' engines, which then hold the language model alone.
Placeholder: no engines, only their GPUs. External: engines that somebody else runs, each in its own role."""

OWNED_ENGINE_ARGS = (
    "admin-api-key",
    "api-key",
    "config",
    "disaggregation-bootstrap-port",
    "disaggregation-mode",
    "dist-init-addr",
    "enable-memory-saver",
    "encoder-bootstrap-port",
    "encoder-only",
    "encoder-register-urls",
    "encoder-urls",
    "host",
    "language-only",
    "model-path",
    "nnodes",
    "node-rank",
    "pipeline-parallel-size",
    "port",
    "pp-size",
    "served-model-name",
    "tensor-parallel-size",
    "tp-size",
    "weight-version",
)
"""Flags of `sglang.launch_server` that the operator sets itself or that would leak a key into pod specs.

argparse takes unambiguous abbreviations and the last value wins, so an abbreviation of one of these is refused too.
"""

OWNED_ROUTER_ARGS = (
    "host",
    "pd-disaggregation",
    "policy",
    "port",
    "prometheus-host",
    "prometheus-port",
    "selector",
    "service-discovery",
    "worker-urls",
)
"""Flags of `sglang_router.launch_router` that the operator sets itself."""


def _argument_rules(owned: tuple[str, ...], field: str, elsewhere: str) -> tuple[Rule, ...]:
    quoted = ", ".join(f"'{name}'" for name in owned)
    return (
        Rule(
            "self.all(k, k.matches('^[a-z][a-z0-9-]{0,62}$'))",
            f"{field}: keys are flags without the leading dashes, in lower case with '-' between words, "
            "for example mem-fraction-static",
        ),
        Rule(
            f"self.all(k, ![{quoted}].exists(o, o.startsWith(k)))",
            f"{field}: these flags and their abbreviations are set by the operator; {elsewhere}. "
            f"They are: {', '.join(owned)}",
        ),
    )


OWNED_ENGINE_ENV = ("SGLANG_HOST_IP",)
"""Variables that the operator must set itself."""

ArgumentValue = Annotated[str, Field(max_length=4096)]

EngineArguments = Annotated[
    dict[str, ArgumentValue],
    Field(max_length=64),
    *_argument_rules(
        OWNED_ENGINE_ARGS,
        "engine.args",
        "use engine.tensorParallel, engine.pipelineParallel, engine.nodes, role, offload, model",
    ),
]
EngineEnvironment = Annotated[
    dict[str, ArgumentValue],
    Field(max_length=64),
    Rule(
        "self.all(k, k.matches('^[A-Za-z_][A-Za-z0-9_]{0,127}$'))",
        "engine.env: names are letters, digits and '_', and do not begin with a digit",
    ),
    Rule(
        "self.all(k, !(k in [" + ", ".join(f"'{name}'" for name in OWNED_ENGINE_ENV) + "]))",
        f"engine.env: set by the operator: {', '.join(OWNED_ENGINE_ENV)}",
    ),
]
RouterArguments = Annotated[
    dict[str, ArgumentValue],
    Field(max_length=64),
    *_argument_rules(OWNED_ROUTER_ARGS, "router.args", "use router.policy and groups"),
]


class ModelSpec(Model):
    """The model that every engine of the server loads."""

    path: Annotated[str, Field(min_length=1, max_length=1024)]
    """Folder inside the engine container, or a name that SGLang resolves. Weight version 0."""
    served_name: Annotated[str, Field(max_length=253, pattern=r"^[^:\s]+$")] | None = None
    """Name in the OpenAI API; default is the path. No ':'."""


class EngineSpec(Model):
    """One SGLang server."""

    rules = (
        Rule(
            "(self.tensorParallel * self.pipelineParallel) % self.nodes == 0",
            "engine.nodes: tensorParallel * pipelineParallel must be divisible by nodes, "
            "since every pod of an engine holds the same number of GPUs",
        ),
    )

    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Image whose `python` (or `python3`) can run `-m sglang.launch_server`. Only a Placeholder may leave it out."""
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)] = 1
    """GPUs over which a layer is split."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Stages into which the layers are split."""
    nodes: Annotated[int, Field(ge=1, le=99)] = 1
    """Pods an engine. GPUs a pod = tensorParallel * pipelineParallel / nodes."""
    topology_key: Annotated[str, Field(min_length=1, max_length=316)] | None = None
    """Node label, for example topology.kubernetes.io/zone: the nodes of one engine must have the same value of it."""
    env: EngineEnvironment = {}
    """Environment variables of the engine's container. For values from secrets or fields use `template`."""
    args: EngineArguments = {}
    """More flags for SGLang, without dashes. An empty value is a flag without a value. Flags that take several
    values take them separated by blanks. Nothing is expanded: a '$' stays a '$'."""

    @property
    def gpus_per_pod(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel // self.nodes


_PART = r"([-a-z0-9.]|\{index\}|\{rank\})"
_END = r"([a-z0-9]|\{index\}|\{rank\})"


class Colocation(Model):
    """Engines on the trainer's own GPUs: their pods request none."""

    rules = (Rule("has(self.resourceClaim) || !has(self.request)", "colocation.request: of which resourceClaim?"),)

    resource_claim: Annotated[str, Field(pattern=f"^{_END}({_PART}*{_END})?$", max_length=253)] | None = None
    """A ResourceClaim of this namespace that the trainer's pod references as well: both get its GPUs. `{index}` stands
    for the engine's index in its group, `{rank}` for the pod's rank. Absent: `template` says how pods get to the
    trainer's GPUs."""
    request: Annotated[str, Field(pattern=f"^{_END}({_PART}*{_END})?$", max_length=63)] | None = None
    """The request of that claim whose GPUs an engine sees, for example gpu-{index}: all engines and the trainer then
    share one claim, which is allocated as a whole. Absent: all GPUs of the claim."""
    shared_memory: (
        Annotated[str, Field(pattern=r"^/dev/shm/[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=128)] | None
    ) = None
    """A folder of the node, made where it is missing, that engines see as their /dev/shm: what CUDA IPC needs between
    two pods. The trainer's pod asks for the same one by the annotation rolloutfleet.dev/shared-memory."""


class EngineFacts(Model):
    """What an engine says of how it was started (SGLang's /server_info)."""

    role: Role
    bootstrap_port: int | None = None
    """Of a prefill engine: where decode engines ask for its ranks."""
    tensor_parallel: int
    pipeline_parallel: int
    memory_saver: bool
    """Its memory can be released and resumed."""
    version: Annotated[str, Field(max_length=64)] = ""
    """Of SGLang."""


class ExternalEngine(Model):
    """An engine that somebody else runs."""

    url: Annotated[str, Field(pattern=r"^http://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}/?$", max_length=300)]
    """http://HOST:PORT of its rank 0, as routers and trainers reach it; IPv6 in brackets. Case and a slash at the end
    make no difference."""
    model_path: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Where it has the model; default: spec.model.path. One that was started with another model is not used."""


class ExternalSpec(Model):
    """Engines that somebody else runs: used and trained on, never restarted."""

    engines: Annotated[list[ExternalEngine], Field(min_length=1, max_length=256), ListMap(("url",))]


class BackoffSpec(Model):
    """The pause before an engine that failed again is started anew; it doubles with each further failure in a row.
    After the first failure in a row there is none."""

    rules = (
        Rule(
            "self.initialSeconds <= self.maxSeconds",
            "backoff.initialSeconds: must not be greater than backoff.maxSeconds",
        ),
    )

    initial_seconds: Annotated[int, Field(ge=1, le=3600)] = 10
    """After the second failure in a row."""
    max_seconds: Annotated[int, Field(ge=1, le=86400)] = 300
    """Up to a quarter of each pause is left out, by engine, so that those that failed together do not load together."""
    reset_after_seconds: Annotated[int, Field(ge=0, le=86400)] = 300
    """An engine that has served for so long is cleared of its failures: pauses and `maxRestarts` count anew."""


class HealthCheckSpec(Model):
    """How an engine that hangs is found: by a token that it generates. Not asked of one that the trainer holds."""

    period_seconds: Annotated[int, Field(ge=1, le=3600)] = 20
    """From the end of one check to the next."""
    timeout_seconds: Annotated[int, Field(ge=2, le=600)] = 30
    """SGLang answers such a check after a second at best."""
    failure_threshold: Annotated[int, Field(ge=1, le=100)] = 3
    """Checks in a row without an answer until the engine is replaced."""
    weights_period_seconds: Annotated[int, Field(ge=0, le=86400)] = 600
    """How often the checksum of the weights of an engine that serves is read again; 0: only when something says that
    they changed. Reading it takes the scheduler's time: tens of milliseconds for a small model."""


class RecoverySpec(Model):
    """How engines that fail come back."""

    startup_deadline_seconds: Annotated[int, Field(ge=10, le=86400)] = 1800
    """From the container's start until SGLang answers; after it the engine is replaced."""
    backoff: BackoffSpec = BackoffSpec()
    max_restarts: Annotated[int, Field(ge=0, le=10000)] | None = None
    """Failures in a row after which an engine stays Failed, its last pod kept for diagnosis, until somebody resumes it
    (`kubectl rolloutfleet resume`) or the spec changes. Absent: it is tried for ever, at the longest pause. Ends that
    say nothing against the engine, like a deleted pod or a lost node, do not count."""
    health_check: HealthCheckSpec = HealthCheckSpec()
    force_delete_after_seconds: Annotated[int, Field(ge=0, le=86400)] | None = None
    """A pod that is still there so long after its grace period, on a node that does not answer, is removed from the API
    without its kubelet's word: what runs on that node may go on running. Absent: never. A replacement does not wait for
    it either way."""


class RollingUpdate(Model):
    """How a change of image, arguments or template reaches the engines: one by one, only while enough others serve."""

    rules = (
        Rule(
            "self.maxUnavailable + self.maxSurge >= 1",
            "rollingUpdate: maxUnavailable and maxSurge must not both be 0, or no engine could ever be replaced",
        ),
    )

    max_unavailable: Annotated[int, Field(ge=0, le=1024)] = 1
    """Engines that may be missing from those asked for. A change stops while so many do not serve."""
    max_surge: Annotated[int, Field(ge=0, le=1024)] = 0
    """Engines beyond those asked for: needs as many spare GPUs."""


DrainSeconds = Annotated[int, Field(ge=0, le=86400)]


class LocalCopySpec(Model):
    """A worker beside each engine copies a new version into its pod before the engine is paused. With it a version may
    be a delta, and no pause waits for the shared volume."""

    size_limit: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,11}[MGT]i$", max_length=14)]
    """Room on the node's disk, for example 40Gi: at least two checkpoints. A version for which it is too little is
    refused."""

    @property
    def limit_bytes(self) -> int:
        return int(self.size_limit[:-2]) << {"M": 20, "G": 30, "T": 40}[self.size_limit[-2]]


class WeightsSpec(Model):
    """The volume through which the trainer hands over checkpoints; also what restarted engines catch up from."""

    volume: Annotated[dict[str, Any], Opaque()]
    """A Kubernetes volume source, for example {persistentVolumeClaim: {claimName: weights}}. Mounted read-only."""
    mount_path: Annotated[str, Field(pattern=r"^/[^:]*$", max_length=512)] = "/weights"
    """Where engines see the volume. The trainer must mount it at the same path."""
    local_copy: LocalCopySpec | None = None
    """Left out, engines load versions from the volume itself, while they are paused, and deltas are refused."""


class Condition(Model):
    """A condition as in metav1.Condition."""

    type: Annotated[str, Field(max_length=316)]
    status: Literal["True", "False", "Unknown"]
    observed_generation: int | None = None
    last_transition_time: Annotated[str, Field(max_length=64)] = ""
    reason: Annotated[str, Field(max_length=1024)]
    message: Annotated[str, Field(max_length=32768)] = ""


Conditions = Annotated[tuple[Condition, ...], Field(max_length=16), ListMap(("type",))]


class EnginePhase(StrEnum):
    """Where an engine stands; computed from what is observed, never remembered."""

    PENDING = "Pending"
    """No pod yet, or not scheduled."""
    STARTING = "Starting"
    """Scheduled; SGLang does not answer yet."""
    STALE = "Stale"
    """Up, but its weights are not (known to be) the fleet's."""
    SERVING = "Serving"
    """Right weights, listed healthy by every router replica."""
    HELD = "Held"
    """The trainer has it paused or offloaded."""
    DRAINING = "Draining"
    """Out of the routers, about to go."""
    RESERVED = "Reserved"
    """A placeholder that holds its GPUs."""
    FAILED = "Failed"
    """Its last life ended; waits for its next one, or for somebody to resume it."""
