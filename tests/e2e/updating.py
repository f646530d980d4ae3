"""Updates of a fleet of two real engines, that stop at a known moment: so that a fault happens with some tensors in the
engines and others not, in the pause, or before the commit.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from e2e import faults
from e2e.fleets import (
    START_SECONDS,
    Trainer,
    await_routable,
    engines,
    label_for,
    label_of,
    paused,
    rollout_server,
)
from e2e.load import PROMPTS
from e2e.support import Kubectl, eventually

SERVER = "upd"
GREEDY = (
    f"[[s['response_tokens'] for s in g.model_dump()['samples']] for g in fleet.generate({PROMPTS}, temperature=0.0, \
max_new_tokens=12, ignore_eos=True, timeout=120)]"
)
TENSORS = """
from safetensors.torch import load_file
state = load_file('/models/{model}/model.safetensors')
"""
STOPPING = """
import pathlib, time
def stopping():
    for number, (name, tensor) in enumerate(state.items()):
        if number == 3:
            pathlib.Path('/tmp/stopped').touch()
            while not pathlib.Path('/tmp/go').exists():
                time.sleep(0.02)
        yield name, tensor
"""


SENDER = b"update_weights"
"""Of the trainer's process that updates, in the lines that it runs."""


def send(model: str, **options: Any) -> tuple[str, str]:
    """(set-up, expression) that send a model's tensors."""
    words = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return TENSORS.format(model=model), f"fleet.update_weights(state, timeout=120, {words})"


def send_stopping(model: str, source: str) -> tuple[str, str]:
    call = f"fleet.update_weights(stopping(), bucket_bytes=1, timeout=120, source={source!r})"
    return TENSORS.format(model=model) + STOPPING, call


def labels(space: Kubectl) -> set[str]:
    return {label_of(space, engine["pod"]) for engine in engines(space, f"{SERVER}-main")}


class Stopped:
    """An update of the trainer that waits after its first tensors."""

    def __init__(
        self, space: Kubectl, trainer: Trainer, pool: ThreadPoolExecutor, model: str, *, source: str = ""
    ) -> None:
        self._space = space
        self._pod = trainer_uid(space)
        self._in_trainer("rm", "-f", "/tmp/stopped", "/tmp/go")
        before, expression = send_stopping(model, source)
        self.result: Future[Any] = pool.submit(trainer, expression, before=before)
        eventually(self._waits, 60, "the trainer has sent its first tensors")

    def _waits(self) -> bool:
        if self.result.done():
            self.result.result()
        self._in_trainer("ls", "/tmp/stopped")
        return True

    def _in_trainer(self, *command: str) -> None:
        self._space("exec", "trainer", "--container=trainer", "--", *command)

    def go_on(self) -> None:
        """Needs no API server."""
        faults.touch(self._pod, "/tmp/go", part=SENDER)


def trainer_uid(space: Kubectl) -> str:
    return str(space.json("get", "pod", "trainer")["metadata"]["uid"])


@contextmanager
def between_buckets(space: Kubectl, trainer: Trainer, pool: ThreadPoolExecutor, model: str) -> Iterator[Future[Any]]:
    """An update by broadcast of which engines have the first tensors, and that goes on after the block."""
    update = Stopped(space, trainer, pool, model, source=f"/weights/{model}")
    yield update.result
    update.go_on()


@contextmanager
def in_pause(space: Kubectl, trainer: Trainer, pool: ThreadPoolExecutor, model: str) -> Iterator[Future[Any]]:
    """An update from disk that waits for the second engine, whose scheduler has stopped, to flush its cache in the
    pause."""
    waited_for = engines(space, f"{SERVER}-main")[1]
    with faults.stopped(faults.processes(waited_for["podUid"], part=faults.SCHEDULER_PROCESS)):
        update = pool.submit(trainer, f"fleet.update_weights('/weights/{model}', timeout=120)")
        eventually(lambda: asked(waited_for, "/ready").status_code == 503, 60, "it has been asked to pause")
        yield update


