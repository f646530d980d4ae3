"""What a chaos run would find: each kind of wrong that it looks for, made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from chaos.verdict import recreated_without_cause, samples_lost_or_doubled, versions_back_in_time, wrong_weights
from e2e.watching import Life


def tokens(version: int, prompt: Sequence[int], before: Sequence[int], count: int) -> list[int]:
    return [100 * version + sum(prompt) + len(before) + position for position in range(count)]


def sample(*spans: tuple[int, int], prompt: Sequence[int] = (1, 2), status: str = "truncated") -> dict[str, Any]:
    """`spans`: (version, tokens of it)."""
    made: list[int] = []
    versions = []
    for version, count in spans:
        start, end = len(made), len(made) + count
        made += tokens(version, prompt, made, end - start)
        versions.append({"version": version, "start": start, "end": end})
    return {"status": status, "error": "", "response_tokens": made, "weight_versions": versions}


def asked(call: str = "0/0", n: int = 1) -> dict[str, Any]:
    return {"asked": call, "prompts": [[1, 2]], "n": n}


def got(*samples: dict[str, Any], call: str = "0/0") -> dict[str, Any]:
    return {"got": call, "groups": [{"prompt": [1, 2], "samples": list(samples)}]}


def life(index: int, epoch: int, name: str = "") -> Life:
    name = name or f"pod-{index}-e{epoch}"
    return Life(name=name, uid=f"{index}/{epoch}/{name}", index=index, epoch=epoch, created=0.0)


def test_a_run_in_which_all_is_well_has_nothing_to_say() -> None:
    lines = [asked(), {"update": 1, "engines": ["Committed"]}, got(sample((0, 2), (1, 3)))]
    assert samples_lost_or_doubled(lines) == []
    assert wrong_weights(lines, tokens) == []
    assert versions_back_in_time(lines) == []
    assert recreated_without_cause([life(0, 1), life(0, 3), life(1, 2)], {"0/1/pod-0-e1": ["kill"]}, {}) == []


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([asked()], "came back 0 times"),
        ([asked(), got(sample((0, 2))), got(sample((0, 2)))], "came back 2 times"),
        ([asked(n=2), got(sample((0, 2)))], "1 samples"),
        ([asked(), got(sample((0, 2), status="aborted"))], "aborted"),
        ([asked(), {**got(), "groups": []}], "other prompts"),
        ([got(sample((0, 2)))], "never made"),
    ],
)
def test_what_is_lost_or_doubled_is_found(lines: list[dict[str, Any]], found: str) -> None:
    assert any(found in sentence for sentence in samples_lost_or_doubled(lines))


def test_tokens_of_other_weights_than_the_sample_names_are_found() -> None:
    right = sample((0, 2), (1, 3))
    for wrong in (
        {**right, "response_tokens": tokens(1, [1, 2], [], 5)},
        {**right, "response_tokens": [*right["response_tokens"], 7]},
        {**right, "weight_versions": right["weight_versions"][1:]},
        {**right, "weight_versions": [{"version": 2, "start": 0, "end": 5}]},
    ):
        assert wrong_weights([asked(), got(wrong)], tokens)


def test_what_real_weights_make_of_a_beginning_by_others_is_not_judged() -> None:
    started = sample((0, 2), (1, 3))
    first_alone = wrong_weights([got(started)], lambda *asked: None if asked[2] else tokens(*asked))
    assert first_alone == []
    started["response_tokens"][0] += 1
    assert wrong_weights([got(started)], lambda *asked: None if asked[2] else tokens(*asked))


def test_old_weights_after_an_update_that_was_answered_are_found() -> None:
    update = {"update": 3, "engines": ["Committed"]}
    assert versions_back_in_time([update, asked(), got(sample((2, 2)))])
    assert not versions_back_in_time([update, asked(), got(sample((4, 2)))])
    assert not versions_back_in_time([asked(), update, got(sample((2, 2)))]), "it was under way"


def test_pods_beyond_one_for_each_end_are_found() -> None:
    broken = {"0/1/pod-0-e1": ["kill"]}
    assert recreated_without_cause([life(0, 1), life(0, 2), life(0, 3)], broken, {(0, 3): "Hung"})[0].endswith("Hung")
    assert recreated_without_cause([life(0, 1), life(0, 2, "again"), life(0, 2)], broken, {})
    assert recreated_without_cause([life(0, 1, "same"), life(1, 1, "same")], {}, {})
