"""Who dies in an update, at each call: an engine, the agent, the trainer, by each transport.

What must hold then, whoever it was: an engine that generates has the committed weights, what the agent leaves behind is
enough for the operator to let all of them generate, and the next update reaches everybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from rolloutfleet.api.agent import EngineTensors, GroupAt, JoinGroups, SendBucket, SenderDone, SendTensors, UpdateResult
from rolloutfleet.api.rollout_server import RolloutServer, WeightsPhase
from rolloutfleet.engine.http import Answer, Http
from rolloutfleet.plan.observed import Fleet, LeaseView
from rolloutfleet.plan.training import Training, training_of
from unit.agent.copies import write_deltas
from unit.agent.machine import Died, MortalCluster, Process
from unit.agent.test_sessions import WEIGHT, begin, over
from unit.agent.test_updates import outcomes
from unit.agent.world import Engine, World, fleet_on_loopback, play, signed, wanted

BEFORE = ("pause_generation", "flush_cache")
SESSION = ("end_weight_update", "update_weight_version")
AFTER = ("weights_checker", "model_info", "continue_generation")
CALLS = {
    "disk": ("model_info", *BEFORE, "update_weights_from_disk", *AFTER),
    "delta": ("v1/copies", "model_info", *BEFORE, "update_weights_from_disk", *AFTER),
    "distributed": (
        "model_info",
        "init_weights_update_group",
        *BEFORE,
        "begin_weight_update",
        *("update_weights_from_distributed",) * 2,
        *SESSION,
        *AFTER,
    ),
    "tensor": ("model_info", *BEFORE, "begin_weight_update", *("update_weights_from_tensor",) * 2, *SESSION, *AFTER),
}
"""What each engine is asked in an update in which nobody dies; the last two looks come at once."""
MOMENTS = [(transport, moment) for transport, calls in CALLS.items() for moment in range(len(calls))]
NAMED = [f"{transport}-{moment}-{CALLS[transport][moment].replace('/', '-')}" for transport, moment in MOMENTS]


class Trainer:
    """A trainer's process, in one update."""

    def __init__(self, world: World, transport: str, *, name: str = "update00") -> None:
        self.finishing = False
        """It has sent everything, and asks for the commit."""
        self._world = world
        self._transport = transport
        self._name = name
        self._held: asyncio.Task[Any] | None = None

    async def update(self) -> UpdateResult:
        if self._transport == "disk":
            return await self._world.updater.update(wanted(self._world))
        if self._transport == "delta":
            return await self._world.updater.update(wanted(self._world, "v000002"))
        session, told, self._held = await begin(self._world, id=self._name, transport=self._transport)
        if self._transport == "distributed":
            await session.join_groups(
                JoinGroups(groups=[GroupAt(uid=engine.uid, port=20000) for engine in told.engines])
            )
        for number in range(2):
            if self._transport == "distributed":
                await session.send_bucket(SendBucket(number=number, tensors=[WEIGHT]))
            else:
                engines = [EngineTensors(uid=engine.uid, payloads=["cA=="]) for engine in told.engines]
                await session.send_tensors(SendTensors(tensors=[WEIGHT], engines=engines))
        self.finishing = True
        return await session.finish(SenderDone(bytes=24))

    async def hang_up(self) -> None:
        """Also of no use to a trainer whose agent has died."""
        if self._held is not None:
            self._held.cancel()
            await asyncio.wait({self._held})


def prepare(world: World, transport: str) -> None:
    if transport == "delta":
        world.keep_copies()
        write_deltas(world)
        for engine in world.engines:
            engine.delta = True


# What must hold


def as_the_operator_sees_it(world: World) -> Training:
    """When the agent's Lease has run out."""
    server = RolloutServer.model_validate(world.cluster.seen("rolloutservers", "qwen"))
    fence = int(world.cluster.seen("leases", "qwen-trainer")["spec"].get("leaseTransitions", 0))
    now = datetime.now(UTC)
    lease = LeaseView(holder="train", fence=fence, expires_at=now - timedelta(seconds=1))
    return training_of(Fleet(server=server, lease=lease), now)


def is_committed(training: Training, engine: Engine) -> bool:
    """It holds the weights that it says it does, and these are the fleet's."""
    known = training.checksums.get(("qwen-main", "r1"), "sum-of-m0")
    return training.claimed_by(engine.label) and engine.checksum == known


def check(world: World) -> None:
    training = as_the_operator_sees_it(world)
    assert not training.held, "the operator's hands are free"
    for engine in world.engines:
        if not engine.paused and not engine.dead:
            assert is_committed(training, engine), f"{engine.pod} generates with {engine.label} {engine.checksum}"


def restore(world: World) -> None:
    """As the operator does it when nobody holds the fleet: what is right goes on, what is not is loaded anew, the dead
    have another life."""
    training = as_the_operator_sees_it(world)
    for index, engine in enumerate(world.engines):
        if engine.dead:
            engine.dead, engine.answers, engine.updating, engine.groups = False, None, False, set()
            engine.uid += "-new"
            world.change_engine(index, podUid=engine.uid)
            # A stand-in's checksum tells all that it was ever sent; a real one is the same for the same tensors.
            engine.label, engine.checksum = "default", world.engines[0].checksum
        if not is_committed(training, engine) and training.path:
            engine.label, engine.checksum = signed(training.version), f"sum-of-{Path(training.path).name}"
        engine.paused = not is_committed(training, engine)
        waits = {"phase": "Stale", "reason": "AwaitingUpdate"} if engine.paused else {"phase": "Serving", "reason": ""}
        world.change_engine(index, **waits)


