"""What collecting samples through the agent costs. See README.md.

usage: python -m bench.samples [--only real,instant,kills,store] [--rounds 3] [--requests 384]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from bench.router.parts import _process, _until_up
from bench.scale.costs import cpu_seconds, peak_rss_mib
from bench.telling import say, words
from rolloutfleet.agent.store.address import open_store
from rolloutfleet.agent.store.ledger import GroupUpdate, Ledger, Run
from rolloutfleet.api.samples import Sample, SampleStatus, VersionSpan
from rolloutfleet.plan.concurrency import FIRST_PER_ENGINE
from rolloutfleet.trainer import connect
from servers import CpuEngine
from unit.collection import test_kills
from unit.collection.fast_engine import serve_until_killed
from unit.collection.world import free_port

HERE = Path(__file__).parent
ENGINE_PYTHON = os.environ.get("ENGINE_PYTHON", sys.executable)
FORKS = multiprocessing.get_context("forkserver")
N, TOKENS = 8, 48
RUNNING = 32
"""Requests that each engine runs at once (--max-running-requests): what an engine computes at once decides its speed,
so it must be the same for both."""
CONCURRENCY = 2 * FIRST_PER_ENGINE
"""Open requests of the bare loop: as many as the agent begins with. Enough for both that no engine waits for them."""
REAL_KILLS = 20
BATCH = 16
"""Groups a step."""


def main() -> int:
    arguments = _arguments()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-samples-") as folder:
        work = Path(folder)
        if "store" in arguments.only:
            found["store"] = {tokens: store(work, tokens) for tokens in (100, 8000)}
        if "instant" in arguments.only:
            found["instant"] = {tokens: instant(work, tokens) for tokens in (100, 8000)}
        if {"real", "kills"} & {*arguments.only}:
            with engines_and_router(work) as (engines, router):
                if "real" in arguments.only:
                    found |= real(work, engines, router, arguments)
                if "kills" in arguments.only:
                    found |= kills(work, router)
    found["load"] = round(os.getloadavg()[0], 1)
    print(json.dumps(found))
    return 0


# Real engines


@contextmanager
def engines_and_router(work: Path) -> Iterator[tuple[list[CpuEngine], str]]:
    """Two SGLang servers on the CPU behind the real router."""
    make = [ENGINE_PYTHON, str(HERE.parent / "update/checkpoints.py"), str(work / "models"), "small"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)
    options = ["--max-total-tokens", "16384", "--max-running-requests", str(RUNNING)]
    engines = [CpuEngine(work / "models/m0", name=f"e{n}", logs=work, options=options) for n in range(2)]
    try:
        for engine in engines:
            say(f"engine {engine.name} serves after {engine.wait()} s")
        with ExitStack() as stack:
            port = free_port()
            command = [os.environ["ROUTER_PYTHON"], "-m", "sglang_router.launch_router"]
            command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--worker-urls"]
            command += [*(engine.url for engine in engines), "--prometheus-port", str(free_port())]
            stack.enter_context(_process(command))
            url = f"http://127.0.0.1:{port}"
            asyncio.run(_router_is_up(url, len(engines)))
            yield engines, url
    finally:
        for engine in engines:
            engine.kill()


async def _router_is_up(url: str, engines: int) -> None:
    async with aiohttp.ClientSession() as http, asyncio.timeout(120):
        await _until_up(http, f"{url}/health")
        while True:
            async with http.get(f"{url}/workers") as answer:
                if sum(worker.get("is_healthy", False) for worker in (await answer.json())["workers"]) == engines:
                    return
            await asyncio.sleep(0.2)


def real(work: Path, engines: Sequence[CpuEngine], router: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Bare loops and the agent in turns, with the same prompts, concurrency and router."""
    count = arguments.requests
    seconds: dict[str, list[float]] = {"httpx": [], "aiohttp": [], "agent": []}
    for number in range(arguments.rounds + 1):
        urls = [engine.url for engine in engines]
        now = {
            "httpx": asyncio.run(by_httpx(router, count)),
            "aiohttp": asyncio.run(by_aiohttp(router, count)),
            "agent": collected(work / f"real-{number}", router, urls, count),
        }
        say(f"{count} samples, seconds: {json.dumps({name: round(value, 2) for name, value in now.items()})}")
        if number:  # the first warms up
            for name, value in now.items():
                seconds[name].append(value)

    def ratios(bare: str) -> list[float]:
        return [theirs / ours for theirs, ours in zip(seconds[bare], seconds["agent"], strict=True)]

    rates = {name: count / statistics.median(values) for name, values in seconds.items()}
    return {
        "real_engine_ratio": round(statistics.median(ratios("httpx")), 3),
        "real_engine_ratios": [round(ratio, 3) for ratio in ratios("httpx")],
        "aiohttp_ratio": round(statistics.median(ratios("aiohttp")), 3),
        "aiohttp_ratios": [round(ratio, 3) for ratio in ratios("aiohttp")],
        "samples_per_s": {name: round(rate, 2) for name, rate in rates.items()},
        "tokens_per_s": {name: round(rate * TOKENS, 1) for name, rate in rates.items()},
    }


