"""Objects read as models: each version once, however many plans are made from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Reading(Generic[T]):
    """What a model reads from an object is kept by UID until the object is replaced; neither is ever changed."""

    def __init__(self, read: Callable[[Mapping[str, Any]], T]) -> None:
        self._read = read
        self._kept: dict[str, tuple[Mapping[str, Any], T]] = {}

    def __call__(self, body: Mapping[str, Any]) -> T:
        uid = body["metadata"].get("uid", "")
        kept = self._kept.get(uid)
        if kept is not None and kept[0] is body:
            return kept[1]
        value = self._read(body)
        self._kept[uid] = (body, value)
        return value

    def forget(self, uid: str) -> None:
        self._kept.pop(uid, None)