@contextmanager
def before_commit(space: Kubectl, trainer: Trainer, pool: ThreadPoolExecutor, model: str) -> Iterator[Future[Any]]:
    """An update by broadcast that every engine has taken, and that cannot be recorded: the API server has stopped."""
    label = label_for(space, SERVER, trainer("fleet.weight_version") + 1)
    found = engines(space, f"{SERVER}-main")
    update = Stopped(space, trainer, pool, model, source=f"/weights/{model}")
    with faults.without_api_server():
        update.go_on()
        for engine in found:
            eventually(
                lambda engine=engine: asked(engine, "/model_info").json()["weight_version"],  # type: ignore[misc]
                60,
                f"{engine['pod']} has taken all tensors",
                accept=lambda seen: seen == label,
            )
        yield update.result


@dataclass(frozen=True)
class Killed:
    """An update to m1 in the middle of which somebody was killed."""

    version: int
    """Of m0, which was served before."""
    engine: str
    """Pod of the second one."""
    update: Future[Any]


def kill(
    space: Kubectl,
    trainer: Trainer,
    part: bytes,
    moment: Callable[[Kubectl, Trainer, ThreadPoolExecutor, str], AbstractContextManager[Future[Any]]],
) -> Killed:
    """`part`: of the command line of whom to kill, who runs in the second engine's pod or in the trainer's."""
    version = settled(space, trainer)
    engine = engines(space, f"{SERVER}-main")[1]
    uid = engine["podUid"] if part == faults.ENGINE_PROCESS else trainer_uid(space)
    with ThreadPoolExecutor() as pool:
        with moment(space, trainer, pool, "m1") as update:
            faults.send(uid, signal.SIGKILL, part=part)
        update.exception()  # ended, however
    return Killed(version, engine["pod"], update)


def asked(engine: dict[str, Any], path: str) -> httpx.Response:
    """Without the API server."""
    return httpx.get(f"{engine['url']}{path}", timeout=10.0, trust_env=False)


def restored(space: Kubectl, trainer: Trainer, version: int, tokens: Any, *, seconds: float = 120.0) -> None:
    """The fleet serves one version and nothing stays paused."""

    def look() -> Any:
        found = engines(space, f"{SERVER}-main")
        phases = [engine["phase"] for engine in found]
        return phases, [paused(space, engine["pod"]) for engine in found], labels(space)

    wanted = (["Serving"] * 2, [False] * 2, {label_for(space, SERVER, version)})
    eventually(look, seconds, f"version {version} serves everywhere", accept=lambda seen: seen == wanted)
    await_routable(space, SERVER, 2, seconds=30)
    # An agent that is killed often comes back later each time.
    eventually(lambda: trainer(GREEDY), 120, "samples are those of its weights", accept=lambda seen: seen == tokens)


def scale(space: Kubectl, replicas: int) -> None:
    space.apply(rollout_server(SERVER, replicas=replicas, service_accounts=("trainer",)))


def settled(space: Kubectl, trainer: Trainer) -> int:
    """m0 is served from a checkpoint, by two engines."""
    scale(space, 2)
    eventually(
        lambda: [(engine["phase"], engine["reason"]) for engine in engines(space, f"{SERVER}-main")],
        START_SECONDS,
        "both engines can take part in an update",
        accept=lambda seen: len(seen) == 2 and {*seen} <= {("Serving", ""), ("Stale", "AwaitingUpdate")},
    )
    version: int = trainer("fleet.update_weights('/weights/m0', timeout=120)")["version"]
    await_routable(space, SERVER, 2, seconds=60)
    return version


def caught_up(space: Kubectl, trainer: Trainer, version: int, tokens: Any) -> None:
    """The survivor serves the new version, and the other one comes back with it, without another update."""
    assert trainer("fleet.weight_version") == version
    assert trainer(GREEDY) == tokens
    restored(space, trainer, version, tokens, seconds=START_SECONDS)
