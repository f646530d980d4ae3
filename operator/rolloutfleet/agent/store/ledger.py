"""An agent's side of the ledger: claim prompts, keep what is generated for them, say how they ended.

Every method is one transaction and may be repeated: after StoreBusy, when nobody knows whether it was committed, the
same call does what is still to be done and no more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rolloutfleet.agent.store.database import Database, Transaction, Values
from rolloutfleet.agent.store.errors import Fenced, Refused, StoreDamaged
from rolloutfleet.api.sample_codec import DamagedSample, decode, encode
from rolloutfleet.api.samples import Sample, SampleStatus
from rolloutfleet.plan.stitching import oldest_version

SESSION_SECONDS = 60.0
"""How long an agent of several may be silent before the others take over its prompts."""


class PromptId(NamedTuple):
    epoch: int
    prompt: int
    """Number in the epoch, in the epoch's order."""


@dataclass(frozen=True)
class Run:
    name: str
    source: str
    """Fingerprint of the data set, its order included: the ledger keeps numbers of prompts and not their text."""
    epoch_size: int
    epochs: int | None = None
    """None: without end."""


class Left(NamedTuple):
    """What of a run no step has yet."""

    fresh: bool
    """There are prompts that nobody was given."""
    open: int
    """Prompts that were given to an agent, of whomever."""
    finished: int
    """Groups that wait for a step."""

    @property
    def comes(self) -> bool:
        """Something may still be finished."""
        return self.fresh or self.open > 0


class Claim(NamedTuple):
    id: PromptId
    claim: int
    """The how-manieth claim of this prompt: what belongs to an earlier one is no longer taken."""


@dataclass(frozen=True)
class GroupUpdate:
    claim: Claim
    samples: Sequence[Sample] = ()
    """Those that changed, each in the place of the one with its index; for `finished` the whole group."""
    outcome: Literal["open", "finished", "dropped", "released"] = "open"
    """finished: no sample of the group goes on; it waits for a trainer. dropped: it is not to be trained, and its
    samples are deleted. released: with what it has, for whoever claims next."""
    reason: str = ""
    """Why it was dropped."""


