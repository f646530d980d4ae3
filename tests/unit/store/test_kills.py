"""A real process with a real file dies by SIGKILL, hundreds of times, at moments that nobody chose."""

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
from unit.store.world import clean, sample

EVERY = {(epoch, prompt) for epoch in range(2) for prompt in range(RUN.epoch_size)}
LONGEST_LIFE_SECONDS = 0.02
LIVES = 3000


def test_each_prompt_of_each_epoch_is_trained_once_whenever_the_process_is_killed(tmp_path: Path) -> None:
    check(str(tmp_path / "ledger.sqlite"), tmp_path / "checkpoint.json", kills=200)


def test_the_same_on_postgresql(postgres: str, tmp_path: Path) -> None:
    clean(postgres)
    fields = dict(part.split("=") for part in postgres.split())
    address = f"postgresql://{fields['user']}@/{fields['dbname']}?host={fields['host']}"
    check(address, tmp_path / "checkpoint.json", kills=60)


def check(store: str, checkpoint: Path, *, kills: int) -> None:
    """`kills`: at least so many must have hit the process at work, else the test has shown nothing."""
    chance = random.Random(7)
    killed = 0
    for _ in range(LIVES):
        # After enough of them it may end in peace.
        seconds = chance.uniform(0, LONGEST_LIFE_SECONDS) if killed < kills else None
        if life(store, checkpoint, seconds):
            break
        killed += 1
    else:
        raise AssertionError(f"it does not end in {LIVES} lives")
    assert killed >= kills, f"it ended after {killed} kills"

    database = open_store(store)
    trained = Counter(tuple(id) for batch in json.loads(checkpoint.read_text()).values() for id in batch)
    assert trained == Counter(EVERY), "none lost, none twice"
    in_ledger = {tuple(id): step for id, step in prompts_in(database, RUN.name, "trained")}
    assert in_ledger.keys() == EVERY
    database.close()


def life(store: str, checkpoint: Path, seconds: float | None) -> bool:
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
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        rest = reports.read()
    _, status = os.waitpid(child, 0)
    if seconds is None:
        assert os.waitstatus_to_exitcode(status) == 0
    return rest == b"ended\n" and os.waitstatus_to_exitcode(status) == 0


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
