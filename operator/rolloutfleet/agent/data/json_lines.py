"""A file of JSON lines. Where each line is is kept, not the lines: a data set may be larger than the memory."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolloutfleet.agent.data.errors import DataError

MAX_LINE_BYTES = 32 << 20
BOM = b"\xef\xbb\xbf"


class JsonLines:
    """Rows by number; a blank line is none. `check` raises ValueError for a row that cannot be used."""

    def __init__(self, path: Path, check: Callable[[Any], object]) -> None:
        """Reads all of it once. Raises DataError where it cannot be read at all."""
        self.path = path
        self.problems: list[str] = []
        self._starts, self._lengths = array("Q"), array("Q")
        digest = hashlib.sha256()
        try:
            self._file = open(path, "rb", buffering=1 << 20)  # noqa: SIM115 - it stays open: a replaced file is read on
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        at = 0
        for number, line in enumerate(self._file, 1):
            digest.update(line)
            skip = len(BOM) if number == 1 and line.startswith(BOM) else 0
            text = line[skip:].strip(b" \t\r\n")
            if text:
                try:
                    check(_parsed(text))
                except ValueError as error:
                    self.problems.append(f"{path}:{number}: {error}")
                else:
                    self._starts.append(at + skip)
                    self._lengths.append(len(line) - skip)
            at += len(line)
        self.fingerprint = digest.hexdigest()
        self._read = self._state()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Any:
        """Raises DataError if the file was written to since it was opened."""
        line = os.pread(self._file.fileno(), self._lengths[number], self._starts[number])
        if self._state() != self._read:
            raise DataError(f"{self.path}: it was changed while the run reads it")
        return _parsed(line.strip(b" \t\r\n"))

    def close(self) -> None:
        self._file.close()

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns


def _parsed(line: bytes) -> Any:
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"{len(line)} bytes; a row has {MAX_LINE_BYTES} at most")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {line[error.start]:#04x} at {error.start} is not UTF-8") from error
    return json.loads(text, object_pairs_hook=_each_key_once, parse_constant=_no_constant)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)}: given twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
