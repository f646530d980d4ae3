"""Checkpoints that engines load: one immutable folder a version, complete when its name appears."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rolloutfleet.engine.checkpoint import read_checkpoint
from rolloutfleet.engine.errors import CheckpointError
from rolloutfleet.engine.versions import INDEX_FILE, chain
from rolloutfleet.trainer.host_tensors import on_host, write_safetensors
from rolloutfleet.trainer.tensors import Tensors

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

FOLDER = re.compile(r"v(\d{6,})")
COPIED = ("*.json", "*.model", "*.txt", "*.jinja")
TENSORS_FILE = "model.safetensors"


def folder_name(version: int) -> str:
    return f"v{version:06d}"


def save_checkpoint(
    model: Tensors,
    folder: str | os.PathLike[str],
    *,
    version: int,
    base: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
) -> Path:
    """Write `folder`/v000001 and return its path; `base` is the served model's folder (config, tokenizer).

    Floating tensors are written as `dtype` (default: each as it is). Names must be the served model's. The folder
    appears by one rename when all is on disk. Of tied tensors those are written that the base has. Raises
    NonFiniteWeights naming a tensor, ZeroWeights, FileExistsError for a version that exists, FileNotFoundError for a
    base without config.json, and other OSErrors with errno and path.
    """
    tensors = dict(on_host(model, dtype, in_base=names_of(base)))
    with new_version(folder, version) as (target, partial):
        copy_model_files(Path(base), partial)
        write_safetensors(partial / TENSORS_FILE, tensors)
    return target


def prune_checkpoints(folder: str | os.PathLike[str], *, keep: int) -> list[Path]:
    """Remove all but the newest `keep` versions and what they rest on, and return what was removed.

    At least 2 are kept, since an engine may be catching up from the last but one. What cannot be removed is logged.
    """
    if keep < 2:
        raise ValueError(f"keep: {keep} is too few; at least 2, since an engine may be loading the last but one")
    versions: dict[int, Path] = {}
    for path in Path(folder).iterdir():
        match = FOLDER.fullmatch(path.name)
        if match:
            versions[int(match[1])] = path
    kept = set()
    for version in sorted(versions)[-keep:]:
        try:
            kept |= {link.path.name for link in chain(versions[version])}
        except CheckpointError as error:
            logger.warning("nothing was pruned: %s", error)
            return []
    return [path for version, path in sorted(versions.items()) if path.name not in kept and _removed(path)]


def _removed(path: Path) -> bool:
    """Its name goes at once: nobody may find half of a checkpoint under it."""
    away = path.with_name(f".{path.name}.removed-{os.getpid()}")
    try:
        path.rename(away)
        shutil.rmtree(away)
    except OSError as error:
        logger.warning("%s: not removed: %s", path, error)
    return not path.exists()


@contextlib.contextmanager
def new_version(folder: str | os.PathLike[str], version: int) -> Iterator[tuple[Path, Path]]:
    """(Path of the version, folder to write it into); the one becomes the other when all went well, and else nothing
    is left. Raises FileExistsError, and other OSErrors with errno and path."""
    target = Path(folder) / folder_name(version)
    partial = Path(folder) / f".{folder_name(version)}.partial-{os.getpid()}"
    if target.exists():
        raise FileExistsError(f"{target}: exists; a version is never rewritten, since engines may be reading it")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield target, partial
        for file in partial.iterdir():
            file.chmod(0o644)  # engines run as another user
            _sync(file)
        partial.chmod(0o755)
        _sync(partial)
        partial.rename(target)
        _sync(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if error.filename is None and error.errno is not None:  # a write knows its file by number only
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def copy_model_files(base: Path, partial: Path) -> None:
    """What makes tensors a checkpoint: configuration and tokenizer."""
    for pattern in COPIED:
        for file in base.glob(pattern):
            if not file.name.endswith(".index.json") and file.name != INDEX_FILE:
                shutil.copyfile(file, partial / file.name)


def names_of(base: str | os.PathLike[str]) -> frozenset[str]:
    """Tensors of the served model. Raises FileNotFoundError for a folder that holds no model."""
    if not (Path(base) / "config.json").is_file():
        raise FileNotFoundError(f"{base}: holds no config.json; base is the folder of the served model")
    try:
        return frozenset(read_checkpoint(Path(base)).shapes)
    except CheckpointError:
        return frozenset()  # other formats: nothing to compare with


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if path.is_dir():
            with contextlib.suppress(OSError):  # some network file systems cannot sync a folder
                os.fsync(descriptor)
        else:
            os.fsync(descriptor)  # the disk may say only now that it is full
    finally:
        os.close(descriptor)
