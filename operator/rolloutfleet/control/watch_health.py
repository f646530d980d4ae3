"""Whether a watch still tells. Its silence says nothing: a cluster may be quiet, and kopf keeps bookmarks to itself."""

from __future__ import annotations


class WatchHealth:
    """Of the watch of one kind: suspect since a list found something new, trusted again with its next event."""

    def __init__(self) -> None:
        self._suspect_since: float | None = None

    def told(self) -> None:
        self._suspect_since = None

    def was_late(self, now: float) -> None:
        """A list had what the watch had not told."""
        if self._suspect_since is None:
            self._suspect_since = now

    def silent_seconds(self, now: float) -> float:
        """How long it owes an event; 0 while it owes none."""
        return 0.0 if self._suspect_since is None else now - self._suspect_since
