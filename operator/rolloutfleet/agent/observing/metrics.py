"""Observations for Prometheus, read when it asks. docs/guides/metrics.md lists all metrics; a test keeps it true.

They are on a port of their own, which Prometheus reaches from outside of the pod: the agent's API is on localhost, and
tells what samples say.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Metric, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from rolloutfleet.agent.observing.observations import Observations
from rolloutfleet.api.samples import SampleStatus

logger = logging.getLogger(__name__)

PATH = "/metrics"
LABELS = ("namespace", "server", "role")


class SampleMetrics:
    """A collector of prometheus_client. `roles`: server and observations of each role."""

    def __init__(self, namespace: str, roles: Mapping[str, tuple[str, Observations]]) -> None:
        self._roles = [((namespace, server, role), seen) for role, (server, seen) in roles.items()]

    def collect(self) -> Iterable[Metric]:
        yield from self._counters()
        yield from self._histograms()
        yield from self._gauges()
        yield from self._evaluations()

    def _counters(self) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            "rolloutfleet_samples_ended",
            "Samples by how they ended; aborted ones may be continued and end again",
            labels=(*LABELS, "status"),
        )
        dropped = CounterMetricFamily(
            "rolloutfleet_samples_groups_dropped",
            "Groups that were not handed to the trainer, by reason",
            labels=(*LABELS, "reason"),
        )
        for labels, seen in self._roles:
            for status in SampleStatus:
                ended.add_metric((*labels, status.value), seen.ended[status])
            for reason, count in seen.dropped.items():
                dropped.add_metric((*labels, reason), count)
        yield ended
        yield dropped
        for field, name, text in (
            ("groups", "groups_finished", "Groups that finished and that no filter dropped"),
            ("zero_variance", "groups_zero_variance", "Finished groups whose samples all have the same reward"),
            ("judged", "judged", "Samples of finished groups that have a reward"),
            ("passed", "passed", "Samples of finished groups whose reward is at least the one that counts as passed"),
            ("repetitive", "repetitive", "Samples that repeat themselves at their end"),
            ("prompt_tokens", "prompt_tokens", "Prompt tokens that engines were sent, continued samples counted again"),
            ("cached_tokens", "prompt_cached_tokens", "Prompt tokens that engines had in their prefix caches"),
            ("draft_tokens", "draft_tokens", "Tokens that speculative decoding drafted"),
            ("accepted_tokens", "draft_accepted_tokens", "Drafted tokens that were accepted"),
            ("trained_tokens", "trained_tokens", "Tokens with loss mask 1 in the batches of steps"),
        ):
            family = CounterMetricFamily(f"rolloutfleet_samples_{name}", text, labels=LABELS)
            for labels, seen in self._roles:
                family.add_metric(labels, getattr(seen.counts, field))
            yield family

    def _histograms(self) -> Iterator[Metric]:
        for name, text in (
            ("response_tokens", "Length of responses; the sum is all tokens that were generated"),
            ("seconds", "From a sample's first request to its end, waiting included"),
            ("rewards", "Rewards in finished groups"),
            ("staleness", "Versions between a sample's oldest trained token and the weights that its step starts from"),
        ):
            family = HistogramMetricFamily(f"rolloutfleet_samples_{name}", text, labels=LABELS)
            for labels, seen in self._roles:
                histogram = getattr(seen, name)
                family.add_metric(labels, histogram.cumulative(), histogram.sum)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        groups = GaugeMetricFamily(
            "rolloutfleet_samples_groups",
            "Groups by state: open (in work), finished (waits for a step), leased (no checkpoint has its step yet)",
            labels=(*LABELS, "state"),
        )
        requests = GaugeMetricFamily(
            "rolloutfleet_samples_requests", "Requests for samples that routers and engines have", labels=LABELS
        )
        step = GaugeMetricFamily("rolloutfleet_samples_step", "The last step that has its batch", labels=LABELS)
        trained = GaugeMetricFamily(
            "rolloutfleet_samples_trained_step", "The last step that a checkpoint has", labels=LABELS
        )
        mean = GaugeMetricFamily(
            "rolloutfleet_samples_step_reward", "Mean reward in the batch of the last step", labels=LABELS
        )
        for labels, seen in self._roles:
            for state, count in seen.queue_lengths or ():
                if state == "running":
                    requests.add_metric(labels, count)
                else:
                    groups.add_metric((*labels, state), count)
            last = seen.last_step
            if last is not None:
                step.add_metric(labels, last.step)
            if last is not None and last.reward_mean is not None:
                mean.add_metric(labels, last.reward_mean)
            if seen.last_trained is not None:
                trained.add_metric(labels, seen.last_trained)
        yield from (groups, requests, step, trained, mean)

    def _evaluations(self) -> Iterator[Metric]:
        for field, name, text in (
            ("reward_mean", "reward", "Mean reward in the last evaluation of this name"),
            ("pass_rate", "passed", "Share of its samples whose reward is at least the one that counts as passed"),
            ("samples", "samples", "Samples of it that came to an end"),
            ("version", "version", "Weights that were committed when it began"),
        ):
            family = GaugeMetricFamily(f"rolloutfleet_samples_evaluation_{name}", text, labels=(*LABELS, "evaluation"))
            for labels, seen in self._roles:
                for evaluation, view in seen.last_evaluations.items():
                    value = getattr(view, field)
                    if value is not None:
                        family.add_metric((*labels, evaluation), value)
            yield family


async def serve_metrics(
    namespace: str, roles: Mapping[str, tuple[str, Observations]], *, host: str | None = None, port: int
) -> web.AppRunner:
    """A server that answers already; `cleanup` ends it. A port that is taken costs the metrics alone: in a pod with its
    node's network others may have it."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(SampleMetrics(namespace, roles))

    async def scrape(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    app = web.Application()
    app.router.add_get(PATH, scrape)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        logger.warning("no metrics of samples: port %d: %s", port, error)
    return runner
