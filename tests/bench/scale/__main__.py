"""`make bench-scale`: the operator at scale. The last line of stdout is one JSON object; what happens goes to stderr.

See README.md of this folder for what is measured and how.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.scale import stand_in
from bench.scale.control_plane import NAMESPACE, STATE, ControlPlane
from bench.scale.costs import AuditLog, cpu_seconds, peak_rss_mib, quantiles
from bench.scale.subjects import READY_SECONDS, SETTLE_SECONDS, LeaderWorkerSet, Least, Rolloutfleet, Subject, stop
from bench.scale.watcher import Watcher, until
from rolloutfleet.kube import client as kube

FAKE_SECONDS = 1.0
"""From bound to running, by kwok."""
IN_FLIGHT = 32
WARM_UP_ENGINES = 6
WARM_UP_SECONDS = 60.0
KILL_PAUSE_SECONDS = 0.5


@dataclass(frozen=True)
class Scenario:
    name: str
    fleets: int
    engines: int
    per_second: float | None
    """None: all at once."""
    idle: bool = False


SCENARIOS = (
    Scenario("paced_100", fleets=100, engines=6, per_second=5, idle=True),
    Scenario("burst_100", fleets=100, engines=6, per_second=None),
    Scenario("fleets_1000", fleets=1000, engines=2, per_second=None),
    Scenario("engines_1000", fleets=1, engines=1000, per_second=None),
)


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f}s] {text}", file=sys.stderr, flush=True)


STARTED = time.monotonic()


class Bench:
    def __init__(self, arguments: argparse.Namespace, plane: ControlPlane, api: kube.KubeApi) -> None:
        self._arguments = arguments
        self._plane = plane
        self._api = api
        self._pods = stand_in.Pods()
        self._watcher = Watcher(api, pods_too=self._pods.saw)
        self._random = random.Random(5)

    async def run(self) -> dict[str, Any]:
        """Our figures, and those of other subjects under their names, each scenario right after ours."""
        subjects: list[Subject] = [Rolloutfleet(self._plane)]
        if self._arguments.least:
            subjects.append(Least(self._plane, self._api, self._watcher))
        if self._arguments.lws:
            subjects.append(LeaderWorkerSet(self._plane, self._arguments.lws))
        for subject in subjects:
            subject.install()
        await self._plane.complete(self._api, {kind for subject in subjects for kind in subject.kinds})
        server = await stand_in.serve(self._pods)
        results: dict[str, dict[str, Any]] = {subject.name: {} for subject in subjects}
        for scenario in SCENARIOS:
            if self._arguments.only in (None, scenario.name):
                for subject in subjects:
                    async with self._watcher.watching(subject):
                        results[subject.name] |= await self._measure(subject, self._sized(scenario))
        server.close()
        return results.pop(Rolloutfleet.name) | results

    def _sized(self, scenario: Scenario) -> Scenario:
        asked = self._arguments
        return Scenario(
            scenario.name,
            fleets=asked.fleets or scenario.fleets,
            engines=asked.engines or scenario.engines,
            per_second=scenario.per_second,
            idle=scenario.idle,
        )

    async def _measure(self, subject: Subject, scenario: Scenario) -> dict[str, Any]:
        shape = f"{scenario.fleets} fleets of {scenario.engines} engines"
        say(f"{subject.name}, {scenario.name}: {shape}; load {os.getloadavg()[0]:.1f} before")
        self._subject = subject
        operator = await subject.start(scenario.engines)
        await self._warm_up(min(scenario.engines, WARM_UP_ENGINES))
        beside = self._beside(operator.pid)
        names = [f"f{index:04}" for index in range(scenario.fleets)]
        self._watcher.started_after.clear()
        audit, before = self._audit(), self._cpu_by_process()
        posted = await self._create(names, scenario)
        await until(lambda: len(self._watcher.whole) == len(names), READY_SECONDS, "every fleet whole")
        beyond = [self._watcher.whole[name] - posted[name] - FAKE_SECONDS for name in names]
        say(f"  from bound to running: {quantiles(self._watcher.started_after)}")
        await until(self._watcher.all_ready, 60, "every pod Ready, gates and all")
        await asyncio.sleep(SETTLE_SECONDS)
        spent = {name: round(cpu - before[name], 2) for name, cpu in self._cpu_by_process().items()}
        writes = audit.read()
        say(f"  writes of the operator: {dict(writes.operator.most_common())}; reads: {dict(writes.reads)}")
        say(f"  writes of others: {dict(writes.others.most_common(8))}")
        figures: dict[str, Any] = {"apply_to_ready_beyond_fake_s": quantiles(beyond)}
        say(f"  {figures}; cpu {spent}; {writes.operator.total() / len(names):.1f} writes a fleet")
        if beside is not None:
            beside.wait()
        extra = {"idle_writes_per_minute": await self._idle()} if scenario.idle else {}
        replacements = await self._replace(names) if subject.repairs else []
        figures |= {
            "delete_all_s": await self._delete(names),
            "replacement_created_s": quantiles(replacements),
            "cpu_ms_per_fleet": round(1000 * sum(spent.values()) / len(names)),
            "cpu_seconds": spent["operator"],
            "cpu_seconds_by_process": spent,
            "peak_rss_mib": peak_rss_mib(operator.pid),
            "writes_per_fleet": round(writes.operator.total() / len(names), 2),
        }
        await stop(operator)
        say(f"  {json.dumps(figures)}")
        return {scenario.name: figures} | extra

    def _cpu_by_process(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in {**self._plane.pids, "harness": os.getpid()}.items()}

    def _audit(self) -> AuditLog:
        return AuditLog(self._subject.account.user, self._subject.account.namespace)

    async def _warm_up(self, engines: int) -> None:
        """One fleet before those that count: connections are open, modules are imported."""
        await self._api.create(self._subject.fleet, self._subject.manifest("warm-up", engines))
        await until(lambda: "warm-up" in self._watcher.whole, WARM_UP_SECONDS, "the first fleet whole")
        await self._delete(["warm-up"])

    def _beside(self, pid: int) -> subprocess.Popen[bytes] | None:
        """A profiler, say."""
        command = self._arguments.beside
        return subprocess.Popen(shlex.split(command.format(pid=pid)), stdout=sys.stderr) if command else None

    async def _create(self, names: list[str], scenario: Scenario) -> dict[str, float]:
        posted: dict[str, float] = {}
        slots = asyncio.Semaphore(IN_FLIGHT)

        async def post(name: str) -> None:
            async with slots:
                posted[name] = time.monotonic()
                await self._api.create(self._subject.fleet, self._subject.manifest(name, scenario.engines))

        start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for index, name in enumerate(names):
                if scenario.per_second:
                    await asyncio.sleep(max(0.0, start + index / scenario.per_second - time.monotonic()))
                group.create_task(post(name))
        return posted

    async def _idle(self) -> float:
        seconds: float = self._arguments.idle
        audit, before = self._audit(), self._cpu_by_process()
        await asyncio.sleep(seconds)
        writes = audit.read()
        shares = {name: f"{(cpu - before[name]) / seconds:.1%}" for name, cpu in self._cpu_by_process().items()}
        say(f"  idle for {seconds:.0f} s: writes {dict(writes.operator)}; of a core: {shares}")
        return round(writes.operator.total() * 60 / seconds, 1)

    async def _replace(self, names: list[str]) -> list[float]:
        """Delete engines' pods at once (grace 0), one after the other; seconds until the watch shows the next one."""
        seconds: list[float] = []
        for kill in range(self._arguments.kills):
            name = names[kill % len(names)]
            engines = [pod for pod in self._watcher.pods[name].values() if pod["engine"] and not pod["going"]]
            before = len(self._watcher.made[name])
            start = time.monotonic()
            victim = self._random.choice(engines)["name"]
            await self._api.delete(kube.POD, victim, namespace=NAMESPACE, grace_seconds=0)
            await until(lambda: len(self._watcher.made[name]) > before, 30, f"a replacement of {victim}")  # noqa: B023
            seconds.append(self._watcher.made[name][before][0] - start)
            await asyncio.sleep(KILL_PAUSE_SECONDS)
        await until(lambda: len(self._watcher.whole) == len(names), 60, "every fleet whole again")
        await asyncio.sleep(1)
        extra = {name: len(self._watcher.made[name]) for name in names}
        made, wanted = sum(extra.values()), sum(len(self._engines(name)) for name in names) + self._arguments.kills
        say(f"  replacements {quantiles(seconds)}, the slowest {max(seconds):.3f} s; {made} pods made, {wanted} wanted")
        return seconds

    def _engines(self, name: str) -> list[dict[str, Any]]:
        return [pod for pod in self._watcher.pods[name].values() if pod["engine"]]

    async def _delete(self, names: list[str]) -> float:
        slots = asyncio.Semaphore(IN_FLIGHT)

        async def delete(name: str) -> None:
            async with slots:
                await self._api.delete(self._subject.fleet, name, namespace=NAMESPACE)

        audit, start = self._audit(), time.monotonic()
        await asyncio.gather(*(delete(name) for name in names))
        await until(self._watcher.empty, 300, "every fleet and pod gone")
        seconds = time.monotonic() - start
        if len(names) > 1:
            say(f"  deleted in {seconds:.1f} s; operator {dict(audit.read().operator)}")
        self._watcher.made.clear()
        return round(seconds, 2)


