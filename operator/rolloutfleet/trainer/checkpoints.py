"""Checkpoints that engines load: one immutable folder a version, complete when its name appears."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rolloutfleet.engine.checkpoint import CheckpointError, read_checkpoint

if TYPE_CHECKING:
    import torch

FOLDER = re.compile(r"v(\d{6,})")
COPIED = ("*.json", "*.model", "*.txt", "*.jinja")


class NonFiniteWeights(ValueError):
    """A tensor holds NaN or an infinity: engines would serve noise at full speed."""


def folder_name(version: int) -> str:
    return f"v{version:06d}"


def save_checkpoint(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    folder: str | os.PathLike[str],
    *,
    version: int,
    base: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
) -> Path:
    """Write `folder`/v000001 and return its path; `base` is the served model's folder (config, tokenizer).

    Tensors are written as `dtype` (default: each as it is). Names must be the served model's. The folder appears by
    one rename when all is on disk. Of tied tensors those are written that the base has. Raises NonFiniteWeights naming
    a tensor, FileExistsError for a version that exists, FileNotFoundError for a base without config.json.
    """
    import torch
    from safetensors.torch import save_file

    if not (Path(base) / "config.json").is_file():
        raise FileNotFoundError(f"{base}: holds no config.json; base is the folder of the served model")
    state = model.state_dict() if isinstance(model, torch.nn.Module) else dict(model)
    in_base = _names(Path(base))
    written: set[int] = set()
    tensors = {}
    for name, tensor in sorted(state.items(), key=lambda item: item[0] not in in_base):
        if tensor.data_ptr() in written and name not in in_base:
            continue  # tied to one that is written
        written.add(tensor.data_ptr())
        if not torch.isfinite(tensor).all():
            raise NonFiniteWeights(f"{name}: not finite in version {version}; nothing was written")
        tensors[name] = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype).clone().contiguous()

    target = Path(folder) / folder_name(version)
    if target.exists():
        raise FileExistsError(f"{target}: exists; a version is never rewritten, since engines may be reading it")
    partial = Path(folder) / f".{folder_name(version)}.partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for pattern in COPIED:
            for file in Path(base).glob(pattern):
                if not file.name.endswith(".index.json"):
                    shutil.copyfile(file, partial / file.name)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        for file in partial.iterdir():
            file.chmod(0o644)  # engines run as another user
            _sync(file)
        partial.chmod(0o755)
        _sync(partial)
        partial.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def prune_checkpoints(folder: str | os.PathLike[str], *, keep: int) -> list[Path]:
    """Remove all but the newest `keep` versions (at least 2: an engine may be catching up from the last but one)."""
    if keep < 2:
        raise ValueError(f"keep: {keep} is too few; at least 2, since an engine may be loading the last but one")
    versions: dict[int, Path] = {}
    for path in Path(folder).iterdir():
        match = FOLDER.fullmatch(path.name)
        if match:
            versions[int(match[1])] = path
    old = [versions[version] for version in sorted(versions)[:-keep]]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)
    return old


def _names(base: Path) -> frozenset[str]:
    try:
        return frozenset(read_checkpoint(base).shapes)
    except CheckpointError:
        return frozenset()  # other formats: nothing to compare with


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
