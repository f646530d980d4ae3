"""Folders of weight versions that say themselves what they hold: one index file in each.

A full version is a checkpoint as SGLang loads it, and the index beside it has a checksum of each tensor. A delta holds
the changes against another version, its base, in a sibling folder; a full version ends each such chain. The changes
lie in a file of our own (engine/changes.py) whose name is none that SGLang looks for (*.safetensors, *.bin, *.pt): it
would take such a folder for a checkpoint, and skip names that it does not know or die of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rolloutfleet.engine.errors import CheckpointError, CheckpointGone

INDEX_FILE = "rolloutfleet-version.json"
CHANGES_FILE = "changes.deflate"
PIECE_BYTES = 1 << 24
"""Tensors are compared and changed in pieces, so that memory is bounded whatever their size. Part of the format."""
MAX_CHAIN = 1000
"""Deltas that may rest on one full version."""


class Change(NamedTuple):
    """One piece of a tensor that has changed."""

    piece: int
    """Which, of PIECE_BYTES each."""
    offset: int
    """Where its changes begin in the file of changes."""
    length: int


class Tensor(BaseModel):
    model_config = ConfigDict(frozen=True)

    dtype: str
    """As safetensors names it, for example BF16."""
    shape: tuple[int, ...]
    sha256: str
    """Of its bytes in this version."""
    changes: tuple[Change, ...] = ()
    """Against the base, by piece."""


class Base(BaseModel):
    model_config = ConfigDict(frozen=True)

    folder: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,254}$")
    """Name of the folder beside this one."""
    state: str


class VersionIndex(BaseModel):
    """What the index file holds."""

    model_config = ConfigDict(frozen=True)

    format: Literal["rolloutfleet-version/1"] = "rolloutfleet-version/1"
    version: int | None = None
    """Absent of a copy whose source has no index."""
    state: str
    """Digest of all tensors: equal for equal weights, whatever the version is called."""
    base: Base | None = None
    """Of a delta."""
    source: str = ""
    """Of a copy whose source has no index: fingerprint of the source."""
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Link:
    path: Path
    index: VersionIndex | None
    """None: a full checkpoint that somebody else wrote."""


def state_of(tensors: Mapping[str, Tensor]) -> str:
    lines = (f"{name} {tensor.dtype} {list(tensor.shape)} {tensor.sha256}\n" for name, tensor in tensors.items())
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def read_index(folder: Path) -> VersionIndex | None:
    """None for a folder without one. Raises CheckpointError, OSError."""
    path = folder / INDEX_FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return VersionIndex.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise CheckpointError(f"{path}: not an index of a weight version: {where}: {problem['msg']}") from error


def is_delta(folder: Path) -> bool:
    """Raises CheckpointError, OSError."""
    index = read_index(folder)
    return index is not None and index.base is not None


def chain(path: Path) -> list[Link]:
    """The version and what it rests on, newest first; the last one is full. Raises CheckpointError, OSError."""
    links: list[Link] = []
    folder, expected = path, ""
    while len(links) <= MAX_CHAIN:
        if not folder.is_dir():
            needed = f", which {links[-1].path.name} rests on" if links else ""
            raise CheckpointGone(f"{folder}{needed}: no such folder; versions are pruned, or it was never written")
        index = read_index(folder)
        if expected and (index is None or index.state != expected):
            raise CheckpointError(f"{folder}: not what {links[-1].path.name} was made against: it was written anew")
        links.append(Link(folder, index))
        if index is None or index.base is None:
            return links
        folder, expected = folder.parent / index.base.folder, index.base.state
    raise CheckpointError(f"{path}: rests on more than {MAX_CHAIN} deltas, or on itself")


def fingerprint(folder: Path) -> str:
    """Changes when a file of the folder is replaced, rewritten, added or removed. Raises OSError."""
    found = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        stat = file.stat()
        found.update(f"{file.name} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return found.hexdigest()


@dataclass(frozen=True)
class Fingerprints:
    """Of folders that must stay as they are while they are read."""

    taken: Mapping[Path, str]

    @classmethod
    def of(cls, folders: list[Path]) -> Fingerprints:
        return cls({folder: fingerprint(folder) for folder in folders})

    def require_same(self, *folders: Path) -> None:
        """Raises CheckpointError, CheckpointGone."""
        for folder in folders:
            try:
                now = fingerprint(folder)
            except FileNotFoundError as error:
                raise CheckpointGone(f"{folder}: gone while it was read") from error
            if now != self.taken[folder]:
                raise CheckpointError(
                    f"{folder}: changed while it was read; a version's folder is written once: write it under another "
                    "name, rename it when it is complete, and never touch it again"
                )
