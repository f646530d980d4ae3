"""Whatever comes late, twice, out of order, wrong or never: a fleet ends as its spec wants it, and no engine was made
twice, named twice or listed with other weights than the fleet's on the way."""

from __future__ import annotations

import asyncio
import random

import pytest

from api_server import faults
from api_server.control_plane import ControlPlane
from api_server.faults import Mangle
from api_server.fleet import Fleet, regular, running
from api_server.wire import Disturb, undisturbed
from api_server.world import world

IDLE_SECONDS = 3.0
RESYNC_SECONDS = 2.0


async def life_of_a_fleet(fleet: Fleet) -> None:
    """Made, scaled, hurt, updated and rolled; each failure makes one recreation."""
    await fleet.apply(regular())
    await fleet.settled(idle=0.0)
    await fleet.apply(regular(3))
    await fleet.settled(idle=0.0)
    await fleet.delete_pod(fleet.live_pod(0))
    await fleet.fail(fleet.live_pod(1), exit_code=1)
    await fleet.until(lambda: fleet.lives(0) == 2 and fleet.lives(1) == 2, "both are replaced")
    await fleet.settled(idle=0.0)
    async with fleet.trainer() as updater:
        await fleet.update_weights(updater, "/weights/m1")
        await fleet.settled(idle=0.0)
    await fleet.apply(regular(3, image="engine:2"))
    await fleet.settled(idle=0.0)
    await fleet.apply(regular(1, image="engine:2"))
    await fleet.settled(idle=0.0)
    lives = [fleet.lives(index) for index in range(4)]
    assert lives == [3, 3, 2, 0], f"{lives} lives: {fleet.report()}"


def through(cluster: ControlPlane, name: str, *, mangle: Mangle | None = None, disturb: Disturb = undisturbed) -> None:
    async def scenario() -> None:
        async with (
            world(cluster.credentials) as everything,
            running(
                everything, name, resync=RESYNC_SECONDS, disturb=disturb, mangle=mangle or (lambda deliver: deliver)
            ) as fleet,
        ):
            await life_of_a_fleet(fleet)
            fleet.process.wires.disturb = undisturbed
            await fleet.settled(idle=IDLE_SECONDS)

    asyncio.run(scenario())


def test_nothing_goes_wrong(cluster: ControlPlane) -> None:
    through(cluster, "nothing")


def test_watch_events_come_late(cluster: ControlPlane) -> None:
    through(cluster, "late", mangle=faults.late(0.3))


def test_watch_events_come_twice(cluster: ControlPlane) -> None:
    through(cluster, "twice", mangle=faults.doubled(0.3))


@pytest.mark.parametrize("seed", range(3))
def test_watch_events_overtake_each_other(cluster: ControlPlane, seed: int) -> None:
    through(cluster, f"reordered-{seed}", mangle=faults.reordered(random.Random(seed), most=0.5))


@pytest.mark.parametrize("seed", range(3))
def test_watch_events_are_never_told(cluster: ControlPlane, seed: int) -> None:
    through(cluster, f"dropped-{seed}", mangle=faults.dropped(random.Random(seed), share=0.3))


def test_watches_expire(cluster: ControlPlane) -> None:
    through(cluster, "expired", mangle=faults.broken_off(seconds=0.7))


def test_lists_are_old_when_they_arrive(cluster: ControlPlane) -> None:
    through(cluster, "stale", disturb=faults.stale_lists())


@pytest.mark.parametrize("seed", range(3))
def test_calls_fail(cluster: ControlPlane, seed: int) -> None:
    through(cluster, f"failing-{seed}", disturb=faults.failing(random.Random(seed), share=0.1))
