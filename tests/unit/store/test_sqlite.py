"""A file that cannot be written or is held by another: told clearly, and nothing that was committed is lost."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rolloutfleet.agent.store import sqlite as sqlite_module
from rolloutfleet.agent.store.address import open_store
from rolloutfleet.agent.store.audit import prompts_in
from rolloutfleet.agent.store.database import Database
from rolloutfleet.agent.store.errors import Refused, StoreBusy, StoreDamaged, StoreError, StoreUnwritable
from rolloutfleet.agent.store.handover import Handover
from rolloutfleet.agent.store.ledger import GroupUpdate, Ledger, PromptId, Run
from rolloutfleet.agent.store.sqlite import SQLite
from unit.store.world import RUN, sample

LONG = Run("long", source="x", epoch_size=10_000)


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """One megabyte, a file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    folder = tmp_path / "volume"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_volume_stops_the_agent_with_a_clear_error_and_loses_nothing(small_volume: Path) -> None:
    filler = small_volume / "filler"
    filler.write_bytes(bytes(500_000))
    fills_up_and_goes_on(small_volume / "ledger.sqlite", filler.unlink, "database or disk is full")


def test_so_does_a_quota_or_a_limit_of_a_files_size(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, hard))
    try:
        make_room: Callable[[], None] = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))  # noqa: E731
        fills_up_and_goes_on(tmp_path / "ledger.sqlite", make_room, "disk I/O error")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fills_up_and_goes_on(path: Path, make_room: Callable[[], None], reason: str) -> None:
    database = open_store(str(path))
    ledger = Ledger(database, LONG, agent="agent")
    kept: list[PromptId] = []
    whole = [sample(tokens=500), sample(1, tokens=500)]

    def generate() -> None:
        for _ in range(1000):
            (claim,) = ledger.claim(1)
            ledger.save([GroupUpdate(claim, whole, "finished")])
            kept.append(claim.id)

    with pytest.raises(StoreUnwritable) as refusal:
        generate()
    assert len(kept) > 2
    for words in (str(path), reason, "bytes are free", "Nothing that was committed is lost"):
        assert words in str(refusal.value)
    assert finished_ids(database) == kept
    for _ in range(3):  # it is said again, as long as it is so; the claim of the one that failed holds
        with pytest.raises(StoreUnwritable):
            generate()
    make_room()
    claims = ledger.claim(1)
    assert ledger.save([GroupUpdate(claim, whole, "finished") for claim in claims]) == []
    assert finished_ids(database) == [*kept, PromptId(0, len(kept))]
    trainer = Handover(database, LONG.name, trainer="trainer", step=0)
    trainer.lease(1, groups=len(kept) + 1)
    assert [group.samples for group in trainer.read(1)] == [whole] * (len(kept) + 1)
    database.close()


def finished_ids(database: Database) -> list[PromptId]:
    return [id for id, _ in prompts_in(database, LONG.name, "finished")]


def test_what_is_committed_is_on_the_disk_before_anybody_is_told(tmp_path: Path) -> None:
    database = SQLite(tmp_path / "ledger.sqlite")
    with database.transaction() as tx:
        assert tx.run("PRAGMA journal_mode") == [("wal",)]
        assert tx.run("PRAGMA synchronous") == [(2,)], "FULL"
    database.close()


def test_a_transaction_of_another_process_is_waited_for_and_then_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_module, "BUSY_SECONDS", 0.05)
    path = tmp_path / "ledger.sqlite"
    database = open_store(str(path))
    ledger = Ledger(database, RUN, agent="agent")
    stopped_in_its_middle = sqlite3.connect(path, isolation_level=None)
    stopped_in_its_middle.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusy, match="database is locked"):
        ledger.claim(1)
    stopped_in_its_middle.close()
    assert len(ledger.claim(1)) == 1
    database.close()


def test_threads_of_an_agent_take_turns(tmp_path: Path) -> None:
    database = open_store(str(tmp_path / "ledger.sqlite"))
    ledger = Ledger(database, LONG, agent="agent")

    def work() -> None:
        for _ in range(20):
            ledger.save([GroupUpdate(claim, [sample()], "finished") for claim in ledger.claim(3)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = finished_ids(database)
    assert ids == [PromptId(0, number) for number in range(len(ids))]
    database.close()


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database, and long enough to be looked at as one" * 20)
    with pytest.raises(StoreDamaged, match="file is not a database"):
        open_store(str(tmp_path / "text"))
    with pytest.raises(StoreUnwritable, match="unable to open"):
        open_store(str(tmp_path / "missing" / "ledger.sqlite"))
    with pytest.raises(StoreError, match=r"journal mode memory; the volume's file system bears no WAL"):
        open_store(":memory:")


def test_a_store_of_another_layout_is_refused(tmp_path: Path) -> None:
    database = open_store(str(tmp_path / "ledger.sqlite"))
    with database.transaction() as tx:
        tx.run("UPDATE ledger SET version = 99")
    database.close()
    with pytest.raises(Refused, match="the store has layout 99, this agent knows layout 1"):
        open_store(str(tmp_path / "ledger.sqlite"))
