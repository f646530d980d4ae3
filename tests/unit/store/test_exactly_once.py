"""Whatever agents and trainers do, in any order, dying at any statement: each prompt of each epoch ends in exactly one
batch of the lineage of checkpoints that survives, or is dropped with a reason. None is lost, none is trained twice."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rolloutfleet.agent.store.audit import progress, prompts_in
from rolloutfleet.agent.store.errors import Fenced
from rolloutfleet.agent.store.handover import Handover
from rolloutfleet.agent.store.ledger import Claim, GroupUpdate, Ledger, PromptId, Run
from unit.store.world import Breakable, Crash, Opened, Store, finished, postgres_store, sample, sqlite_store

EPOCH, EPOCHS = 5, 2
EVERY = {PromptId(epoch, prompt) for epoch in range(EPOCHS) for prompt in range(EPOCH)}
AGENTS = st.sampled_from(["one", "two"])
FUSE = st.integers(-30, 14).map(lambda statements: None if statements < 0 else statements)
"""Statements until the process dies; None: it lives."""
STEPS = 50
STATES = ("open", "finished", "leased", "trained", "dropped")


@dataclass
class Agent:
    ledger: Ledger
    database: Breakable
    claims: list[Claim] = field(default_factory=list)
    told: list[GroupUpdate] = field(default_factory=list)
    """What it has saved: any of it may be delivered again."""


@dataclass
class Checkpoint:
    step: int = 0
    trained: dict[int, list[PromptId]] = field(default_factory=dict)


@dataclass
class Trainer:
    handover: Handover
    database: Breakable
    checkpoint: Checkpoint
    """What its weights have seen."""


class Runs(RuleBasedStateMachine):
    make_store: ClassVar[Callable[[], Store]]
    count: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).count += 1
        self.store = type(self).make_store()
        self.run = Run(f"run-{type(self).count}", source="x", epoch_size=EPOCH, epochs=EPOCHS)
        self.agents: dict[str, Agent] = {}
        self.trainer: Trainer | None = None
        self.former: list[Trainer] = []
        self.saved = [Checkpoint()]
        self.lives = 0
        self.shared = False
        self.watcher = self.store.connect()

    def teardown(self) -> None:
        self.run_to_the_end()
        self.store.opened.close()

    @initialize(shared=st.booleans())
    def begin(self, shared: bool) -> None:
        self.shared = shared
        self.start_agent("one", None)

    @contextmanager
    def process(self, actor: Agent | Trainer, fuse: int | None) -> Iterator[None]:
        """The actor works until its fuse burns down: then all that it remembers is gone."""
        actor.database.fuse = fuse
        try:
            yield
        except Crash:
            actor.database.close()
            if isinstance(actor, Agent):
                self.agents = {name: agent for name, agent in self.agents.items() if agent is not actor}
            elif actor is self.trainer:
                self.trainer = None
        except Fenced:
            assert isinstance(actor, Agent), "a trainer that is the newest is never fenced"
            self.agents = {name: agent for name, agent in self.agents.items() if agent is not actor}
        finally:
            actor.database.fuse = None

    # Agents

    @rule(name=AGENTS, fuse=FUSE)
    def start_agent(self, name: str, fuse: int | None) -> None:
        database = self.store.connect()
        database.fuse = fuse
        ended = [self.agents.pop(name)] if name in self.agents else []
        if not self.shared:
            ended += self.agents.values()
            self.agents.clear()
        try:
            ledger = Ledger(database, self.run, agent=name, shared=self.shared, session_seconds=10)
        except Crash:
            database.close()
            return
        database.fuse = None
        self.agents[name] = Agent(ledger, database)
        for agent in ended:  # a former process may be there still, frozen, and thaw now
            with pytest.raises(Fenced):
                agent.ledger.claim(1)
            with pytest.raises(Fenced):
                agent.ledger.save([finished(claim) for claim in agent.claims])
            agent.database.close()

    def living(self, name: str) -> Agent:
        if name not in self.agents:
            self.start_agent(name, None)
        return self.agents[name]

    @rule(name=AGENTS, total=st.integers(1, 5), fuse=FUSE)
    def claim(self, name: str, total: int, fuse: int | None) -> None:
        agent = self.living(name)
        with self.process(agent, fuse):
            agent.claims += agent.ledger.claim(total, known=agent.claims)

    @rule(name=AGENTS, data=st.data(), fuse=FUSE)
    def save(self, name: str, data: st.DataObject, fuse: int | None) -> None:
        agent = self.living(name)
        if not agent.claims:
            self.claim(name, 3, None)
        if not agent.claims or name not in self.agents:
            return
        updates = []
        for claim in data.draw(st.lists(st.sampled_from(agent.claims), min_size=1, unique=True)):
            version = data.draw(st.integers(1, 3))
            updates.append(
                data.draw(
                    st.sampled_from(
                        [
                            finished(claim, version=version),
                            finished(claim, n=3, version=version),
                            GroupUpdate(claim, [sample(status="aborted", version=version)]),
                            GroupUpdate(claim, [sample(1, version=version)], "released"),
                            GroupUpdate(claim, outcome="dropped", reason="zero_std"),
                        ]
                    )
                )
            )
        with self.process(agent, fuse):
            lost = agent.ledger.save(updates)
            assert lost == [], "what an agent holds and has not told is taken"
            ended = {update.claim for update in updates if update.outcome != "open"}
            agent.claims = [claim for claim in agent.claims if claim not in ended]
            agent.told += [update for update in updates if update.outcome != "open"]

    @rule(name=AGENTS, data=st.data(), fuse=FUSE)
    def deliver_again(self, name: str, data: st.DataObject, fuse: int | None) -> None:
        agent = self.agents.get(name)
        if agent is None or not agent.told:
            return
        updates = data.draw(st.lists(st.sampled_from(agent.told), min_size=1, max_size=3))
        with self.process(agent, fuse):
            assert agent.ledger.save(updates) == [update.claim for update in updates]

    @rule(seconds=st.integers(1, 12))
    def wait(self, seconds: int) -> None:
        self.store.time += seconds

    # Trainers

    @rule(fuse=FUSE, back=st.integers(0, 2))
    def start_trainer(self, fuse: int | None, back: int) -> None:
        """From its newest checkpoint, or from one of those before it."""
        self.lives += 1
        del self.saved[max(len(self.saved) - back, 1) :]
        at = self.saved[-1]
        database = self.store.connect()
        database.fuse = fuse
        if self.trainer:
            self.former.append(self.trainer)
        self.trainer = None
        try:
            handover = Handover(database, self.run.name, trainer=f"life-{self.lives}", step=at.step)
        except Crash:
            database.close()
            return
        database.fuse = None
        self.trainer = Trainer(handover, database, Checkpoint(at.step, dict(at.trained)))
        seen = {id: step for step, batch in at.trained.items() for id in batch}
        assert dict(prompts_in(self.watcher, self.run.name, "trained")) == seen
        assert prompts_in(self.watcher, self.run.name, "leased") == []

    @precondition(lambda self: self.trainer)
    @rule()
    def another_rank_starts(self) -> None:
        """Of the same trainer, and late: it knows the checkpoint from which the trainer started, or a later one."""
        Handover(self.watcher, self.run.name, trainer=f"life-{self.lives}", step=self.saved[-1].step)

    @rule(groups=st.integers(1, 4), oldest=st.integers(0, 3), twice=st.booleans(), saves=st.booleans(), fuse=FUSE)
    def generate_and_train(self, groups: int, oldest: int, twice: bool, saves: bool, fuse: int | None) -> None:
        if not self._begun() or not prompts_in(self.watcher, self.run.name, "finished"):
            agent = self.living("one")
            with self.process(agent, None):
                agent.claims = agent.ledger.claim(3)
                agent.ledger.save([finished(claim, version=3) for claim in agent.claims])
                agent.claims.clear()
        self.train(groups, oldest, twice=twice, fuse=fuse)
        if saves and self.trainer:
            self.save_checkpoint(True, fuse)

    def train(self, groups: int, oldest: int, *, twice: bool = False, fuse: int | None = None) -> None:
        if self.trainer is None:
            self.start_trainer(None, 0)
        trainer = self.trainer
        assert trainer is not None
        step = trainer.checkpoint.step + 1
        with self.process(trainer, fuse):
            batch = trainer.handover.lease(step, groups=groups, minimum=1, oldest_version=oldest)
            if twice:
                assert batch is None or trainer.handover.lease(step, groups=9) == batch
            if batch is None:
                return
            read = trainer.handover.read(step)
            assert [group.id for group in read] == batch
            assert all(group.samples for group in read)
            trainer.checkpoint.step = step
            trainer.checkpoint.trained[step] = batch

    @precondition(lambda self: self.trainer)
    @rule(told=st.booleans(), fuse=FUSE)
    def save_checkpoint(self, told: bool, fuse: int | None) -> None:
        trainer = self.trainer
        assert trainer is not None
        made = trainer.checkpoint
        if made.step > self.saved[-1].step:
            self.saved.append(Checkpoint(made.step, dict(made.trained)))
        if told:
            with self.process(trainer, fuse):
                trainer.handover.acknowledge(self.saved[-1].step)

    @precondition(lambda self: self.former and self.trainer)
    @rule(data=st.data(), step=st.integers(0, 9))
    def a_former_trainer_calls(self, data: st.DataObject, step: int) -> None:
        former = data.draw(st.sampled_from(self.former))
        call: Callable[[], Any] = data.draw(
            st.sampled_from([lambda: former.handover.lease(step, groups=1), lambda: former.handover.acknowledge(step)])
        )
        with pytest.raises(Fenced):
            call()

    # What holds at every moment

    @invariant()
    def every_prompt_is_in_one_place(self) -> None:
        if not self.agents and not self._begun():
            return
        found = progress(self.watcher, self.run.name)
        reached = {id for id in EVERY if id < found.cursor}
        rows = [id for state in STATES for id, _ in prompts_in(self.watcher, self.run.name, state)]
        assert Counter(rows) == Counter(reached)

    @invariant()
    def what_the_trainer_has_seen_is_its_own(self) -> None:
        if self.trainer is None:
            return
        seen = self.trainer.checkpoint.trained
        assert max(Counter(id for batch in seen.values() for id in batch).values(), default=0) <= 1
        rows = dict(prompts_in(self.watcher, self.run.name, "leased"))
        rows |= dict(prompts_in(self.watcher, self.run.name, "trained"))
        assert all(rows.get(id) == step for step, batch in seen.items() for id in batch)

    def _begun(self) -> bool:
        with self.watcher.transaction() as tx:
            return bool(tx.run("SELECT 1 FROM runs WHERE run = :run", run=self.run.name))

    def run_to_the_end(self) -> None:
        if not self._begun() and not self.agents:
            return
        self.start_trainer(None, 0)
        assert self.trainer is not None
        self.store.time += 20
        self.start_agent("last", None)
        ledger = self.agents["last"].ledger
        for _ in range(100):
            claims = ledger.claim(4)
            ledger.save([finished(claim) for claim in claims])
            before = self.trainer.checkpoint.step
            self.train(3, 0)
            if not claims and self.trainer.checkpoint.step == before:
                break
        else:
            raise AssertionError("it does not end")
        self.save_checkpoint(True, None)
        seen = Counter(id for batch in self.saved[-1].trained.values() for id in batch)
        dropped = Counter(id for id, _ in prompts_in(self.watcher, self.run.name, "dropped"))
        assert seen + dropped == Counter(EVERY)
        assert progress(self.watcher, self.run.name).states.keys() <= {"trained", "dropped"}


def test_on_sqlite() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        made = iter(range(1_000_000))

        class OnSQLite(Runs):
            make_store = staticmethod(lambda: sqlite_store(Path(folder, str(next(made))), Opened()))

        run_state_machine_as_test(OnSQLite, settings=_settings(100))


def test_on_postgresql(postgres: str) -> None:
    class OnPostgreSQL(Runs):
        make_store = staticmethod(lambda: postgres_store(postgres, Opened()))

    run_state_machine_as_test(OnPostgreSQL, settings=_settings(15))


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
