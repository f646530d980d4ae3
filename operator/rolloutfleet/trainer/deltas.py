"""Versions written as what has changed since the one before."""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rolloutfleet.engine.versions import (
    CHANGES_FILE,
    INDEX_FILE,
    PIECE_BYTES,
    Base,
    Change,
    Tensor,
    VersionIndex,
    state_of,
)
from rolloutfleet.trainer.checkpoints import TENSORS_FILE, copy_model_files, names_of, new_version
from rolloutfleet.trainer.host_tensors import HostTensor, on_host, write_safetensors
from rolloutfleet.trainer.tensors import Tensors

if TYPE_CHECKING:
    import torch

THREADS = min(os.cpu_count() or 1, 8)
AHEAD = 2 * THREADS
"""Tensors on the host at a time beyond those of the version before."""


@dataclass(frozen=True)
class SavedVersion:
    """A version's folder; may be given to `Fleet.update_weights` as it is."""

    path: Path
    version: int
    full: bool
    density: float
    """Of all elements, those that differ from the version before; 1.0 where there is none."""
    bytes: int
    """That were written."""
    seconds: float

    def __fspath__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class _Held:
    tensor: HostTensor
    sha256: str


@dataclass(frozen=True)
class _Compared:
    held: _Held
    pieces: list[tuple[int, bytes]]
    changed: int
    """Elements."""
    comparable: bool


class DeltaWriter:
    """Writes versions of one model to one folder; `engine/versions.py` says what a folder holds.

    The first version is a full checkpoint, as `save_checkpoint` writes it, and so is every `full_every`-th; the others
    hold the changes against the version written before. Each is on disk before the next is written against it, whether
    or not the fleet took it, so a refused update costs nothing. Keeps a copy of the weights in the host's memory. Not
    for several threads.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        base: str | os.PathLike[str],
        dtype: torch.dtype | None = None,
        full_every: int = 20,
    ) -> None:
        """`base` and `dtype` as for `save_checkpoint`. Raises ValueError, FileNotFoundError."""
        if full_every < 1:
            raise ValueError(f"full_every: {full_every}; 1 writes full versions only, more saves more")
        self._folder = Path(folder)
        self._base = Path(base)
        self._dtype = dtype
        self._full_every = full_every
        self._in_base = names_of(base)
        self._before: VersionIndex | None = None
        self._before_folder = ""
        self._held: dict[str, _Held] = {}
        self._deltas = 0

    def save(self, tensors: Tensors, *, version: int) -> SavedVersion:
        """Raises what `save_checkpoint` raises; then nothing was written, and the next version is a full one.

        Of a sharded model (FSDP2) one process saves, while the others call `gather(model)`.
        """
        return self.save_from_host(on_host(tensors, self._dtype, in_base=self._in_base), version=version)

    def save_from_host(self, tensors: Iterable[tuple[str, HostTensor]], *, version: int) -> SavedVersion:
        """`save` for whoever has tensors as bytes already; they must not change afterwards."""
        began = time.monotonic()
        before, held = self._before, self._held
        self._before, self._held = None, {}  # until this one is complete nobody knows what comes next
        changed = elements = 0
        comparable = before is not None
        indexed: dict[str, Tensor] = {}
        with new_version(self._folder, version) as (target, partial):
            with (partial / CHANGES_FILE).open("wb") as stream:
                for name, found in _compared(tensors, held):
                    indexed[name] = Tensor(
                        dtype=found.held.tensor.dtype,
                        shape=found.held.tensor.shape,
                        sha256=found.held.sha256,
                        changes=tuple(_append(stream, piece, data) for piece, data in found.pieces),
                    )
                    self._held[name] = found.held
                    changed += found.changed
                    elements += len(found.held.tensor.elements)
                    comparable = comparable and found.comparable
            comparable = comparable and not held  # else tensors are missing that the version before had
            full = not comparable or self._deltas + 1 >= self._full_every
            if full:
                (partial / CHANGES_FILE).unlink()
                copy_model_files(self._base, partial)
                write_safetensors(partial / TENSORS_FILE, {name: held.tensor for name, held in self._held.items()})
                indexed = {name: tensor.model_copy(update={"changes": ()}) for name, tensor in indexed.items()}
            index = VersionIndex(
                version=version,
                state=state_of(indexed),
                base=None if full or before is None else Base(folder=self._before_folder, state=before.state),
                tensors=indexed,
            )
            (partial / INDEX_FILE).write_text(index.model_dump_json(exclude_none=True))
            size = sum(file.stat().st_size for file in partial.iterdir())
        # Of the index only its state is needed from now on.
        self._before, self._before_folder = index.model_copy(update={"tensors": {}}), target.name
        self._deltas = 0 if full else self._deltas + 1
        return SavedVersion(
            path=target,
            version=version,
            full=full,
            density=changed / max(elements, 1) if comparable else 1.0,
            bytes=size,
            seconds=time.monotonic() - began,
        )


def _compared(tensors: Iterable[tuple[str, HostTensor]], held: dict[str, _Held]) -> Iterator[tuple[str, _Compared]]:
    """Each tensor against the one before, which leaves `held`: never are two versions in memory."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="delta") as pool:
        running: deque[tuple[str, Future[_Compared]]] = deque()
        for name, new in tensors:
            running.append((name, pool.submit(_compare, new, held.pop(name, None))))
            if len(running) >= AHEAD:
                done, future = running.popleft()
                yield done, future.result()
        for done, future in running:
            yield done, future.result()


def _compare(new: HostTensor, old: _Held | None) -> _Compared:
    from rolloutfleet.engine.changes import encode

    if old is None or (old.tensor.dtype, old.tensor.shape) != (new.dtype, new.shape):
        held = _Held(new, hashlib.sha256(new.elements.data).hexdigest())
        return _Compared(held, pieces=[], changed=0, comparable=False)
    pieces = []
    changed = 0
    step = PIECE_BYTES // new.elements.itemsize
    for number, begin in enumerate(range(0, len(new.elements), step)):
        data, count = encode(old.tensor.elements[begin : begin + step], new.elements[begin : begin + step])
        changed += count
        if data:
            pieces.append((number, data))
    sha256 = hashlib.sha256(new.elements.data).hexdigest() if pieces else old.sha256
    return _Compared(_Held(new, sha256), pieces=pieces, changed=changed, comparable=True)


def _append(stream: BinaryIO, piece: int, data: bytes) -> Change:
    offset = stream.tell()
    stream.write(data)
    return Change(piece=piece, offset=offset, length=len(data))
