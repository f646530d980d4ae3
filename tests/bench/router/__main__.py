"""What the real sglang-router does to requests when engines refuse, die, hang or vanish, by its settings.

`make bench-router` (root: engines are cut off in network namespaces; ten minutes). A line each measurement; the last
line is one JSON object. `python -m bench.router TEXT` takes those with TEXT in their names alone. docs/adr/0011 draws
the conclusions.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from bench.router.parts import Engine, Rig, rig
from rolloutfleet.plan.engine_args import ROUTER_DEFAULTS, flag_words

BEFORE = {
    "disable-circuit-breaker": "",
    "health-check-endpoint": "/ping",
    "health-check-interval-secs": "5",
    "health-failure-threshold": "2",
    "health-success-threshold": "1",
    "request-timeout-secs": "14400",
}
SETTINGS = {
    "breaker": {flag: value for flag, value in BEFORE.items() if flag != "disable-circuit-breaker"},
    "before": BEFORE,
    "one try": {**BEFORE, "disable-retries": ""},
    "ten tries": {**ROUTER_DEFAULTS, "retry-max-retries": "10", "retry-initial-backoff-ms": "100"},
    "chosen": dict(ROUTER_DEFAULTS),
}
AT_ONCE = 4
"""Routers under test at a time: more, and the machine is what is measured."""
PATIENCE = 65.0
"""Seconds after which a client counts a request as failed."""

Result = dict[str, Any]
Experiment = Callable[[], Awaitable[Result]]


def router(settings: str, policy: str = "cache_aware", *, pairs: bool = False) -> AbstractAsyncContextManager[Rig]:
    words = flag_words({**SETTINGS[settings], "policy": policy})
    return rig(*words, *(["--pd-disaggregation"] if pairs else []))


async def start_engines(rig: Rig, victim: str = "regular", *, apart: bool = False) -> Engine:
    """Two of each role; the first of the victim's role owns the prefix of prompt 0, since it was there first."""
    other = {"prefill": "decode", "decode": "prefill"}.get(victim, "")
    owner = await rig.start_listed(victim, apart=apart)
    if other:
        await rig.start_listed(other)
    for number in range(5):
        answer = await rig.ask(f"warm-{number}")
        assert answer.status == 200, answer
    await rig.start_listed(victim)
    if other:
        await rig.start_listed(other)
    return owner


async def refused(settings: str, status: int, role: str = "regular") -> Result:
    """Fifty requests that engines answer with an error, ten at a time, then twenty good ones."""
    async with router(settings, pairs=role != "regular") as rig:
        await start_engines(rig, role)
        for ten in range(5):
            await asyncio.gather(*(rig.ask(f"{status}-{ten}{number}") for number in range(10)))
        good = [await rig.ask(f"good-{number}") for number in range(20)]
        return {"failed": sum(answer.status != 200 for answer in good), "of": len(good)}


async def owner_lost(
    settings: str, how: str, *, role: str = "regular", policy: str = "cache_aware", removed_after: float | None = None
) -> Result:
    """A request with the owner's prefix every 50 ms, from the moment at which the owner is lost."""
    async with router(settings, policy, pairs=role != "regular") as rig:
        owner = await start_engines(rig, role, apart=how == "vanish")
        owner.end(how)
        rig.began = time.monotonic()
        asked: list[asyncio.Task[Any]] = []
        removal: asyncio.Task[tuple[float, float]] | None = None
        while rig.clock < 12:
            asked.append(asyncio.create_task(rig.ask(f"r-{len(asked)}", limit=PATIENCE if how == "vanish" else 20)))
            if removed_after is not None and removal is None and rig.clock >= removed_after:
                removal = asyncio.create_task(rig.remove(owner.url))
            await asyncio.sleep(0.05)
        answers = await asyncio.gather(*asked)
        failed = [answer for answer in answers if answer.status != 200]
        result = {"failed": len(failed), "last_failed_at_s": round(max((a.at for a in failed), default=0.0), 1)}
        result["slowest_s"] = round(max((a.seconds for a in answers if a.status == 200), default=0.0), 1)
        return result | ({"removed_in_s": round((await removal)[1], 3)} if removal else {})


async def in_flight(settings: str, *steps: str, role: str = "regular") -> Result:
    """Eight requests of three seconds; after one, the engine that has them is removed, or lost, or both."""
    async with router(settings, pairs=role != "regular") as rig:
        owner = await start_engines(rig, role, apart="vanish" in steps)
        asked = [asyncio.create_task(rig.ask(f"long-{n}", tokens=3000, limit=PATIENCE)) for n in range(8)]
        await asyncio.sleep(1)
        for step in steps:
            if step == "remove":
                await rig.remove(owner.url)
            else:
                owner.end(step)
        answers = await asyncio.gather(*asked)
        failed = sum(answer.status != 200 for answer in answers)
        return {"failed": failed, "of": 8, "slowest_s": round(max(answer.seconds for answer in answers), 1)}