class Ledger:
    """A session of one agent. When it ends, by `close`, by a newer one or by silence, its claims are free again."""

    def __init__(
        self,
        database: Database,
        run: Run,
        *,
        agent: str,
        fence: int = 0,
        shared: bool = False,
        session_seconds: float = SESSION_SECONDS,
    ) -> None:
        """`shared`: other agents of the run go on; else they are ended. `fence`: the number of the Lease under which
        the agent leads; a lower one than the ledger has seen is refused.

        Raises Fenced, Refused for another data set under the run's name, and other StoreErrors.
        """
        if run.epoch_size < 1:
            raise Refused(f"run {run.name}: its data set has no prompts")
        self.run = run
        self._database = database
        self._seconds = session_seconds
        now = database.now()
        with database.transaction() as tx:
            tx.run(
                "INSERT INTO runs (run, source, epoch_size, epochs) VALUES (:run, :source, :size, :epochs) "
                "ON CONFLICT (run) DO NOTHING",
                run=run.name,
                source=run.source,
                size=run.epoch_size,
                epochs=run.epochs,
            )
            ((source, size, seen),) = tx.run(
                "SELECT source, epoch_size, fence FROM runs WHERE run = :run {lock}", run=run.name
            )
            if (source, size) != (run.source, run.epoch_size):
                raise Refused(
                    f"run {run.name}: it was started with data set {source} of {size} prompts and now has {run.source} "
                    f"of {run.epoch_size}; give the run another name, or it the same data"
                )
            if fence < seen:
                raise Fenced(f"run {run.name}: an agent with fence {seen} has taken over, this one has {fence}")
            ((self._session,),) = tx.run(
                "UPDATE runs SET fence = :fence, epochs = :epochs, sessions = sessions + 1 WHERE run = :run "
                "RETURNING sessions",
                run=run.name,
                fence=fence,
                epochs=run.epochs,
            )
            if shared:
                self._end_sessions(tx, "(expires_at < :now OR agent = :agent)", now=now, agent=agent)
            else:
                self._end_sessions(tx, "session < :mine", mine=self._session)
            tx.run(
                "INSERT INTO sessions (run, session, agent, expires_at) VALUES (:run, :session, :agent, :expires)",
                run=run.name,
                session=self._session,
                agent=agent,
                expires=now + session_seconds,
            )

    def claim(self, total: int, *, known: Collection[Claim] = ()) -> list[Claim]:
        """Hold `total` prompts and return those that are not `known`: begun ones first, then fresh ones from the
        cursor. Fewer where the run has no more."""
        now = self._database.now()
        with self._database.transaction() as tx:
            self._alive(tx, now)
            self._end_sessions(tx, "expires_at < :now", now=now)
            held = self._held(tx)
            wanted = total - len(held)
            if wanted > 0:
                begun = tx.run(
                    "SELECT epoch, prompt FROM prompts WHERE run = :run AND state = 'open' AND session IS NULL "
                    "ORDER BY epoch, prompt LIMIT :wanted {skip_locked}",
                    run=self.run.name,
                    wanted=wanted,
                )
                tx.run_many(
                    f"UPDATE prompts SET session = :session, claims = claims + 1 {THIS}",
                    [self._of(PromptId(*row)) for row in begun],
                )
                fresh = self._advance(tx, wanted - len(begun))
                if begun or fresh:
                    held = self._held(tx)
        return sorted(held.difference(known))

    def partials(self, ids: Collection[PromptId]) -> dict[PromptId, list[Sample]]:
        """What is kept of the samples of prompts that were claimed, in the order of their indices."""
        found: dict[PromptId, list[Sample]] = {}
        with self._database.transaction() as tx:
            for id in ids:
                rows = tx.run(
                    f"SELECT payload FROM samples {THIS} ORDER BY sample",
                    run=self.run.name,
                    epoch=id.epoch,
                    prompt=id.prompt,
                )
                found[id] = [stored(payload) for (payload,) in rows]
        return found

    def save(self, updates: Sequence[GroupUpdate]) -> list[Claim]:
        """All of them or none. Returns the claims that no longer hold, whose updates were left out: they were told
        before, or somebody else has the prompt now."""
        encoded = [_encoded(update) for update in updates]
        now = self._database.now()
        with self._database.transaction() as tx:
            self._alive(tx, now)
            held = self._held(tx)
            samples: dict[Claim, dict[int, Values]] = {}
            ends: dict[str, list[Values]] = {}
            lost: list[Claim] = []
            for update, payloads in zip(updates, encoded, strict=True):
                if update.claim not in held:
                    lost.append(update.claim)
                    continue
                of = self._of(update.claim.id)
                if update.outcome in ("finished", "dropped"):
                    samples[update.claim] = {}  # also what was told of it a moment ago, in the same call
                samples.setdefault(update.claim, {}).update(
                    (index, of | {"sample": index, "payload": payload}) for index, payload in payloads
                )
                if update.outcome != "open":
                    held.remove(update.claim)
                    ends.setdefault(update.outcome, []).append(of | _summary(update) | {"now": now})
            for outcome in ends.keys() - {"released"}:
                _many(tx, FORGET, ends[outcome])
            _many(
                tx,
                "INSERT INTO samples (run, epoch, prompt, sample, payload) "
                "VALUES (:run, :epoch, :prompt, :sample, :payload) "
                "ON CONFLICT (run, epoch, prompt, sample) DO UPDATE SET payload = excluded.payload",
                [values for of_claim in samples.values() for values in of_claim.values()],
            )
            for outcome, values in ends.items():
                _many(tx, _ENDS[outcome], values)
        return lost

    def finished(self) -> int:
        """Groups of the run that no step has yet."""
        with self._database.transaction() as tx:
            return self._count(tx, "finished")

    def left(self) -> Left:
        """Costs the same however long the run is."""
        with self._database.transaction() as tx:
            ((epoch,),) = tx.run("SELECT epoch FROM runs WHERE run = :run", run=self.run.name)
            fresh = self.run.epochs is None or epoch < self.run.epochs
            return Left(fresh, self._count(tx, "open"), self._count(tx, "finished"))

    def _count(self, tx: Transaction, state: Literal["open", "finished"]) -> int:
        # The state is written out: an index of its own finds these alone.
        statement = f"SELECT count(*) FROM prompts WHERE run = :run AND state = '{state}'"
        ((count,),) = tx.run(statement, run=self.run.name)
        return int(count)

    def keep_alive(self) -> None:
        """To be called well within the session's seconds, by agents that share a run. Raises Fenced."""
        now = self._database.now()
        with self._database.transaction() as tx:
            self._alive(tx, now)

    def close(self) -> None:
        with self._database.transaction() as tx:
            self._end_sessions(tx, "session = :mine", mine=self._session)

    def _alive(self, tx: Transaction, now: float) -> None:
        alive = tx.run(
            "UPDATE sessions SET expires_at = :expires WHERE run = :run AND session = :session RETURNING session",
            run=self.run.name,
            session=self._session,
            expires=now + self._seconds,
        )
        if not alive:
            raise Fenced(f"run {self.run.name}: session {self._session} was ended by another agent, or by its silence")

    def _end_sessions(self, tx: Transaction, which: str, **values: object) -> None:
        """Their prompts are free again, with the samples that were kept."""
        ended = tx.run(
            f"DELETE FROM sessions WHERE run = :run AND {which} RETURNING session", run=self.run.name, **values
        )
        _many(
            tx,
            "UPDATE prompts SET session = NULL WHERE run = :run AND state = 'open' AND session = :session",
            [{"run": self.run.name, "session": session} for (session,) in ended],
        )

    def _held(self, tx: Transaction) -> set[Claim]:
        rows = tx.run(
            "SELECT epoch, prompt, claims FROM prompts WHERE run = :run AND state = 'open' AND session = :session",
            run=self.run.name,
            session=self._session,
        )
        return {Claim(PromptId(epoch, prompt), claims) for epoch, prompt, claims in rows}

    def _advance(self, tx: Transaction, count: int) -> int:
        """Move the cursor over `count` prompts, and claim them. Returns how many there were."""
        if count <= 0:
            return 0
        ((epoch, prompt),) = tx.run("SELECT epoch, prompt FROM runs WHERE run = :run {lock}", run=self.run.name)
        fresh: list[Values] = []
        while len(fresh) < count and (self.run.epochs is None or epoch < self.run.epochs):
            fresh.append(self._of(PromptId(epoch, prompt)))
            epoch, prompt = (epoch, prompt + 1) if prompt + 1 < self.run.epoch_size else (epoch + 1, 0)
        _many(
            tx,
            "INSERT INTO prompts (run, epoch, prompt, session, claims) VALUES (:run, :epoch, :prompt, :session, 1)",
            fresh,
        )
        tx.run(
            "UPDATE runs SET epoch = :epoch, prompt = :prompt WHERE run = :run",
            run=self.run.name,
            epoch=epoch,
            prompt=prompt,
        )
        return len(fresh)

    def _of(self, id: PromptId) -> dict[str, object]:
        return {"run": self.run.name, "epoch": id.epoch, "prompt": id.prompt, "session": self._session}


