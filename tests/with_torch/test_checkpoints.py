"""save_checkpoint with real torch: run by tests/run.sh in the engine's environment, which has torch and no pytest."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
import textwrap
import unittest
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from rolloutfleet.engine.checkpoint import differences, read_checkpoint
from rolloutfleet.engine.errors import CheckpointError
from rolloutfleet.trainer import NonFiniteWeights, ZeroWeights, prune_checkpoints, save_checkpoint


class Checkpoints(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.base = self.root / "base"
        self.base.mkdir()
        (self.base / "config.json").write_text("{}")
        (self.base / "model.safetensors.index.json").write_text("{}")
        self.state = {"a.weight": torch.ones(2, 3), "b.weight": torch.zeros(4)}
        self.weights = self.root / "weights"
        self.weights.mkdir()

    def test_a_saved_version_is_complete_readable_by_others_and_in_the_asked_type(self) -> None:
        path = save_checkpoint(self.state, self.weights, version=3, base=self.base, dtype=torch.bfloat16)
        self.assertEqual(path, self.weights / "v000003")
        self.assertEqual(load_file(path / "model.safetensors")["a.weight"].dtype, torch.bfloat16)
        self.assertEqual(read_checkpoint(path).shapes, {"a.weight": (2, 3), "b.weight": (4,)})
        self.assertTrue((path / "config.json").exists())
        self.assertFalse((path / "model.safetensors.index.json").exists(), "an index of other shards")
        self.assertEqual((path / "model.safetensors").stat().st_mode & 0o777, 0o644)

    def test_weights_that_are_no_numbers_are_refused_by_name_and_leave_nothing(self) -> None:
        for poison, dtype in ((float("nan"), torch.float32), (-float("inf"), torch.bfloat16), (1e9, torch.float8_e5m2)):
            state = {**self.state, "b.weight": torch.tensor([1.0, poison]).to(dtype)}
            with self.assertRaisesRegex(NonFiniteWeights, r"b\.weight"):
                save_checkpoint(state, self.weights, version=1, base=self.base)
        self.assertEqual(list(self.weights.iterdir()), [])

    def test_weights_that_are_all_zero_are_refused_and_a_matrix_that_is_zero_is_not(self) -> None:
        blank = {"a.weight": torch.zeros(2, 3), "norm.weight": torch.ones(3)}
        with self.assertRaisesRegex(ZeroWeights, "all 1 matrices"):
            save_checkpoint(blank, self.weights, version=1, base=self.base)
        self.assertEqual(list(self.weights.iterdir()), [])
        save_checkpoint({**blank, "b.weight": torch.eye(2)}, self.weights, version=1, base=self.base)

    def test_a_version_is_never_rewritten(self) -> None:
        path = save_checkpoint(self.state, self.weights, version=1, base=self.base)
        before = (path / "model.safetensors").stat().st_ino
        with self.assertRaisesRegex(FileExistsError, "v000001"):
            save_checkpoint(self.state, self.weights, version=1, base=self.base)
        self.assertEqual((path / "model.safetensors").stat().st_ino, before)

    def test_a_write_that_fails_leaves_no_folder_that_an_engine_could_take(self) -> None:
        full = OSError(errno.ENOSPC, "No space left on device")
        with mock.patch("os.fsync", side_effect=full), self.assertRaises(OSError) as raised:
            save_checkpoint(self.state, self.weights, version=1, base=self.base)
        found = (raised.exception.errno, raised.exception.filename)
        self.assertEqual(found, (errno.ENOSPC, str(self.weights / "v000001")))
        with self.assertRaisesRegex(FileNotFoundError, "config.json"):
            save_checkpoint(self.state, self.weights, version=1, base=self.root / "none")
        self.assertEqual(list(self.weights.iterdir()), [])

    def test_a_volume_that_is_full_or_read_only_is_named_and_keeps_nothing(self) -> None:
        """With room for one checkpoint and a half; in a mount namespace that goes with its process."""
        story = """
            import os, subprocess, sys, torch
            from rolloutfleet.trainer import save_checkpoint
            folder, base = sys.argv[1:]
            def save(version):
                try:
                    save_checkpoint({"a.weight": torch.ones(1 << 20, 2)}, folder, version=version, base=base)
                except OSError as error:
                    print(error.errno, error.filename)
                print(*os.listdir(folder))
            save(1)
            save(2)
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
            save(3)
        """
        mounted = f'mount -t tmpfs -o size=12m weights {self.weights} && exec "$@"'
        python = [sys.executable, "-c", textwrap.dedent(story), str(self.weights), str(self.base)]
        told = subprocess.run(
            ["unshare", "--mount", "sh", "-c", mounted, "sh", *python],
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=True,
        )
        saved, full, after, read_only, still = told.stdout.splitlines()
        self.assertEqual([saved, after, still], ["v000001"] * 3)
        self.assertEqual(full, f"{errno.ENOSPC} {self.weights}/v000002")
        number, path = read_only.split()
        self.assertEqual(int(number), errno.EROFS)
        self.assertTrue(path.startswith(str(self.weights)), path)

    def test_of_tied_tensors_those_are_written_that_the_base_has(self) -> None:
        save_file({"embed.weight": torch.ones(2, 2)}, self.base / "model.safetensors")
        (self.base / "model.safetensors.index.json").unlink()
        tied = torch.ones(2, 2)
        path = save_checkpoint({"head.weight": tied, "embed.weight": tied}, self.weights, version=1, base=self.base)
        self.assertEqual(list(load_file(path / "model.safetensors")), ["embed.weight"])

    def test_pruning_keeps_the_newest_and_refuses_to_keep_less_than_two(self) -> None:
        for version in (1, 2, 10):
            save_checkpoint(self.state, self.weights, version=version, base=self.base)
        self.assertEqual(prune_checkpoints(self.weights, keep=2), [self.weights / "v000001"])
        self.assertEqual(sorted(path.name for path in self.weights.iterdir()), ["v000002", "v000010"])
        with self.assertRaisesRegex(ValueError, "keep"):
            prune_checkpoints(self.weights, keep=1)

    def test_a_truncated_file_and_other_shapes_are_seen_in_the_headers(self) -> None:
        good = read_checkpoint(save_checkpoint(self.state, self.weights, version=1, base=self.base))
        other = {"a.weight": torch.ones(3, 2), "c.weight": torch.zeros(4)}
        found = differences(good, read_checkpoint(save_checkpoint(other, self.weights, version=2, base=self.base)))
        self.assertEqual(len(found), 3)
        file = self.weights / "v000002" / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-8])
        with self.assertRaisesRegex(CheckpointError, "model.safetensors"):
            read_checkpoint(self.weights / "v000002")


if __name__ == "__main__":
    unittest.main()
