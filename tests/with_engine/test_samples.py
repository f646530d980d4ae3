"""Greedy samples through agent and router are those of the engine: each token, each log-prob, whatever stopped them on
the way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rolloutfleet.api.agent import PauseMode
from rolloutfleet.api.samples import Sample, VersionSpan
from rolloutfleet.engine.http import Http
from rolloutfleet.trainer.collecting import StepBatch
from with_engine import collecting
from with_engine.collecting import FLOAT32, Made, RealFleet, close, directly
from with_engine.conftest import Server, place

TOLERANCE = 4e-6
"""In float32, natural logarithm, around -6. What was seen is 9.5e-7, two steps of float32 there: between a request
alone and the same one among others, and where a prefix was computed at once instead of token by token."""
PROMPTS = [[7, 8, 9], [11, 300, 5, 42, 77], [499], [(31 * n) % 500 + 1 for n in range(64)]]
N = 2
TOKENS = 640
GREEDY = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
SOME = 8 * N * len(PROMPTS)
"""Tokens of all requests together: a few each, far from their end."""


@pytest.fixture(scope="module")
def float32(tmp_path_factory: pytest.TempPathFactory, http: Http, runner: asyncio.Runner) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("engine")
    server = Server(folder, place("MODELS"), http, *FLOAT32)
    with collecting.started(server, runner) as server:
        yield server


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory, float32: Server) -> Iterator[str]:
    with collecting.router(tmp_path_factory.mktemp("router"), float32.url) as url:
        yield url


@pytest.fixture
def fleet(tmp_path: Path, runner: asyncio.Runner, float32: Server, router: str) -> Iterator[RealFleet]:
    runner.run(float32.begin_anew())
    with collecting.fleet(tmp_path, runner, float32, router) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def alone(float32: Server, runner: asyncio.Runner) -> list[Made]:
    """What version 0 makes of each prompt, asked directly and nothing beside it."""
    runner.run(float32.begin_anew())
    made = [directly(float32.url, prompt, TOKENS) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens, _ in made}) == len(PROMPTS)
    return made


ROWS = [{"prompt": prompt} for prompt in PROMPTS]


def checked(batch: StepBatch) -> list[Sample]:
    """All that were asked for, at their end."""
    assert sorted((sample.group_index, sample.index) for sample in batch.samples) == [
        (prompt, index) for prompt in range(len(PROMPTS)) for index in range(N)
    ]
    for sample in batch.samples:
        assert (sample.status, sample.response_length) == ("truncated", TOKENS)
        assert sample.prompt_tokens == PROMPTS[sample.group_index]
    return batch.samples


def assert_made_by(sample: Sample, expected: Sequence[Made], spans: Sequence[VersionSpan]) -> None:
    assert sample.weight_versions == list(spans)
    assert sample.response_tokens == [token for tokens, _ in expected for token in tokens]
    close(sample.rollout_log_probs, [logprob for _, logprobs in expected for logprob in logprobs], TOLERANCE)


def test_samples_are_those_of_the_engine(fleet: RealFleet, alone: list[Made]) -> None:
    for sample in checked(fleet.collect(ROWS, n=N, sampling_params=GREEDY).batch(1, timeout=120)):
        assert sample.attempts == 1
        assert_made_by(sample, [alone[sample.group_index]], [VersionSpan(version=0, start=0, end=TOKENS)])


def test_tokens_that_stop_a_sample_are_its_last_ones(fleet: RealFleet, alone: list[Made]) -> None:
    stops = [alone[0][0][20], alone[1][0][30]]
    run = fleet.collect(ROWS, n=N, sampling_params={"temperature": 0, "max_new_tokens": 64, "stop_token_ids": stops})
    for sample in run.batch(1, timeout=120).samples:
        tokens, logprobs = (made[:64] for made in alone[sample.group_index])
        ends = [place for place, token in enumerate(tokens) if token in stops]
        end = ends[0] + 1 if ends else len(tokens)
        assert sample.status == ("completed" if ends else "truncated")
        assert sample.response_tokens == tokens[:end]
        close(sample.rollout_log_probs, logprobs[:end], TOLERANCE)


def test_a_sample_of_many_parts_is_one_that_was_never_stopped(fleet: RealFleet, alone: list[Made]) -> None:
    stops = 3
    run = fleet.collect(ROWS, n=N, sampling_params=GREEDY)
    for _ in range(stops):
        fleet.until_it_has_made(N * len(PROMPTS), SOME)
        run.end()
        fleet.until_idle()
        run.begin()
    for sample in checked(run.batch(1, timeout=120)):
        assert sample.attempts == stops + 1, "it was stopped as often as the collection"
        assert_made_by(sample, [alone[sample.group_index]], [VersionSpan(version=0, start=0, end=TOKENS)])


def test_a_sample_that_goes_on_after_an_update_is_made_by_both_weights_and_says_where(
    fleet: RealFleet, alone: list[Made]
) -> None:
    run = fleet.collect(ROWS, n=N, sampling_params=GREEDY)
    fleet.until_it_has_made(N * len(PROMPTS), SOME)
    run.end()
    assert fleet.trainer.update_weights(place("MODELS") / "m1").committed
    assert_made_by_both(fleet, alone, checked(run.batch(1, timeout=120)))


@pytest.mark.parametrize(("pause", "parts"), [("Retract", 1), ("Abort", 2)])
def test_an_update_in_the_middle_of_a_request_parts_its_tokens(
    fleet: RealFleet, alone: list[Made], pause: PauseMode, parts: int
) -> None:
    """Retract: the engine itself goes on with it. Abort: the agent does."""
    run = fleet.collect(ROWS, n=N, sampling_params=GREEDY)
    fleet.until_it_has_made(N * len(PROMPTS), SOME)
    assert fleet.trainer.update_weights(place("MODELS") / "m1", pause_mode=pause).committed
    samples = checked(run.batch(1, timeout=120))
    assert {sample.attempts for sample in samples} == {parts}
    assert_made_by_both(fleet, alone, samples)


def assert_made_by_both(fleet: RealFleet, before: Sequence[Made], samples: Sequence[Sample]) -> None:
    """`before`: what version 0 makes of the prompts. The engine has version 1 now."""
    for sample in samples:
        at = sample.weight_versions[0].end
        assert 0 < at < TOKENS
        tokens, logprobs = before[sample.group_index]
        after = directly(fleet.engine, sample.prompt_tokens + tokens[:at], TOKENS - at)
        assert after[0] != tokens[at:], "the other weights make something else of it"
        spans = [VersionSpan(version=0, start=0, end=at), VersionSpan(version=1, start=at, end=TOKENS)]
        assert_made_by(sample, [(tokens[:at], logprobs[:at]), after], spans)