def stored(payload: bytes) -> Sample:
    """Raises StoreDamaged."""
    try:
        return decode(bytes(payload))
    except DamagedSample as error:
        raise StoreDamaged(f"the store: {error}") from error


def _encoded(update: GroupUpdate) -> list[tuple[int, bytes]]:
    """Raises Refused for a group that ends in a way that does not fit its samples."""
    name = f"prompt {update.claim.id.prompt} of epoch {update.claim.id.epoch}"
    indices = [sample.index for sample in update.samples]
    if len({*indices}) != len(indices):
        raise Refused(f"{name}: two samples have one index: {sorted(indices)}")
    if update.outcome == "finished":
        going_on = {s.status.value for s in update.samples if s.status in (SampleStatus.PENDING, SampleStatus.ABORTED)}
        if going_on or not update.samples:
            raise Refused(f"{name}: a finished group has {', '.join(sorted(going_on)) or 'no'} samples")
    if update.outcome == "dropped":
        if not update.reason:
            raise Refused(f"{name}: dropped without a reason")
        return []
    return [(sample.index, encode(sample)) for sample in update.samples]


def _summary(update: GroupUpdate) -> dict[str, object]:
    """What is chosen by, when batches are made."""
    versions = [version for sample in update.samples if (version := oldest_version(sample)) is not None]
    return {
        "samples": len(update.samples),
        "tokens": sum(len(sample.tokens) for sample in update.samples),
        "oldest_version": min(versions, default=None),
        "reason": update.reason,
    }


def _many(tx: Transaction, statement: str, values: Sequence[Values]) -> None:
    if values:
        tx.run_many(statement, values)


THIS = "WHERE run = :run AND epoch = :epoch AND prompt = :prompt"
FORGET = f"DELETE FROM samples {THIS}"
_ENDS = {
    "released": f"UPDATE prompts SET session = NULL {THIS}",
    "dropped": f"UPDATE prompts SET state = 'dropped', session = NULL, reason = :reason {THIS}",
    "finished": "UPDATE prompts SET state = 'finished', session = NULL, finished_at = :now, samples = :samples, "
    f"tokens = :tokens, oldest_version = :oldest_version {THIS}",
}
