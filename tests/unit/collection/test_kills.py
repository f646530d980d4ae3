"""The agent's process, whole, dies by SIGKILL a thousand times at moments that nobody chose, its trainer now and then,
and each prompt of each epoch is trained once."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.trainer import collecting as trainers_side
from rolloutfleet.trainer import connect
from rolloutfleet.trainer.collecting import SampleCollection
from rolloutfleet.trainer.errors import FleetError
from stand_ins import agent
from unit.collection.fast_engine import FastEngine
from unit.collection.world import free_port

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["stand_ins.agent", __name__])
PROMPTS, EPOCHS = 100, 2
KILLS = int(os.environ.get("ROLLOUTFLEET_KILLS", "1000"))
LONGEST_LIFE_SECONDS = 0.12
STEPS_A_CHECKPOINT = 3
STEPS_A_LIFE = 7

Trained = dict[int, list[tuple[int, int]]]
"""Epoch and number of the prompts of each step that a checkpoint has."""


def test_each_prompt_is_trained_once_however_often_the_agent_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainers_side, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(trainers_side, "LONG_POLL_SECONDS", 0.5)
    with FastEngine(tokens=4) as engine:
        kills = runs = 0
        while kills < KILLS:
            runs += 1
            kills += one_run(tmp_path / f"run-{runs}", engine.url, runs)


class NotOnce(AssertionError):
    def __init__(self, found: Counter[tuple[int, int]], every: set[tuple[int, int]]) -> None:
        self.lost, self.doubled = len(every - found.keys()), sum(count - 1 for count in found.values())
        super().__init__(f"{self.lost} lost, {self.doubled} doubled, {len(found.keys() - every)} that nobody asked for")


def one_run(
    folder: Path,
    engine: str,
    seed: int,
    *,
    prompts: int = PROMPTS,
    longest_life_seconds: float = LONGEST_LIFE_SECONDS,
) -> int:
    """From its beginning to the end of its epochs: how often the agent was killed. Raises NotOnce."""
    folder.mkdir()
    write_data(folder, prompts)
    port = free_port()
    write_fleet(folder, port=port, router=engine, engines=[engine])
    over, problems = threading.Event(), list[Exception]()
    trained: Trained = {}

    def train() -> None:
        try:
            while not a_life_of_the_trainer(folder, f"http://127.0.0.1:{port}", trained):
                pass
        except Exception as problem:
            problems.append(problem)
        finally:
            over.set()

    trainer = threading.Thread(target=train)
    trainer.start()
    kills = 0
    chance = random.Random(seed)
    while not over.is_set():
        with a_life_of_the_agent(folder / "fleet.json"):
            over.wait(chance.uniform(0, longest_life_seconds))
        kills += 1
    trainer.join()
    if problems:
        raise problems[0]
    require_once([trained], prompts)
    return kills


def require_once(trained: Sequence[Trained], prompts: int) -> None:
    """By whichever trainer. Raises NotOnce."""
    found = Counter(prompt for by_step in trained for batch in by_step.values() for prompt in batch)
    every = {(epoch, prompt) for epoch in range(EPOCHS) for prompt in range(prompts)}
    if found != Counter(every):
        raise NotOnce(found, every)


def write_data(folder: Path, prompts: int) -> None:
    (folder / "data.jsonl").write_text("".join(json.dumps({"prompt": [n + 1]}) + "\n" for n in range(prompts)))


def write_fleet(folder: Path, *, port: int, router: str, engines: Sequence[str], name: str = "train") -> None:
    """What the stand-in agent `name` is told of its fleet. It need not lead, so its short lives are spent at work."""
    fleet = {
        "name": name,
        "port": port,
        "address": "127.0.0.1",
        "model": str(folder),
        "volume": str(folder),
        "checksum": "",
        "router": router,
        "frozen": True,
        "engines": [{"pod": f"e{n}", "uid": f"u{n}", "url": url} for n, url in enumerate(engines)],
    }
    (folder / "fleet.json").write_text(json.dumps(fleet))


def asked_for(folder: Path, *, done: int) -> dict[str, Any]:
    """The collection of a trainer whose checkpoint has `done` steps."""
    return {
        "run": "run",
        "store": str(folder / "ledger.sqlite"),
        "data": {"path": str(folder / "data.jsonl")},
        "epochs": EPOCHS,
        "n": 2,
        "groups_per_step": 4,
        "estimator": "raw",
        "mode": "asynchronous",
        "over_sampling": 1.5,
        "sampling_params": {"max_new_tokens": 4},
        "step": done,
    }


def a_life_of_the_trainer(folder: Path, url: str, trained: Trained, **fields: Any) -> bool:
    """A few steps from the last checkpoint, which is all that a life leaves behind; True when the run is over.
    `fields`: others of its collection."""
    done = max(trained, default=0)
    fleet = connect("actor", url=url)
    since: Trained = {}
    try:
        run = fleet.collect(**(asked_for(folder, done=done) | fields))
        for batch in run.batches(done + 1):
            since[batch.step] = sorted({(s.epoch, s.group_index) for s in batch.samples})
            assert len(batch.samples) == 2 * len(since[batch.step])
            if batch.step % STEPS_A_CHECKPOINT == 0:
                _checkpoint(run, trained, since)
            if batch.step - done == STEPS_A_LIFE:
                return False
        _checkpoint(run, trained, since)
        return True
    finally:
        fleet.close()


def _checkpoint(run: SampleCollection, trained: Trained, since: Trained) -> None:
    trained |= since
    if trained:
        with contextlib.suppress(FleetError):  # it may be lost: the next life says what is trained
            run.acknowledge(max(trained), timeout=0.0)


@contextlib.contextmanager
def a_life_of_the_agent(fleet: Path) -> Iterator[None]:
    """A fork of a process whose imports are done, and that has no threads: a life takes milliseconds to begin."""
    child = FORKS.Process(target=live, args=(fleet,))
    child.start()
    try:
        yield
    finally:
        child.kill()
        child.join()
    assert child.exitcode == -signal.SIGKILL, f"it died of itself: {fleet.with_suffix('.log').read_text()[-2000:]}"


def live(fleet: Path) -> None:
    log = os.open(fleet.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    agent.main(fleet)
