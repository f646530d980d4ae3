"""What is observed of samples, with values worked out by hand."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from rolloutfleet.agent.collection.observer import Evaluation
from rolloutfleet.agent.observing.measures import Histogram, all_equal, bars, repetition, reward_of
from rolloutfleet.agent.observing.observations import MAX_EVALUATIONS, MAX_STEPS, OTHER, REASONS, Observations
from rolloutfleet.agent.observing.recent import CHARACTERS, HEAD, MAX_SAMPLES, MAX_TOKENS, TAIL
from rolloutfleet.agent.observing.throughput import SLOTS
from rolloutfleet.api.samples import PrefixCacheInfo, Sample, SampleStatus, SpecInfo, VersionSpan
from rolloutfleet.api.samples_view import Bar, EvaluationView, QueueView, SamplesView


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def sample(
    group: int = 0,
    index: int = 0,
    *,
    tokens: int = 4,
    version: int = 7,
    status: SampleStatus = SampleStatus.COMPLETED,
    **fields: object,
) -> Sample:
    return Sample.model_validate(
        {
            "group_index": group,
            "index": index,
            "prompt_tokens": [1, 2],
            "response_tokens": list(range(tokens)),
            "rollout_log_probs": [-0.5] * tokens,
            "weight_versions": [VersionSpan(version=version, start=0, end=tokens)] if tokens else [],
            "status": status,
            **fields,
        }
    )


def group(number: int, *rewards: float | None, **fields: object) -> list[Sample]:
    return [sample(number, index, reward=reward, **fields) for index, reward in enumerate(rewards)]  # type: ignore[arg-type]


def seen_with(**options: object) -> tuple[Observations, Clock]:
    clock = Clock()
    return Observations(clock=clock, **options), clock  # type: ignore[arg-type]


def view(seen: Observations, **options: int) -> SamplesView:
    return seen.view(role="actor", server="qwen", **options)


# Measures


def test_repetition_is_the_share_of_ngrams_that_came_before() -> None:
    assert repetition([]) == repetition([1, 1, 1]) == 0.0
    assert repetition([1, 2, 3, 4, 5, 6]) == 0.0
    assert repetition([1, 1, 1, 1, 1]) == 0.5  # (1,1,1,1) twice
    assert repetition([1, 2, 3, 1, 2, 3, 1]) == 0.25  # 1231 2312 3123 1231
    # A loop of 10 tokens fills the tail of 512 tokens, 509 n-grams, of which 10 are different.
    assert repetition([*range(1000, 5000), *([*range(10)] * 60)]) == pytest.approx(499 / 509)
    assert repetition([*([*range(10)] * 60), *range(1000, 1512)]) == 0.0  # it got out of it


def test_rewards_are_equal_up_to_what_slime_calls_equal() -> None:
    assert all_equal([1.0, 1.0, 1.0 + 1e-7])
    assert not all_equal([1.0, 1.0, 1.00001])
    assert not all_equal([1.0])
    assert not all_equal([])


def test_a_reward_with_parts_counts_by_its_key_and_nobody_who_watches_stops_a_run() -> None:
    assert reward_of(sample(reward={"right": 1.0, "short": 0.25}), "short") == 0.25
    assert reward_of(sample(reward={"right": 1.0}), "") is None
    assert reward_of(sample(reward=0.5), "right") == 0.5
    assert reward_of(sample(), "") is None


def test_few_different_values_have_a_bar_each() -> None:
    assert bars([1.0, 0.0, 1.0]) == [Bar(low=0, high=0, count=1), Bar(low=1, high=1, count=2)]
    assert bars([]) == []


def test_many_different_values_have_bars_of_equal_width_and_none_is_lost() -> None:
    found = bars([float(number) for number in range(41)], most=20)
    assert [bar.count for bar in found] == [2] * 19 + [3]  # 40, the highest, is in the last one
    assert (found[0].low, found[0].high, found[-1].high) == (0, 2, 40)
    close = bars([5e-324 * number for number in range(12)])
    assert sum(bar.count for bar in close) == 12


def test_a_histogram_counts_up_to_each_bound_itself_included() -> None:
    histogram = Histogram(1, 2.5)
    for value in (0.5, 1, 2, 2.5, 3):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.5", 4), ("+Inf", 5)]
    assert histogram.sum == 9


# Ends of samples


def test_samples_count_by_status_and_tokens_once() -> None:
    seen, clock = seen_with()
    stopped = sample(tokens=3, status=SampleStatus.ABORTED)
    seen.sample_ended(stopped)
    assert (seen.response_tokens.sum, view(seen).throughput.tokens_per_second) == (0, 0)
    seen.sample_ended(sample(tokens=10, status=SampleStatus.TRUNCATED))  # the same one, continued
    seen.sample_ended(sample(1, tokens=0, status=SampleStatus.FAILED, error="400"))
    clock.now += 2
    found = view(seen)
    assert found.ended == {SampleStatus.ABORTED: 1, SampleStatus.TRUNCATED: 1, SampleStatus.FAILED: 1}
    assert (found.throughput.tokens_per_second, found.throughput.samples_per_second) == (5.0, 1.0)
    assert (found.rates.samples, found.rates.truncated, found.rates.failed) == (2, 0.5, 0.5)
    assert [one.id for one in found.samples] == ["0/1/0", "0/0/0"]
    assert [one.response_length for one in found.samples] == [0, 10]


def test_rates_of_caches_and_drafts_are_of_tokens_and_none_where_there_were_none() -> None:
    seen, _ = seen_with()
    assert view(seen).rates.model_dump(exclude={"samples"}) == dict.fromkeys(
        (
            *("truncated", "failed", "repetitive", "prefix_cache_hit"),
            *("spec_accepted", "spec_accept_length", "zero_variance"),
        )
    )
    cache = PrefixCacheInfo(cached_tokens=30, total_prompt_tokens=40)
    drafts = SpecInfo(spec_accept_token_num=6, spec_draft_token_num=12, spec_verify_ct=4, completion_token_num=10)
    seen.sample_ended(sample(0, prefix_cache_info=cache, spec_info=drafts))
    seen.sample_ended(
        sample(
            1,
            prefix_cache_info=PrefixCacheInfo(total_prompt_tokens=60),
            spec_info=SpecInfo(completion_token_num=99),  # of an engine without drafts
        )
    )
    rates = view(seen).rates
    assert (rates.prefix_cache_hit, rates.spec_accepted, rates.spec_accept_length) == (0.3, 0.5, 2.5)
    assert (seen.counts.prompt_tokens, seen.counts.cached_tokens) == (100, 30)
    assert (seen.counts.draft_tokens, seen.counts.accepted_tokens) == (12, 6)


def test_a_sample_that_repeats_itself_counts() -> None:
    seen, _ = seen_with()
    seen.sample_ended(sample(0))
    seen.sample_ended(sample(1, tokens=40, response_tokens=[5] * 40))
    assert view(seen).rates.repetitive == 0.5
    assert view(seen).samples[0].repetition == pytest.approx(36 / 37, abs=1e-3)


def test_throughput_is_of_the_last_minute_and_its_course_of_the_last_ten() -> None:
    seen, clock = seen_with()
    for _ in range(15):  # 100 tokens every 5 s for 75 s
        seen.sample_ended(sample(tokens=100))
        clock.now += 5
    found = view(seen).throughput
    # Now is 1075, a slot that has just begun: the 11 slots before it had a sample each, in 55 s.
    assert (found.window_seconds, found.tokens_per_second, found.samples_per_second) == (55, 20, 0.2)
    assert found.series == [20.0] * 15
    clock.now += 100
    assert view(seen).throughput.tokens_per_second == 0
    assert view(seen).throughput.series == [20.0] * 15 + [0.0] * 20
    clock.now += 10_000
    assert view(seen).throughput.series == [0.0] * (SLOTS - 1)


def test_a_first_burst_is_no_rate_yet() -> None:
    seen, _ = seen_with()
    seen.sample_ended(sample(tokens=100))
    assert view(seen).throughput.tokens_per_second == 100


# Groups


def test_finished_groups_give_rewards_passes_and_how_many_teach_nothing() -> None:
    seen, _ = seen_with(pass_reward=0.5)
    seen.group_finished(group(0, 0.0, 1.0, 0.5))
    seen.group_finished(group(1, 1.0, 1.0))
    seen.group_finished(group(2, None, 0.25))
    assert (seen.counts.groups, seen.counts.zero_variance) == (3, 1)
    assert (seen.counts.judged, seen.counts.passed) == (6, 4)
    found = view(seen)
    assert found.groups == 3
    assert found.rates.zero_variance == pytest.approx(1 / 3)
    assert {bar.low: bar.count for bar in found.rewards} == {0.0: 1, 0.25: 1, 0.5: 1, 1.0: 3}


def test_a_group_s_rewards_show_with_samples_that_are_still_kept() -> None:
    seen, _ = seen_with()
    one, other = sample(0, 0), sample(0, 1)
    seen.sample_ended(one)
    seen.sample_ended(other)
    before = view(seen)
    assert [found.reward for found in before.samples] == [None, None]
    seen.group_finished([one.changed(reward=0.5), other.changed(reward=0.0), sample(0, 2, reward=1.0)])
    changed = view(seen, after=before.number)
    assert [(found.id, found.reward) for found in changed.samples] == [("0/0/1", 0.0), ("0/0/0", 0.5)]


def test_drops_count_by_reason_and_reasons_are_bounded() -> None:
    seen, _ = seen_with()
    seen.sample_ended(sample(0))
    seen.group_dropped(group(0, 0.0, 0.0), "zero_std_0.0")
    assert [(found.dropped, found.reward) for found in view(seen).samples] == [("zero_std_0.0", 0.0)]
    for number in range(REASONS + 50):
        seen.group_dropped([], f"reason {number}")
    dropped = view(seen).dropped
    assert dropped["zero_std_0.0"] == 1
    assert dropped[OTHER] == 51
    assert len(dropped) == REASONS + 1


def test_of_a_reward_with_parts_the_one_that_the_collection_names_is_shown() -> None:
    seen, _ = seen_with()
    parts = [sample(0, index, reward={"right": float(index), "short": 0.5}) for index in range(2)]
    seen.group_finished(parts)
    assert view(seen).rewards == []
    seen.collection_began(trainer="t", step=0, reward_key="right")
    seen.sample_ended(parts[1])
    seen.group_finished(parts)
    assert {bar.low: bar.count for bar in view(seen).rewards} == {0.0: 1, 1.0: 1}
    assert view(seen).samples[0].reward == 1.0


# Steps


def test_a_step_has_mean_deviation_passes_and_staleness() -> None:
    seen, _ = seen_with()
    old = sample(1, 1, version=4, reward=0.0, status=SampleStatus.TRUNCATED, tokens=8)
    masked = sample(1, 2, version=1, reward=0.0, loss_mask=[0, 0, 0, 0])
    seen.step_leased(12, [group(0, 1.0, 1.0), [sample(1, 0, version=6, reward=1.0), old, masked]], 7)
    (step,) = view(seen).steps
    assert (step.step, step.version, step.groups, step.samples, step.trained_tokens) == (12, 7, 2, 5, 4 + 4 + 4 + 8)
    assert step.reward_mean == 0.6
    assert step.reward_std == pytest.approx(0.24**0.5)  # mean of squares 0.6, less 0.36
    assert (step.pass_rate, step.pass_at_n, step.zero_variance) == (0.6, 1.0, 1)
    assert (step.response_length, step.truncated) == (4.8, 0.2)
    # Versions 7 7 | 6 4, and one whose tokens are not trained at all.
    assert (step.staleness_mean, step.staleness_max) == (0.8, 3)
    assert view(seen).staleness == {0: 3, 1: 1, 3: 1}
    assert not step.trained


def test_a_step_without_rewards_or_without_samples_is_shown_all_the_same() -> None:
    seen, _ = seen_with()
    seen.step_leased(1, [group(0, None, None)], 7)
    seen.step_leased(2, [], 7)
    for step in view(seen).steps:
        assert (step.reward_mean, step.reward_std, step.pass_rate, step.pass_at_n) == (None, None, None, None)


def test_the_same_step_again_replaces_the_first_and_counts_once() -> None:
    seen, _ = seen_with()
    for _ in range(3):
        seen.step_leased(5, [group(0, 1.0)], 8)
    assert seen.counts.trained_tokens == 4
    assert seen.staleness.cumulative()[-1] == ("+Inf", 1)
    assert view(seen).staleness == {1: 1}
    seen.step_leased(5, [group(0, 0.0)], 7)
    assert [step.reward_mean for step in view(seen).steps] == [0.0]
    assert view(seen).staleness == {0: 1}


def test_a_checkpoint_has_all_steps_up_to_its_own() -> None:
    seen, _ = seen_with()
    for step in (3, 4, 5):
        seen.step_leased(step, [group(0, 1.0)], 7)
    seen.step_trained(4)
    assert [step.trained for step in view(seen).steps] == [True, True, False]
    assert (seen.last_trained, seen.last_step and seen.last_step.step) == (4, 5)


def test_an_evaluation_is_shown_for_itself_and_counts_among_no_samples_of_training() -> None:
    seen, clock = seen_with()
    groups = [group(0, 1.0, 0.0), group(1, 0.5, None), [sample(2, status=SampleStatus.FAILED)]]
    seen.evaluation_ended(Evaluation("math", 7, groups, failed=1, reward_key="", seconds=3.0))
    clock.now += 60
    (shown,) = view(seen).evaluations
    assert shown == EvaluationView(
        name="math",
        version=7,
        ago=60.0,
        seconds=3.0,
        prompts=3,
        samples=4,
        failed=1,
        reward_mean=0.5,
        pass_rate=1 / 3,
        pass_at_n=0.5,
        response_length=4.0,
        truncated=0.0,
    )
    assert (seen.ended, seen.counts.judged, view(seen).rewards) == ({}, 0, [])
    for number in range(MAX_EVALUATIONS):
        seen.evaluation_ended(Evaluation("nothing", number, [], failed=0, reward_key="", seconds=0.0))
    assert [one.version for one in view(seen).evaluations] == list(range(MAX_EVALUATIONS))
    assert view(seen).evaluations[0].reward_mean is None


def test_a_trainer_that_comes_back_from_a_checkpoint_has_the_later_steps_again() -> None:
    seen, _ = seen_with()
    seen.collection_began(trainer="life-1", step=0, reward_key="")
    for step in (1, 2, 3):
        seen.step_leased(step, [group(0, 1.0)], 7)
    seen.collection_began(trainer="life-1", step=0, reward_key="other")
    assert len(view(seen).steps) == 3, "the same life, with other parameters"
    seen.collection_began(trainer="life-2", step=2, reward_key="")
    assert [(step.step, step.trained) for step in view(seen).steps] == [(1, True), (2, True)]
    seen.step_leased(3, [group(0, 0.0)], 8)
    assert [step.reward_mean for step in view(seen).steps] == [1.0, 1.0, 0.0]


def test_the_queue_is_what_was_told_last() -> None:
    seen, _ = seen_with()
    assert view(seen).queue is None
    seen.step_leased(1, [group(0, 1.0)], 7)
    seen.step_leased(2, [group(1, 1.0), group(2, 1.0)], 7)
    seen.step_trained(1)
    seen.queue(open=9, finished=2, running=4)
    assert view(seen).queue == QueueView(open=9, finished=2, leased=2, running=4)


# Bounds


def test_only_samples_that_have_changed_since_are_told() -> None:
    seen, _ = seen_with()
    for number in range(5):
        seen.sample_ended(sample(number))
    first = view(seen, limit=2)
    assert ([found.id for found in first.samples], first.number) == (["0/4/0", "0/3/0"], 5)
    assert view(seen, after=first.number).samples == []
    seen.sample_ended(sample(9))
    assert [found.id for found in view(seen, after=first.number).samples] == ["0/9/0"]


def test_another_run_of_the_agent_is_told_apart() -> None:
    assert view(seen_with()[0]).run != view(seen_with()[0]).run


def test_kept_samples_are_bounded_by_number_and_by_tokens() -> None:
    seen, _ = seen_with()
    for number in range(MAX_SAMPLES + 10):
        seen.sample_ended(sample(number))
    assert len(view(seen).samples) == MAX_SAMPLES
    seen.sample_ended(sample(1000, tokens=MAX_TOKENS - 10))
    # Room for the long one with its two prompt tokens and one short one of six.
    assert [found.id for found in view(seen).samples] == ["0/1000/0", f"0/{MAX_SAMPLES + 9}/0"]
    seen.sample_ended(sample(1001, tokens=MAX_TOKENS + 1))
    assert [found.id for found in view(seen).samples] == ["0/1001/0"]
    seen.sample_ended(sample(1002))
    assert [found.id for found in view(seen).samples] == ["0/1002/0"]


def test_a_long_sample_is_told_by_its_head_and_its_tail() -> None:
    seen, _ = seen_with()
    seen.sample_ended(sample(tokens=5000, response="x" * 10_000 + "end", prompt="short"))
    (found,) = view(seen).samples
    head, tail = found.tokens
    assert (head.start, head.ids) == (0, list(range(HEAD)))
    assert (tail.start, tail.ids) == (5000 - TAIL, list(range(5000 - TAIL, 5000)))
    assert len(tail.log_probs) == len(tail.mask) == TAIL
    assert found.response.endswith("xend")
    assert "[… 6003 characters …]" in found.response
    assert len(found.response) < CHARACTERS + 40
    assert (found.prompt, found.prompt_ids, found.prompt_length) == ("short", [], 2)


def test_a_prompt_is_text_or_messages_or_token_ids() -> None:
    seen, _ = seen_with()
    seen.sample_ended(sample(0, prompt=[{"role": "user", "content": "grüße"}]))
    seen.sample_ended(sample(1))
    ids, messages = view(seen).samples
    assert messages.prompt == '[{"role": "user", "content": "grüße"}]'
    assert (ids.prompt, ids.prompt_ids) == ("", [1, 2])


def test_memory_does_not_grow_with_the_run() -> None:
    seen, clock = seen_with()
    dice = random.Random(1)

    def steps(first: int, count: int) -> None:
        for step in range(first, first + count):
            made = group(step, *(dice.random() for _ in range(4)), tokens=200)
            for one in made:
                seen.sample_ended(one)
            seen.group_finished(made)
            seen.group_dropped(group(-step, 0.0), f"reason {step}")
            seen.step_leased(step, [made], step)
            seen.step_trained(step)
            clock.now += 1

    tracemalloc.start()
    try:
        steps(0, 800)  # until everything that is bounded is full
        before, _ = tracemalloc.get_traced_memory()
        steps(800, 400)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 50_000
    assert len(view(seen).steps) == MAX_STEPS
    assert view(seen).steps[-1].step == 1199


def test_what_is_shown_goes_over_the_wire_and_back() -> None:
    seen, _ = seen_with()
    seen.sample_ended(sample(reward=1.0))
    seen.group_finished(group(0, 1.0))
    seen.step_leased(1, [group(0, 1.0)], 8)
    seen.queue(open=1, finished=1, running=1)
    found = view(seen)
    assert SamplesView.model_validate_json(found.model_dump_json()) == found
