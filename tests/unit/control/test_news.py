"""Which news of pods are planned for at once, and which wait for others."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutfleet.control.operator import ends, troubled
from rolloutfleet.control.term import STEP_SECONDS
from unit.control.test_takeover import converged, pods, until
from unit.virtual_time import now, run

EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "evicting"}
RUNNING = {"name": "engine", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
PULL_FAILS = {"name": "engine", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}


@pytest.mark.parametrize(
    ("status", "urgent"),
    [
        ({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]}, False),
        ({"phase": "Running", "containerStatuses": [RUNNING]}, False),
        ({"phase": "Pending", "containerStatuses": [PULL_FAILS]}, True),
        ({"phase": "Running", "containerStatuses": [RUNNING], "conditions": [EVICTED]}, True),
    ],
)
def test_a_pod_that_does_what_it_should_is_in_no_hurry(status: dict[str, Any], urgent: bool) -> None:
    pod = {"metadata": {"name": "p"}, "status": status}
    assert troubled(pod) is urgent
    assert not ends(pod)


def test_an_eviction_does_not_wait_as_long_as_a_step() -> None:
    async def scenario() -> None:
        cluster, leader, standby = await converged()
        pod = cluster.objects["Pod", pods(cluster)[0]]
        begun = now()
        cluster.put("Pod", {**pod, "status": {"phase": "Running", "containerStatuses": [RUNNING], "podIP": "10.0.0.1"}})
        cluster.put("Pod", {**pod, "status": {"phase": "Running", "conditions": [EVICTED], "podIP": "10.0.0.1"}})
        await until(lambda: any("-e3-" in name for name in pods(cluster)), "its successor")
        assert now() - begun < STEP_SECONDS / 2
        for replica in (leader, standby):
            await replica.operator.stop()

    run(scenario())
