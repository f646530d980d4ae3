"""What an agent shows of the samples of one role: GET /v1/servers/{role}/samples.json. JSON, snake_case.

The page, the terminal and the trainer library read it. Everything in it is bounded, however long a run lasts.
"""

from __future__ import annotations

from rolloutfleet.api.agent import Told
from rolloutfleet.api.samples import SampleStatus, VersionSpan


class TokensView(Told):
    """Response tokens [start, start + len(ids)) of a sample."""

    start: int
    ids: list[int]
    log_probs: list[float]
    """Rounded; 0 where no engine sampled the token."""
    mask: list[int]


class SampleView(Told):
    """One sample of those that ended last. Of a long one the middle is left out."""

    id: str
    """EPOCH/GROUP/INDEX"""
    number: int
    """Rises with each change of a sample: ask for what comes after the highest that you have."""
    ago: float
    """Seconds since it ended."""
    status: SampleStatus
    error: str = ""
    dropped: str = ""
    """Why its group was dropped."""
    removed: bool = False
    """remove_sample: none of its tokens is trained."""
    reward: float | None = None
    prompt: str = ""
    """Text, where the data set has text; of messages their JSON."""
    prompt_ids: list[int] = []
    """Where there is no text."""
    prompt_length: int = 0
    response: str = ""
    response_length: int = 0
    trained_tokens: int = 0
    tokens: list[TokensView] = []
    """One piece, or head and tail."""
    weight_versions: list[VersionSpan] = []
    engine: str = ""
    attempts: int = 0
    seconds: float = 0.0
    repetition: float = 0.0


class Bar(Told):
    """Values v with low <= v < high; the last bar has its upper end too."""

    low: float
    high: float
    count: int


class StepView(Told):
    """The batch of one training step. Rewards and rates are of its samples that have a reward."""

    step: int
    version: int
    """Weights that the step starts from."""
    groups: int
    samples: int
    trained_tokens: int
    reward_mean: float | None
    reward_std: float | None
    """Of the population, as advantages are normalised."""
    pass_rate: float | None
    """Share of samples with a reward of at least `pass_reward`."""
    pass_at_n: float | None
    """Share of groups with at least one such sample."""
    zero_variance: int
    """Groups whose samples all have the same reward: they teach nothing."""
    response_length: float
    truncated: float
    staleness_mean: float
    staleness_max: int
    trained: bool = False


class EvaluationView(Told):
    """One evaluation: a data set that was sampled once."""

    name: str
    version: int
    """Weights that were committed when it began."""
    ago: float
    """Seconds since it ended."""
    seconds: float
    """That it took."""
    prompts: int
    samples: int
    """That came to an end: what the figures below are of."""
    failed: int
    """Samples that failed, or were not finished in time."""
    reward_mean: float | None
    pass_rate: float | None
    """Share of samples with a reward of at least `pass_reward`."""
    pass_at_n: float | None
    """Share of prompts with at least one such sample."""
    response_length: float
    truncated: float


class Rates(Told):
    """Shares, each None where there was nothing to take it of."""

    samples: int = 0
    """How many of those that ended last they are of."""
    truncated: float | None = None
    failed: float | None = None
    repetitive: float | None = None
    prefix_cache_hit: float | None = None
    """Prompt tokens that engines had cached."""
    spec_accepted: float | None = None
    """Draft tokens of speculative decoding that were accepted."""
    spec_accept_length: float | None = None
    """Tokens for each verification; no share."""
    zero_variance: float | None = None
    """Of the groups that finished last."""


class Throughput(Told):
    """Of samples that ended for good, by the moment when they ended."""

    samples_per_second: float = 0.0
    tokens_per_second: float = 0.0
    window_seconds: float = 0.0
    """What these two are an average of."""
    slot_seconds: float = 0.0
    series: list[float] = []
    """Tokens a second in each slot, the oldest first; the last slot is not over yet and left out."""


class QueueView(Told):
    open: int
    """Groups in work: their samples are generated or judged."""
    running: int
    """Requests that routers and engines have."""
    finished: int
    """Groups that wait for a step."""
    leased: int
    """Groups of steps that no checkpoint has yet."""


class SamplesView(Told):
    role: str
    server: str
    run: str = ""
    """Another one with each start of the agent: numbers of samples begin anew."""
    number: int = 0
    """The highest of any sample."""
    since: float = 0.0
    """Seconds that the counts below are of."""
    ended: dict[SampleStatus, int] = {}
    groups: int = 0
    dropped: dict[str, int] = {}
    """Groups by reason."""
    throughput: Throughput = Throughput()
    rates: Rates = Rates()
    rewards: list[Bar] = []
    """Of the groups that finished last."""
    staleness: dict[int, int] = {}
    """Samples of the last steps by versions between their oldest trained token and the step's weights."""
    pass_reward: float = 1.0
    steps: list[StepView] = []
    evaluations: list[EvaluationView] = []
    """The last ones, the oldest first."""
    queue: QueueView | None = None
    samples: list[SampleView] = []
    """The newest first."""
