"""What can go wrong with the store.

StoreError
├── StoreBusy        the database does not answer or another process holds it: the same call may be made again
├── StoreUnwritable  full or read-only: what was committed is safe, and calls succeed again once there is room
├── StoreDamaged     what was read is not what was written
├── Fenced           somebody newer has taken over: this agent or trainer must stop
└── Refused          the call makes no sense in the ledger's state, for example another data set under the run's name
"""

from __future__ import annotations

from rolloutfleet.agent.errors import AgentError, conflict, unavailable


class StoreError(Exception):
    pass


class StoreBusy(StoreError):
    pass


class StoreUnwritable(StoreError):
    pass


class StoreDamaged(StoreError):
    pass


class Fenced(StoreError):
    pass


class Refused(StoreError):
    pass


def as_refusal(error: StoreError) -> AgentError:
    """What the agent answers with. 503: the same request may be made again."""
    if isinstance(error, Fenced):
        return conflict("Fenced", str(error))
    if isinstance(error, Refused):
        return conflict("StoreRefused", str(error))
    return unavailable(type(error).__name__, str(error))
