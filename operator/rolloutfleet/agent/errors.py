"""Refusals of the agent's API: each has a code that programs read and a text that people read."""

from __future__ import annotations


class AgentError(Exception):
    """Becomes an HTTP answer of `status` with `code`."""

    def __init__(self, code: str, message: str, *, status: int, details: list[str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.details = details or []


def conflict(code: str, message: str) -> AgentError:
    return AgentError(code, message, status=409)


def invalid(code: str, message: str, details: list[str] | None = None) -> AgentError:
    return AgentError(code, message, status=422, details=details)


def unavailable(code: str, message: str) -> AgentError:
    return AgentError(code, message, status=503)
