"""Where all prompts of a run are, for people, metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass

from rolloutfleet.agent.store.database import Database
from rolloutfleet.agent.store.ledger import PromptId


@dataclass(frozen=True)
class Progress:
    cursor: PromptId
    """The next prompt that nobody was given yet."""
    states: dict[str, int]
    """Prompts by state: open, finished, leased, trained, dropped."""
    claimed: int
    """Of the open ones."""
    dropped: dict[str, int]
    """By reason."""


def progress(database: Database, run: str) -> Progress:
    with database.transaction() as tx:
        ((epoch, prompt),) = tx.run("SELECT epoch, prompt FROM runs WHERE run = :run", run=run)
        states = tx.run("SELECT state, count(*) FROM prompts WHERE run = :run GROUP BY state", run=run)
        ((claimed,),) = tx.run(
            "SELECT count(*) FROM prompts WHERE run = :run AND state = 'open' AND session IS NOT NULL", run=run
        )
        dropped = tx.run(
            "SELECT reason, count(*) FROM prompts WHERE run = :run AND state = 'dropped' GROUP BY reason", run=run
        )
    return Progress(PromptId(epoch, prompt), dict(states), claimed, dict(dropped))


def prompts_in(database: Database, run: str, state: str) -> list[tuple[PromptId, int | None]]:
    """With the step whose batch each is in, in the order of epochs."""
    with database.transaction() as tx:
        rows = tx.run(
            "SELECT epoch, prompt, step FROM prompts WHERE run = :run AND state = :state ORDER BY epoch, prompt",
            run=run,
            state=state,
        )
    return [(PromptId(epoch, prompt), step) for epoch, prompt, step in rows]
