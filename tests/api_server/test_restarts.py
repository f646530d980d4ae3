"""What an operator does that starts among fleets which serve: it looks first, and changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from api_server.control_plane import ControlPlane
from api_server.fleet import regular, running
from api_server.world import world
from rolloutfleet.api.names import GATE_ROUTABLE


def test_a_restart_is_not_noticed_by_a_fleet_that_serves(cluster: ControlPlane) -> None:
    async def scenario() -> None:
        async with world(cluster.credentials) as everything, running(everything, "restart") as fleet:
            await fleet.apply(regular())
            await fleet.settled(idle=1.0)
            noticed: list[Any] = []

            def saw(kind: str, type_of_event: str | None, body: dict[str, Any]) -> None:
                status = body.get("status") or {}
                if kind == "ServerGroup":
                    noticed.extend(engine for engine in status["engines"] if engine["phase"] != "Serving")
                if kind == "Pod":
                    gates = [c for c in status["conditions"] if c["type"] == GATE_ROUTABLE]
                    noticed.extend(gate for gate in gates if gate["status"] != "True")

            with everything.hub.subscribed("restart", saw):
                await fleet.restart()
                await fleet.settled(idle=1.0)
            assert not noticed
            assert len(fleet.created) == 2

    asyncio.run(scenario())


def test_a_restart_in_the_middle_of_a_change_takes_down_no_engine_that_serves(cluster: ControlPlane) -> None:
    async def scenario() -> None:
        async with world(cluster.credentials) as everything, running(everything, "change") as fleet:
            await fleet.apply(regular(4))
            await fleet.settled(idle=0.3)
            everything.node.holding.add("change")
            await fleet.apply(regular(4, image="engine:2"))
            await fleet.until(lambda: len(fleet.created) == 5, "the first engine is made anew")
            await fleet.restart()
            await fleet.until(lambda: fleet.process.looked, "its successor has looked around")
            await asyncio.sleep(1.0)
            assert len(fleet.created) == 5, "one may be missing, and one is"
            everything.node.release("change", fleet.engine_pods)
            await fleet.settled(idle=1.0)

    asyncio.run(scenario())
