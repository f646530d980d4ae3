"""Updates that come together are committed together, in their order, and one that makes no sense fails alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rolloutfleet.agent.store.audit import prompts_in
from rolloutfleet.agent.store.errors import Refused
from rolloutfleet.agent.store.handover import Group
from rolloutfleet.agent.store.ledger import GroupUpdate, Ledger
from rolloutfleet.agent.store.worker import LedgerWorker
from unit.store.world import RUN, Store, finished, sample


class Counted(Ledger):
    transactions = 0

    def save(self, updates: Any) -> Any:
        self.transactions += 1
        return super().save(updates)


def test_what_is_told_together_is_one_transaction_or_two(store: Store) -> None:
    async def scenario() -> None:
        ledger = Counted(store.connect(), RUN, agent="agent")
        worker = LedgerWorker(ledger)
        claims = await worker.run(ledger.claim, 12)
        told = [worker.save(GroupUpdate(claim, [sample(1, status="aborted")])) for claim in claims]
        told += [worker.save(finished(claim)) for claim in claims]
        assert await asyncio.gather(*told) == [True] * 24
        assert ledger.transactions <= 2
        assert await worker.save(finished(claims[0])) is False, "told before"
        await worker.close()

    asyncio.run(scenario())
    assert len(prompts_in(store.connect(), "run", "finished")) == 12
    trainer = store.handover()
    ids = trainer.lease(1, groups=12)
    assert ids is not None
    assert trainer.read(1) == [Group(id, [sample(0), sample(1)]) for id in ids]


def test_an_update_that_makes_no_sense_fails_alone(store: Store) -> None:
    async def scenario() -> None:
        worker = LedgerWorker(store.ledger())
        one, two, three = await worker.run(worker.ledger.claim, 3)
        told = [worker.save(finished(one)), worker.save(GroupUpdate(two, [], "finished")), worker.save(finished(three))]
        good, bad, also_good = await asyncio.gather(*told, return_exceptions=True)
        assert (good, also_good) == (True, True)
        assert isinstance(bad, Refused)
        await worker.close()

    asyncio.run(scenario())


def test_a_store_that_cannot_save_tells_everybody_who_waits(store: Store) -> None:
    async def scenario() -> None:
        worker = LedgerWorker(store.ledger())
        claims = await worker.run(worker.ledger.claim, 3)
        store.ledger("newer")
        told = await asyncio.gather(*[worker.save(finished(claim)) for claim in claims], return_exceptions=True)
        assert [type(error).__name__ for error in told] == ["Fenced"] * 3
        await worker.close()

    asyncio.run(scenario())


def test_what_was_told_is_committed_before_the_worker_is_closed_though_its_teller_is_cancelled(store: Store) -> None:
    async def scenario() -> None:
        worker = LedgerWorker(store.ledger())
        (claim,) = await worker.run(worker.ledger.claim, 1)
        teller = asyncio.create_task(worker.save(finished(claim)))
        await asyncio.sleep(0)
        teller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await teller
        await worker.close()

    asyncio.run(scenario())
    assert len(prompts_in(store.connect(), "run", "finished")) == 1
