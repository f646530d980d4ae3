"""A batch comes back from its file as it was, and a damaged file is called so."""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutfleet.api.samples import PrefixCacheInfo, Sample, SampleStatus, SpecInfo, Timings, VersionSpan
from rolloutfleet.trainer import load_batch, save_batch, saved_steps

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), max_size=9))
    count = len(tokens)
    cut = draw(st.integers(0, count))
    return Sample(
        epoch=draw(st.integers(0, 3)),
        group_index=draw(st.integers(0, 9)),
        rollout_id=draw(st.none() | st.integers(0, 9)),
        prompt=draw(st.none() | TEXT | st.lists(st.dictionaries(TEXT, JSON, max_size=2), max_size=2)),
        label=draw(JSON),
        metadata=draw(st.dictionaries(TEXT, JSON, max_size=3)),
        prompt_tokens=draw(st.lists(st.integers(0, 2**31 - 1), max_size=9)),
        response_tokens=tokens,
        response=draw(TEXT),
        rollout_log_probs=draw(st.lists(FLOATS, min_size=count, max_size=count)),
        loss_mask=draw(st.lists(st.sampled_from([0, 1]), min_size=count, max_size=count)),
        weight_versions=[VersionSpan(version=3, start=0, end=cut), VersionSpan(version=4, start=cut, end=count)],
        status=SampleStatus.COMPLETED,
        reward=draw(st.none() | FLOATS | st.dictionaries(TEXT, FLOATS, max_size=2)),
        remove_sample=draw(st.booleans()),
        seconds=draw(st.floats(0, 1e6)),
        timings=Timings(generation=draw(st.floats(0, 1e6))),
        spec_info=SpecInfo(spec_verify_ct=draw(st.integers(0, 9))),
        prefix_cache_info=PrefixCacheInfo(cached_tokens=draw(st.integers(0, 9))),
    )


@given(st.lists(st.lists(samples(), max_size=3), max_size=3), st.integers(0, 10**9))
def test_a_batch_comes_back_as_it_was(groups: list[list[Sample]], step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_batch(folder, step, groups)
        loaded = load_batch(folder, step)
    assert loaded == groups
    for before, after in zip(chain(*groups), chain(*loaded), strict=True):
        signs = [math.copysign(1, value) for value in before.rollout_log_probs]
        assert [math.copysign(1, value) for value in after.rollout_log_probs] == signs
        assert json.dumps(after.model_dump(mode="json")) == json.dumps(before.model_dump(mode="json")), "1 is not 1.0"


def sample(group: int = 0) -> Sample:
    return Sample(group_index=group, prompt_tokens=[1], response_tokens=[2], rollout_log_probs=[-0.1], loss_mask=[0])


def test_steps_are_listed_in_their_order_and_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "when needed"
    for step in (100_000_000, 9, 10):
        save_batch(folder, step, [[sample(step)]])
    (folder / "notes.txt").write_text("mine")
    assert saved_steps(folder) == [9, 10, 100_000_000]
    save_batch(folder, 9, [[sample(1), sample(2)]])
    assert load_batch(folder, 9) == [[sample(1), sample(2)]]
    assert len(list(folder.iterdir())) == 4, "nothing half-written is left"


def test_a_batch_that_cannot_be_written_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    save_batch(tmp_path, 1, [[sample()]])
    (tmp_path / "step-00000002.jsonl.gz").mkdir()
    with pytest.raises(OSError, match=r"step-00000002\.jsonl\.gz"):
        save_batch(tmp_path, 2, [[sample()]])
    assert len(list(tmp_path.iterdir())) == 2
    assert load_batch(tmp_path, 1) == [[sample()]]


def test_it_can_be_read_with_the_tools_that_everybody_has(tmp_path: Path) -> None:
    path = save_batch(tmp_path, 3, [[sample()], []])
    head, first, second = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert head == {"format": "rolloutfleet-batch-1", "step": 3, "groups": 2}
    assert first[0]["response_tokens"] == [2]
    assert second == []


@pytest.mark.parametrize("damage", ["cut", "changed", "other file", "lines lost", "no object", "another step"])
def test_a_damaged_file_is_called_so_by_its_name(tmp_path: Path, damage: str) -> None:
    path = save_batch(tmp_path, 1, [[sample(number)] for number in range(50)])
    whole = path.read_bytes()
    lines = gzip.decompress(whole).splitlines(keepends=True)
    path.write_bytes(
        {
            "cut": whole[: len(whole) // 2],
            "changed": whole[:100] + bytes([whole[100] ^ 255]) + whole[101:],
            "other file": b"step,reward\n1,0.5\n",
            "lines lost": gzip.compress(b"".join(lines[:-1])),
            "no object": gzip.compress(b"[]\n[]\n"),
            "another step": gzip.compress(lines[0].replace(b'"step":1', b'"step":2') + b"".join(lines[1:])),
        }[damage]
    )
    with pytest.raises(ValueError, match=r"step-00000001\.jsonl\.gz: not a batch of step 1"):
        load_batch(tmp_path, 1)


def test_a_step_that_is_not_there_or_cannot_be_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_batch(tmp_path, 1)
    with pytest.raises(ValueError, match="step: -1"):
        save_batch(tmp_path, -1, [])
