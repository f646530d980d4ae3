"""A pod's copy equals the full checkpoint bit by bit, whatever came before, and a failure leaves the old one."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutfleet.engine.checkpoint import read_checkpoint, tensors_in
from rolloutfleet.engine.errors import CheckpointError, CheckpointGone
from rolloutfleet.engine.versions import CHANGES_FILE, PIECE_BYTES
from rolloutfleet.trainer import SavedVersion, deltas, prune_checkpoints
from rolloutfleet.worker import making
from rolloutfleet.worker.copies import Copies
from unit.worker.versions import (
    Killed,
    Weights,
    as_read,
    bits,
    foreign_checkpoint,
    host,
    killed_at,
    read_weights,
    writer,
)

STATES: list[Weights] = [
    {"a": bits("BF16", 1, 2, 3, 4), "b": bits("F32", 5, 6)},
    {"a": bits("BF16", 1, 9, 3, 4), "b": bits("F32", 5, 6)},
    {"a": bits("BF16", 1, 9, 3, 4), "b": bits("F32", 7, 8)},
]


class Pod:
    def __init__(self, root: Path, *, limit_bytes: int | None = None) -> None:
        self.volume = root / "pod"
        self.volume.mkdir(exist_ok=True)
        self.copies = Copies(self.volume, weights=root / "weights", limit_bytes=limit_bytes)

    @property
    def folders(self) -> list[Path]:
        return sorted((self.volume / "copies").iterdir())


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def saved(root: Path, states: list[Weights] = STATES, *, full_every: int = 20) -> list[SavedVersion]:
    weights = writer(root, full_every=full_every)
    return [weights.save_from_host(host(state), version=number) for number, state in enumerate(states, start=1)]


def test_a_new_pod_gets_the_full_version_with_all_deltas_on_it(tmp_path: Path, pod: Pod) -> None:
    versions = saved(tmp_path)
    assert [version.full for version in versions] == [True, False, False]
    made = pod.copies.bring_to(versions[2].path)
    assert (made.version, made.deltas) == (3, 2)
    assert read_weights(Path(made.path)) == as_read(STATES[2])
    assert (Path(made.path) / "config.json").exists(), "an engine loads it as a checkpoint"
    assert read_checkpoint(Path(made.path)).shapes == {"a": (4,), "b": (2,)}


def test_a_copy_that_is_there_needs_the_new_deltas_only(tmp_path: Path, pod: Pod) -> None:
    versions = saved(tmp_path)
    pod.copies.bring_to(versions[1].path)
    (versions[0].path / "model.safetensors").unlink()
    made = pod.copies.bring_to(versions[2].path)
    assert made.deltas == 1
    assert made.bytes_read == (versions[2].path / CHANGES_FILE).stat().st_size
    assert read_weights(Path(made.path)) == as_read(STATES[2])


def test_asked_again_it_answers_with_what_is_there(tmp_path: Path, pod: Pod) -> None:
    path = saved(tmp_path)[2].path
    first, again = pod.copies.bring_to(path), pod.copies.bring_to(path)
    assert (again.path, again.deltas, again.bytes_read) == (first.path, 0, 0)


def test_an_older_version_is_made_anew_beside_the_newer_one(tmp_path: Path, pod: Pod) -> None:
    versions = saved(tmp_path)
    pod.copies.bring_to(versions[2].path)
    made = pod.copies.bring_to(versions[1].path)
    assert read_weights(Path(made.path)) == as_read(STATES[1])
    assert len(pod.folders) == 2


def test_an_engine_that_is_handed_a_delta_itself_finds_nothing_to_load(tmp_path: Path) -> None:
    """SGLang takes unknown names in *.safetensors for success, and dies of a *.bin that torch cannot load."""
    names = {file.suffix for file in saved(tmp_path)[1].path.iterdir()}
    assert not names & {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt"}


def test_two_copies_are_kept_at_most(tmp_path: Path, pod: Pod) -> None:
    for version in saved(tmp_path, STATES * 2, full_every=3):
        made = Path(pod.copies.bring_to(version.path).path)
        assert made in pod.folders
        assert len(pod.folders) <= 2


def test_a_checkpoint_without_an_index_is_copied_once(tmp_path: Path, pod: Pod) -> None:
    path = foreign_checkpoint(tmp_path / "weights" / "step-7", STATES[0])
    made = pod.copies.bring_to(path)
    assert made.version is None
    assert read_weights(Path(made.path)) == as_read(STATES[0])
    assert pod.copies.bring_to(path).bytes_read == 0
    shutil.rmtree(path)
    foreign_checkpoint(path, STATES[1])
    assert read_weights(Path(pod.copies.bring_to(path).path)) == as_read(STATES[1])


@pytest.mark.parametrize("poison", [0x7F80, 0xFFC0])
def test_numbers_that_are_none_are_refused_by_name(tmp_path: Path, pod: Pod, poison: int) -> None:
    path = foreign_checkpoint(tmp_path / "weights" / "step-7", {"a": bits("BF16", 1, poison)})
    with pytest.raises(CheckpointError, match="a: holds NaN or an infinity"):
        pod.copies.bring_to(path)
    assert pod.folders == []


def test_a_damaged_delta_is_refused_and_the_copy_stays(tmp_path: Path, pod: Pod) -> None:
    versions = saved(tmp_path)
    kept = Path(pod.copies.bring_to(versions[0].path).path)
    changes = versions[1].path / CHANGES_FILE
    changes.write_bytes(bytes(len(changes.read_bytes())))
    with pytest.raises(CheckpointError):
        pod.copies.bring_to(versions[1].path)
    made = pod.copies.bring_to(versions[0].path)
    assert (Path(made.path), read_weights(kept)) == (kept, as_read(STATES[0]))


def test_a_damaged_copy_is_made_anew_from_the_full_version(tmp_path: Path, pod: Pod) -> None:
    versions = saved(tmp_path)
    file = Path(pod.copies.bring_to(versions[0].path).path) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    made = pod.copies.bring_to(versions[1].path)
    assert read_weights(Path(made.path)) == as_read(STATES[1])


def test_what_a_version_rests_on_must_be_what_it_was(tmp_path: Path, pod: Pod) -> None:
    versions = saved(tmp_path)
    shutil.rmtree(versions[0].path)
    with pytest.raises(CheckpointGone, match=r"v000001, which v000002 rests on: no such folder"):
        pod.copies.bring_to(versions[2].path)
    writer(tmp_path).save_from_host(host(STATES[2]), version=1)
    with pytest.raises(CheckpointError, match="v000001: not what v000002 was made against"):
        pod.copies.bring_to(versions[2].path)


def test_a_version_that_vanishes_while_it_is_read_is_gone(
    tmp_path: Path, pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = saved(tmp_path)[0]
    read = tensors_in

    def pruned(file: Path) -> Any:
        found = read(file)
        shutil.rmtree(version.path)
        return found

    monkeypatch.setattr(making, "tensors_in", pruned)
    with pytest.raises(CheckpointGone, match="v000001"):
        pod.copies.bring_to(version.path)
    assert pod.folders == []


def test_a_folder_that_is_rewritten_while_it_is_read_is_refused(
    tmp_path: Path, pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = foreign_checkpoint(tmp_path / "weights" / "live", STATES[0])
    read = tensors_in

    def rewritten(file: Path) -> Any:
        found = read(file)
        file.write_bytes(file.read_bytes())
        return found

    monkeypatch.setattr(making, "tensors_in", rewritten)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        pod.copies.bring_to(path)
    assert pod.folders == []


def test_without_room_it_says_so_before_it_writes(tmp_path: Path) -> None:
    version = saved(tmp_path)[0]
    size = sum(file.stat().st_size for file in version.path.iterdir())
    pod = Pod(tmp_path, limit_bytes=size - 1)
    with pytest.raises(OSError, match="MiB are free") as refused:
        pod.copies.bring_to(version.path)
    assert (refused.value.errno, refused.value.filename) == (errno.ENOSPC, str(pod.volume / "copies"))
    assert pod.folders == []


def test_a_disk_that_fills_meanwhile_is_named_and_the_old_copy_stays(
    tmp_path: Path, pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = saved(tmp_path)
    kept = Path(pod.copies.bring_to(versions[0].path).path)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left") as refused:
        pod.copies.bring_to(versions[1].path)
    assert (refused.value.errno, refused.value.filename) == (
        errno.ENOSPC,
        str(pod.volume / "copies" / ".v000002" / "model.safetensors"),
    )
    assert pod.folders == [kept]


@pytest.mark.parametrize("path", ["/etc", "weights", "weights/../pod"])
def test_only_folders_below_the_weights_volume_are_read(tmp_path: Path, pod: Pod, path: str) -> None:
    with pytest.raises(CheckpointError, match="must be a folder below"):
        pod.copies.bring_to(tmp_path / path)


# Any sequence of changes, any end of any process


@st.composite
def next_weights(draw: st.DrawFn, before: Weights | None) -> Weights:
    """Mostly a step of training; at times another model."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    if before is None or draw(st.integers(0, 9)) == 0:
        names = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True))
        kinds = {name: draw(st.sampled_from(("BF16", "F8_E4M3", "I64", "F32"))) for name in names}
        shapes = {name: draw(st.sampled_from(((0,), (1,), (7, 11), (200,)))) for name in names}
        return {
            name: (kind, generator.integers(0, 1 << 6, shapes[name]).astype(bits(kind)[1].dtype))
            for name, kind in kinds.items()
        }
    share = draw(st.sampled_from((0.0, 0.02, 0.9)))
    return {
        name: (kind, elements ^ (generator.random(elements.shape) < share).astype(elements.dtype))
        for name, (kind, elements) in before.items()
    }


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_chain_equals_the_full_checkpoint_whoever_dies_when(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        root = Path(folder)
        for module in (deltas, making):
            patch.setattr(module, "PIECE_BYTES", 64)
        pod, weights = Pod(root), writer(root, full_every=data.draw(st.integers(1, 4), label="full every"))
        truth: dict[Path, Weights] = {}
        state: Weights | None = None
        held: tuple[Path, Weights] | None = None
        """The copy that an engine may be loading."""
        for version in range(1, data.draw(st.integers(2, 7), label="versions")):
            state = data.draw(next_weights(state))
            try:
                with killed_at(data.draw(st.integers(0, 40), label="steps of the trainer")):
                    truth[weights.save_from_host(host(state), version=version).path] = state
            except Killed:
                path = root / "weights" / f"v{version:06d}"
                if path.exists():  # it was killed after the rename
                    truth[path] = state
                weights = writer(root, full_every=3)
            if not truth:
                continue
            target = data.draw(st.sampled_from(sorted(truth)), label="asked for")
            try:
                with killed_at(data.draw(st.integers(0, 60), label="steps of the worker")):
                    held = Path(pod.copies.bring_to(target).path), truth[target]
            except Killed:
                pod = Pod(root)
            if held is not None:
                assert read_weights(held[0]) == as_read(held[1])
            held = Path(pod.copies.bring_to(target).path), truth[target]
            assert read_weights(held[0]) == as_read(held[1])
            if data.draw(st.booleans(), label="prune") and len(truth) > 2:
                for gone in prune_checkpoints(root / "weights", keep=2):
                    truth.pop(gone, None)
        for path, weights_then in truth.items():
            fresh = Pod(root)
            assert read_weights(Path(fresh.copies.bring_to(path).path)) == as_read(weights_then)


def test_pieces_are_whole_elements_of_every_type() -> None:
    assert PIECE_BYTES % 8 == 0
