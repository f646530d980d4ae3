"""Parquet files, and data sets that Hugging Face datasets saved to a folder (Arrow files that are mapped, not read).

pyarrow reads both: `datasets` itself would bring fifty packages for a list of file names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rolloutfleet.agent.data.errors import DataError

try:
    import pyarrow
    import pyarrow.parquet
except ImportError:  # the trainer's own image, without the extra `data`
    pyarrow = None

STATE, SPLITS = "state.json", "dataset_dict.json"


class Table:
    """Rows by number; see JsonLines."""

    def __init__(self, files: list[Path], check: Callable[[Any], object]) -> None:
        if pyarrow is None:
            raise DataError(f"{files[0]}: pyarrow is missing; install rolloutfleet[data]")
        self.problems: list[str] = []
        self._rows: list[tuple[int, int]] = []
        digest = hashlib.sha256()
        self._tables = []
        for file in files:
            try:
                with open(file, "rb") as opened:
                    digest.update(hashlib.file_digest(opened, "sha256").digest())
                table = _parquet(file) if file.suffix == ".parquet" else _arrow(file)
            except (OSError, pyarrow.ArrowException) as error:
                raise DataError(f"{file}: {error}") from error
            self._tables.append(table)
            self._check(file, table, check)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:
        table, row = self._rows[number]
        return self._tables[table].slice(row, 1).to_pylist()[0]

    def close(self) -> None:
        self._tables.clear()

    def _check(self, file: Path, table: Any, check: Callable[[Any], object]) -> None:
        number = 0
        for batch in table.to_batches(max_chunksize=1024):
            for row in batch.to_pylist():
                try:
                    check(row)
                except ValueError as error:
                    self.problems.append(f"{file}: row {number}: {error}")
                else:
                    self._rows.append((len(self._tables) - 1, number))
                number += 1


def files_of(folder: Path) -> list[Path]:
    """Raises DataError for a folder that is no data set."""
    if (folder / SPLITS).is_file():
        splits = ", ".join(str(folder / split) for split in _json(folder / SPLITS).get("splits", []))
        raise DataError(f"{folder}: it has several splits; name one: {splits}")
    if (folder / STATE).is_file():
        state = _json(folder / STATE)
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise DataError(f"{folder}: its order is in a file of indices (datasets before 2.0); save it again")
        files = [folder / entry["filename"] for entry in state.get("_data_files", [])]
        if not files:
            raise DataError(f"{folder}: {STATE} names no files")
        return files
    found = sorted(folder.glob("*.parquet"))
    if not found:
        raise DataError(f"{folder}: a folder without Parquet files, and not one of Hugging Face's save_to_disk")
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: no object")
    return found


def _parquet(file: Path) -> Any:
    return pyarrow.parquet.read_table(file, memory_map=True)


def _arrow(file: Path) -> Any:
    with pyarrow.memory_map(str(file)) as mapped:
        return pyarrow.ipc.open_stream(mapped).read_all()
