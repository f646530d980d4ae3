"""Several agents at once on a real server, and a server that goes away."""

from __future__ import annotations

import threading
import time
from collections import Counter

import psycopg
import pytest

from rolloutfleet.agent.store.audit import prompts_in
from rolloutfleet.agent.store.errors import StoreBusy
from rolloutfleet.agent.store.handover import Handover
from rolloutfleet.agent.store.ledger import GroupUpdate, Ledger, PromptId, Run
from rolloutfleet.agent.store.postgres import PostgreSQL
from rolloutfleet.agent.store.schema import prepare
from unit.store.world import clean, finished

RUN = Run("shared", source="x", epoch_size=150, epochs=2)
EVERY = {PromptId(epoch, prompt) for epoch in range(2) for prompt in range(RUN.epoch_size)}


def test_agents_and_consumers_at_once_share_the_work_without_overlap(postgres: str) -> None:
    clean(postgres)
    trained: Counter[PromptId] = Counter()
    errors: list[BaseException] = []
    lock = threading.Lock()
    start = threading.Barrier(4, timeout=120)
    deadline = time.monotonic() + 60

    def agent(name: str) -> None:
        database = PostgreSQL(postgres)
        prepare(database)  # all of them make the tables
        ledger = Ledger(database, RUN, agent=name, shared=True)
        while claims := ledger.claim(5):
            assert ledger.save([finished(claim) for claim in claims[:4]]) == []
            ledger.save([GroupUpdate(claim, outcome="released") for claim in claims[4:]])
        database.close()

    def consumer(name: str) -> None:
        database = PostgreSQL(postgres)
        prepare(database)
        handover = Handover(database, RUN.name, consumer=name, trainer=name, step=0)
        step = 0
        while sum(trained.values()) < len(EVERY) and not errors and time.monotonic() < deadline:
            batch = handover.lease(step + 1, groups=3, minimum=1)
            if batch is None:
                continue
            step += 1
            assert [group.id for group in handover.read(step)] == batch
            handover.acknowledge(step)
            with lock:
                trained.update(batch)
        database.close()

    def thread(work: object, name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                start.wait()
                work(name)  # type: ignore[operator]
            except BaseException as error:
                errors.append(error)

        return threading.Thread(target=guarded)

    threads = [thread(agent, "one"), thread(agent, "two"), thread(consumer, "left"), thread(consumer, "right")]
    for each in threads:
        each.start()
    for each in threads:
        each.join(timeout=120)
    assert errors == []
    assert trained == Counter(EVERY)
    database = PostgreSQL(postgres)
    assert {id for id, _ in prompts_in(database, RUN.name, "trained")} == EVERY
    database.close()


def test_a_connection_that_breaks_is_told_and_made_anew(postgres: str) -> None:
    clean(postgres)
    database = PostgreSQL(postgres)
    prepare(database)
    ledger = Ledger(database, RUN, agent="agent")
    held = ledger.claim(3)
    with psycopg.connect(postgres, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    with pytest.raises(StoreBusy, match="PostgreSQL: "):
        ledger.claim(3)
    assert ledger.claim(3) == held
    database.close()


def test_a_server_that_is_not_there_is_told(tmp_path: object) -> None:
    database = PostgreSQL(f"host={tmp_path} user=nobody dbname=none")
    with pytest.raises(StoreBusy, match="connection"):
        prepare(database)
