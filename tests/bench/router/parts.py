"""The real router and stand-in engines as processes of this machine, each in the state that an experiment needs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ENGINE = Path(__file__).with_name("engine.py")
_spaces = itertools.count(1)
_ports = itertools.count(21000 + os.getpid() % 50 * 200)
"""Below those that the kernel gives to clients, and others than a run beside this one takes: what was free a moment
ago stays so."""


@dataclass
class Engine:
    url: str
    role: str
    process: subprocess.Popen[bytes]
    space: str = ""
    """Its network namespace; empty if it runs in ours."""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def name(self) -> str:
        """As it signs its answers."""
        return self.url.removeprefix("http://")

    def kill(self) -> None:
        """Connections break or are refused."""
        self.process.kill()
        self.process.wait()

    def hang(self) -> None:
        """Connections are accepted, by the kernel, and nothing is answered."""
        self.process.send_signal(signal.SIGSTOP)

    def vanish(self) -> None:
        """Its node is lost: nothing that it or its kernel says arrives any more, not even a refusal."""
        outside = self.url.removeprefix("http://").rpartition(":")[0].rpartition(".")[0] + ".1"
        ip("-n", self.space, "route", "add", "blackhole", f"{outside}/32")

    def end(self, how: str) -> None:
        {"kill": self.kill, "hang": self.hang, "vanish": self.vanish}[how]()


@dataclass(frozen=True)
class Answer:
    at: float
    """Seconds on the rig's clock at which it was asked for."""
    seconds: float
    status: int
    """0: none in time."""
    by: str
    """The engine, or what went wrong."""


@dataclass
class Rig:
    """One router and its engines."""

    router: str
    http: aiohttp.ClientSession
    stack: contextlib.ExitStack
    engines: list[Engine] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def clock(self) -> float:
        return time.monotonic() - self.began

    async def start(self, role: str = "regular", *, apart: bool = False) -> Engine:
        engine = self.stack.enter_context(_engine(role, apart=apart))
        await _until_up(self.http, f"{engine.url}/ping")
        self.engines.append(engine)
        return engine

    async def start_listed(self, role: str = "regular", *, apart: bool = False) -> Engine:
        engine = await self.start(role, apart=apart)
        await self.list_again(engine)
        return engine

    async def list_again(self, engine: Engine) -> None:
        await self.add(engine.url, engine.role, engine.port if engine.role == "prefill" else None)
        await self.until(lambda: self._lists(engine.url))

    async def _lists(self, url: str) -> bool:
        return bool(url in await self.workers())

    async def _lacks(self, url: str) -> bool:
        return url not in await self.workers()

    async def until(self, condition: Callable[[], Awaitable[bool]], *, seconds: float = 120) -> float:
        """Seconds until it held."""
        start = time.monotonic()
        while not await condition():
            if time.monotonic() - start > seconds:
                raise RuntimeError(f"not so after {seconds} s: {condition}")
            await asyncio.sleep(0.01)
        return time.monotonic() - start

    async def workers(self) -> dict[str, dict[str, Any]]:
        """By URL."""
        async with self.http.get(f"{self.router}/workers") as answer:
            return {worker["url"]: worker for worker in (await answer.json())["workers"]}

    async def add(self, url: str, role: str = "regular", bootstrap_port: int | None = None) -> str:
        """Its id; whether it will be listed is another question."""
        body = {"url": url, "worker_type": role} | ({"bootstrap_port": bootstrap_port} if bootstrap_port else {})
        async with self.http.post(f"{self.router}/workers", json=body) as answer:
            return str((await answer.json())["worker_id"])

    async def job(self, uid: str) -> str:
        """What the router says of one worker: listed, gone, or how far its registration is."""
        async with self.http.get(f"{self.router}/workers/{uid}") as answer:
            told = await answer.json()
        if answer.status == 404:
            return "gone"
        job: dict[str, str] | None = told.get("job_status")
        return f"{job['status']}: {job.get('message')}" if job else "listed"

    async def remove(self, url: str) -> tuple[float, float]:
        """(seconds of the DELETE, seconds until the list lacks the worker)."""
        uid = (await self.workers())[url]["id"]
        start = time.monotonic()
        async with self.http.delete(f"{self.router}/workers/{uid}") as answer:
            assert answer.status == 202, await answer.text()
        accepted = time.monotonic() - start
        return accepted, accepted + await self.until(lambda: self._lacks(url))

    async def ask(self, rid: str, *, prompt: int = 0, tokens: int = 5, limit: float = 60) -> Answer:
        """A request for `tokens` milliseconds of generation; equal prompts share their prefix and their routing key."""
        at, start, status, by = self.clock, time.monotonic(), 0, ""
        body = {"rid": rid, "input_ids": [prompt] * 200, "sampling_params": {"max_new_tokens": tokens}}
        headers = {"X-SMG-Routing-Key": str(prompt)}
        try:
            async with (
                asyncio.timeout(limit),
                self.http.post(f"{self.router}/generate", json=body, headers=headers) as answer,
            ):
                text = await answer.text()
                status, by = answer.status, (await answer.json())["text"] if answer.status == 200 else text[:300]
        except (TimeoutError, aiohttp.ClientError) as error:
            by = type(error).__name__
        return Answer(at=at, seconds=time.monotonic() - start, status=status, by=by)


@contextlib.asynccontextmanager
async def rig(*flags: str) -> AsyncIterator[Rig]:
    """A router without workers."""
    with contextlib.ExitStack() as stack:
        port = _free_port()
        command = [os.environ["ROUTER_PYTHON"], "-m", "sglang_router.launch_router"]
        command += ["--host", "127.0.0.1", "--port", str(port), *flags]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(_free_port())]
        stack.enter_context(_process(command))
        connections = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(total=None)) as http:
            made = Rig(f"http://127.0.0.1:{port}", http, stack)
            await _until_up(http, f"{made.router}/health")
            yield made


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    log = os.environ.get("BENCH_LOG", os.devnull)
    with open(log, "ab") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _space() -> Iterator[tuple[str, str]]:
    """(name, address) of a network namespace with a wire to ours. Needs root."""
    number = next(_spaces)
    name, wire, net = f"rf-bench-{number}", f"rf-bench-{number}", f"10.213.{number}"
    for of_a_run_that_was_killed in (["netns", "delete", name], ["link", "delete", wire]):
        subprocess.run(["ip", *of_a_run_that_was_killed], check=False, stderr=subprocess.DEVNULL)
    ip("netns", "add", name)
    try:
        ip("link", "add", wire, "type", "veth", "peer", "name", "inside", "netns", name)
        ip("address", "add", f"{net}.1/30", "dev", wire)
        ip("link", "set", wire, "up")
        ip("-n", name, "address", "add", f"{net}.2/30", "dev", "inside")
        ip("-n", name, "link", "set", "inside", "up")
        yield name, f"{net}.2"
    finally:
        ip("link", "delete", wire)  # the kernel takes its time over a namespace
        ip("netns", "delete", name)


@contextlib.contextmanager
def _engine(role: str, *, apart: bool) -> Iterator[Engine]:
    with contextlib.ExitStack() as stack:
        space, host = stack.enter_context(_space()) if apart else ("", "127.0.0.1")
        port = _free_port()
        command = [sys.executable, str(ENGINE), "--host", host, "--port", str(port), "--role", role]
        if space:
            command = ["ip", "netns", "exec", space, *command]
        yield Engine(f"http://{host}:{port}", role, stack.enter_context(_process(command)), space)


def _free_port() -> int:
    for port in _ports:
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("0.0.0.0", port))
            return port
    raise AssertionError


async def _until_up(http: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.05)
