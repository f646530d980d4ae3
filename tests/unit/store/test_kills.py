"""A real process with a real file dies by SIGKILL, a thousand times and more, at moments that nobody chose."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from rolloutfleet.agent.store.address import open_store
from rolloutfleet.agent.store.audit import prompts_in
from rolloutfleet.agent.store.ledger import GroupUpdate, Ledger, PromptId
from unit.store import killed_agent
from unit.store.killed_agent import RUN
from unit.store.postgres_server import address
from unit.store.world import clean, sample

EVERY = {(epoch, prompt) for epoch in range(2) for prompt in range(RUN.epoch_size)}
LIVES = 3000


def test_each_prompt_of_each_epoch_is_trained_once_whenever_the_process_is_killed(tmp_path: Path) -> None:
    killed = runs = 0
    while killed < 1000:
        runs += 1
        store = str(tmp_path / f"ledger-{runs}.sqlite")
        killed += check(store, tmp_path / f"checkpoint-{runs}.json", seed=runs, longest_life_seconds=0.02)


def test_the_same_on_postgresql(postgres: str, tmp_path: Path) -> None:
    killed = runs = 0
    while killed < 60:
        runs += 1
        clean(postgres)
        killed += check(address(postgres), tmp_path / f"checkpoint-{runs}.json", seed=runs, longest_life_seconds=0.1)


def check(store: str, checkpoint: Path, *, seed: int, longest_life_seconds: float) -> int:
    """One run from its first life to its end: how many lives were ended by a kill, more on a slow machine."""
    chance = random.Random(seed)
    killed = 0
    while not life(store, checkpoint, chance.uniform(0, longest_life_seconds)):
        killed += 1
        assert killed < LIVES, f"it does not end in {LIVES} lives"

    database = open_store(store)
    trained = Counter(tuple(id) for batch in json.loads(checkpoint.read_text()).values() for id in batch)
    assert trained == Counter(EVERY), "none lost, none twice"
    in_ledger = {tuple(id): step for id, step in prompts_in(database, RUN.name, "trained")}
    assert in_ledger.keys() == EVERY
    database.close()
    return killed


def life(store: str, checkpoint: Path, seconds: float) -> bool:
    """A fork of this process, whose imports are done: a life takes milliseconds. True when it came to its end."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(tell, 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        code = 1
        try:
            killed_agent.main(store, checkpoint)
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(tell)
    with os.fdopen(told, "rb") as reports:
        begun = reports.readline()
        assert begun == b"begun\n", "the agent could not begin"
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        rest = reports.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"it died of itself: {code}"
    return rest == b"ended\n" and code == 0


def test_what_was_kept_of_a_sample_outlives_the_process(tmp_path: Path) -> None:
    store = str(tmp_path / "ledger.sqlite")
    child = os.fork()
    if child == 0:
        ledger = Ledger(open_store(store), RUN, agent="agent")
        (claim,) = ledger.claim(1)
        ledger.save([GroupUpdate(claim, [sample(status="aborted")])])
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    database = open_store(store)
    again = Ledger(database, RUN, agent="agent")
    assert again.partials([claim.id for claim in again.claim(1)]) == {PromptId(0, 0): [sample(status="aborted")]}
    database.close()
