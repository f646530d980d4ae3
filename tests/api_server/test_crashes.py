"""Wherever the operator dies, its successor brings the fleet to the same end: at each single call of each scenario.

A call is one that may change something: at the API server, in a router's table, in an engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest

from api_server.control_plane import ControlPlane
from api_server.fleet import Fleet, regular
from api_server.sweep import Scenario, Step, Sweep, sweep

SCENARIOS: dict[str, Scenario] = {}


async def serving(fleet: Fleet) -> None:
    await fleet.apply(regular())
    await fleet.settled(idle=0.5)


def scenario(name: str, *, begin: Step | None = serving, lanes: int = 2) -> Callable[[Step], Step]:
    def register(step: Step) -> Step:
        SCENARIOS[name] = Scenario(step, begin, lanes)
        return step

    return register


async def replaced(fleet: Fleet, index: int, created: int) -> None:
    await fleet.settled(idle=0.0)
    assert fleet.lives(index) == created + 1, f"one failure, one recreation: {fleet.report()}"


@scenario("apply", begin=None)
async def applied(fleet: Fleet) -> None:
    await fleet.apply(regular())
    await fleet.settled(idle=0.0)
    assert len(fleet.created) == 2, "each engine was made once"


@scenario("pair", begin=None)
async def prefill_and_decode(fleet: Fleet) -> None:
    await fleet.apply(regular(1, name="p", role="Prefill"), regular(1, name="d", role="Decode"))
    await fleet.settled(idle=0.0)
    assert len(fleet.created) == 2, "each engine was made once"


@scenario("ranks", begin=None)
async def engine_of_two_pods(fleet: Fleet) -> None:
    group = regular(1)
    group["engine"] |= {"nodes": 2, "tensorParallel": 2}
    await fleet.apply(group)
    await fleet.settled(idle=0.0)
    assert len(fleet.created) == 2, "each pod was made once"


@scenario("deleted")
async def pod_deleted(fleet: Fleet) -> None:
    created = fleet.lives(0)
    await fleet.delete_pod(fleet.live_pod(0))
    await replaced(fleet, 0, created)


@scenario("exited")
async def engine_exits(fleet: Fleet) -> None:
    created = fleet.lives(0)
    await fleet.fail(fleet.live_pod(0), exit_code=137)
    await replaced(fleet, 0, created)


async def on_nodes_of_their_own(fleet: Fleet) -> None:
    fleet.world.node.apart.add(fleet.namespace)
    await serving(fleet)


@scenario("node", begin=on_nodes_of_their_own)
async def node_gone(fleet: Fleet) -> None:
    created, pod = fleet.lives(0), fleet.live_pod(0)
    await fleet.world.node.lose(pod)
    await fleet.delete_pod(pod)
    await replaced(fleet, 0, created)


@scenario("scale", lanes=3)
async def scaled_up_and_down(fleet: Fleet) -> None:
    for replicas in (4, 1, 2):
        await fleet.apply(regular(replicas))
        await fleet.settled(idle=0.0)


IMAGES = (f"engine:{number}" for number in itertools.count(2))


@scenario("image", lanes=4)
async def new_image(fleet: Fleet) -> None:
    created = len(fleet.created)
    await fleet.apply(regular(image=next(IMAGES)))
    await fleet.settled(idle=0.0)
    assert len(fleet.created) == created + 2, "each engine was made anew once"


PATHS = (f"/weights/m{number}" for number in itertools.count(1))


@scenario("update")
async def update_that_one_engine_missed(fleet: Fleet) -> None:
    """It starts while the others are updated, with the old weights, and catches up."""
    created, node = fleet.lives(0), fleet.world.node
    node.holding.add(fleet.namespace)
    await fleet.delete_pod(fleet.live_pod(0))
    await fleet.until(lambda: fleet.lives(0) > created, "the successor is made")
    async with fleet.trainer() as updater:
        await fleet.update_weights(updater, next(PATHS))
        node.release(fleet.namespace, fleet.engine_pods)
        await replaced(fleet, 0, created)


@pytest.fixture(scope="module")
def swept(cluster: ControlPlane, request: pytest.FixtureRequest) -> Mapping[str, Sweep]:
    """Of the scenarios that were asked for."""
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    return sweep(cluster.credentials, {name: scenario for name, scenario in SCENARIOS.items() if name in asked})


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_operator_may_die_at_each_of_its_calls(swept: Mapping[str, Sweep], name: str) -> None:
    result = swept[name]
    print(f"{name}: {result.calls} calls, {result.deaths} deaths")
    assert not result.failures, "\n\n".join(result.failures)
    assert result.deaths > 0
