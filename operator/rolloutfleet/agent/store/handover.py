"""A trainer's side of the ledger: batches for steps, and which of them are in a checkpoint.

A step has one batch, whoever asks and however often. A batch counts as trained when a checkpoint has it. A trainer that
starts says which checkpoint it starts from: what was trained after that one is handed out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rolloutfleet.agent.store.database import Database, Transaction
from rolloutfleet.agent.store.errors import Fenced, Refused
from rolloutfleet.agent.store.ledger import FORGET, THIS, PromptId, stored
from rolloutfleet.api.samples import Sample


@dataclass(frozen=True)
class Offer:
    """A finished group that might go into a batch."""

    id: PromptId
    samples: int
    tokens: int
    """Prompts and responses of all its samples."""
    oldest_version: int | None


@dataclass(frozen=True)
class Group:
    id: PromptId
    samples: list[Sample]


Choose = Callable[[Sequence[Offer]], Sequence[Offer]]
"""Which of the groups that are offered, oldest first, go into the batch; the others wait for the next one."""


class Handover:
    """One consumer of a run, in one life of its trainer."""

    def __init__(self, database: Database, run: str, *, trainer: str, step: int, consumer: str = "") -> None:
        """`trainer`: a name that no other life of the trainer has. `step`: the last step in the checkpoint that it
        starts from, 0 where there is none. All batches up to it are trained; the groups of later ones are handed out
        again, and those whose samples are deleted by now are generated again.

        Only the first call of a life moves anything. From then on all calls for an earlier life raise Fenced.
        """
        if step < 0 or not trainer:
            raise Refused(f"trainer {trainer!r}, step {step}: a name and a step from 0 are needed")
        self._database, self._trainer = database, trainer
        self._key = {"run": run, "consumer": consumer}
        with database.transaction() as tx:
            tx.run(
                "INSERT INTO consumers (run, consumer) VALUES (:run, :consumer) ON CONFLICT (run, consumer) DO NOTHING",
                **self._key,
            )
            current, _, _, pruned = self._state(tx)
            if current == trainer:
                return
            at = self._key | {"step": step, "pruned": pruned}
            tx.run(f"UPDATE prompts SET state = 'trained' {_OF} AND state = 'leased' AND step <= :step", **at)
            # Deleted with their batch long ago: nothing is left to hand out.
            tx.run(
                "UPDATE prompts SET state = 'open', session = NULL, restarts = restarts + 1, consumer = NULL, "
                f"step = NULL {_OF} AND step > :step AND step <= :pruned",
                **at,
            )
            tx.run(f"UPDATE prompts SET state = 'finished', consumer = NULL, step = NULL {_OF} AND step > :step", **at)
            tx.run(
                "UPDATE consumers SET trainer = :trainer, leased_step = :step, acknowledged_step = :step, "
                f"pruned_step = :kept {_OF}",
                **self._key,
                trainer=trainer,
                step=step,
                kept=min(step, pruned),
            )

    def lease(
        self, step: int, *, groups: int, minimum: int | None = None, oldest_version: int = 0, choose: Choose = tuple
    ) -> list[PromptId] | None:
        """The batch of `step`: the one that it has, or a new one of what `choose` takes of up to `groups` groups, first
        finished first. None where fewer than `minimum` (default: `groups`) are there, or would be after `choose`.

        Groups with trained tokens of weights before `oldest_version` are not handed out but generated again.
        """
        at = self._key | {"step": step}
        with self._database.transaction() as tx:
            leased, acknowledged = self._current(tx)
            rows = tx.run(f"SELECT epoch, prompt FROM prompts {_OF} AND step = :step {_ORDER}", **at)
            if rows:
                return [PromptId(*row) for row in rows]
            if step <= max(leased, acknowledged):
                raise Refused(f"step {step}: steps up to {max(leased, acknowledged)} have had their batches")
            self._restart_stale(tx, oldest_version)
            chosen = choose(self._offers(tx, groups, " {skip_locked}"))
            if not chosen or len(chosen) < (groups if minimum is None else minimum):
                return None
            tx.run_many(
                f"UPDATE prompts SET state = 'leased', consumer = :consumer, step = :step {THIS}",
                [at | {"epoch": offer.id.epoch, "prompt": offer.id.prompt} for offer in chosen],
            )
            tx.run(f"UPDATE consumers SET leased_step = :step {_OF}", **at)
            return [offer.id for offer in chosen]

    def offers(self, most: int) -> list[Offer]:
        """Finished groups that no step has yet, first finished first."""
        with self._database.transaction() as tx:
            self._current(tx)
            return self._offers(tx, most)

    def _offers(self, tx: Transaction, most: int, lock: str = "") -> list[Offer]:
        rows = tx.run(
            "SELECT epoch, prompt, samples, tokens, oldest_version FROM prompts "
            f"WHERE run = :run AND state = 'finished' {_ORDER} LIMIT :most{lock}",
            run=self._key["run"],
            most=most,
        )
        return [Offer(PromptId(*row[:2]), *row[2:]) for row in rows]

    def _restart_stale(self, tx: Transaction, oldest_version: int) -> None:
        # Those alone that no other consumer is taking at this moment: its batch needs their samples.
        stale = tx.run(
            "SELECT epoch, prompt FROM prompts "
            "WHERE run = :run AND state = 'finished' AND oldest_version < :oldest {skip_locked}",
            run=self._key["run"],
            oldest=oldest_version,
        )
        if stale:
            these = [{"run": self._key["run"], "epoch": epoch, "prompt": prompt} for epoch, prompt in stale]
            tx.run_many(FORGET, these)
            tx.run_many(f"UPDATE prompts SET state = 'open', restarts = restarts + 1 {THIS}", these)

    def read(self, step: int) -> list[Group]:
        """The batch of `step`, in its order; also after it was acknowledged, until the next checkpoint is. Raises
        Refused where it has none, or none any more."""
        with self._database.transaction() as tx:
            self._current(tx)
            rows = tx.run(
                "SELECT p.epoch, p.prompt, s.payload FROM prompts p JOIN samples s "
                "ON s.run = p.run AND s.epoch = p.epoch AND s.prompt = p.prompt "
                "WHERE p.run = :run AND p.consumer = :consumer AND p.step = :step "
                "ORDER BY p.finished_at, p.epoch, p.prompt, s.sample",
                **self._key,
                step=step,
            )
        if not rows:
            raise Refused(f"step {step}: it has no batch, or its samples were deleted when a later one was trained")
        groups: dict[PromptId, list[Sample]] = {}
        for epoch, prompt, payload in rows:
            groups.setdefault(PromptId(epoch, prompt), []).append(stored(payload))
        return [Group(id, samples) for id, samples in groups.items()]

    def acknowledge(self, step: int) -> None:
        """A checkpoint has all steps up to `step`. Samples are kept until the next one is acknowledged too, so that a
        trainer may go back by one checkpoint."""
        at = self._key | {"step": step}
        with self._database.transaction() as tx:
            leased, acknowledged = self._current(tx)
            if step <= acknowledged:
                return
            if step > leased:
                raise Refused(f"step {step}: it has no batch; the last one that has is {leased}")
            tx.run(
                "DELETE FROM samples WHERE run = :run AND (epoch, prompt) IN (SELECT epoch, prompt FROM prompts "
                f"{_OF} AND step > (SELECT pruned_step FROM consumers {_OF}) AND step <= :acknowledged)",
                **self._key,
                acknowledged=acknowledged,
            )
            tx.run(f"UPDATE prompts SET state = 'trained' {_OF} AND state = 'leased' AND step <= :step", **at)
            tx.run(
                f"UPDATE consumers SET acknowledged_step = :step, pruned_step = :acknowledged {_OF}",
                **at,
                acknowledged=acknowledged,
            )

    def _current(self, tx: Transaction) -> tuple[int, int]:
        """Steps (leased, acknowledged). Raises Fenced."""
        current, leased, acknowledged, _ = self._state(tx)
        if current != self._trainer:
            raise Fenced(f"run {self._key['run']}: trainer {current} has taken over from {self._trainer}")
        return leased, acknowledged

    def _state(self, tx: Transaction) -> tuple[str, int, int, int]:
        ((trainer, leased, acknowledged, pruned),) = tx.run(
            f"SELECT trainer, leased_step, acknowledged_step, pruned_step FROM consumers {_OF} {{lock}}", **self._key
        )
        return trainer, leased, acknowledged, pruned


_OF = "WHERE run = :run AND consumer = :consumer"
_ORDER = "ORDER BY finished_at, epoch, prompt"
