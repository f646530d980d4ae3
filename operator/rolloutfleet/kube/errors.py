"""What may go wrong between us and the Kubernetes API.

ApiError
├── Unreachable          no answer: connection, TLS or time-out
├── NotFound             404
├── Conflict             409: resourceVersion, UID or field ownership
│   └── AlreadyExists    409 on create
├── Forbidden            403: RBAC, quota or admission
├── Invalid              422 and 400: the object breaks a rule
├── Expired              410: the resourceVersion is too old, list again
└── TooManyRequests      429
"""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    def __init__(self, message: str, *, status: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.reason = reason


class Unreachable(ApiError):
    pass


class NotFound(ApiError):
    pass


class Conflict(ApiError):
    pass


class AlreadyExists(Conflict):
    pass


class Forbidden(ApiError):
    pass


class Invalid(ApiError):
    pass


class Expired(ApiError):
    pass


class TooManyRequests(ApiError):
    pass


_BY_STATUS: dict[int, type[ApiError]] = {
    400: Invalid,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Expired,
    422: Invalid,
    429: TooManyRequests,
}


def error_from(status: int, body: Any, text: str) -> ApiError:
    """From a metav1.Status, or from whatever a proxy in between answered."""
    details = body if isinstance(body, dict) else {}
    reason = str(details.get("reason") or "")
    message = str(details.get("message") or text[:300] or f"HTTP {status}")
    kind = AlreadyExists if reason == "AlreadyExists" else _BY_STATUS.get(status, ApiError)
    return kind(message, status=status, reason=reason)
