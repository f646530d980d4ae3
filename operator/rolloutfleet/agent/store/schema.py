"""The ledger's tables. A prompt is named by run, epoch and number in the epoch; a sample by its number in the group."""

from __future__ import annotations

from rolloutfleet.agent.store.database import Database
from rolloutfleet.agent.store.errors import Refused

VERSION = 1

STATEMENTS = (
    "CREATE TABLE IF NOT EXISTS ledger (version BIGINT NOT NULL)",
    # epoch and prompt: the cursor, the next prompt that nobody was given yet.
    """CREATE TABLE IF NOT EXISTS runs (
        run TEXT PRIMARY KEY,
        source TEXT NOT NULL,
        epoch_size BIGINT NOT NULL,
        epochs BIGINT,
        epoch BIGINT NOT NULL DEFAULT 0,
        prompt BIGINT NOT NULL DEFAULT 0,
        fence BIGINT NOT NULL DEFAULT 0,
        sessions BIGINT NOT NULL DEFAULT 0
    )""",
    """CREATE TABLE IF NOT EXISTS sessions (
        run TEXT NOT NULL,
        session BIGINT NOT NULL,
        agent TEXT NOT NULL,
        expires_at DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (run, session)
    )""",
    # session and claims: who generates it, and the how-manieth claim that is. consumer and step: whose batch it is in.
    """CREATE TABLE IF NOT EXISTS prompts (
        run TEXT NOT NULL,
        epoch BIGINT NOT NULL,
        prompt BIGINT NOT NULL,
        state TEXT NOT NULL DEFAULT 'open',
        session BIGINT,
        claims BIGINT NOT NULL DEFAULT 0,
        restarts BIGINT NOT NULL DEFAULT 0,
        samples BIGINT NOT NULL DEFAULT 0,
        tokens BIGINT NOT NULL DEFAULT 0,
        oldest_version BIGINT,
        finished_at DOUBLE PRECISION,
        consumer TEXT,
        step BIGINT,
        reason TEXT,
        PRIMARY KEY (run, epoch, prompt)
    )""",
    "CREATE INDEX IF NOT EXISTS prompts_open ON prompts (run, session) WHERE state = 'open'",
    "CREATE INDEX IF NOT EXISTS prompts_finished ON prompts (run, finished_at) WHERE state = 'finished'",
    "CREATE INDEX IF NOT EXISTS prompts_steps ON prompts (run, consumer, step) WHERE step IS NOT NULL",
    """CREATE TABLE IF NOT EXISTS samples (
        run TEXT NOT NULL,
        epoch BIGINT NOT NULL,
        prompt BIGINT NOT NULL,
        sample BIGINT NOT NULL,
        payload {bytes} NOT NULL,
        PRIMARY KEY (run, epoch, prompt, sample)
    )""",
    # trainer: the one life of the consumer whose calls count. Samples of steps up to pruned_step are deleted.
    """CREATE TABLE IF NOT EXISTS consumers (
        run TEXT NOT NULL,
        consumer TEXT NOT NULL,
        trainer TEXT NOT NULL DEFAULT '',
        leased_step BIGINT NOT NULL DEFAULT 0,
        acknowledged_step BIGINT NOT NULL DEFAULT 0,
        pruned_step BIGINT NOT NULL DEFAULT 0,
        PRIMARY KEY (run, consumer)
    )""",
)


def prepare(database: Database) -> None:
    """Makes the tables where they are missing. Raises Refused where another version of them is there."""
    with database.transaction() as transaction:
        if database.schema_lock:
            transaction.run(database.schema_lock)
        transaction.run(STATEMENTS[0])
        found = transaction.run("SELECT version FROM ledger")
        if found and found[0][0] != VERSION:
            raise Refused(f"the store has layout {found[0][0]}, this agent knows layout {VERSION}: use a new store")
        for statement in STATEMENTS[1:]:
            transaction.run(statement.replace("{bytes}", database.bytes_type))
        if not found:
            transaction.run("INSERT INTO ledger (version) VALUES (:version)", version=VERSION)
