"""The agent's HTTP API on localhost, as models that agent and trainer library share. JSON, snake_case."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rolloutfleet.api.rollout_server import EngineVerdict

MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]
TokenIds = list[Annotated[int, Field(ge=0)]]


class Wire(BaseModel):
    """Unknown fields are refused: a misspelled one would be silently ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Told(BaseModel):
    """An answer. Unknown fields are ignored: the trainer's library may be older than the agent beside it."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class FleetState(StrEnum):
    WAITING_FOR_SERVER = "WaitingForServer"
    """No RolloutServer of that name yet; the agent connects when it appears."""
    FORBIDDEN = "Forbidden"
    """The pod's service account is not among spec.trainers.serviceAccounts."""
    UNREACHABLE = "Unreachable"
    """The Kubernetes API does not answer."""
    CONNECTED = "Connected"


class EngineView(Told):
    name: str
    """Pod of rank 0."""
    group: str
    index: int
    phase: str
    reason: str
    url: str
    weight_version: int | None


class FleetView(Told):
    """GET /v1/servers/{role}"""

    role: str
    server: str
    state: FleetState
    message: str = ""
    ready: bool = False
    router_url: str = ""
    weight_version: int | None = None
    """The committed version."""
    desired: int = 0
    routable: int = 0
    leading: bool = False
    """This agent holds the fleet's Lease."""
    holder: str = ""
    fence: int = 0
    engines: list[EngineView] = []


class UpdateWeights(Wire):
    """POST /v1/servers/{role}/update-weights"""

    path: Annotated[str, Field(min_length=1, max_length=1024)]
    """Folder of the checkpoint, as trainer and engines both see it."""
    version: Annotated[int, Field(ge=1)] | None = None
    """Default: the committed version plus 1."""
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 300.0


class UpdateResult(Told):
    version: int
    """Committed now."""
    committed: bool
    """The requested version was committed on at least one engine."""
    engines: list[EngineVerdict]
    seconds: dict[str, float]
    """By phase: pause, load, verify, total."""


class MemoryRequest(Wire):
    """POST /v1/servers/{role}/offload and /onload"""

    tags: Annotated[list[MemoryTag], Field(min_length=1)] = ["weights", "kv_cache", "cuda_graph"]
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 120.0


class MemoryResult(Told):
    released: list[MemoryTag]
    """Tags that are released now."""
    engines: list[str]
    """Pods that this was done on."""
    failed: dict[str, str]
    """Pods that fell out, and why; the operator replaces them."""
    seconds: float


class SamplingParams(Wire):
    """SGLang's sampling parameters that reach an engine through the router. Others are refused by name."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] = 1.0
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _explain_refusals(cls, values: object) -> object:
        if isinstance(values, dict):
            for name, instead in _REFUSED.items():
                if name in values:
                    raise ValueError(f"sampling_params.{name}: {instead}")
        return values

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if stop == "" or (isinstance(stop, list) and "" in stop):
            raise ValueError("an empty stop string would stop at once")
        return stop

    @model_validator(mode="after")
    def _minimum_fits(self) -> SamplingParams:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens: {self.min_new_tokens} is greater than max_new_tokens {self.max_new_tokens}"
            )
        return self


_REFUSED = {
    "n": "belongs to the request: use its `n`, the samples a prompt",
    "max_tokens": "unknown; max_new_tokens is meant",
    "logit_bias": "the router drops it",
    "custom_params": "the router drops it",
    "stop_regex": "the router drops it",
    "structural_tag": "the router drops it",
}


class Generate(Wire):
    """POST /v1/servers/{role}/generate"""

    prompts: Annotated[list[Annotated[TokenIds, Field(min_length=1)]], Field(min_length=1, max_length=65536)]
    n: Annotated[int, Field(ge=1, le=4096)] = 1
    """Samples a prompt."""
    sampling_params: SamplingParams = SamplingParams()
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 600.0


class VersionSpan(Told):
    """Response tokens [start, end) were sampled by this weight version."""

    version: int
    start: int
    end: int


class Sample(Told):
    tokens: list[int]
    """Response tokens."""
    log_probs: list[float]
    """Natural logarithm of each response token's probability under the version that sampled it."""
    status: Literal["completed", "truncated", "aborted", "failed"]
    """truncated: max_new_tokens reached. aborted: not finished in time. failed: the engine refused it."""
    weight_versions: list[VersionSpan]
    error: str = ""
    attempts: int
    seconds: float


class SampleGroup(Told):
    prompt: list[int]
    samples: list[Sample]


class Generated(Told):
    groups: list[SampleGroup]
    """In the order of the prompts."""
    seconds: float


class ErrorBody(Told):
    code: str
    message: str
    details: list[str] = []


class ErrorAnswer(Told):
    error: ErrorBody