async def serves_again(world: World, transport: str) -> None:
    restore(world)
    before = as_the_operator_sees_it(world).version
    result = await Trainer(world, transport, name="update01").update()
    assert result.version == before + 1
    assert outcomes(world) == ["Committed"] * len(world.engines)
    assert not any(engine.paused or engine.updating for engine in world.engines)
    check(world)


@pytest.mark.parametrize("transport", CALLS)
def test_these_are_the_calls_of_an_update(tmp_path: Path, transport: str) -> None:
    """So that whoever adds one adds the moment at which somebody dies at it."""

    async def story(world: World) -> None:
        prepare(world, transport)
        await Trainer(world, transport).update()
        for engine in world.engines:
            assert sorted(engine.asked) == sorted(CALLS[transport])

    play(tmp_path, story)


# Who dies


@pytest.mark.parametrize(("transport", "moment"), MOMENTS, ids=NAMED)
def test_an_engine_dies_and_the_others_serve_the_new_version(tmp_path: Path, transport: str, moment: int) -> None:
    async def story(world: World) -> None:
        prepare(world, transport)
        world.engines[1].answers = moment
        result = await Trainer(world, transport).update()
        assert world.engines[1].dead
        assert (result.version, result.committed) == (1, True)
        proved = CALLS[transport][moment] == "continue_generation"
        assert outcomes(world) == ["Committed", "Committed" if proved else "Unreachable", "Committed"]
        assert [(engine.label, engine.paused) for engine in world.engines[::2]] == [(signed(1), False)] * 2
        check(world)
        await serves_again(world, transport)

    play(tmp_path, story)


@pytest.mark.parametrize(("transport", "moment"), MOMENTS, ids=NAMED)
def test_the_trainer_dies_and_one_version_serves(tmp_path: Path, transport: str, moment: int) -> None:
    async def story(world: World) -> None:
        prepare(world, transport)
        trainer = Trainer(world, transport)
        updating = asyncio.ensure_future(trainer.update())
        watched = world.engines[0]
        dead = asyncio.Event()

        async def die() -> None:
            if len(watched.asked) == moment + 1:
                updating.cancel()
                await trainer.hang_up()
                dead.set()

        watched.before = {path: die for path in CALLS[transport]}
        await dead.wait()
        await asyncio.wait({updating})
        await over(world)
        weights = world.training.weights
        assert weights is not None
        assert weights.phase is WeightsPhase.COMMITTED
        # Engines read a checkpoint without the trainer.
        goes_on = transport in ("disk", "delta") or trainer.finishing
        assert weights.version == (1 if goes_on else 0)
        assert not any(engine.updating for engine in world.engines)
        if goes_on:
            assert outcomes(world) == ["Committed"] * 3
            assert not any(engine.paused for engine in world.engines)
        check(world)
        watched.before = {}
        await serves_again(world, transport)

    play(tmp_path, story)


@pytest.mark.parametrize("transport", CALLS)
def test_the_agent_dies_and_one_version_serves(tmp_path: Path, transport: str) -> None:
    """Before and after each of its calls to engines, workers and the API server."""

    async def story(folder: Path, dies_at: int) -> bool:
        asyncio.get_running_loop().set_exception_handler(_not_of_the_dead)
        async with fleet_on_loopback(folder, engines=2) as world:
            prepare(world, transport)
            process = Process(dies_at)
            await restart(world, process)
            process.dies_at = dies_at
            trainer = Trainer(world, transport)
            await asyncio.wait({asyncio.ensure_future(_until_it_dies(trainer.update()))})
            died = process.dead
            await trainer.hang_up()
            await over(world)
            await process.idle.wait()
            check(world)
            await restart(world, Process())
            await serves_again(world, transport)
            return died

    moment = 0
    while True:
        folder = tmp_path / str(moment)
        folder.mkdir()
        if not asyncio.run(story(folder, moment)):
            break
        moment += 1
    assert moment > 2 * 2 * len(CALLS[transport]), "each call to each engine, before and after"


def _not_of_the_dead(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Nobody asks what has become of the tasks of a process that has died."""
    if not isinstance(context.get("exception"), Died):
        loop.default_exception_handler(context)


async def _until_it_dies(update: Awaitable[Any]) -> None:
    try:
        await update
    except (Died, Exception):
        return


async def restart(world: World, process: Process) -> None:
    async def send(
        method: str, url: URL, body: Any, timeout: aiohttp.ClientTimeout, headers: dict[str, str] | None
    ) -> Answer:
        answer: Answer = await process.call(
            world.http.ask(method, str(url), body=body, timeout=timeout, headers=headers)
        )
        return answer

    world.restart_agent(api=MortalCluster(world.cluster, process), http=Http(max_connections=1, send=send))
    dies_at, process.dies_at = process.dies_at, None
    await world.leadership.lease.acquire()
    process.dies_at = dies_at
