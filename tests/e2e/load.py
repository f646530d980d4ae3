"""Generation load on engines while their weights change, and what its samples must say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from e2e.fleets import Trainer, engines, through_proxy
from e2e.support import Kubectl, eventually

PROMPTS = [[1, 2, 3], [7, 8, 9, 10], [200, 100]]
TOKENS = 192
ENOUGH = "/tmp/enough"
CLIENTS = 2
"""Each begins its next call when its last one has ended: with two, engines are never idle between them for long."""
LOAD = f"""
import pathlib, time
groups, until = [], time.monotonic() + 240
while not pathlib.Path({ENOUGH!r}).exists() and time.monotonic() < until:
    groups += fleet.generate({PROMPTS}, n=4, temperature=0.0, max_new_tokens={TOKENS}, ignore_eos=True, timeout=240)
"""


@contextmanager
def generating(space: Kubectl, trainer: Trainer, group: str) -> Iterator[list[dict[str, Any]]]:
    """Every engine of the group generates meanwhile; then the groups of samples stand in what this gives."""
    inside = ("exec", trainer.pod, "--container=trainer", "--")
    space(*inside, "rm", "-f", ENOUGH)
    groups: list[dict[str, Any]] = []
    with ThreadPoolExecutor() as pool:
        clients = [pool.submit(trainer, "groups", before=LOAD, timeout=300) for _ in range(CLIENTS)]
        try:
            eventually(lambda: running(space, group), 60, "engines generate", accept=lambda counts: all(counts))
            yield groups
        finally:
            space(*inside, "touch", ENOUGH)
        for client in clients:
            groups += client.result()


def updated_under_load(
    space: Kubectl, trainer: Trainer, group: str, update: Callable[[], dict[str, Any]], *, pause_mode: str
) -> dict[str, Any]:
    """What `update`, to the next version, gives while every engine generates. No sample is lost, each names the
    versions that made it, and some were made by both, unless the mode aborts them."""
    version = trainer("fleet.weight_version")
    with generating(space, trainer, group) as groups:
        result = update()
    samples = [sample for one in groups for sample in one["samples"]]
    assert {sample["status"] for sample in samples} == {"truncated"}
    spans = [[(span["version"], span["start"], span["end"]) for span in s["weight_versions"]] for s in samples]
    assert all(parts[0][1] == 0 and parts[-1][2] == TOKENS for parts in spans)
    assert {part[0] for parts in spans for part in parts} <= {version, version + 1}
    both = [parts for parts in spans if [part[0] for part in parts] == [version, version + 1]]
    if pause_mode != "Abort":
        assert both, "no sample spans the update"
        assert all(first[2] == second[1] for first, second in both)
    return result


def running(space: Kubectl, group: str) -> list[int]:
    """Requests that run in each engine."""
    loads = [through_proxy(space, engine["pod"], "/v1/loads") for engine in engines(space, group)]
    return [sum(rank["num_running_reqs"] for rank in load["loads"]) for load in loads]
