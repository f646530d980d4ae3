"""What can go wrong between trainer and fleet.

FleetError
├── AgentUnreachable   no agent answers: is the pod annotated, and the agent's container up?
├── NotReady           the fleet does not serve (yet): missing, starting, led by another trainer's agent
└── Refused            the agent refused the request or could not do it; `code` and `details` say why
NonFiniteWeights       nothing was written, or the update was given up
ZeroWeights            likewise
"""

from __future__ import annotations

from collections.abc import Sequence


class NonFiniteWeights(ValueError):
    """A tensor holds NaN or an infinity: engines would serve noise at full speed."""


class ZeroWeights(ValueError):
    """Every matrix is zero: engines would sample all tokens alike."""


class FleetError(Exception):
    def __init__(self, message: str, *, code: str = "", details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code = code
        """A word that programs read; the runbook explains each."""
        self.details = list(details)
        """Of a failed update: a verdict an engine."""


class AgentUnreachable(FleetError):
    pass


class NotReady(FleetError):
    pass


class Refused(FleetError):
    pass
