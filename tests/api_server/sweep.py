"""Scenarios, and going through each of them again and again with an operator that dies at another call each time."""

from __future__ import annotations

import asyncio
import itertools
import os
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from api_server.fleet import Fleet, running
from api_server.wire import Moment
from api_server.world import World, world
from rolloutfleet.kube.config import Credentials

IDLE_SECONDS = 1.0
"""An operator that has written nothing for so long has nothing more to write: it looks at everything in that time."""
BEHIND = 3
"""Scenarios in a row that ended before their k-th call, after which no more are tried: the number of calls varies."""
MOMENTS: tuple[Moment, ...] = ("before", "after") if os.environ.get("ROLLOUTFLEET_BOTH_MOMENTS") else ("after",)
"""What the world is before the k-th call it is behind the one before that: one of the two is enough."""

Step = Callable[[Fleet], Awaitable[None]]


@dataclass(frozen=True)
class Scenario:
    step: Step
    """Takes a settled fleet through the scenario, and back to where it can begin again."""
    begin: Step | None
    """Makes the fleet; None: each step is the first of a fleet of its own."""
    lanes: int
    """Fleets beside each other."""


@dataclass
class Sweep:
    """Hands out calls to die at, and gathers what came of it."""

    calls: int = 0
    """That the scenario takes when nobody dies; the fewest: what happens side by side is told at once or twice."""
    deaths: int = 0
    failures: list[str] = field(default_factory=list)
    _taken: int = 0
    _behind: int = 0

    def take(self) -> tuple[int, Moment] | None:
        if self._behind >= BEHIND * len(MOMENTS) or self.failures:
            return None
        self._taken += 1
        if self._taken == 1:
            return 1, "before"
        number, moment = divmod(self._taken - 2, len(MOMENTS))
        return number + 1, MOMENTS[moment]

    async def once(self, fleet: Fleet, scenario: Scenario) -> bool:
        place = self.take()
        if place is None:
            return False
        deaths, wires = fleet.deaths, fleet.process.wires
        wires.count_from_here(die_at=place)
        try:
            await scenario.step(fleet)
            await fleet.settled(idle=IDLE_SECONDS)
        except Exception:
            self.failures.append(f"dying {place[1]} call {place[0]}, {wires.writes[-1:]}: {traceback.format_exc()}")
            return False
        died = fleet.deaths > deaths
        self.deaths += died
        self._behind = 0 if died else self._behind + 1
        if not died:
            self.calls = min(self.calls or len(wires.writes), len(wires.writes))
        return True

    async def lane(self, name: str, scenario: Scenario, everything: World, numbers: itertools.count[int]) -> None:
        more = True
        while more:
            async with running(everything, f"{name}-{next(numbers)}") as fleet:
                if scenario.begin is None:
                    more = await self.once(fleet, scenario)
                    continue
                await scenario.begin(fleet)
                while more:
                    more = await self.once(fleet, scenario)


def sweep(credentials: Credentials, scenarios: Mapping[str, Scenario]) -> dict[str, Sweep]:
    """All of them beside each other: each is waiting most of the time."""
    sweeps = {name: Sweep() for name in scenarios}

    async def run() -> None:
        async with world(credentials) as everything, asyncio.TaskGroup() as group:
            for name, scenario in scenarios.items():
                numbers = itertools.count(1)
                for _ in range(scenario.lanes):
                    group.create_task(sweeps[name].lane(name, scenario, everything, numbers))

    asyncio.run(run())
    return sweeps
