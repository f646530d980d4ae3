"""Sample collection, as the trainer asks for it: what to sample, how to judge it, what a step gets."""

from __future__ import annotations

from enum import StrEnum
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from rolloutfleet.api.agent import SamplingParams, Told, Wire
from rolloutfleet.api.data import DataSource
from rolloutfleet.api.samples import SampleGroup

Reference = Annotated[str, Field(min_length=1, max_length=1024)]
"""Of a plug-in: package.module:function, package.module.function, or the name of an entry point."""
Seconds = Annotated[float, Field(gt=0, le=86400)]


class Estimator(StrEnum):
    GRPO = "grpo"
    """Within the group: minus mean, by standard deviation (n - 1). GSPO and CISPO take the same; they differ in the
    loss."""
    DR_GRPO = "dr_grpo"
    """Within the group: minus mean."""
    RLOO = "rloo"
    """Within the group: minus the mean of the others (leave one out)."""
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    """Over the whole batch: minus mean, by standard deviation (n)."""
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    """Within the group: minus mean; then over the batch as REINFORCE++."""
    RAW = "raw"


class Judging(Wire):
    """What makes and judges samples. Without a `reward` and a `group_reward` there is none, and advantages are 0."""

    generate: Reference | None = None
    """In place of one request a sample: several turns, tools, several samples from one prompt."""
    reward: Reference | None = None
    """A plug-in, or the http(s) URL of a judge."""
    group_reward: Reference | None = None
    """Judges all samples of a prompt together."""
    filters: list[Reference] = []
    """Each may drop a whole group. `zero_variance` is built in: rewards that are all the same."""
    sample_hooks: list[Reference] = []
    """Each may change a sample before it is judged."""
    reward_key: str = ""
    """Of a reward that has parts: the one that is trained."""
    plugin_folders: list[Annotated[str, Field(pattern=r"^/")]] = []
    """Where the agent finds plug-ins' modules: folders of a volume that it sees."""
    plugin_seconds: Seconds = 60.0
    """For one call."""


class Collection(Judging):
    """PUT /v1/servers/{role}/collection: samples for one training run, from now on.

    The same one again changes nothing; another one takes the place of the one before.
    """

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,126}[A-Za-z0-9])?$")]
    """Name of the run in the store. A run goes on where it was, whoever asks."""
    store: Annotated[str, Field(min_length=1, max_length=1024)]
    """A file on a volume that the agent may write to, or postgresql://..."""
    shared: bool = False
    """Agents of other trainers collect for this run too (PostgreSQL only). Else this agent must lead the fleet."""
    trainer: Annotated[str, Field(min_length=1, max_length=128)]
    """Name of this life of the trainer: no other life has the same."""
    consumer: Annotated[str, Field(max_length=128)] = ""
    """Of several trainers that share a run: which one this is, the same in all of its lives."""
    step: Annotated[int, Field(ge=0)] = 0
    """Last step in the checkpoint that the trainer starts from. What was handed out after it is handed out again."""

    data: DataSource
    epochs: Annotated[int, Field(ge=1)] | None = None
    """None: again and again."""
    tokenizer: Annotated[str, Field(max_length=1024)] = ""
    """Folder of a Hugging Face tokenizer, for prompts that are texts or messages, and for the text of responses. The
    agent needs transformers for it."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longer prompts are dropped."""

    n: Annotated[int, Field(ge=1, le=4096)] = 8
    """Samples a prompt."""
    sampling_params: SamplingParams = SamplingParams()
    seed: int | None = None
    """Each sample gets a seed of its own that follows from this one: the engines need deterministic inference."""

    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    """synchronous: engines work for a step while the trainer waits for its batch. asynchronous: they also work while
    it trains, until `ahead` batches wait for it."""
    groups_per_step: Annotated[int, Field(ge=1, le=1_000_000)]
    ahead: Annotated[int, Field(ge=1, le=1024)] = 1
    over_sampling: Annotated[float, Field(ge=1, le=64)] = 1.0
    """So many times the groups that a step needs are in work; when enough are finished the others stop."""
    partial_rollout: bool = True
    """What is stopped keeps its tokens and goes on later, else it begins again."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Most versions between the oldest trained token and the weights that the step trains. None: any number."""
    stale: Literal["mask", "restart"] = "restart"
    """What becomes of a sample that is continued and has older tokens: they are not trained, or it begins again."""
    multiple: Annotated[int, Field(ge=1)] = 1
    """The number of a batch's samples is a multiple of it; groups that are too many wait for the next step."""
    buffer_filter: Reference | None = None
    """Chooses among finished groups those that may go into the next batch."""
    estimator: Estimator = Estimator.GRPO
    """From rewards to advantages."""
    post_process: Reference | None = None
    """A plug-in in its place."""

    attempts: Annotated[int, Field(ge=1)] = 20
    """Requests for a sample that may fail one after the other while engines are routable, until it counts as failed."""
    request_seconds: Seconds = 3600.0
    """Silence of an engine after which a request is given up."""
    max_drops_per_step: Annotated[int, Field(ge=1)] | None = None
    """Groups that may be dropped for one step, until collection stops and says so. Default: 64 times its groups."""
    direct: bool = False
    """Ask engines without the router, which drops some fields; not for prefill and decode groups."""
    keep_meta: list[Annotated[str, Field(min_length=1, max_length=64)]] = []
    """Fields of SGLang's meta_info that the trainer wants, in `train_metadata`, for example routed_experts."""
    request_fields: dict[str, JsonValue] = {}
    """Further fields of SGLang's /generate, for example return_routed_experts; `direct` must be set."""

    @model_validator(mode="after")
    def _fields_fit(self) -> Collection:
        if self.shared and not self.store.startswith(("postgresql://", "postgres://")):
            raise ValueError(f"shared: store {self.store} is a file, which one agent has; take PostgreSQL")
        if self.request_fields and not self.direct:
            raise ValueError("request_fields: the router drops fields that it does not know; set direct")
        ours = self.request_fields.keys() & {"rid", "input_ids", "text", "sampling_params", "return_logprob", "stream"}
        if ours:
            raise ValueError(f"request_fields: {', '.join(sorted(ours))}: set by the agent")
        if self.reward is not None and self.group_reward is not None:
            raise ValueError("reward, group_reward: one of them judges a sample, not both")
        return self


