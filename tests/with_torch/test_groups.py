"""Buckets as SGLang reads them, and process groups with engines that hang or die; engines are small processes here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from rolloutfleet.trainer import GroupError, NonFiniteWeights
from rolloutfleet.trainer.groups import CUMEM, Groups, require_matching_nccl
from rolloutfleet.trainer.tensors import NumberCheck, buckets
from servers import Process, wait_until

ENGINE = """
import sys, torch
from datetime import timedelta
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world, rendezvous
port, name = sys.argv[1:]
store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=timedelta(seconds=60)))
print("waits", flush=True)
store = dist.PrefixStore(name, store)
group, _ = _new_process_group_helper(
    2, 1, [], Backend("gloo"), store, group_name=name, timeout=timedelta(seconds=600)
)
_world.pg_group_ranks[group] = {0: 0, 1: 1}
while True:
    received = torch.zeros(1 << 24, dtype=torch.uint8)
    dist.broadcast(received, src=0, group=group)
    print("received", int(received[-1]), flush=True)
"""
"""Joins as SGLang's init_custom_process_group does."""


class Buckets(unittest.TestCase):
    def test_tensors_of_mixed_types_lie_where_sglang_looks_for_them(self) -> None:
        state = {
            "bytes": torch.arange(3, dtype=torch.uint8),
            "half": torch.randn(5).bfloat16(),
            "scalar": torch.tensor(2.5),
            "float": torch.randn(3, 5).t(),
            "double": torch.randn(1, 1, 1).double(),
        }
        (bucket,) = buckets(state.items(), 1 << 20, check=True)
        empty = FlattenedTensorBucket.empty(
            [meta.name for meta in bucket.tensors],
            [meta.dtype for meta in bucket.tensors],
            [meta.shape for meta in bucket.tensors],
            "cpu",
        )
        self.assertEqual(empty.get_flattened_tensor().shape, bucket.flat.shape)
        read = FlattenedTensorBucket(flattened_tensor=bucket.flat, metadata=empty.get_metadata())
        for name, tensor in read.reconstruct_tensors():
            self.assertTrue(torch.equal(tensor, state[name]), name)

    def test_buckets_keep_to_their_size_but_for_a_tensor_that_is_larger_alone(self) -> None:
        state = [(str(index), torch.zeros(size)) for index, size in enumerate((10, 10, 10, 100, 1))]
        sizes = [bucket.flat.nbytes for bucket in buckets(state, 80, check=False)]
        self.assertEqual(sizes, [80, 40, 400, 4])

    def test_one_bad_number_of_any_type_is_found_by_the_name_of_its_tensor(self) -> None:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
            good = torch.ones(1000).to(dtype)
            NumberCheck().look([("good", good), ("empty", torch.empty(0)), ("whole", torch.arange(3))])
            for bad in (float("nan"), float("inf"), float("-inf")):
                poisoned = good.clone()
                poisoned[77] = bad
                if poisoned[77].float().isfinite():
                    continue  # float8 has no infinity: on a CPU it becomes the greatest number
                with self.assertRaisesRegex(NonFiniteWeights, "poisoned"):
                    NumberCheck().look([("good", good), ("poisoned", poisoned)])
        NumberCheck().look([("great", torch.tensor([1e300], dtype=torch.float64))])


class Environment(unittest.TestCase):
    def test_what_nccl_must_agree_on_is_set_or_refused_before_a_broadcast_hangs(self) -> None:
        with mock.patch.dict(os.environ):
            os.environ.pop(CUMEM, None)
            require_matching_nccl()
            self.assertEqual(os.environ[CUMEM], "0")
            require_matching_nccl()
            os.environ[CUMEM] = "1"
            with self.assertRaisesRegex(GroupError, f"{CUMEM} is 1 .*{CUMEM}=0"):
                require_matching_nccl()


ENDING = """
import torch
from rolloutfleet.trainer.groups import Groups
groups = Groups()
print(groups.open("it", seconds=60.0), flush=True)
groups.joining("it", "group-it", ranks=1, backend="gloo", seconds=60.0).result()
print("joined", flush=True)
input()
groups.broadcasting(torch.zeros(1 << 24, dtype=torch.uint8), seconds=600.0)
print("ends", flush=True)
"""


