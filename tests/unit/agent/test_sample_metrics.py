"""Observations as Prometheus reads them, from the port that it reaches."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rolloutfleet.agent.collection.observer import Evaluation
from rolloutfleet.agent.observing.metrics import serve_metrics
from rolloutfleet.agent.observing.observations import Observations
from rolloutfleet.api.samples import PrefixCacheInfo, SampleStatus
from unit.agent.test_observations import group, sample

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(**roles: Observations) -> Values:
    async def scrape() -> str:
        observed = {role: ("qwen", seen) for role, seen in roles.items()}
        runner = await serve_metrics("rl", observed, host="127.0.0.1", port=0)
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
                answer = await client.get(f"http://127.0.0.1:{runner.addresses[0][1]}/metrics")
        finally:
            await runner.cleanup()
        return answer.text

    return {
        (found.name.removeprefix("rolloutfleet_samples_"), tuple(sorted(found.labels.items()))): found.value
        for family in text_string_to_metric_families(asyncio.run(scrape()))
        for found in family.samples
    }


def value(values: Values, name: str, role: str = "actor", **labels: str) -> float:
    return values[name, tuple(sorted({"namespace": "rl", "server": "qwen", "role": role, **labels}.items()))]


def test_counts_are_told_with_the_labels_of_the_fleet() -> None:
    seen = Observations()
    cache = PrefixCacheInfo(cached_tokens=1, total_prompt_tokens=2)
    seen.sample_ended(sample(0, tokens=100, prefix_cache_info=cache, seconds=2.0))
    seen.sample_ended(sample(1, tokens=0, status=SampleStatus.FAILED))
    seen.sample_ended(sample(2, tokens=3, status=SampleStatus.ABORTED))
    seen.group_finished(group(0, 1.0, 1.0))
    seen.group_finished(group(1, 0.0, 1.0))
    seen.group_dropped(group(2, 0.0), "too_old")
    seen.step_leased(4, [group(1, 0.0, 1.0)], 9)
    seen.step_leased(5, [group(3, 1.0)], 7)
    seen.step_trained(4)
    seen.queue(open=7, finished=1, running=3)
    for version, reward in ((3, 0.0), (8, 1.0)):
        groups = [group(0, reward, 0.5), [sample(1, status=SampleStatus.FAILED)]]
        seen.evaluation_ended(Evaluation("math", version, groups, failed=1, reward_key="", seconds=2.0))
    values = scraped(actor=seen, critic=Observations())

    assert [value(values, "ended_total", status=status.value) for status in SampleStatus] == [0, 1, 0, 1, 1]
    assert value(values, "groups_dropped_total", reason="too_old") == 1
    assert (value(values, "groups_finished_total"), value(values, "groups_zero_variance_total")) == (2, 1)
    assert (value(values, "judged_total"), value(values, "passed_total")) == (4, 3)
    assert (value(values, "prompt_tokens_total"), value(values, "prompt_cached_tokens_total")) == (2, 1)
    assert value(values, "trained_tokens_total") == 12
    assert (value(values, "response_tokens_sum"), value(values, "response_tokens_count")) == (100, 2)
    assert value(values, "response_tokens_bucket", le="64.0") == 1
    assert value(values, "seconds_sum") == 2
    assert (value(values, "rewards_bucket", le="0.0"), value(values, "rewards_bucket", le="1.0")) == (1, 4)
    assert (value(values, "staleness_bucket", le="1.0"), value(values, "staleness_bucket", le="2.0")) == (1, 3)
    assert [value(values, "groups", state=state) for state in ("open", "finished", "leased")] == [7, 1, 1]
    assert value(values, "requests") == 3
    assert (value(values, "step"), value(values, "trained_step"), value(values, "step_reward")) == (5, 4, 1)
    of_the_last = [
        value(values, f"evaluation_{it}", evaluation="math") for it in ("reward", "passed", "samples", "version")
    ]
    assert of_the_last == [0.75, 0.5, 2, 8]
    assert value(values, "ended_total", role="critic", status="completed") == 0
    assert not any(name == "step" and ("role", "critic") in labels for name, labels in values)
    assert ("process_resident_memory_bytes", ()) in values


def test_a_port_that_is_taken_costs_the_metrics_and_not_the_agent(caplog: pytest.LogCaptureFixture) -> None:
    async def both() -> None:
        first = await serve_metrics("rl", {}, host="127.0.0.1", port=0)
        second = await serve_metrics("rl", {}, host="127.0.0.1", port=first.addresses[0][1])
        assert second.addresses == []
        await second.cleanup()
        await first.cleanup()

    with caplog.at_level(logging.WARNING):
        asyncio.run(both())
    assert "no metrics of samples: port" in caplog.text
