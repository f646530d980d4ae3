from __future__ import annotations

import asyncio
from pathlib import Path

from unit.agent.world import fleet_on_loopback


def test_a_look_that_finds_nothing_new_keeps_what_was_validated_and_one_that_does_takes_it(tmp_path: Path) -> None:
    async def story() -> None:
        async with fleet_on_loopback(tmp_path) as world:
            await world.fleet.refresh()
            server, groups = world.fleet.server, world.fleet.groups
            await world.fleet.refresh()
            assert world.fleet.server is server
            assert [*map(id, world.fleet.groups)] == [*map(id, groups)]
            world.change_engine(0, phase="Failed")
            await world.fleet.refresh()
            assert world.fleet.server is server
            assert [engine.phase for _, engine in world.fleet.engines()] == ["Failed", "Serving", "Serving"]
            world.change_training(holder="train-2")
            await world.fleet.look()
            assert world.fleet.training.holder == "train-2"

    asyncio.run(story())
