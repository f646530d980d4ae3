"""A checkpoint that an engine could not load is known as such from its headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.engine.checkpoint import CONFIG, INDEX, differences, read_checkpoint
from rolloutfleet.engine.errors import CheckpointError

Shapes = dict[str, list[int]]


def write_shard(path: Path, shapes: Shapes, *, missing_bytes: int = 0) -> None:
    """A safetensors file of 2-byte elements, all zero."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        size = 2
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + bytes(end)
    path.write_bytes(whole[: len(whole) - missing_bytes])


def checkpoint(folder: Path, shapes: Shapes) -> Path:
    folder.mkdir(exist_ok=True)
    write_shard(folder / "model.safetensors", shapes)
    return folder


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        read_checkpoint(path)
    return str(refused.value)


def test_a_single_file_is_read(tmp_path: Path) -> None:
    found = read_checkpoint(checkpoint(tmp_path, {"a": [2, 3], "scalar": []}))
    assert found.shapes == {"a": (2, 3), "scalar": ()}
    assert found.total_bytes == (tmp_path / "model.safetensors").stat().st_size


def test_shards_are_read_together(tmp_path: Path) -> None:
    write_shard(tmp_path / "model-00001.safetensors", {"a": [2]})
    write_shard(tmp_path / "model-00002.safetensors", {"b": [3]})
    weight_map = {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert read_checkpoint(tmp_path).shapes == {"a": (2,), "b": (3,)}


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent") == f"{tmp_path / 'absent'}: no such folder"


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", {"a": [1]})
    assert "not a folder" in refusal(tmp_path / "model.safetensors")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "holds no *.safetensors file" in refusal(tmp_path)


def test_a_shard_that_the_index_names_and_that_is_missing_is_named(tmp_path: Path) -> None:
    write_shard(tmp_path / "model-00001.safetensors", {"a": [2]})
    weight_map = {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert f"model-00002.safetensors is named by {INDEX} and missing" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": null}', '{"weight_map": ["a"]}'])
def test_an_unreadable_index_is_named(tmp_path: Path, text: str) -> None:
    write_shard(tmp_path / "model.safetensors", {"a": [2]})
    (tmp_path / INDEX).write_text(text)
    assert f"{INDEX}: not a weight index" in refusal(tmp_path)


@pytest.mark.parametrize("missing_bytes", [1, 12])
def test_truncated_data_is_seen_from_the_header(tmp_path: Path, missing_bytes: int) -> None:
    write_shard(tmp_path / "model.safetensors", {"a": [2, 3]}, missing_bytes=missing_bytes)
    assert "but its header speaks of" in refusal(tmp_path)


def test_data_that_nobody_names_is_seen_from_the_header(tmp_path: Path) -> None:
    file = checkpoint(tmp_path, {"a": [2]}) / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    assert "but its header speaks of" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 20])
def test_a_truncated_header_is_seen(tmp_path: Path, keep: int) -> None:
    file = checkpoint(tmp_path, {"a": [2]}) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "truncated, or not a safetensors file" in refusal(tmp_path)


def test_a_length_beyond_any_header_is_not_read_into_memory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    assert "truncated, or not a safetensors file" in refusal(tmp_path)


def test_a_header_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"\xff\xfe{}")
    assert "its header is no JSON" in refusal(tmp_path)


def test_equal_names_and_shapes_have_no_differences(tmp_path: Path) -> None:
    reference = read_checkpoint(checkpoint(tmp_path / "m0", {"a": [2, 3], "b": [4]}))
    new = read_checkpoint(checkpoint(tmp_path / "m1", {"b": [4], "a": [2, 3]}))
    assert differences(reference, new) == []


def test_other_names_and_shapes_are_told_one_by_one(tmp_path: Path) -> None:
    reference = read_checkpoint(checkpoint(tmp_path / "m0", {"a": [2, 3], "b": [4], "c": [1]}))
    new = read_checkpoint(checkpoint(tmp_path / "m1", {"a": [3, 2], "c": [1], "d": [4]}))
    assert differences(reference, new) == [
        "b: missing",
        "d: not a tensor of this model",
        "a: shape [3, 2], the model has [2, 3]",
    ]


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"text_config": {"tie_word_embeddings": True}}, True),
        ({"tie_word_embeddings": False}, False),
        ({}, False),
        (None, False),
    ],
)
@pytest.mark.parametrize("dropped_by", ["new", "reference"])
def test_a_tied_output_head_may_be_left_out_of_either(
    tmp_path: Path, config: dict[str, Any] | None, tied: bool, dropped_by: str
) -> None:
    whole, short = {"embed": [4, 2], "lm_head.weight": [4, 2]}, {"embed": [4, 2]}
    reference = checkpoint(tmp_path / "m0", whole if dropped_by == "new" else short)
    new = checkpoint(tmp_path / "m1", short if dropped_by == "new" else whole)
    if config is not None:
        (reference / CONFIG).write_text(json.dumps(config))
    assert (differences(read_checkpoint(reference), read_checkpoint(new)) == []) is tied


def test_a_tied_output_head_of_another_shape_is_told(tmp_path: Path) -> None:
    reference = checkpoint(tmp_path / "m0", {"lm_head.weight": [4, 2]})
    (reference / CONFIG).write_text('{"tie_word_embeddings": true}')
    new = checkpoint(tmp_path / "m1", {"lm_head.weight": [5, 2]})
    assert len(differences(read_checkpoint(reference), read_checkpoint(new))) == 1


@pytest.mark.parametrize("text", ["[]", "{", '{"text_config": 3}'])
def test_a_configuration_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    checkpoint(tmp_path, {"a": [1]})
    (tmp_path / CONFIG).write_text(text)
    assert f"{tmp_path / CONFIG}: not a model's configuration" in refusal(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert f"{tmp_path / 'model.safetensors'}: cannot be read" in refusal(tmp_path)
