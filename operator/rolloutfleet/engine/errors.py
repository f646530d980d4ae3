"""What may go wrong between us and an engine or a router.

EngineError
├── EngineUnreachable    no connection, or it broke: the request may or may not have been performed
├── EngineTimeout        no answer in time: likewise
└── EngineRefused        an answer with an error status
"""

from __future__ import annotations


class EngineError(Exception):
    pass


class EngineUnreachable(EngineError):
    pass


class EngineTimeout(EngineError):
    pass


class EngineRefused(EngineError):
    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class CheckpointError(ValueError):
    """The folder is no complete checkpoint; the text names the path and what is wrong."""


class CheckpointGone(CheckpointError):
    """It is not there, or not any more."""
