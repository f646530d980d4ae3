"""Which GPU each rank of an engine takes a bucket from; without a GPU, without torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rolloutfleet.api.agent import UpdateEngine
from rolloutfleet.trainer import Refused, shared_memory
from rolloutfleet.trainer.shared_memory import places, share


def engine(pod: str, *, ranks: int = 1, releasable: bool = False) -> UpdateEngine:
    return UpdateEngine(uid=pod, pod=pod, url="http://x", ranks=ranks, group="", join=False, releasable=releasable)


class Flat:
    """A bucket's bytes on a GPU."""

    def __init__(self, gpu: int) -> None:
        self.device = SimpleNamespace(index=gpu)

    def to(self, device: str) -> Flat:
        return Flat(int(device.removeprefix("cuda:")))


@pytest.fixture(autouse=True)
def payloads_say_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_metadata", lambda _: [])
    monkeypatch.setattr(shared_memory, "_payload", lambda flat, _: f"on GPU {flat.device.index}")


def bucket(gpu: int) -> Any:
    return SimpleNamespace(flat=Flat(gpu))


def test_each_rank_takes_the_bucket_from_the_gpu_that_was_said_and_there_is_one_copy_on_each() -> None:
    engines = [engine("a", ranks=2, releasable=True), engine("b", ranks=2), engine("c")]
    gpus = places(engines, lambda each: {"a": [0, 1], "b": [2, 1], "c": [0]}[each.pod])
    shared = share(bucket(0), engines, gpus)
    assert shared.payloads == {"a": ["on GPU 0", "on GPU 1"], "b": ["on GPU 2", "on GPU 1"], "c": ["on GPU 0"]}
    assert sorted(flat.device.index for flat in shared.flats) == [0, 1, 2]


def test_ranks_take_it_from_where_it_is_if_nothing_is_said() -> None:
    engines = [engine("a", ranks=2), engine("b", releasable=True)]
    shared = share(bucket(1), engines, places(engines, None))
    assert shared.payloads == {"a": ["on GPU 1", "on GPU 1"], "b": ["on GPU 1"]}
    assert len(shared.flats) == 1


def test_engines_of_several_ranks_that_no_other_gpu_may_write_are_refused_by_name_unless_it_is_said() -> None:
    with pytest.raises(Refused, match="gpus: b has 2 ranks whose memory can be released"):
        places([engine("a"), engine("b", ranks=2, releasable=True)], None)


def test_a_gpu_too_few_is_refused() -> None:
    with pytest.raises(Refused, match=r"gpus: \[0\] for a, which has 2 ranks"):
        places([engine("a", ranks=2)], lambda _: [0])
