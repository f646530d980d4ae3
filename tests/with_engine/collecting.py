"""A fleet of one real engine behind the real router, with the whole agent beside it, each a process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from rolloutfleet.trainer import Fleet, connect
from rolloutfleet.trainer.collecting import SampleCollection
from rolloutfleet.trainer.errors import AgentUnreachable
from unit.collection.world import free_port
from with_engine.conftest import Server, launch, place

WAIT_SECONDS = 120.0
ROOT = Path(__file__).parents[2]
FLOAT32 = ("--dtype", "float32", "--max-total-tokens", "16384", "--load-snapshot-publish-interval", "1")
"""Of engines whose numbers are compared, and that tell at each step how far they are."""


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"not within {WAIT_SECONDS:g} s: {what}"
        time.sleep(0.01)


@contextlib.contextmanager
def running(arguments: Sequence[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = launch([*arguments], {**os.environ, **environment}, file)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def started(server: Server, runner: asyncio.Runner) -> Iterator[Server]:
    try:
        runner.run(server.start())
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def router(folder: Path, *engines: str) -> Iterator[str]:
    """Its URL, once it sends requests to all of them."""
    port, url = free_port(), ""
    command = [str(place("ROUTER_PYTHON")), "-m", "sglang_router.launch_router", "--policy", "round_robin"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    url = f"http://127.0.0.1:{port}"

    def lists_them() -> bool:
        with contextlib.suppress(httpx.TransportError, ValueError, KeyError):
            workers = httpx.get(f"{url}/workers", timeout=5).json()["workers"]
            return sum(worker.get("is_healthy") is True for worker in workers) == len(engines)
        return False

    with running([*command, "--worker-urls", *engines], folder / "router.log"):
        until(lists_them, "the router lists its engines")
        yield url


Made = tuple[list[int], list[float]]
"""Tokens, and the log-prob of each."""


def directly(engine: str, prompt: Sequence[int], tokens: int, **fields: Any) -> Made:
    """What the engine itself makes greedily of the prompt, asked by no code of ours and computed anew. `fields`: others
    of the request."""
    body = {
        "input_ids": [*prompt],
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
        "extra_key": uuid.uuid4().hex,  # nothing of its prefix is in the cache
        **fields,
    }
    answer = httpx.post(f"{engine}/generate", json=body, timeout=WAIT_SECONDS)
    assert answer.status_code == 200, answer.text
    entries = answer.json()["meta_info"]["output_token_logprobs"]
    return [entry[1] for entry in entries], [entry[0] for entry in entries]


class RealFleet:
    """What a test does with one: through the agent, as a trainer, and with the engine directly."""

    def __init__(self, folder: Path, trainer: Fleet, engine: str) -> None:
        self.folder, self.trainer, self.engine = folder, trainer, engine

    def collect(self, rows: Sequence[dict[str, Any]], **fields: Any) -> SampleCollection:
        """All of `rows` in one step."""
        data = self.folder / "data.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"path": str(data), "shuffle": False, **fields.pop("data", {})}
        asked: dict[str, Any] = {
            "n": 2,
            "groups_per_step": len(rows),
            "epochs": 1,
            "estimator": "raw",
            "mode": "asynchronous",
        }
        store = str(self.folder / "ledger.sqlite")
        return self.trainer.collect(run="run", store=store, data=source, **(asked | fields))

    def until_it_has_made(self, requests: int, tokens: int) -> None:
        """`requests` run in the engine, and since they do it has made `tokens` for them together."""
        until(lambda: self._load("num_running_reqs") == requests, f"{requests} requests run")
        enough = self._load("num_used_tokens") + tokens
        until(lambda: self._load("num_used_tokens") >= enough, f"{requests} requests with {tokens} tokens")

    def until_idle(self) -> None:
        until(lambda: self._load("num_running_reqs") == 0, "no request runs")

    def _load(self, name: str) -> int:
        loads = httpx.get(f"{self.engine}/v1/loads?include=core", timeout=10).json()["loads"]
        return sum(int(load[name]) for load in loads)


@contextlib.contextmanager
def fleet(
    folder: Path, runner: asyncio.Runner, server: Server, router_url: str, *, model: str = "m0", **told: Any
) -> Iterator[RealFleet]:
    """An agent and a store that know nothing of it. `told`: more for stand_ins.agent."""
    models, port = place("MODELS"), free_port()
    file = folder / "fleet.json"
    one = {"pod": "e0", "uid": "u0", "url": server.url}
    described = {
        "port": port,
        "address": "127.0.0.1",
        "model": str(models / model),
        "volume": str(models),
        "checksum": runner.run(server.client.checksum()),
        "router": router_url,
        "engines": [one],
        **told,
    }
    file.write_text(json.dumps(described))
    command = [sys.executable, "-m", "stand_ins.agent", str(file)]
    with running(command, folder / "agent.log", PYTHONPATH=f"{ROOT / 'operator'}:{ROOT / 'tests'}"):
        trainer = connect("actor", url=f"http://127.0.0.1:{port}")
        try:
            until(functools.partial(_leads, trainer), "the agent leads its fleet")
            yield RealFleet(folder, trainer, server.url)
        finally:
            trainer.close()


def _leads(trainer: Fleet) -> bool:
    try:
        return trainer.view().leading
    except AgentUnreachable:
        return False


def close(found: Sequence[float], expected: Sequence[float], tolerance: float) -> None:
    assert len(found) == len(expected)
    worst = max((abs(a - b) for a, b in zip(found, expected, strict=True)), default=0.0)
    assert worst <= tolerance, f"log-probs differ by {worst:g}"
