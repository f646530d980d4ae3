"""What a real SGLang engine makes of checkpoints that are not as they should be, and what is left of many updates."""

from __future__ import annotations

import os
import shutil
import tempfile
import unittest
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
from engines import Agent, model
from safetensors.torch import load_file, save_file

from rolloutfleet.trainer import Fleet, Refused
from servers import CpuEngine
from stand_ins.agent import FIRST_LABEL

WITHOUT_OVERRIDE = ("setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search")
"""Root that may not read what others have closed."""
SOMEBODY = 1000
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


class UnfitWeights(unittest.TestCase):
    """One engine that has started with m0, in bfloat16."""

    folder: ClassVar[Path]
    engine: ClassVar[CpuEngine]

    @classmethod
    def setUpClass(cls) -> None:
        holder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(holder.cleanup)
        cls.folder = Path(holder.name)
        for seed in (0, 1):
            model(seed).to(torch.bfloat16).save_pretrained(cls.folder / f"m{seed}")
        cls.engine = CpuEngine(cls.folder / "m0", name="engine", logs=cls.folder, prefix=WITHOUT_OVERRIDE)
        cls.addClassCleanup(cls.engine.kill)
        cls.engine.wait()

    def setUp(self) -> None:
        self.engine.ask("/continue_generation", {})
        start = {"model_path": str(self.folder / "m0"), "weight_version": FIRST_LABEL}
        self.engine.ask("/update_weights_from_disk", start)
        self.agent = Agent([self.engine], served=self.folder / "m0", folder=self.folder)
        self.addCleanup(self.agent.kill)
        self.fleet = self.connect()

    def connect(self) -> Fleet:
        fleet = self.agent.connect()
        self.addCleanup(fleet.close)
        return fleet

    def checkpoint(self, name: str, tensors: dict[str, torch.Tensor]) -> Path:
        path = self.folder / name
        shutil.copytree(self.folder / "m1", path)
        self.addCleanup(shutil.rmtree, path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    @property
    def new(self) -> dict[str, torch.Tensor]:
        return dict(load_file(self.folder / "m1" / "model.safetensors"))

    def test_a_checkpoint_of_a_wider_type_gives_what_the_served_type_gives(self) -> None:
        self.fleet.update_weights(self.folder / "m1")
        tokens, checksum = self.engine.tokens(), self.engine.checksum()
        self.fleet.update_weights(self.folder / "m0")
        wide = self.checkpoint("float32", {name: tensor.float() for name, tensor in self.new.items()})
        self.fleet.update_weights(wide)
        self.assertEqual((self.engine.tokens(), self.engine.checksum()), (tokens, checksum))

    def test_a_folder_that_the_engine_may_not_read_is_named_and_the_old_version_serves(self) -> None:
        tokens = self.engine.tokens()
        closed = self.checkpoint("closed", self.new)
        closed.chmod(0o700)
        os.chown(closed, SOMEBODY, SOMEBODY)
        with self.assertRaises(Refused) as refusal:
            self.fleet.update_weights(closed)
        self.assertEqual(refusal.exception.code, "UpdateFailed")
        self.assertIn(f"sees no checkpoint at {closed}", refusal.exception.details[0])
        self.assertEqual((self.engine.tokens(), self.fleet.weight_version), (tokens, 0))

    def test_samples_of_weights_that_are_no_numbers_fail_with_the_reason_and_one_call_goes_back(self) -> None:
        self.fleet.update_weights(self.folder / "m0", version=1)
        for number in (float("nan"), float("inf")):
            poisoned = self.new
            poisoned["model.norm.weight"][3] = number
            path = self.checkpoint(f"poisoned-{number}", poisoned)
            self.fleet.update_weights(path, version=2)
            (group,) = self.fleet.generate([[1, 2, 3]], n=4, timeout=60.0, **GREEDY)
            self.assertEqual({sample.status for sample in group.samples}, {"failed"})
            self.assertIn("weights of version 2 hold NaN", group.samples[0].error)
            self.fleet.update_weights(self.folder / "m0", version=1, rollback=True)
            (group,) = self.fleet.generate([[1, 2, 3]], n=4, timeout=60.0, **GREEDY)
            self.assertEqual({sample.status for sample in group.samples}, {"truncated"})

    def test_many_updates_leave_nothing_open_and_no_file_and_take_no_memory(self) -> None:
        state = model(1).to(torch.bfloat16).state_dict()

        def update(times: int) -> None:
            for number in range(times):
                self.fleet.update_weights(self.folder / f"m{number % 2}")
                self.fleet.update_weights(state.items(), bucket_bytes=100_000)
                self.fleet.update_weights(state, transport="tensor")
                newcomer = self.connect()  # a trainer that has started anew: its groups are new
                newcomer.update_weights(state)
                newcomer.close()

        update(5)
        before = self.left()
        update(20)
        after = self.left()
        size = sum(tensor.nbytes for tensor in state.values())
        # Of eighty updates half would have to stay to be more than allocators keep for themselves.
        bounds = {"descriptors": 2, "threads": 2, "files": 0, "bytes": 40 * size}
        grown = {
            f"{kind} of the {name}": more
            for name in before
            for kind, bound in bounds.items()
            if (more := after[name][kind] - before[name][kind]) > bound
        }
        self.assertEqual(grown, {}, f"{before}, then {after}")

    def left(self) -> dict[str, dict[str, int]]:
        trainer = used([os.getpid()])
        trainer["files"] = len([file for file in os.listdir("/dev/shm") if f"_{os.getpid()}_" in file])
        engine = used(self.engine.members())
        engine["files"] = len(list(self.engine.scratch.iterdir()))
        return {"trainer": trainer, "engine": engine, "agent": {**used(self.agent.members()), "files": 0}}


def used(processes: Iterable[int]) -> dict[str, int]:
    found = {"descriptors": 0, "threads": 0, "bytes": 0}
    for pid in processes:
        process = Path(f"/proc/{pid}")
        found["descriptors"] += len(os.listdir(process / "fd"))
        found["threads"] += len(os.listdir(process / "task"))
        found["bytes"] += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return found


if __name__ == "__main__":
    unittest.main()
