"""Deltas of real torch modules: a pod's copy ends with the module's weights. Run as test_checkpoints.py is."""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from rolloutfleet.engine.versions import is_delta
from rolloutfleet.trainer import DeltaWriter, NonFiniteWeights, prune_checkpoints
from rolloutfleet.worker.copies import Copies


class Deltas(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        root = Path(folder.name)
        self.base, self.weights, pod = root / "base", root / "weights", root / "pod"
        for path in (self.base, self.weights, pod):
            path.mkdir()
        (self.base / "config.json").write_text("{}")
        self.copies = Copies(pod, weights=self.weights)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.LayerNorm(32)).to(torch.bfloat16)

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 1e-4 * torch.randn_like(parameter)

    def copied(self, version: int) -> dict[str, torch.Tensor]:
        made = self.copies.bring_to(self.weights / f"v{version:06d}")
        found: dict[str, torch.Tensor] = load_file(Path(made.path) / "model.safetensors")
        return found

    def assert_same(self, found: dict[str, torch.Tensor]) -> None:
        state = self.model.state_dict()
        self.assertEqual(found.keys(), state.keys())
        for name, tensor in state.items():
            self.assertTrue(torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name)

    def test_a_module_that_is_trained_in_place_reaches_a_pod_step_by_step(self) -> None:
        writer = DeltaWriter(self.weights, base=self.base, full_every=3)
        fulls = []
        for version in range(1, 6):
            self.train()
            saved = writer.save(self.model, version=version)
            fulls.append(saved.full)
            self.assertGreater(saved.bytes, 0)
            self.assert_same(self.copied(version))
        self.assertEqual(fulls, [True, False, False, True, False])

    def test_of_a_step_that_changes_little_little_is_written(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False)).to(torch.bfloat16)
        writer = DeltaWriter(self.weights, base=self.base)
        full = writer.save(self.model, version=1)
        with torch.no_grad():
            self.model[0].weight[::100] *= 1.01
        delta = writer.save(self.model, version=2)
        self.assertAlmostEqual(delta.density, 0.01, delta=0.005)
        self.assertLess(delta.bytes, full.bytes / 50)
        self.assert_same(self.copied(2))

    def test_tensors_may_come_one_by_one_and_in_another_type(self) -> None:
        wide = self.model.to(torch.float32)

        def streamed() -> Iterator[tuple[str, torch.Tensor]]:
            yield from wide.state_dict().items()

        writer = DeltaWriter(self.weights, base=self.base, dtype=torch.bfloat16)
        for version in (1, 2):
            self.train()
            writer.save(streamed(), version=version)
        self.assertTrue(is_delta(self.weights / "v000002"))
        self.model = self.model.to(torch.bfloat16)
        self.assert_same(self.copied(2))

    def test_weights_that_are_no_numbers_are_refused_and_the_next_version_is_whole(self) -> None:
        writer = DeltaWriter(self.weights, base=self.base)
        writer.save(self.model, version=1)
        before = self.model[0].bias.detach().clone()
        with torch.no_grad():
            self.model[0].bias[3] = float("inf")
        with self.assertRaisesRegex(NonFiniteWeights, r"0\.bias"):
            writer.save(self.model, version=2)
        self.assertEqual([path.name for path in self.weights.iterdir()], ["v000001"])
        with torch.no_grad():
            self.model[0].bias.copy_(before)
        self.assertTrue(writer.save(self.model, version=2).full)
        self.assert_same(self.copied(2))

    def test_another_model_is_written_whole(self) -> None:
        writer = DeltaWriter(self.weights, base=self.base)
        writer.save(self.model, version=1)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 32)).to(torch.bfloat16)
        self.assertTrue(writer.save(self.model, version=2).full)
        self.assert_same(self.copied(2))

    def test_pruning_keeps_what_a_kept_delta_rests_on(self) -> None:
        writer = DeltaWriter(self.weights, base=self.base, full_every=4)
        for version in range(1, 8):  # 1 and 5 are full
            self.train()
            writer.save(self.model, version=version)
        self.assertEqual(
            [path.name for path in prune_checkpoints(self.weights, keep=2)], [f"v{n:06d}" for n in range(1, 5)]
        )
        self.assertEqual(sorted(path.name for path in self.weights.iterdir()), ["v000005", "v000006", "v000007"])
        self.assert_same(self.copied(7))


if __name__ == "__main__":
    unittest.main()