class Peers(unittest.TestCase):
    def setUp(self) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)
        self.groups = Groups()
        self.addCleanup(self.groups.close)

    def engine(self, uid: str) -> Process:
        port = self.groups.open(uid, seconds=60.0)
        engine = Process([sys.executable, "-c", ENGINE, str(port), f"group-{uid}"], log=self.folder / uid)
        self.addCleanup(engine.kill)
        return engine

    def joined(self, *uids: str) -> None:
        joining = [self.groups.joining(uid, f"group-{uid}", ranks=1, backend="gloo", seconds=60.0) for uid in uids]
        for each in joining:
            each.result(timeout=60.0)

    def test_a_trainer_that_ends_beside_an_engine_that_dies_ends_well(self) -> None:
        trainer = subprocess.Popen(
            [sys.executable, "-c", ENDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(trainer.wait)
        self.addCleanup(trainer.kill)
        assert trainer.stdin is not None and trainer.stdout is not None
        self.addCleanup(trainer.stdin.close)
        self.addCleanup(trainer.stdout.close)
        port = trainer.stdout.readline().strip()
        engine = Process([sys.executable, "-c", ENGINE, port, "group-it"], log=self.folder / "it")
        self.addCleanup(engine.kill)
        self.assertEqual(trainer.stdout.readline(), "joined\n")
        engine.signal(signal.SIGSTOP)
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        self.assertEqual(trainer.stdout.readline(), "ends\n")
        engine.kill()
        self.assertEqual(trainer.wait(30), 0)

    def test_an_engine_that_hangs_keeps_neither_the_sender_nor_another_engine(self) -> None:
        well, hanging = self.engine("well"), self.engine("hanging")
        self.joined("well", "hanging")
        hanging.signal(signal.SIGSTOP)
        sent = self.groups.broadcasting(torch.full((1 << 24,), 7, dtype=torch.uint8), seconds=600.0)
        sent["well"].result(timeout=30.0)
        wait_until(lambda: "received 7" in well.log.read_text(), seconds=30.0, what="the other one has it")
        self.assertFalse(sent["hanging"].done())
        self.groups.abort("hanging")
        self.assertEqual(self.groups.names("gloo"), {"well": "group-well"})
        self.groups.broadcasting(torch.full((1 << 24,), 8, dtype=torch.uint8), seconds=600.0)["well"].result(timeout=30)

    def test_what_is_sent_before_the_first_has_arrived_follows_in_its_order(self) -> None:
        engine = self.engine("one")
        self.joined("one")
        engine.signal(signal.SIGSTOP)
        numbers = list(range(1, 9))
        sent = [
            self.groups.broadcasting(torch.full((1 << 24,), number, dtype=torch.uint8), seconds=60.0)["one"]
            for number in numbers
        ]
        engine.signal(signal.SIGCONT)
        for each in sent:
            each.result(timeout=30.0)
        lines = [f"received {number}" for number in numbers]
        wait_until(lambda: engine.log.read_text().splitlines()[1:] == lines, seconds=30.0, what=f"{lines} in the log")

    def test_an_engine_that_waits_in_a_group_which_is_given_up_is_freed(self) -> None:
        waiting = self.engine("waiting")
        wait_until(lambda: "waits" in waiting.log.read_text(), seconds=60.0, what="it has found the store")
        self.groups.abort("waiting")
        wait_until(lambda: not waiting.running, seconds=60.0, what="it hears that the store is closed")
        self.assertNotEqual(waiting.code, 0)

    def test_groups_of_engines_that_are_gone_are_left_and_the_others_kept(self) -> None:
        self.engine("stays")
        gone = self.engine("gone")
        self.joined("stays", "gone")
        self.groups.keep({"stays": "group-stays"})
        self.assertEqual(self.groups.names("gloo"), {"stays": "group-stays"})
        self.assertEqual(self.groups.names("nccl"), {})
        wait_until(lambda: not gone.running, seconds=30.0, what="its end of the group breaks")