async def by_httpx(router: str, count: int) -> float:
    """Seconds for `count` samples."""
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    async with httpx.AsyncClient(limits=limits, timeout=600, trust_env=False) as http:

        async def post(body: dict[str, Any]) -> Any:
            return (await http.post(f"{router}/generate", json=body)).json()

        return await bare(post, count)


async def by_aiohttp(router: str, count: int) -> float:
    """The same with the client library of the agent: what is left is what the agent itself costs."""
    limits = aiohttp.TCPConnector(limit=CONCURRENCY)
    async with aiohttp.ClientSession(connector=limits, timeout=aiohttp.ClientTimeout(600)) as http:

        async def post(body: dict[str, Any]) -> Any:
            async with http.post(f"{router}/generate", json=body) as answer:
                return await answer.json()

        return await bare(post, count)


async def bare(post: Callable[[dict[str, Any]], Awaitable[Any]], count: int) -> float:
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(number: int) -> None:
        body = {
            "input_ids": prompt(number // N),
            "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True},
            "return_logprob": True,
        }
        async with places:
            answer = await post(body)
        assert len(answer["meta_info"]["output_token_logprobs"]) == TOKENS

    started = time.monotonic()
    await asyncio.gather(*map(one, range(count)))
    return time.monotonic() - started


def prompt(number: int) -> list[int]:
    return [(7 * number + k) % 500 + 1 for k in range(8)]


def collected(folder: Path, router: str, engines: Sequence[str], count: int) -> float:
    """Seconds from the request for the one batch of `count` samples to its last byte."""
    with running_agent(folder, router, engines) as (url, _):
        data = folder / "data.jsonl"
        data.write_text("".join(json.dumps({"prompt": prompt(number)}) + "\n" for number in range(count // N)))
        fleet = connect("actor", url=url)
        run = fleet.collect(
            run="bench",
            store=str(folder / "ledger.sqlite"),
            data={"path": str(data), "shuffle": False},
            epochs=1,
            n=N,
            groups_per_step=count // N,
            estimator="raw",
            sampling_params={"max_new_tokens": TOKENS, "ignore_eos": True},
        )
        started = time.monotonic()
        batch = run.batch(1)
        seconds = time.monotonic() - started
        assert [len(sample.rollout_log_probs) for sample in batch.samples] == [TOKENS] * count
        fleet.close()
        return seconds


# An engine that answers at once


def instant(work: Path, tokens: int) -> dict[str, Any]:
    """Asynchronous collection as fast as it goes, for some seconds: what one agent carries."""
    folder = work / f"instant-{tokens}"
    seconds = 15.0
    engine = FORKS.Process(target=serve_until_killed, args=(tokens, folder / "engine.url"), daemon=True)
    folder.mkdir()
    engine.start()
    try:
        while not (folder / "engine.url").exists():
            assert engine.is_alive()
            time.sleep(0.05)
        at = (folder / "engine.url").read_text()
        with running_agent(folder, at, [at]) as (url, process):
            data = folder / "data.jsonl"
            data.write_text("".join(json.dumps({"prompt": prompt(number)}) + "\n" for number in range(1000)))
            fleet = connect("actor", url=url)
            run = fleet.collect(
                run="bench",
                store=str(folder / "ledger.sqlite"),
                data={"path": str(data)},
                n=N,
                groups_per_step=BATCH,
                ahead=4,
                mode="asynchronous",
                estimator="raw",
                sampling_params={"max_new_tokens": tokens},
            )
            run.batch(1)
            started, cpu, samples, step = time.monotonic(), cpu_seconds(process), 0, 1
            while time.monotonic() - started < seconds:
                step += 1
                samples += len(run.batch(step).samples)
                if step % 8 == 0:
                    run.acknowledge(step)
            passed, used = time.monotonic() - started, cpu_seconds(process) - cpu
            peak = peak_rss_mib(process)
            fleet.close()
    finally:
        engine.kill()
        engine.join()
    result = {
        "samples_per_s": round(samples / passed, 1),
        "tokens_per_s": round(samples * tokens / passed),
        "cpu_seconds_per_1000_samples": round(1000 * used / samples, 2),
        "rss_mib": round(peak),
    }
    say(f"{tokens} tokens, instant engine: {json.dumps(result)}")
    return result


@contextmanager
def running_agent(folder: Path, router: str, engines: Sequence[str]) -> Iterator[tuple[str, int]]:
    folder.mkdir(exist_ok=True)
    port = free_port()
    test_kills.write_fleet(folder, port=port, router=router, engines=engines)
    process = FORKS.Process(target=test_kills.live, args=(folder / "fleet.json",))
    process.start()
    try:
        yield f"http://127.0.0.1:{port}", int(process.pid or 0)
    finally:
        process.kill()
        process.join()


# The store alone, and kills


def store(work: Path, tokens: int) -> dict[str, float]:
    """The ledger's part: claim and save groups, as many in a transaction as come together."""
    groups = 400 if tokens < 1000 else 60
    run = Run("store", source="x", epoch_size=groups)
    database = open_store(str(work / f"store-{tokens}.sqlite"))
    ledger = Ledger(database, run, agent="agent")
    samples = [
        Sample(
            index=index,
            prompt_tokens=prompt(index),
            response_tokens=list(range(tokens)),
            rollout_log_probs=[-0.5] * tokens,
            weight_versions=[VersionSpan(version=0, start=0, end=tokens)],
            status=SampleStatus.TRUNCATED,
        )
        for index in range(N)
    ]
    started, cpu = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(groups // BATCH):
        claims = ledger.claim(BATCH)
        ledger.save([GroupUpdate(claim, samples, "finished") for claim in claims])
    count = groups // BATCH * BATCH * N
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
    database.close()
    return {
        "samples_per_s": round(count / (time.monotonic() - started), 1),
        "cpu_seconds_per_1000_samples": round(1000 * used / count, 3),
    }


def kills(work: Path, router: str) -> dict[str, Any]:
    """The agent's process killed while real engines generate for it; the test of it says whether anything was lost."""
    killed = runs = 0
    while killed < REAL_KILLS:
        runs += 1
        try:
            killed += test_kills.one_run(work / f"kills-{runs}", router, runs, prompts=16, longest_life_seconds=2.0)
        except test_kills.NotOnce as wrong:
            return {"kills": killed, "lost": wrong.lost, "doubled": wrong.doubled}
        say(f"{killed} kills")
    return {"kills": killed, "lost": 0, "doubled": 0}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.samples")
    everything = ["store", "instant", "real", "kills"]
    parser.add_argument("--only", type=words, default=everything)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=384)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
