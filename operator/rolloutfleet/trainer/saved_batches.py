"""Batches in files, to train on them again without a fleet: the same step with other code, or on a developer's machine.

A file is gzip, a JSON object a line: what it is, then a group each. Python writes floats so that they read back as they
were.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from rolloutfleet.api.samples import Sample

FORMAT = "rolloutfleet-batch-1"
_NAME = re.compile(r"step-(\d{8,})\.jsonl\.gz")


def save_batch(folder: str | os.PathLike[str], step: int, groups: Sequence[Sequence[Sample]]) -> Path:
    """In place of what the step had there. The file appears whole or not at all. Raises OSError."""
    path = _path(folder, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"format": FORMAT, "step": step, "groups": len(groups)}
    rows = [[sample.model_dump(mode="json", exclude_defaults=True) for sample in group] for group in groups]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in (head, *rows))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(gzip.compress(text.encode("ascii"), compresslevel=5, mtime=0))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def load_batch(folder: str | os.PathLike[str], step: int) -> list[list[Sample]]:
    """Its groups in their order. Raises FileNotFoundError, and ValueError where the file is damaged or something
    else."""
    path = _path(folder, step)
    try:
        head, *rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        if head.get("format") != FORMAT or head["groups"] != len(rows) or head["step"] != step:
            raise ValueError(f"it begins with {head}, and has {len(rows)} groups")
        return [[Sample.model_validate(sample) for sample in row] for row in rows]
    except (EOFError, zlib.error, gzip.BadGzipFile, ValidationError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"{path}: not a batch of step {step}, saved by save_batch: {error}") from error


def saved_steps(folder: str | os.PathLike[str]) -> list[int]:
    """In their order. Raises FileNotFoundError."""
    found = (_NAME.fullmatch(entry.name) for entry in Path(folder).iterdir())
    return sorted(int(match[1]) for match in found if match)


def _path(folder: str | os.PathLike[str], step: int) -> Path:
    if step < 0:
        raise ValueError(f"step: {step} is below 0")
    return Path(folder) / f"step-{step:08}.jsonl.gz"
