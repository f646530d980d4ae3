"""Making one copy: a full checkpoint's tensors, with the changes of deltas, into a new folder, each checked."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rolloutfleet.engine.changes import BadChanges, Elements, apply
from rolloutfleet.engine.checkpoint import ITEM_BYTES, TensorInFile, tensors_in
from rolloutfleet.engine.errors import CheckpointError
from rolloutfleet.engine.versions import CHANGES_FILE, INDEX_FILE, PIECE_BYTES, Tensor, VersionIndex

THREADS = 4
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000, "F64": 0x7FF0000000000000}
"""Bits of a number that are all set in infinities and NaN alone."""


@dataclass(frozen=True)
class Delta:
    """One that is to be applied."""

    path: Path
    index: VersionIndex


def make_copy(
    base: Path, deltas: Sequence[Delta], target: Path, *, expected: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """Write what `base`, a full checkpoint, becomes by `deltas`, oldest first, into the empty folder `target`.

    `expected`: what must come out, with checksums; without it only finite numbers are asked for. Returns what came
    out. Raises CheckpointError, OSError; then the target holds nothing of use.
    """
    found: dict[str, Tensor] = {}
    # The threads end before their files are closed: a number may be another file's by then.
    with ExitStack() as files, _threads() as pool:
        changes = [files.enter_context((delta.path / CHANGES_FILE).open("rb")).fileno() for delta in deltas]
        running = []
        for file in sorted(base.iterdir()):
            if file.suffix != ".safetensors":
                if file.is_file() and file.name != INDEX_FILE:
                    shutil.copyfile(file, target / file.name)
                continue
            source = files.enter_context(file.open("rb")).fileno()
            made = os.open(target / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            files.callback(os.close, made)
            tensors = tensors_in(file)
            begin = min((tensor.begin for tensor in tensors.values()), default=file.stat().st_size)
            _write(made, _read(source, begin, 0, file), 0, target / file.name)
            for name, tensor in tensors.items():
                task = _Task(name, tensor, file, source, target / file.name, made, deltas, changes, expected)
                running.append((name, pool.submit(task.run)))
        names = {name for name, _ in running}
        for known in (expected, *(delta.index.tensors for delta in deltas)):
            if known is not None and known.keys() != names:
                one = min(known.keys() ^ names)
                raise CheckpointError(f"{base}: {one} is not in all of the versions that rest on each other")
        for name, future in running:
            found[name] = future.result()
    return found


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="copy")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Task:
    """One tensor, in pieces."""

    name: str
    tensor: TensorInFile
    file: Path
    source: int
    copy: Path
    made: int
    deltas: Sequence[Delta]
    changes: Sequence[int]
    """Files of changes, one a delta."""
    expected: Mapping[str, Tensor] | None

    def run(self) -> Tensor:
        dtype = np.dtype(f"u{ITEM_BYTES.get(self.tensor.dtype, 1)}")
        known = self.expected[self.name] if self.expected is not None else None
        if known is not None and (known.dtype, known.shape) != (self.tensor.dtype, self.tensor.shape):
            raise CheckpointError(
                f"{self.file}: {self.name} is {self.tensor.dtype} {list(self.tensor.shape)}, "
                f"and {known.dtype} {list(known.shape)} in the version that rests on it"
            )
        digest = hashlib.sha256()
        for number, begin in enumerate(range(self.tensor.begin, self.tensor.end, PIECE_BYTES)):
            length = min(PIECE_BYTES, self.tensor.end - begin)
            piece = np.frombuffer(_read(self.source, length, begin, self.file), np.uint8).view(dtype)
            self._change(number, piece)
            mask = _EXPONENT.get(self.tensor.dtype)
            if mask is not None and bool(((piece & dtype.type(mask)) == mask).any()):
                raise CheckpointError(f"{self.name}: holds NaN or an infinity: engines would serve noise")
            digest.update(piece.data)
            _write(self.made, piece.data, begin, self.copy)
        if known is not None and digest.hexdigest() != known.sha256:
            raise CheckpointError(f"{self.name}: its checksum is not the one that was written with it")
        return Tensor(dtype=self.tensor.dtype, shape=self.tensor.shape, sha256=digest.hexdigest())

    def _change(self, number: int, piece: Elements) -> None:
        for delta, changes in zip(self.deltas, self.changes, strict=True):
            path = delta.path / CHANGES_FILE
            for change in delta.index.tensors[self.name].changes:
                if change.piece == number:
                    try:
                        apply(bytes(_read(changes, change.length, change.offset, path)), piece)
                    except BadChanges as error:
                        raise CheckpointError(f"{path}: {self.name}: {error}") from error


def _read(descriptor: int, length: int, offset: int, path: Path) -> bytearray:
    found = bytearray(length)
    view = memoryview(found)
    done = 0
    while done < length:
        with _naming(path):
            count = os.preadv(descriptor, [view[done:]], offset + done)
        if not count:
            raise CheckpointError(f"{path}: ends after {offset + done} bytes, in the middle of a tensor")
        done += count
    return found


def _write(descriptor: int, data: bytearray | memoryview, offset: int, path: Path) -> None:
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        with _naming(path):
            done += os.pwrite(descriptor, view[done:], offset + done)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """A descriptor's errors do not name its file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
