"""A pod's own copies of weight versions: made of a full checkpoint and deltas, checked, then named.

A copy is a folder that appears by one rename and never changes. A crash at any point leaves what was there before.
Nothing is synced to disk: the volume goes with the pod, and what an engine loads of it is proved by checksum again.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rolloutfleet.api.worker import LocalCopy
from rolloutfleet.engine.errors import CheckpointError, CheckpointGone
from rolloutfleet.engine.versions import (
    CHANGES_FILE,
    INDEX_FILE,
    Fingerprints,
    Link,
    VersionIndex,
    chain,
    read_index,
    state_of,
)
from rolloutfleet.worker.making import Delta, make_copy

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Copy:
    path: Path
    index: VersionIndex


@dataclass(frozen=True)
class _Way:
    """From a full checkpoint to a version."""

    base: Path
    local: bool
    """The base is a copy of ours."""
    deltas: tuple[Delta, ...]
    """Oldest first."""

    @property
    def reads(self) -> list[Path]:
        """Folders of the weights volume."""
        return [delta.path for delta in self.deltas] + ([] if self.local else [self.base])


class Copies:
    """In a folder of the pod that nothing else writes to. Not for several threads or processes."""

    def __init__(self, volume: Path, *, weights: Path, limit_bytes: int | None = None) -> None:
        """`weights`: where the weights volume is mounted. `limit_bytes`: what the kubelet lets our volume hold."""
        self._folder = volume / "copies"
        self._weights = weights
        self._limit = limit_bytes

    def bring_to(self, path: Path) -> LocalCopy:
        """Make the version at `path` one of our copies. Raises CheckpointError, CheckpointGone, and OSError with errno
        and path; then the copies that were there are there still, but for the oldest."""
        began = time.monotonic()
        if not path.is_relative_to(self._weights) or path == self._weights or ".." in path.parts:
            raise CheckpointError(f"{path}: must be a folder below {self._weights}, where this pod has the weights")
        self._folder.mkdir(exist_ok=True)
        _remove(self._folder.glob(".*"))  # of a process that died while it made or removed one
        try:
            links = chain(path)
            before = Fingerprints.of([link.path for link in links])
            copies = self._copies()
            there = next((copy for copy in copies if _same(copy, links[0], before)), None)
            if there is not None:
                _mark_newest(there.path)
                return _answer(there.path, links[0], began)
            for way in _ways(links, copies[:1], before):
                try:
                    made = self._make(way, links[0], before)
                except CheckpointError as error:
                    if not way.local:
                        raise
                    logger.warning("%s does not lead to %s and is removed: %s", way.base, path, error)
                    _remove([way.base])
                else:
                    read = [way.base] if not way.local else []
                    return _answer(made, links[0], began, way=way, read=_size(read) + _changes_size(way))
        except FileNotFoundError as error:
            raise CheckpointGone(f"{error.filename}: gone while it was read") from error
        raise AssertionError("the last way is from the full version, and ends in one of both")

    def _copies(self) -> list[_Copy]:
        """Newest first."""
        folders = sorted(self._folder.iterdir(), key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
        indexed = ((folder, read_index(folder)) for folder in folders)
        return [_Copy(folder, index) for folder, index in indexed if index is not None]

    def _make(self, way: _Way, target: Link, before: Fingerprints) -> Path:
        # There are two at most, and the engine may still be loading the newest one.
        _remove(copy.path for copy in self._copies()[1:])
        self._require_room(_size([way.base]))
        partial = self._folder / f".{target.path.name}"
        partial.mkdir()
        try:
            expected = target.index.tensors if target.index is not None else None
            tensors = make_copy(way.base, way.deltas, partial, expected=expected)
            before.require_same(*way.reads)
            index = VersionIndex(
                version=target.index.version if target.index is not None else None,
                state=state_of(tensors),
                source=before.taken[target.path],
                tensors=tensors,
            )
            (partial / INDEX_FILE).write_text(index.model_dump_json(exclude_none=True))
            _mark_newest(partial)
            return partial.rename(self._folder / f"{target.path.name}-{before.taken[target.path][:12]}")
        finally:
            _remove([partial])

    def _require_room(self, needed: int) -> None:
        """Before a byte is written: past its sizeLimit the kubelet evicts the pod, and the engine with it."""
        free = shutil.disk_usage(self._folder).free
        if self._limit is not None:
            free = min(free, self._limit - _size(self._folder.iterdir()))
        if needed > free:
            text = f"{os.strerror(errno.ENOSPC)}: {needed >> 20} MiB are needed and {max(free, 0) >> 20} MiB are free"
            raise OSError(errno.ENOSPC, text, str(self._folder))


def _same(copy: _Copy, link: Link, before: Fingerprints) -> bool:
    if link.index is None:
        return copy.index.source == before.taken[link.path]
    return copy.index.state == link.index.state


def _ways(links: list[Link], copies: list[_Copy], before: Fingerprints) -> Iterable[_Way]:
    """The shortest one first; the last one is from the full version on the weights volume."""
    for steps, link in enumerate(links):
        deltas = tuple(Delta(step.path, step.index) for step in reversed(links[:steps]) if step.index is not None)
        for copy in copies:
            if _same(copy, link, before):
                yield _Way(copy.path, local=True, deltas=deltas)
    yield _Way(links[-1].path, local=False, deltas=deltas)


def _answer(path: Path, target: Link, began: float, *, way: _Way | None = None, read: int = 0) -> LocalCopy:
    return LocalCopy(
        path=str(path),
        version=target.index.version if target.index is not None else None,
        delta=target.index is not None and target.index.base is not None,
        deltas=len(way.deltas) if way is not None else 0,
        bytes_read=read,
        seconds=round(time.monotonic() - began, 3),
    )


def _mark_newest(copy: Path) -> None:
    """Explicitly: the time that a file system gives by itself may be the same for two copies."""
    now = time.time_ns()
    os.utime(copy, ns=(now, now))


def _size(folders: Iterable[Path]) -> int:
    return sum(file.stat().st_size for folder in folders for file in folder.iterdir())


def _changes_size(way: _Way) -> int:
    return sum((delta.path / CHANGES_FILE).stat().st_size for delta in way.deltas)


def _remove(folders: Iterable[Path]) -> None:
    for folder in list(folders):
        if folder.name[0] != ".":  # half of a copy must not bear its name
            folder = folder.rename(folder.with_name(f".{folder.name}.removed"))
        shutil.rmtree(folder, ignore_errors=True)
