"""A tiny model, and the real agent beside real engines as a process of a test."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rolloutfleet.trainer import Fleet, connect
from servers import Engine, Process, free_port, wait_until

TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def model(seed: int) -> Qwen2ForCausalLM:
    """Random, in float32, its output head tied to the embedding."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**TINY))


class Agent(Process):
    """The agent of a trainer beside these engines, and its fleet."""

    def __init__(
        self, engines: Sequence[Engine], *, served: Path, folder: Path, ranks: int = 1, colocated: bool = False
    ) -> None:
        """`ranks`: of each engine. `colocated`: on the trainer's GPUs."""
        self.port = free_port()
        told = {
            "port": self.port,
            "address": "127.0.0.1",
            "model": str(served),
            "volume": str(folder),
            "checksum": engines[0].checksum(),
            "router": engines[0].url,  # takes requests as a router does
            "engines": [],
            "ranks": ranks,
            "colocated": colocated,
        }
        self.file = folder / f"fleet-{self.port}.json"
        self.file.write_text(json.dumps(told))
        self.serve(*engines)
        super().__init__(
            [sys.executable, "-m", "stand_ins.agent", str(self.file)],
            log=self.file.with_suffix(".log"),
            PYTHONPATH=os.pathsep.join(sys.path),
        )
        self.url = f"http://127.0.0.1:{self.port}"
        fleet = self.connect()
        wait_until(lambda: self._leads(fleet), seconds=30.0, what="the agent leads")
        fleet.close()

    def serve(self, *engines: Engine) -> None:
        """From the agent's next look on these are the fleet."""
        told = json.loads(self.file.read_text())
        told["engines"] = [{"pod": e.name, "uid": f"uid-{e.name}", "url": e.url} for e in engines]
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(told))
        partial.rename(self.file)

    def connect(self) -> Fleet:
        return connect("actor", url=self.url)

    def _leads(self, fleet: Fleet) -> bool:
        try:
            return fleet.view().leading
        except Exception:
            if not self.running:
                raise RuntimeError(self.log.read_text()[-2000:]) from None
            return False

    @property
    def training(self) -> dict[str, Any]:
        """What it has written to status.training."""
        written = self.file.with_suffix(".training")
        return json.loads(written.read_text()) if written.exists() else {}
