"""The trainer library and the agent send tensors to real SGLang engines, over gloo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch
from engines import Agent, model

from rolloutfleet.trainer import NonFiniteWeights, Refused, ZeroWeights
from servers import CpuEngine, Engine, Process, free_port, wait_until
from stand_ins.agent import FIRST_LABEL


class Sending(unittest.TestCase):
    """One engine starts with model 0 and is updated; the other starts with model 1 and shows what is right."""

    folder: ClassVar[Path]
    updated: ClassVar[Engine]
    fresh: ClassVar[Engine]

    @classmethod
    def setUpClass(cls) -> None:
        holder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(holder.cleanup)
        cls.folder = Path(holder.name)
        for seed in (0, 1):
            model(seed).save_pretrained(cls.folder / f"m{seed}")
        cls.updated = CpuEngine(cls.folder / "m0", name="updated", logs=cls.folder)
        cls.addClassCleanup(cls.updated.kill)
        cls.fresh = CpuEngine(cls.folder / "m1", name="fresh", logs=cls.folder)
        cls.addClassCleanup(cls.fresh.kill)
        cls.updated.wait()
        cls.fresh.wait()

    def setUp(self) -> None:
        self.updated.ask("/continue_generation", {})
        start = {"model_path": str(self.folder / "m0"), "weight_version": FIRST_LABEL}
        self.updated.ask("/update_weights_from_disk", start)

    def agent(self, *engines: Engine) -> Agent:
        agent = Agent(engines, served=self.folder / "m0", folder=self.folder)
        self.addCleanup(agent.kill)
        return agent

    def test_tokens_and_checksum_are_those_of_a_fresh_engine_for_each_transport_and_size_of_bucket(self) -> None:
        old, new = self.updated.tokens(), self.fresh.tokens()
        self.assertNotEqual(old, new)
        fleet = self.agent(self.updated).connect()
        self.addCleanup(fleet.close)
        for transport in ("distributed", "tensor"):
            for bucket_bytes in (1, 400_000, 1 << 30):
                with self.subTest(transport=transport, bucket_bytes=bucket_bytes):
                    told: list[int] = []
                    result = fleet.update_weights(
                        model(1),
                        transport=transport,
                        bucket_bytes=bucket_bytes,
                        progress=lambda *, sent_bytes, buckets, told=told: told.append(sent_bytes),
                    )
                    self.assertEqual([verdict.outcome for verdict in result.engines], ["Committed"])
                    self.assertEqual(self.updated.tokens(), new)
                    self.assertEqual(self.updated.checksum(), self.fresh.checksum())
                    self.assertEqual(told[-1], result.bytes)
                    fleet.update_weights(model(0).state_dict().items(), transport=transport)  # a stream
                    self.assertEqual(self.updated.tokens(), old)

    def test_weights_of_another_type_are_sent_in_the_served_one(self) -> None:
        fleet = self.agent(self.updated).connect()
        self.addCleanup(fleet.close)
        half = fleet.update_weights(model(1), dtype=torch.bfloat16)
        self.assertEqual(self.updated.tokens(), self.fresh.tokens())
        self.assertEqual(half.bytes * 2, fleet.update_weights(model(0)).bytes)

    def test_a_model_that_is_sharded_over_processes_is_gathered_a_tensor_at_a_time(self) -> None:
        agent = self.agent(self.updated)
        story = """
            import os, sys, torch.distributed as dist
            from torch.distributed.fsdp import fully_shard
            from engines import model
            from rolloutfleet.trainer import connect, gather
            dist.init_process_group("gloo")
            sharded = fully_shard(model(1), mesh=dist.init_device_mesh("cpu", (2,)))
            if dist.get_rank() == 0:
                connect("actor", url=sys.argv[1]).update_weights(sharded, bucket_bytes=100_000)
            else:
                gather(sharded)
        """
        port = str(free_port())
        ranks = [
            Process(
                [sys.executable, "-c", textwrap.dedent(story), agent.url],
                log=self.folder / f"rank{rank}.log",
                RANK=str(rank),
                WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                PYTHONPATH=os.pathsep.join(sys.path),
            )
            for rank in range(2)
        ]
        for rank in ranks:
            self.addCleanup(rank.kill)
        for rank in ranks:
            wait_until(lambda rank=rank: not rank.running, seconds=120.0, what="the trainer ends")  # type: ignore[misc]
            self.assertEqual(rank.code, 0, rank.log.read_text())
        self.assertEqual(self.updated.tokens(), self.fresh.tokens())

    def test_weights_that_are_no_numbers_or_nothing_but_zeros_never_arrive(self) -> None:
        agent = self.agent(self.updated)
        fleet = agent.connect()
        self.addCleanup(fleet.close)
        before = fleet.weight_version
        for poison in (float("nan"), float("-inf")):
            bad = model(1)
            bad.model.norm.weight.data[3] = poison
            with self.assertRaisesRegex(NonFiniteWeights, r"model\.norm\.weight"):
                fleet.update_weights(bad)
            stream = iter(bad.state_dict().items())
            with self.assertRaisesRegex(NonFiniteWeights, r"model\.norm\.weight"):
                fleet.update_weights(stream, bucket_bytes=1 << 30)
        blank = {name: torch.zeros_like(tensor) for name, tensor in model(1).state_dict().items()}
        with self.assertRaises(ZeroWeights):
            fleet.update_weights(blank)
        with self.assertRaises(ZeroWeights):
            fleet.update_weights(iter(blank.items()), bucket_bytes=1 << 30)
        self.assertEqual(agent.training, {}, "nobody was paused")
        self.assertEqual(fleet.weight_version, before)
        self.updated.tokens()

    def test_tensors_of_another_model_are_refused_before_anything_is_paused(self) -> None:
        agent = self.agent(self.updated)
        fleet = agent.connect()
        self.addCleanup(fleet.close)
        state = model(1).state_dict()
        state["model.layers.0.extra"] = state.pop("model.layers.0.mlp.up_proj.weight")
        with self.assertRaises(Refused) as refusal:
            fleet.update_weights(state)
        self.assertEqual(refusal.exception.code, "BadCheckpoint")
        self.assertEqual(
            refusal.exception.details, ["model.layers.0.extra: not a tensor of this model"], agent.log.read_text()
        )
        self.updated.tokens()

    def test_a_sender_that_is_killed_in_a_broadcast_leaves_no_engine_stuck(self) -> None:
        agent = self.agent(self.updated)
        story = """
            import os, signal, sys, time
            from engines import model
            from rolloutfleet.trainer import connect
            from rolloutfleet.trainer.groups import Groups
            def die(*_, **__):
                time.sleep(1.0)  # by now the engine waits in the broadcast
                print(time.monotonic(), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            Groups.broadcasting = die
            connect("actor", url=sys.argv[1]).update_weights(model(1))
        """
        sender = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(story), agent.url],
            cwd=Path(__file__).parent,
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
        self.assertEqual(sender.returncode, -signal.SIGKILL)
        self.updated.checksum(seconds=30.0)
        print(f"engine free {time.monotonic() - float(sender.stdout):.2f} s after its sender was killed")
        wait_until(
            lambda: agent.training["weights"]["phase"] == "Committed", seconds=60.0, what="the update is settled"
        )
        self.assertEqual(agent.training["weights"]["version"], 0)


class Casualty(unittest.TestCase):
    def test_an_engine_that_dies_in_the_middle_keeps_neither_the_sender_nor_the_other_engine(self) -> None:
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        folder = Path(holder.name)
        model(0).save_pretrained(folder / "m0")
        engines = [CpuEngine(folder / "m0", name=name, logs=folder) for name in ("survivor", "casualty")]
        for engine in engines:
            self.addCleanup(engine.kill)
        survivor, casualty = engines
        survivor.wait()
        casualty.wait()
        agent = Agent(engines, served=folder / "m0", folder=folder)
        self.addCleanup(agent.kill)
        fleet = agent.connect()
        self.addCleanup(fleet.close)
        killed: list[float] = []

        def hang_and_die() -> None:
            casualty.signal(signal.SIGSTOP)
            killing = threading.Timer(2.0, lambda: (killed.append(time.monotonic()), casualty.kill()))
            killing.start()

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for index, entry in enumerate(model(1).state_dict().items()):
                if index == 10:
                    hang_and_die()
                yield entry

        result = fleet.update_weights(tensors(), bucket_bytes=100_000)
        print(f"the update was through {time.monotonic() - killed[0]:.2f} s after the engine was killed")
        self.assertEqual([verdict.outcome for verdict in result.engines], ["Committed", "Unreachable"])
        self.assertGreater(len(survivor.tokens()), 0)
        again = fleet.update_weights(model(0))
        self.assertEqual(again.engines[0].outcome, "Committed")
