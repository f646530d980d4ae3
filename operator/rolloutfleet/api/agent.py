"""The agent's HTTP API on localhost, as models that agent and trainer library share. JSON, snake_case."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rolloutfleet.api.rollout_server import EngineVerdict
from rolloutfleet.api.samples import SampleGroup

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


PauseMode = Literal["InPlace", "Retract", "Abort"]
"""What becomes of samples that run while weights change. InPlace: they freeze and go on with the KV cache of the old
weights. Retract: they go back to the queue, and their tokens so far are computed anew by the new weights. Abort: they
end, and the agent generates them again."""


class UpdateOptions(Wire):
    """What every weight update takes."""

    version: Annotated[int, Field(ge=1)] | None = None
    """Default: the committed version plus 1."""
    rollback: bool = False
    """Allow a version that is not newer than the committed one: a trainer that goes on from an older checkpoint."""
    pause_mode: PauseMode = "Retract"
    timeout_seconds: Annotated[float, Field(gt=0, le=86400)] = 300.0

    @model_validator(mode="after")
    def _rollback_says_where_to(self) -> UpdateOptions:
        if self.rollback and self.version is None:
            raise ValueError("rollback: needs the version to go back to")
        return self


class UpdateWeights(UpdateOptions):
    """POST /v1/servers/{role}/update-weights: engines load a checkpoint, or apply a delta to the one they have."""

    path: Annotated[str, Field(min_length=1, max_length=1024)]
    """Folder of the checkpoint, as trainer and engines both see it."""


class TensorMeta(Wire):
    """A tensor by its name in the served model's checkpoint (Hugging Face's names)."""

    name: Annotated[str, Field(min_length=1, max_length=1024)]
    dtype: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")]
    """As torch names it, for example bfloat16."""
    shape: list[Annotated[int, Field(ge=0)]]


class BeginUpdate(UpdateOptions):
    """POST /v1/servers/{role}/updates: the trainer is about to send tensors itself.

    Then, each sender: POST .../updates/{id}/groups (distributed), POST .../updates/{id}/buckets or /tensors for each
    bucket, POST .../updates/{id}/finish. GET .../updates/{id} is held open meanwhile: when it breaks off the trainer
    is taken for dead, and the update is abandoned. DELETE .../updates/{id} abandons it.
    """

    id: Annotated[str, Field(pattern=r"^[a-z0-9]{8,64}$")]
    """Chosen by the trainer, the same for all its senders: whoever comes second joins."""
    transport: Literal["distributed", "tensor"]
    senders: Annotated[int, Field(ge=1, le=1024)] = 1
    """How many of the trainer's processes send, each its own tensors: for example a pipeline stage each."""
    sender: Annotated[int, Field(ge=0)] = 0
    backend: Literal["nccl", "gloo"] = "nccl"
    """Of the process groups of the distributed transport."""
    tensors: Annotated[list[TensorMeta], Field(max_length=1_000_000)] | None = None
    """All that this sender will send, if it knows: compared with the served model before anything is paused."""
    groups: dict[str, str] = {}
    """Process groups that this sender still has from earlier updates: name by engine's UID."""
    source: Annotated[str, Field(max_length=1024)] = ""
    """A checkpoint of the same weights, from which engines that come back later catch up. Without one they wait for
    the next update."""

    @model_validator(mode="after")
    def _sender_is_one_of_them(self) -> BeginUpdate:
        if self.sender >= self.senders:
            raise ValueError(f"sender: {self.sender} of {self.senders} senders; they count from 0")
        return self


class UpdateEngine(Told):
    """An engine that takes part in an update."""

    uid: str
    pod: str
    url: str
    ranks: int
    """Ranks that hold weights: tensor parallel times pipeline parallel size."""
    group: str
    """Name of the process group with this sender; kept as long as the engine lives and the name stays the same."""
    join: bool
    """The group is not there yet: the sender opens a store and says where (POST .../groups)."""
    releasable: bool = False
    """Its memory can be released. SGLang maps such weights so that no GPU but their own may write them."""


class UpdateSession(Told):
    id: str
    version: int
    engines: list[UpdateEngine]
    deadline_seconds: float
    """What is left of the time-out."""


class GroupAt(Wire):
    """Where a sender, rank 0 of the group, waits for an engine's ranks 1 and up."""

    uid: str
    port: Annotated[int, Field(ge=1, le=65535)]
    """Of a TCP store on the trainer pod's address."""


class JoinGroups(Wire):
    """POST /v1/servers/{role}/updates/{id}/groups: engines join, while the sender joins the same groups."""

    sender: Annotated[int, Field(ge=0)] = 0
    groups: Annotated[list[GroupAt], Field(max_length=2048)]


class SendBucket(Wire):
    """POST /v1/servers/{role}/updates/{id}/buckets: engines receive a broadcast, while the sender sends it to all of
    its groups. The next one may be asked for before this one is answered. The first one pauses the fleet."""

    sender: Annotated[int, Field(ge=0)] = 0
    number: Annotated[int, Field(ge=0)] = 0
    """The sender counts its buckets from 0, and broadcasts them in this order: requests may arrive in another one."""
    tensors: Annotated[list[TensorMeta], Field(min_length=1, max_length=1_000_000)]
    """In the order in which they lie in the one flat tensor of bytes that is broadcast."""


class EngineTensors(Wire):
    uid: str
    payloads: Annotated[list[str], Field(min_length=1, max_length=1024)]
    """For each rank, what SGLang's /update_weights_from_tensor takes: a pickle in base64."""


class SendTensors(Wire):
    """POST /v1/servers/{role}/updates/{id}/tensors: engines take tensors over shared memory of their GPU. The next
    ones may be sent before these are answered."""

    sender: Annotated[int, Field(ge=0)] = 0
    tensors: Annotated[list[TensorMeta], Field(min_length=1, max_length=1_000_000)]
    engines: Annotated[list[EngineTensors], Field(min_length=1, max_length=2048)]
    load_format: Literal["flattened_bucket"] | None = "flattened_bucket"


class SenderDone(Wire):
    """POST /v1/servers/{role}/updates/{id}/finish: answered when all senders are done and the version is committed, or
    is not."""

    sender: Annotated[int, Field(ge=0)] = 0
    bytes: Annotated[int, Field(ge=0)] = 0
    """What this sender has sent to each engine."""


class StepResult(Told):
    failed: dict[str, str]
    """Engines, by UID, that have fallen out of the update so far, and why: nothing more is sent to them."""


class UpdateResult(Told):
    version: int
    """Committed now."""
    committed: bool
    """The requested version was committed on at least one engine."""
    engines: list[EngineVerdict]
    seconds: dict[str, float]
    """By phase: pause, load, verify, paused (engines stood still), total."""
    bytes: int = 0
    """Sent to each engine by the trainer; 0 where engines read a checkpoint."""


class MemoryRequest(Wire):
    """POST /v1/servers/{role}/offload and /onload"""

    tags: Annotated[list[MemoryTag], Field(min_length=1)] = ["weights", "kv_cache", "cuda_graph"]
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """For an offload: until engines must be idle. For an onload: until memory must be there again; if it is not by
    then, the engine is given up."""


class MemoryResult(Told):
    released: list[MemoryTag]
    """Tags that are released now."""
    engines: list[str]
    """Pods that have released all of these."""
    failed: dict[str, str]
    """Pods that could not do their part, and why. The operator replaces those of which nobody knows what they hold."""
    freed_bytes: dict[str, int] = {}
    """By UUID of the GPU, for an offload of engines on the trainer's GPUs, where the agent sees these."""
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
