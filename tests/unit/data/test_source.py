"""A data set is checked row by row when it is opened; then a prompt is found by its number, the same one for ever."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutfleet.agent.data import json_lines
from rolloutfleet.agent.data.errors import DataError
from rolloutfleet.agent.data.source import Prompts
from rolloutfleet.api.data import DataSource

HERE = Path(__file__).parent
ROWS = [{"prompt": f"p{number}", "label": str(number), "metadata": {"n": number}} for number in range(7)]


def written(path: Path, rows: list[Any] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


OPENED: list[Prompts] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()


def opened(path: Path | str, **fields: Any) -> Prompts:
    prompts = Prompts(DataSource(path=str(path), **fields))
    OPENED.append(prompts)
    return prompts


def in_order(prompts: Prompts, epoch: int = 0) -> list[Any]:
    return [prompts.get(epoch, number).prompt for number in range(len(prompts))]


def refusal(path: Path | str, **fields: Any) -> DataError:
    with pytest.raises(DataError) as refused:
        opened(path, **fields)
    return refused.value


# JSON lines


def test_rows_have_prompt_label_and_metadata_under_the_names_that_are_given(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"q": [1, 2], "a": {"x": None}, "m": {"source": "gsm"}, "more": 1}])
    prompt = opened(path, input_key="q", label_key="a", metadata_key="m").get(0, 0)
    assert (prompt.prompt, prompt.label, prompt.metadata) == ([1, 2], {"x": None}, {"source": "gsm"})


def test_every_defect_of_a_messy_file_is_told_with_its_line() -> None:
    path = HERE / "messy.jsonl"
    error = refusal(path)
    assert "6 rows cannot be used" in str(error)
    assert [problem.removeprefix(f"{path}:") for problem in error.problems] == [
        "5: byte 0xe9 at 48 is not UTF-8",
        "6: Expecting property name enclosed in double quotes: line 1 column 57 (char 56)",
        "7: a row is an object with fields, this is a list",
        "8: prompt: given twice",
        "9: NaN is no JSON",
        "10: Expecting ',' delimiter: line 1 column 30 (char 29)",
    ]
    assert error.problems[0] in str(error)


def test_bad_rows_are_left_out_if_that_is_asked_and_told() -> None:
    prompts = opened(HERE / "messy.jsonl", bad_rows="skip", shuffle=False)
    assert in_order(prompts) == [[1, 2], [3, 4]], "past a byte order mark, CRLF and blank lines"
    assert len(prompts.skipped) == 6


def test_texts_that_break_others_are_read_as_they_are_or_refused_with_their_line() -> None:
    path = HERE / "unicode.jsonl"
    error = refusal(path)
    assert [problem.removeprefix(f"{path}:") for problem in error.problems] == [
        "2: prompt: half of a surrogate pair, '\\ud83d', is no text",
        "3: prompt: half of a surrogate pair, '\\udca9', is no text",
    ]
    good = [json.loads(line) for line in path.read_text("ascii").splitlines() if "lone-" not in line]
    prompts = opened(path, bad_rows="skip", shuffle=False)
    assert in_order(prompts) == [row["prompt"] for row in good]
    assert [prompts.get(0, n).label for n in range(len(prompts))] == [row["label"] for row in good]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a"}, "prompt: missing; the row has text"),
        ({"prompt": ""}, "prompt: it is empty"),
        ({"prompt": []}, "prompt: it is empty"),
        ({"prompt": 7}, "a text, messages or token ids are needed, this is a int"),
        ({"prompt": [1, "a"]}, "a list of messages or of token ids is needed"),
        ({"prompt": [-1]}, "a list of messages or of token ids is needed"),
        ({"prompt": [{"content": "a"}]}, "a message has no role"),
        ({"prompt": "a", "metadata": [1]}, "metadata: an object with fields is needed, this is a list"),
        ({"prompt": "a", "label": "\ud83d"}, "label: half of a surrogate pair"),
        ({"prompt": "a", "metadata": {"\ud83d": 1}}, "metadata: half of a surrogate pair"),
    ],
)
def test_rows_that_are_no_prompts_are_refused_by_field(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    assert said in str(refusal(written(tmp_path / "a.jsonl", [row])))


def test_a_row_that_is_too_long_is_refused_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 100)
    assert "a.jsonl:1: 116 bytes; a row has 100 at most" in str(
        refusal(written(tmp_path / "a.jsonl", [{"prompt": "x" * 102}]))
    )


@pytest.mark.parametrize("text", ["", "\n\n  \r\n", "\ufeff"])
def test_a_file_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    assert "no rows, of 0 that can be used" in str(refusal(path))


def test_what_is_no_file_is_said_to_be_none(tmp_path: Path) -> None:
    assert "no such file" in str(refusal(tmp_path / "a.txt"))
    assert "No such file" in str(refusal(tmp_path / "a.jsonl"))
    (tmp_path / "d.jsonl").mkdir()
    assert "a folder without Parquet files" in str(refusal(tmp_path / "d.jsonl"))
    (tmp_path / "a.txt").touch()
    assert ".jsonl, .parquet or a folder is needed" in str(refusal(tmp_path / "a.txt"))


def test_a_file_that_is_replaced_is_read_on_and_one_that_is_written_to_is_not(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl")
    prompts = opened(path, shuffle=False)
    written(tmp_path / "b.jsonl", [{"prompt": "other"}] * 7).rename(path)
    assert in_order(prompts) == [row["prompt"] for row in ROWS]
    prompts = opened(path, shuffle=False)
    with open(path, "a") as file:
        file.write('{"prompt": "more"}\n')
    with pytest.raises(DataError, match="it was changed while the run reads it"):
        prompts.get(0, 0)


# Order


SHUFFLED_BY_42 = ["p1", "p3", "p4", "p2", "p6", "p0", "p5"]
"""random.seed(42); random.shuffle(range(7)): another order would be another run."""


def test_an_epoch_is_shuffled_as_slime_does(tmp_path: Path) -> None:
    prompts = opened(written(tmp_path / "a.jsonl"), seed=42)
    assert in_order(prompts, 0) == SHUFFLED_BY_42
    assert in_order(prompts, 1) != in_order(prompts, 0)


@settings(deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(0, 6), min_size=1, max_size=9))
def test_a_prompt_is_the_same_in_whatever_order_it_is_asked_for(seed: int, epochs: list[int]) -> None:
    asked = opened(HERE / "messy.jsonl", bad_rows="skip", seed=seed)
    for epoch in epochs:
        fresh = opened(HERE / "messy.jsonl", bad_rows="skip", seed=seed)
        assert in_order(asked, epoch) == in_order(fresh, epoch)
        assert sorted(in_order(asked, epoch)) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("slice_", "numbers"),
    [("[2:4]", [2, 3]), ("[:2]", [0, 1]), ("[-2:]", [5, 6]), ("[5:99]", [5, 6]), ("[:]", list(range(7)))],
)
def test_a_slice_takes_rows_as_python_does(tmp_path: Path, slice_: str, numbers: list[int]) -> None:
    path = written(tmp_path / "a.jsonl")
    assert in_order(opened(f"{path}@{slice_}", shuffle=False)) == [f"p{number}" for number in numbers]
    assert set(in_order(opened(f"{path}@{slice_}"))) == {f"p{number}" for number in numbers}


@pytest.mark.parametrize(
    ("slice_", "said"), [("[3:3]", "no rows, of 7"), ("[a:b]", "a slice is"), ("[1]", "a slice is")]
)
def test_a_slice_of_nothing_or_none_is_refused(tmp_path: Path, slice_: str, said: str) -> None:
    assert said in str(refusal(f"{written(tmp_path / 'a.jsonl')}@{slice_}"))


def test_whatever_changes_which_prompt_has_a_number_changes_the_fingerprint(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl")
    other = written(tmp_path / "b.jsonl", [*ROWS[:-1], {"prompt": "p6!"}])
    copy = written(tmp_path / "c.jsonl")
    made = [
        opened(path),
        opened(other),
        opened(path, seed=1),
        opened(path, shuffle=False),
        opened(f"{path}@[:6]"),
        opened(path, label_key="answer"),
    ]
    assert len({prompts.fingerprint for prompts in made}) == len(made)
    assert opened(copy).fingerprint == made[0].fingerprint, "where it lies does not matter"
    assert opened(path, shuffle=False, seed=1).fingerprint == opened(path, shuffle=False).fingerprint


# Parquet, and Hugging Face's folders


def table(rows: list[dict[str, Any]]) -> Any:
    return pyarrow.Table.from_pylist(rows)


def test_parquet_files_give_the_same_prompts(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(table(ROWS[:4]), tmp_path / "a-0.parquet", row_group_size=2)
    pyarrow.parquet.write_table(table(ROWS[4:]), tmp_path / "a-1.parquet")
    lines = opened(written(tmp_path / "a.jsonl"))
    prompts = opened(tmp_path)
    assert [prompts.get(1, n) for n in range(7)] == [lines.get(1, n) for n in range(7)]
    assert in_order(opened(tmp_path / "a-1.parquet", shuffle=False)) == ["p4", "p5", "p6"]


def test_bad_rows_of_tables_are_told_by_number(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table([ROWS[0], {"prompt": None}, {"prompt": "x", "label": "y"}]), path)
    assert refusal(path).problems == [
        f"{path}: row 1: prompt: a text, messages or token ids are needed, this is nothing"
    ]
    assert in_order(opened(path, bad_rows="skip", shuffle=False)) == ["p0", "x"]


def test_images_become_base64_and_other_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table([{"prompt": "x", "images": [{"bytes": b"\xff\x00", "path": None}]}]), path)
    prompt = opened(path, multimodal_keys=["images"]).get(0, 0)
    assert prompt.multimodal_inputs == {"images": [{"bytes": "/wA=", "path": None}]}
    assert "images.bytes: a bytes is no JSON" in str(refusal(path, label_key="images"))
    assert "video: missing" in str(refusal(path, multimodal_keys=["video"]))


def test_a_damaged_table_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no more")
    assert "a.parquet: " in str(refusal(tmp_path / "a.parquet"))


def saved(folder: Path, *shards: list[dict[str, Any]]) -> Path:
    """As `Dataset.save_to_disk` of datasets 5.2 writes it."""
    folder.mkdir()
    names = [f"data-{number:05}-of-{len(shards):05}.arrow" for number in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        made = table(rows)
        with pyarrow.OSFile(str(folder / name), "wb") as file, pyarrow.ipc.new_stream(file, made.schema) as stream:
            stream.write_table(made)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


def test_a_folder_of_save_to_disk_gives_the_same_prompts(tmp_path: Path) -> None:
    prompts = opened(saved(tmp_path / "hf", ROWS[:4], ROWS[4:]), shuffle=False)
    assert in_order(prompts) == [row["prompt"] for row in ROWS]
    assert prompts.get(0, 5).metadata == {"n": 5}


def test_a_folder_of_several_splits_names_them(tmp_path: Path) -> None:
    saved(tmp_path / "train", ROWS)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert f"name one: {tmp_path / 'train'}, {tmp_path / 'test'}" in str(refusal(tmp_path))
    assert len(opened(tmp_path / "train")) == 7


def test_an_order_that_lies_in_a_file_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "hf", ROWS)
    (folder / "state.json").write_text('{"_data_files": [], "_indices_files": [{"filename": "indices.arrow"}]}')
    assert "its order is in a file of indices" in str(refusal(folder))
