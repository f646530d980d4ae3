"""What becomes of requests that run while weights change."""

from __future__ import annotations

import threading
import time
from typing import Any, get_args

from gpu.machine import GpuEngine
from gpu.setting import FAR, Reference, Trainer, rounded, say, states
from rolloutfleet.api.agent import PauseMode
from rolloutfleet.trainer import FleetError

SENDERS = 12
SETTLED_SECONDS = 3.0


class Requests:
    """That run one after the other, some at once, and how they ended."""

    def __init__(self, engine: GpuEngine) -> None:
        self._engine = engine
        self._stop = threading.Event()
        self.ended: list[str] = []
        self._threads = [threading.Thread(target=self._send) for _ in range(SENDERS)]

    def __enter__(self) -> Requests:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        sampling = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
        while not self._stop.is_set():
            answer = self._engine.ask("/generate", {"input_ids": [1, 2, 3], "sampling_params": sampling})
            self.ended.append(answer["meta_info"]["finish_reason"]["type"])


def load() -> None:
    """Each pause mode under load. After InPlace a plain request gives wrong tokens: SGLang keeps its cache."""
    engine = GpuEngine.found(FAR[0])
    right = Reference(engine).tokens
    weights = states()
    with Trainer(engine) as trainer, Requests(engine) as requests:
        for turn, mode in enumerate(get_args(PauseMode)):
            new = 1 - turn % 2
            time.sleep(SETTLED_SECONDS)
            requests.ended.clear()
            facts: dict[str, Any]
            try:
                result = trainer.fleet.update_weights(weights[new], pause_mode=mode)
                facts = {
                    "outcomes": [verdict.outcome for verdict in result.engines],
                    "seconds": rounded(result.seconds),
                }
            except FleetError as error:
                facts = {"error": str(error)}
            tokens_right = engine.tokens() == right[new]
            time.sleep(SETTLED_SECONDS)
            ended = {reason: requests.ended.count(reason) for reason in sorted(set(requests.ended))}
            say("load", mode=mode, tokens_right=tokens_right, requests_ended=ended, **facts)