async def main(arguments: argparse.Namespace) -> None:
    plane = ControlPlane(arguments.limits)
    try:
        api = await plane.start()
        say(f"control plane up, limits {arguments.limits}")
        result = await Bench(arguments, plane, api).run()
        await api.close()
    except BaseException:
        for name in ("operator", "apiserver"):
            log = STATE / "logs" / f"{name}.log"
            if log.exists():
                say(f"{name}: ..." + log.read_text(errors="replace")[-3000:])
        raise
    finally:
        if arguments.logs:
            shutil.copytree(STATE / "logs", arguments.logs, dirs_exist_ok=True)
    print(json.dumps(result))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-scale", description=__doc__)
    parser.add_argument("--only", choices=[scenario.name for scenario in SCENARIOS], help="one scenario")
    parser.add_argument("--fleets", type=int, help="in place of the scenario's number")
    parser.add_argument("--engines", type=int, help="of a fleet, in place of the scenario's number")
    parser.add_argument("--idle", type=float, default=60, help="seconds of watching an idle operator")
    parser.add_argument("--kills", type=int, default=20, help="pods deleted in each scenario")
    parser.add_argument(
        "--limits", choices=("raised", "stock"), default="raised", help="of controller manager, scheduler"
    )
    parser.add_argument("--logs", type=Path, help="a folder to copy the logs to")
    parser.add_argument("--least", action="store_true", help="measure what makes our objects and no more, too")
    parser.add_argument("--lws", type=Path, help="a checkout of kubernetes-sigs/lws: measure that too")
    parser.add_argument("--beside", help="a command to run while fleets are created; {pid} is the operator's")
    return parser.parse_args()


if __name__ == "__main__":
    for asked_to_end in (signal.SIGINT, signal.SIGTERM):
        # PID 1 has no default handlers, and a shell starts what runs beside it with SIGINT ignored. With us the kernel
        # ends the whole namespace: nothing is left to be tidied up.
        signal.signal(asked_to_end, lambda number, _: os._exit(128 + number))
    asyncio.run(main(parsed()))