async def poisonous(settings: str) -> Result:
    """One request that ends every engine that begins it."""
    async with router(settings, "random") as rig:
        for _ in range(6):
            await rig.start_listed()
        await rig.ask("die-1")
        await asyncio.sleep(0.5)
        return {"engines_killed": sum(engine.process.poll() is not None for engine in rig.engines), "of": 6}


async def removed_behind(registrations: int) -> Result:
    """A removal while the router registers addresses that refuse."""
    async with router("chosen") as rig:
        engine = await rig.start_listed()
        for port in range(1, registrations + 1):
            await rig.add(f"http://127.0.0.1:{port}")
        await asyncio.sleep(1)
        return {"removed_in_s": round((await rig.remove(engine.url))[1], 2)}


async def registered(how: str) -> Result:
    """How long the router works on a registration that nobody answers."""
    async with router("chosen") as rig:
        engine = await rig.start(apart=how == "vanish")
        engine.end(how)
        uid = await rig.add(engine.url)

        async def failed() -> bool:
            return (await rig.job(uid)).startswith("failed")

        return {"given_up_after_s": round(await rig.until(failed), 1)}


async def under_load() -> Result:
    """Reading the table and removing engines while 64 clients keep four engines busy."""
    async with router("chosen", "round_robin") as rig:
        for _ in range(4):
            await rig.start_listed()
        done = asyncio.Event()

        async def client(number: int) -> list[int]:
            statuses = []
            while not done.is_set():
                statuses.append((await rig.ask(f"l-{number}", prompt=number, tokens=100)).status)
            return statuses

        clients = [asyncio.create_task(client(number)) for number in range(64)]
        reads, removals = [], []
        for _ in range(10):
            start = time.monotonic()
            await rig.workers()
            reads.append(time.monotonic() - start)
            removals.append((await rig.remove(rig.engines[0].url))[1])
            await rig.list_again(rig.engines[0])
        done.set()
        statuses = [status for answers in await asyncio.gather(*clients) for status in answers]
        return {
            "read_ms": round(sorted(reads)[5] * 1000, 1),
            "removed_ms": round(sorted(removals)[5] * 1000, 1),
            "failed": sum(status != 200 for status in statuses),
            "of": len(statuses),
        }


def experiments() -> dict[str, Experiment]:
    found: dict[str, Experiment] = {}
    for settings in ("breaker", "before", "chosen"):
        for status in (400, 422, 500):
            found[f"{settings}: 50 x {status}"] = partial(refused, settings, status)
            found[f"{settings}: 50 x {status}, PD"] = partial(refused, settings, status, "prefill")
    for settings in ("breaker", "before", "one try", "chosen"):
        for after in (None, 1.0):
            when = "not removed" if after is None else f"removed after {after:g} s"
            for role in ("regular", "prefill", "decode"):
                found[f"{settings}: {role} killed, {when}"] = partial(
                    owner_lost, settings, "kill", role=role, removed_after=after
                )
        found[f"{settings}: killed, manual"] = partial(owner_lost, settings, "kill", policy="manual")
        found[f"{settings}: killed with 8 in flight"] = partial(in_flight, settings, "kill")
        found[f"{settings}: poisonous request"] = partial(poisonous, settings)
    for policy in ("round_robin", "random"):
        found[f"chosen: killed, {policy}"] = partial(owner_lost, "chosen", "kill", policy=policy)
    for how in ("hang", "vanish"):
        found[f"chosen: {how}, not removed"] = partial(owner_lost, "chosen", how)
        found[f"chosen: {how}, removed after 1 s"] = partial(owner_lost, "chosen", how, removed_after=1.0)
    found["ten tries: poisonous request"] = partial(poisonous, "ten tries")
    for steps in (("remove",), ("remove", "kill"), ("kill", "remove"), ("hang", "remove", "kill"), ("vanish",)):
        found[f"chosen: 8 in flight, {' + '.join(steps)}"] = partial(in_flight, "chosen", *steps)
    for role in ("prefill", "decode"):
        found[f"chosen: 8 in flight, {role} kill + remove"] = partial(in_flight, "chosen", "kill", "remove", role=role)
    for number in (9, 10, 12):
        found[f"chosen: removal behind {number} stuck registrations"] = partial(removed_behind, number)
    for how in ("kill", "hang", "vanish"):
        found[f"chosen: registration, {how}"] = partial(registered, how)
    return found


async def main(part: str) -> None:
    slots = asyncio.Semaphore(AT_ONCE)
    results: dict[str, Result] = {}

    async def measure(name: str, experiment: Experiment) -> None:
        async with slots:
            results[name] = await experiment()
            print(f"{name:55} {json.dumps(results[name])}", flush=True)

    async with asyncio.TaskGroup() as group:
        for name, experiment in experiments().items():
            if part in name:
                group.create_task(measure(name, experiment))
    if not part:
        await measure("chosen: under load", under_load)
    print(json.dumps(results))


if __name__ == "__main__":
    asyncio.run(main(" ".join(sys.argv[1:])))
