"""Whatever comes late, twice, out of order, wrong or never: a fleet ends as its spec wants it, and no engine was made
twice, named twice or listed with other weights than the fleet's on the way."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from api_server import faults
from api_server.control_plane import ControlPlane
from api_server.faults import Mangle
from api_server.fleet import Fleet, regular, running
from api_server.wire import Disturb, undisturbed
from api_server.world import World, world

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


@dataclass(frozen=True)
class Fault:
    mangle: Mangle = lambda deliver: deliver
    disturb: Disturb = undisturbed
    apart: bool = False
    """Each pod has a node of its own, which joins for it."""


FAULTS: dict[str, Fault] = {
    "nothing": Fault(),
    "events-late": Fault(mangle=faults.late(0.3)),
    "events-twice": Fault(mangle=faults.doubled(0.3)),
    **{f"events-overtake-{n}": Fault(mangle=faults.reordered(random.Random(n), most=0.5)) for n in range(3)},
    **{f"events-never-told-{n}": Fault(mangle=faults.dropped(random.Random(n), share=0.3)) for n in range(3)},
    "leases-untold": Fault(mangle=faults.untold("Lease", "MODIFIED")),
    "nodes-ready-untold": Fault(mangle=faults.untold("Node", "MODIFIED"), apart=True),
    "watches-expire": Fault(mangle=faults.broken_off(seconds=0.7)),
    "lists-old": Fault(disturb=faults.stale_lists()),
    **{f"calls-fail-{n}": Fault(disturb=faults.failing(random.Random(n), share=0.1)) for n in range(3)},
}


async def gone_through(everything: World, name: str) -> str:
    """What went wrong in the life of a fleet with this fault; empty when nothing did."""
    fault = FAULTS[name]
    if fault.apart:
        everything.node.apart.add(name)
    try:
        async with running(
            everything, name, resync=RESYNC_SECONDS, disturb=fault.disturb, mangle=fault.mangle
        ) as fleet:
            await life_of_a_fleet(fleet)
            fleet.process.wires.disturb = undisturbed
            await fleet.settled(idle=IDLE_SECONDS)
    except Exception:
        return traceback.format_exc()
    return ""


@pytest.fixture(scope="module")
def lived(cluster: ControlPlane, request: pytest.FixtureRequest) -> Mapping[str, str]:
    """What went wrong under each fault that was asked for: all of them at once, since each waits most of the time."""
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    asked = [name for name in FAULTS if any(item.callspec.params.get("fault") == name for item in items)]

    async def scenario() -> list[str]:
        async with world(cluster.credentials) as everything:
            return await asyncio.gather(*(gone_through(everything, name) for name in asked))

    return dict(zip(asked, asyncio.run(scenario()), strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fleet_lives_through(lived: Mapping[str, str], fault: str) -> None:
    assert not lived[fault], lived[fault]
