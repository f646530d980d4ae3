"""Tensors that a training step takes, made of samples: run by tests/run.sh, see test_checkpoints.py."""

from __future__ import annotations

import random
import unittest

import torch

from rolloutfleet.api.samples import Sample, SampleStatus, VersionSpan
from rolloutfleet.trainer.batches import packed, padded


def sample(prompt: list[int], response: list[int], mask: list[int] | None = None) -> Sample:
    return Sample(
        prompt_tokens=prompt,
        response_tokens=response,
        rollout_log_probs=[-0.5 * (i + 1) for i in range(len(response))],
        loss_mask=mask or [1] * len(response),
        weight_versions=[VersionSpan(version=1, start=0, end=len(response))],
        status=SampleStatus.COMPLETED,
    )


TWO = [sample([1, 2], [3, 4, 5], [1, 0, 1]), sample([6], [7])]


class Batches(unittest.TestCase):
    def test_a_packed_batch_by_hand(self) -> None:
        batch = packed(TWO, [2.0, -1.0])
        self.assertEqual(batch.tokens.tolist(), [1, 2, 3, 4, 5, 6, 7])
        self.assertEqual(batch.position_ids.tolist(), [0, 1, 2, 3, 4, 0, 1])
        self.assertEqual((batch.cu_seqlens.tolist(), batch.max_seqlen), ([0, 5, 7], 5))
        self.assertEqual(batch.loss_mask.tolist(), [0, 0, 1, 0, 1, 0, 1])
        self.assertEqual(batch.rollout_log_probs.tolist(), [0, 0, -0.5, -1, -1.5, 0, -0.5])
        self.assertEqual(batch.advantages.tolist(), [0, 0, 2, 2, 2, 0, -1])
        types = {batch.tokens.dtype, batch.position_ids.dtype, batch.cu_seqlens.dtype, batch.loss_mask.dtype}
        self.assertEqual(types, {torch.int64, torch.int32, torch.float32})

    def test_a_padded_batch_by_hand(self) -> None:
        batch = padded(TWO, [2.0, -1.0], pad_token=9)
        self.assertEqual(batch.tokens.tolist(), [[1, 2, 3, 4, 5], [6, 7, 9, 9, 9]])
        self.assertEqual(batch.attention_mask.tolist(), [[1] * 5, [1, 1, 0, 0, 0]])
        self.assertEqual(batch.loss_mask.tolist(), [[0, 0, 1, 0, 1], [0, 1, 0, 0, 0]])
        self.assertEqual(batch.advantages.tolist(), [[0, 0, 2, 2, 2], [0, -1, 0, 0, 0]])

    def test_both_forms_have_the_same_loss(self) -> None:
        chance = random.Random(3)
        samples = [sample([1] * chance.randint(1, 5), [2] * chance.randint(0, 7)) for _ in range(9)]
        advantages = [chance.uniform(-1, 1) for _ in samples]
        one, other = packed(samples, advantages), padded(samples, advantages)
        losses = [(b.advantages * b.loss_mask * b.rollout_log_probs).sum() for b in (one, other)]
        torch.testing.assert_close(losses[0], losses[1])
        self.assertEqual(int(one.loss_mask.sum()), sum(s.effective_response_length for s in samples))

    def test_a_sample_that_was_filtered_out_is_not_trained(self) -> None:
        batch = packed([TWO[0].changed(remove_sample=True)], [2.0])
        self.assertEqual(batch.loss_mask.sum().item(), 0)

    def test_a_batch_moves_as_a_whole(self) -> None:
        moved = packed(TWO, [1.0, 1.0]).to("meta")
        self.assertEqual({moved.tokens.device.type, moved.advantages.device.type}, {"meta"})
        self.assertEqual(moved.max_seqlen, 5)

    def test_advantages_that_do_not_fit_are_refused(self) -> None:
        for samples, advantages in ((TWO, [1.0]), ([], [])):
            with self.assertRaisesRegex(ValueError, "one each is needed"):
                packed(samples, advantages)


if __name__ == "__main__":
    unittest.main()