class LeaseBatch(Wire):
    """POST /v1/servers/{role}/collection/batches: the batch of a step, the same one whoever asks and however often.

    Answered with 503 NotReady where it is not there in `wait_seconds`; ask again.
    """

    trainer: str
    step: Annotated[int, Field(ge=1)]
    wait_seconds: Annotated[float, Field(ge=0, le=60)] = 20.0
    rank: Annotated[int, Field(ge=0)] = 0
    ranks: Annotated[int, Field(ge=1, le=65536)] = 1
    """Data-parallel ranks: each gets its own samples, equally many, balanced by their tokens."""
    token_budget: Annotated[int, Field(ge=1)] | None = None
    """Most tokens a micro-batch; without it all samples of a rank are one."""
    micro_batch_multiple: Annotated[int, Field(ge=1)] = 1
    """The number of micro-batches is a multiple of it, for pipeline stages that interleave."""

    @model_validator(mode="after")
    def _rank_is_one_of_them(self) -> LeaseBatch:
        if self.rank >= self.ranks:
            raise ValueError(f"rank: {self.rank} of {self.ranks} ranks; they count from 0")
        return self


class BatchHeader(Told):
    """What comes before the samples in the answer: each is its length (u32, little-endian) and bytes of
    rolloutfleet.api.sample_codec; this is JSON, with its length before it as well."""

    step: int
    weight_version: int
    """Committed when the batch was read: what the step trains."""
    groups: int
    """In the whole batch."""
    samples: int
    """In the whole batch."""
    rewards: list[float | None]
    """Of the whole batch, by sample."""
    positions: list[int]
    """In the whole batch, of this rank's samples."""
    advantages: list[float]
    """One for each sample of this rank."""
    micro_batches: list[list[int]]
    """Positions in this rank's samples."""
    last: bool = False
    """The run has no more prompts."""


class Acknowledge(Wire):
    """POST /v1/servers/{role}/collection/acknowledge: a checkpoint has all steps up to `step`."""

    trainer: str
    step: Annotated[int, Field(ge=1)]


class Evaluate(Judging):
    """POST /v1/servers/{role}/collection/evaluate: sample a data set once. Nothing of it is kept."""

    name: Annotated[str, Field(max_length=64)] = ""
    """Under which it is shown beside the samples of training. Default: the data set's file or folder, without path."""
    data: DataSource
    """In the order of its rows."""
    tokenizer: Annotated[str, Field(max_length=1024)] = ""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longer prompts are left out, and count as failed."""
    n: Annotated[int, Field(ge=1, le=4096)] = 1
    sampling_params: SamplingParams = SamplingParams(temperature=0.0)
    seed: int | None = None
    timeout_seconds: Seconds = 3600.0

    @model_validator(mode="after")
    def _order_is_the_rows(self) -> Evaluate:
        if self.data.shuffle and "shuffle" in self.data.model_fields_set:
            raise ValueError("data.shuffle: an evaluation takes the rows in their order")
        return self

    @property
    def shown_name(self) -> str:
        return self.name or PurePath(self.data.path.partition("@[")[0]).stem


class Evaluated(Told):
    groups: list[SampleGroup]
    """In the order of the data set."""
    mean_reward: float | None
    """Of all samples that have one."""
    truncated: int
    failed: int
    """Samples that failed or were not finished in time."""
    seconds: float


class CollectionView(Told):
    """GET /v1/servers/{role}/collection"""

    run: str
    mode: str
    state: Literal["Collecting", "Waiting", "Exhausted", "Failed"]
    """Waiting: enough is finished, or (synchronous) no step is asked for. Exhausted: the run has no more prompts."""
    message: str = ""
    epoch: int = 0
    open: int = 0
    """Prompts in work."""
    finished: int = 0
    """Groups that wait for a step."""
    leased: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}
    """Prompts by reason."""
    requests: int = 0
    """Open at this moment."""
    data_rows_skipped: list[str] = []
