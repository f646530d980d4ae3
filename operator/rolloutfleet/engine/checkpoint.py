"""What a checkpoint folder holds, read from safetensors headers alone: no torch, no tensor data.

A checkpoint whose tensors have other shapes kills SGLang's scheduler, and one with other names leaves old weights in
place behind a new label; both can be seen here, before any engine is paused. The format: 8 bytes length (little
endian), a JSON header {name: {dtype, shape, data_offsets}}, the data (github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rolloutfleet.engine.errors import CheckpointError
from rolloutfleet.engine.versions import chain, read_index

MAX_HEADER_BYTES = 100_000_000
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Of safetensors' dtypes, those of whole bytes."""
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
OUTPUT_HEAD = "lm_head.weight"
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Of config.json, in the order in which SGLang looks (configs/model_config.py)."""


@dataclass(frozen=True)
class TensorInFile:
    dtype: str
    """As safetensors names it, for example BF16."""
    shape: tuple[int, ...]
    begin: int
    """First byte, from the beginning of the file."""
    end: int


@dataclass(frozen=True)
class Checkpoint:
    """A full checkpoint, or a delta (engine/versions.py) with all that it rests on."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    """Tensor name to shape."""
    total_bytes: int
    """Of the full checkpoint."""
    ties_output_head: bool = False
    """config.json says tie_word_embeddings: the output head is the embedding, whether or not a file repeats it."""


def read_checkpoint(path: Path) -> Checkpoint:
    """Raises CheckpointError."""
    try:
        return _read_checkpoint(path)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error


def _read_checkpoint(path: Path) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder")
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a folder; name the folder that holds config.json and *.safetensors")
    version = read_index(path)
    if version is not None and version.base is not None:
        *_, full = chain(path)
        shapes_now = {name: tensor.shape for name, tensor in version.tensors.items()}
        return replace(_read_checkpoint(full.path), path=path, shapes=shapes_now)
    files = sorted(path.glob("*.safetensors"))
    index = path / INDEX
    if index.exists():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index}: not a weight index: {error}") from error
        missing = sorted(named - {file.name for file in files})
        if missing:
            raise CheckpointError(f"{path}: {missing[0]} is named by {INDEX} and missing")
    if not files:
        raise CheckpointError(f"{path}: holds no *.safetensors file")
    shapes: dict[str, tuple[int, ...]] = {}
    total = 0
    for file in files:
        shapes |= {name: tensor.shape for name, tensor in tensors_in(file).items()}
        total += file.stat().st_size
    tied = next(iter(_settings(path, "tie_word_embeddings")), False)
    return Checkpoint(path=path, shapes=shapes, total_bytes=total, ties_output_head=bool(tied))


@dataclass(frozen=True)
class Quantization:
    """How the tensors of a checkpoint are quantised, as its config.json says (Hugging Face's quantization_config)."""

    method: str
    """For example fp8."""
    by_blocks: bool
    """With a scale for each block, in place of one for each tensor or row."""

    def __str__(self) -> str:
        return f"{self.method} by blocks" if self.by_blocks else self.method


def quantization(path: Path) -> Quantization | None:
    """None if config.json is not there, or says of none. Raises CheckpointError, OSError."""
    told = next(filter(None, _settings(path, *QUANTIZATION_KEYS)), None)
    if told is None:
        return None
    if not isinstance(told, dict):
        raise CheckpointError(f"{path / CONFIG}: not a model's configuration: {QUANTIZATION_KEYS[0]} is {told!r}")
    return Quantization(str(told.get("quant_method", "")), by_blocks=bool(told.get("weight_block_size")))


def _settings(folder: Path, *keys: str) -> list[Any]:
    """What config.json sets of these, and then its section in which multimodal models keep the language model's."""
    config = folder / CONFIG
    try:
        content = json.loads(config.read_text())
        sections = (content, content.get("text_config", {}))
        return [section[key] for section in sections for key in keys if section.get(key) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{config}: not a model's configuration: {error}") from error


def tensors_in(file: Path) -> dict[str, TensorInFile]:
    """What the header of a safetensors file says, in the order of the data. Raises CheckpointError, OSError."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(f"{file}: truncated, or not a safetensors file")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
        except ValueError as error:
            raise CheckpointError(f"{file}: its header is no JSON: {error}") from error
    try:
        found = {name: _located(entry, 8 + length) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: its header is not of safetensors: {type(error).__name__} {error}") from error
    end = max((tensor.end for tensor in found.values()), default=8 + length)
    if end != size:
        raise CheckpointError(f"{file}: {size} bytes, but its header speaks of {end}")
    return dict(sorted(found.items(), key=lambda item: item[1].begin))


def _located(entry: dict[str, Any], data: int) -> TensorInFile:
    begin, end = (data + int(offset) for offset in entry["data_offsets"])
    return TensorInFile(
        dtype=str(entry["dtype"]), shape=tuple(int(size) for size in entry["shape"]), begin=begin, end=end
    )


def differences(reference: Checkpoint, new: Checkpoint) -> list[str]:
    """Names and shapes in which a new checkpoint differs from one that is known to load."""
    return missing(reference, new.shapes.keys()) + unfit(reference, new.shapes)


def missing(reference: Checkpoint, names: Collection[str]) -> list[str]:
    """Tensors of a checkpoint that is known to load which are not among these.

    A tied output head may be in either and missing from the other: trainers drop it, and SGLang does not read it.
    """
    return [f"{name}: missing" for name in sorted(reference.shapes.keys() - set(names) - _free(reference))]


def unfit(reference: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Tensors that a checkpoint which is known to load does not have, or has in another shape."""
    unknown = shapes.keys() - reference.shapes.keys() - _free(reference)
    return [f"{name}: not a tensor of this model" for name in sorted(unknown)] + [
        f"{name}: shape {list(shapes[name])}, the model has {list(shape)}"
        for name, shape in sorted(reference.shapes.items())
        if name in shapes and shapes[name] != shape
    ]


def _free(reference: Checkpoint) -> set[str]:
    return {OUTPUT_HEAD} if reference.ties_output_head else set()
