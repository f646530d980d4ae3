"""Two trainers, each with an agent of its own, share one run on a real PostgreSQL server; one of the agents dies."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.agent.collection import collections, collector
from rolloutfleet.agent.store.address import open_store
from rolloutfleet.agent.store.audit import progress
from rolloutfleet.agent.store.ledger import Ledger
from rolloutfleet.trainer import collecting as trainers_side
from unit.collection import test_kills
from unit.collection.fast_engine import FastEngine
from unit.collection.test_kills import FORKS, PROMPTS, Trained, require_once
from unit.collection.world import free_port
from unit.store.postgres_server import address
from unit.store.world import clean

SESSION_SECONDS = 2.0
"""In place of a minute: how long an agent may be silent until the other one takes its prompts."""
LIMIT = 120.0


class Side:
    """A trainer and its agent. The trainer's lives end by themselves, and the next one begins."""

    def __init__(self, name: str, folder: Path, engine: str, store: str) -> None:
        self.name, self.folder, self.store = name, folder / name, store
        self.folder.mkdir()
        self.trained: Trained = {}
        self.problems: list[Exception] = []
        self.over = threading.Event()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        test_kills.write_data(self.folder, PROMPTS)
        test_kills.write_fleet(self.folder, port=port, router=engine, engines=[engine], name=name)

    @contextmanager
    def training(self) -> Iterator[None]:
        """To the end of the run, however often the agent is away."""
        thread = threading.Thread(target=self._train, daemon=True)
        thread.start()
        try:
            yield
        finally:
            thread.join(LIMIT)
            assert not thread.is_alive(), f"{self.name} has not come to an end"
            assert self.problems == []

    def _train(self) -> None:
        try:
            while not self._a_life():
                pass
            self._a_life()  # the last acknowledgement may have been lost: this one says what is trained
        except Exception as problem:
            self.problems.append(problem)
        finally:
            self.over.set()

    def _a_life(self) -> bool:
        options: dict[str, Any] = {"store": self.store, "shared": True, "consumer": self.name}
        return test_kills.a_life_of_the_trainer(self.folder, self.url, self.trained, **options)

    @contextmanager
    def agent(self) -> Iterator[BaseProcess]:
        """One life of it, to a SIGKILL."""
        child = FORKS.Process(target=live, args=(self.folder / "fleet.json",))
        child.start()
        try:
            yield child
        finally:
            child.kill()
            child.join()


def live(fleet: Path) -> None:
    vars(collections)["Ledger"] = functools.partial(Ledger, session_seconds=SESSION_SECONDS)
    vars(collector)["LOOK_SECONDS"] = SESSION_SECONDS / 8
    test_kills.live(fleet)


@pytest.fixture
def sides(postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Side, Side]]:
    monkeypatch.setattr(trainers_side, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(trainers_side, "LONG_POLL_SECONDS", 0.5)
    clean(postgres)
    with FastEngine(tokens=4) as engine:
        yield (
            Side("left", tmp_path, engine.url, address(postgres)),
            Side("right", tmp_path, engine.url, address(postgres)),
        )


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline, f"not within {LIMIT:g} s: {what}"
        time.sleep(0.01)


def claimed(side: Side) -> int:
    database = open_store(side.store)
    try:
        return progress(database, "run").claimed if side.trained else 0
    finally:
        database.close()


def assert_trained_once(left: Side, right: Side) -> None:
    require_once([left.trained, right.trained], PROMPTS)
    database = open_store(left.store)
    assert progress(database, "run").states == {"trained": 2 * PROMPTS}
    database.close()


def test_each_prompt_is_trained_once_by_one_of_them_though_one_agent_is_killed_again_and_again(
    sides: tuple[Side, Side],
) -> None:
    left, right = sides
    chance = random.Random(7)
    kills = 0
    with ExitStack() as stack:
        stack.enter_context(left.training())
        while not left.trained:  # so that both have a part in it
            with left.agent():
                left.over.wait(chance.uniform(0.1, 0.8))
            kills += 1
        stack.enter_context(right.agent())
        stack.enter_context(right.training())
        while not (left.over.is_set() and right.over.is_set()):
            with left.agent():
                left.over.wait(chance.uniform(0.0, 0.4))
            kills += 1
    assert kills > 1
    assert left.trained
    assert right.trained
    assert_trained_once(left, right)


def test_what_an_agent_that_never_comes_back_had_begun_is_finished_by_the_other_and_its_batch_waits_for_its_trainer(
    sides: tuple[Side, Side],
) -> None:
    left, right = sides
    with left.training():
        while not claimed(left):
            with left.agent():
                until(lambda: bool(left.trained and claimed(left)), "it has a checkpoint, and prompts in work")
        with right.agent(), right.training():
            until(right.over.is_set, "the right one has come to the end of the run")
        done = [prompt for side in sides for batch in side.trained.values() for prompt in batch]
        assert len(done) == len({*done})
        with left.agent():
            left.over.wait(LIMIT)
    assert_trained_once(left, right)
