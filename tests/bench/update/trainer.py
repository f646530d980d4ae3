"""The trainer's process of bench-update: ours and by hand in turn, on the same engines. One JSON object a line.

By hand: no check, no record, no verdict; one process group for all engines, as trainers have it. A step goes to all
engines at once, and the next begins when all have answered.

usage: python -m bench.update.trainer OPTIONS
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sglang.srt.utils.common import init_custom_process_group
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

from rolloutfleet.trainer import Fleet, connect
from servers import ask, tokens

GROUP_PORT = 29555


class ByHand:
    def __init__(self, urls: list[str]) -> None:
        self._urls = urls
        self._threads = ThreadPoolExecutor(len(urls))
        self._group: Any = None

    def everywhere(self, path: str, *bodies: dict[str, Any]) -> None:
        each = bodies if len(bodies) > 1 else bodies * len(self._urls)
        list(self._threads.map(lambda pair: ask(pair[0], path, pair[1]), zip(self._urls, each, strict=True)))

    def join(self) -> None:
        world = len(self._urls) + 1
        bodies = [
            {
                "master_address": "127.0.0.1",
                "master_port": GROUP_PORT,
                "rank_offset": 1 + number,
                "world_size": world,
                "group_name": "by-hand",
                "backend": "gloo",
            }
            for number in range(len(self._urls))
        ]
        asked = threading.Thread(target=self.everywhere, args=("/init_weights_update_group", *bodies))
        asked.start()
        self._group = init_custom_process_group(
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{GROUP_PORT}",
            world_size=world,
            rank=0,
            group_name="by-hand",
            timeout=timedelta(seconds=60),
        )
        asked.join()

    def leave(self) -> None:
        self.everywhere("/destroy_weights_update_group", {"group_name": "by-hand"})
        dist.destroy_process_group(self._group)

    def whole(self, transfer: Callable[[], None], label: str) -> dict[str, float]:
        """Seconds by phase, and of all."""
        began = time.perf_counter()
        self.everywhere("/pause_generation", {"mode": "retract"})
        self.everywhere("/flush_cache", {})
        stopped = time.perf_counter()
        transfer()
        self.everywhere("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        loaded = time.perf_counter()
        self.everywhere("/weights_checker", {"action": "checksum"})
        checked = time.perf_counter()
        self.everywhere("/continue_generation", {})
        over = time.perf_counter()
        return {
            "pause": stopped - began,
            "load": loaded - stopped,
            "verify": checked - loaded,
            "paused": over - began,
        }

    def disk(self, path: str) -> None:
        self.everywhere("/update_weights_from_disk", {"model_path": path, "flush_cache": False})

    def distributed(self, state: dict[str, torch.Tensor]) -> None:
        self.everywhere("/begin_weight_update", {})
        bucket = FlattenedTensorBucket(named_tensors=list(state.items()))
        body = {
            "names": list(state),
            "dtypes": [str(tensor.dtype).split(".")[1] for tensor in state.values()],
            "shapes": [list(tensor.shape) for tensor in state.values()],
            "group_name": "by-hand",
            "flush_cache": False,
            "load_format": "flattened_bucket",
        }
        asked = threading.Thread(target=self.everywhere, args=("/update_weights_from_distributed", body))
        asked.start()
        dist.broadcast(bucket.flattened_tensor, 0, group=self._group)
        asked.join()
        self.everywhere("/end_weight_update", {})


def compare(
    transport: str,
    options: dict[str, Any],
    fleet: Fleet,
    ours: Callable[[int], Any],
    by_hand: Callable[[int, str], dict[str, float]],
) -> None:
    urls = options["urls"]
    ours(1)  # groups are made, caches are warm
    expected = {1: tokens(urls[0])}
    ours(0)
    expected[0] = tokens(urls[0])
    label = ask(urls[0], "/model_info")["weight_version"]
    total: list[float] = []
    mine: list[dict[str, float]] = []
    hand: list[dict[str, float]] = []
    for number in range(options["rounds"]):
        k = (number + 1) % 2
        hand.append(by_hand(k, label))
        assert [tokens(url) for url in urls] == [expected[k]] * len(urls), "by hand"
        began = time.perf_counter()
        result = ours(1 - k)
        total.append(time.perf_counter() - began)
        mine.append(result.seconds)
        assert [verdict.outcome for verdict in result.engines] == ["Committed"] * len(urls)
        assert [tokens(url) for url in urls] == [expected[1 - k]] * len(urls), "ours"
    ours_by_phase, by_hand_by_phase = _medians(mine), _medians(hand)
    whole, standing, bare = statistics.median(total), ours_by_phase["paused"], by_hand_by_phase["paused"]
    found = {
        "transport": transport,
        "total_s": round(whole, 4),
        "pause_s": standing,
        "by_hand_s": bare,
        "total_ratio": round(whole / bare, 3),
        "pause_ratio": round(standing / bare, 3),
        "phases": {"ours": ours_by_phase, "by_hand": by_hand_by_phase},
    }
    print(json.dumps(found), flush=True)


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {phase: round(statistics.median(each[phase] for each in rounds), 4) for phase in rounds[0]}


def die(options: dict[str, Any], fleet: Fleet, state: dict[str, torch.Tensor]) -> None:
    """Kill the last engine between two buckets; until the first one generates again."""
    moment = 0.0

    def dying() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal moment
        for number, named in enumerate(state.items()):
            if number == len(state) // 2:
                moment = time.perf_counter()
                for pid in options["victim"]:
                    os.kill(pid, signal.SIGKILL)
            yield named

    quarter = sum(tensor.nbytes for tensor in state.values()) // 4
    result = fleet.update_weights(dying(), bucket_bytes=quarter, timeout=60)
    seconds = time.perf_counter() - moment
    ask(options["urls"][0], "/ready")  # 200, or it raises
    outcomes = [verdict.outcome for verdict in result.engines]
    print(json.dumps({"casualty_to_continue_s": round(seconds, 3), "outcomes": outcomes}), flush=True)


def main(options: dict[str, Any]) -> None:
    states = [load_file(f"{options['mount']}/m{k}/model.safetensors") for k in (0, 1)]
    fleet = connect(url=options["agent"])
    if options["victim"]:
        die(options, fleet, states[1])
        return
    hand = ByHand(options["urls"])
    folders = [f"{options['mount']}/m{k}" for k in (0, 1)]
    compare(
        "disk",
        options,
        fleet,
        lambda k: fleet.update_weights(folders[k], timeout=60),
        lambda k, label: hand.whole(lambda: hand.disk(folders[k]), label),
    )
    hand.join()
    compare(
        "distributed",
        options,
        fleet,
        lambda k: fleet.update_weights(states[k], timeout=60),
        lambda k, label: hand.whole(lambda: hand.distributed(states[k]), label),
    )
    hand.leave()
    fleet.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
