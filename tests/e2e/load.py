"""Generation load on engines while their weights change, and what its samples must say."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from e2e.fleets import Trainer, engines, through_proxy
from e2e.support import Kubectl, eventually

PROMPTS = [[1, 2, 3], [7, 8, 9, 10], [200, 100]]
TOKENS = 192
LOAD = f"fleet.generate({PROMPTS} * 2, n=4, temperature=0.0, max_new_tokens={TOKENS}, ignore_eos=True, timeout=240)"


def updated_under_load(
    space: Kubectl, trainer: Trainer, group: str, update: Callable[[], dict[str, Any]], *, pause_mode: str
) -> dict[str, Any]:
    """What `update`, to the next version, gives while every engine generates. No sample is lost, each names the
    versions that made it, and some were made by both, unless the mode aborts them."""
    version = trainer("fleet.weight_version")
    with ThreadPoolExecutor() as pool:
        load = pool.submit(trainer, LOAD, timeout=300)
        eventually(lambda: running(space, group), 60, "engines generate", accept=lambda counts: all(counts))
        result = update()
        groups = load.result()
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
