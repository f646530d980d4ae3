"""What must hold when the faults have ended. Each check gives sentences about what does not; none: all is well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from e2e.watching import Life

Line = Mapping[str, Any]
Expected = Callable[[int, Sequence[int], Sequence[int], int], Sequence[int] | None]
"""(weight version, prompt, tokens made so far, count) to the tokens that these weights make next; None where nobody has
asked them: what real weights make of a beginning by others."""


def samples_lost_or_doubled(lines: Iterable[Line]) -> list[str]:
    """Every call came back once, with its prompts in their order and as many finished samples of each as asked for."""
    asked: dict[str, Line] = {}
    got: Counter[str] = Counter()
    found = []
    for line in lines:
        if "asked" in line:
            asked[line["asked"]] = line
        if "got" not in line:
            continue
        call = line["got"]
        got[call] += 1
        if call not in asked:
            found.append(f"call {call}: came back and was never made")
            continue
        if [group["prompt"] for group in line["groups"]] != asked[call]["prompts"]:
            found.append(f"call {call}: other prompts came back")
        for group in line["groups"]:
            bad = [sample for sample in group["samples"] if sample["status"] not in ("completed", "truncated")]
            found += [f"call {call}: a sample is {sample['status']}: {sample['error']}" for sample in bad]
            if len(group["samples"]) != asked[call]["n"]:
                found.append(f"call {call}: {len(group['samples'])} samples of {group['prompt']} came back")
    return found + [f"call {call}: came back {got[call]} times" for call in asked if got[call] != 1]


def wrong_weights(lines: Iterable[Line], expected: Expected) -> list[str]:
    """The tokens of every span are what the weights of the span's version make of the prompt."""
    found = []
    for line in lines:
        for group in line.get("groups", ()):
            for sample in group["samples"]:
                tokens, end = sample["response_tokens"], 0
                for span in sample["weight_versions"]:
                    before, made = tokens[: span["start"]], tokens[span["start"] : span["end"]]
                    right = expected(span["version"], group["prompt"], before, len(made))
                    if span["start"] != end or (right is not None and made != list(right)):
                        found.append(f"{group['prompt']}: {made} are not of version {span['version']}")
                    end = span["end"]
                if end != len(tokens):
                    found.append(f"{group['prompt']}: {len(tokens)} tokens, and versions for {end}")
    return found


def versions_back_in_time(lines: Iterable[Line]) -> list[str]:
    """What is asked after an update was answered is made by its weights or newer ones."""
    committed = 0
    asked_at: dict[str, int] = {}
    found = []
    for line in lines:
        if "engines" in line:
            committed = max(committed, line["update"])
        if "asked" in line:
            asked_at[line["asked"]] = committed
        spans = [
            s for group in line.get("groups", ()) for sample in group["samples"] for s in sample["weight_versions"]
        ]
        old = {span["version"] for span in spans if span["version"] < asked_at[line["got"]]}
        found += [f"call {line['got']}: version {v}, asked after {asked_at[line['got']]}" for v in sorted(old)]
    return found


def recreated_without_cause(
    lives: Sequence[Life], broken: Mapping[str, Sequence[str]], causes: Mapping[tuple[int, int], str]
) -> list[str]:
    """Every pod but the last one of an engine was ended by a fault of ours, and no name was used twice.

    So an engine has as many pods as 1 and the ends that were seen. `broken`: faults by pod UID; `causes`: what status
    says of recoveries, by engine and epoch.
    """
    names = Counter(life.name for life in lives)
    found = [f"pod name {name} was used {count} times" for name, count in names.items() if count > 1]
    for index in sorted({life.index for life in lives}):
        row = sorted((life for life in lives if life.index == index), key=lambda life: life.epoch)
        for life, after in pairwise(row):
            if not broken.get(life.uid):
                why = causes.get((index, after.epoch), "unknown")
                found.append(
                    f"{life.name} on {life.node} was replaced by {after.name}, untouched; the operator says {why}"
                )
            if life.epoch == after.epoch:
                found.append(f"{life.name} and {after.name} are one life of one engine")
    return found
