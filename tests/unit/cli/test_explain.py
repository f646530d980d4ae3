"""`why`: one sentence that names the blocker, and the runbook's next step, for whatever status can say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolloutfleet.cli.advice import advice, parse
from rolloutfleet.cli.explain import Explanation, Serves, explain
from unit.cli.objects import condition, engine, fleet, group, server

RUNBOOK = (Path(__file__).parents[3] / "docs/runbook.md").read_text()


def explained(body: dict[str, Any], *groups: dict[str, Any]) -> Explanation:
    found = fleet(body, *groups)
    return explain(found.server, found.groups)


def partly(reason: str, message: str, **fields: Any) -> dict[str, Any]:
    return server(condition("Ready", "True", reason, message), routable=1, **fields)


def not_at_all(reason: str, message: str, **fields: Any) -> dict[str, Any]:
    return server(condition("Ready", "False", reason, message), routable=0, **fields)


SERVING = condition("Ready", "True", "Serving", "2/2 engines routable")


def test_a_fleet_that_serves_says_with_which_weights_and_needs_nothing() -> None:
    found = explained(server(SERVING, weights={"version": 3}), group(engine(0), engine(1)))
    assert found == Explanation(
        Serves.IN_FULL, "qwen serves in full: 2/2 engines routable with weight version 3.", next_step=""
    )


def test_what_the_trainer_does_meanwhile_is_said_of_a_fleet_that_serves() -> None:
    weights = {"phase": "Updating", "version": 3, "targetVersion": 4, "deadline": "2026-01-01T00:10:00+00:00"}
    found = explained(server(SERVING, training={"weights": weights}), group(engine(0), engine(1)))
    assert found.serves is Serves.IN_FULL
    assert "the trainer updates it to version 4, until 2026-01-01T00:10:00+00:00" in found.sentence
    memory = {"phase": "Released", "tags": ["weights", "kv_cache"]}
    found = explained(server(SERVING, training={"memory": memory}), group(engine(0), engine(1)))
    assert "the trainer holds its memory (Released: weights, kv_cache)" in found.sentence


def test_a_failed_engine_is_named_with_its_cause_and_its_next_try() -> None:
    ill = engine(1, 4, "Failed", "OOMKilled", message="killed for memory (exit code 137)", retryAt="T1")
    message = "1/2 engines routable; qwen-main-1-e4: killed for memory (exit code 137)"
    found = explained(partly("OOMKilled", message), group(engine(0), ill))
    assert found.serves is Serves.PARTLY
    assert found.sentence == (
        "qwen serves partly: 1/2 engines routable; "
        "qwen-main-1-e4 is Failed (OOMKilled): killed for memory (exit code 137); next try at T1."
    )
    assert found.next_step == "read the failed pod's log: the last one is kept until its successor starts"


def test_an_engine_that_is_not_tried_again_is_to_be_resumed_by_name() -> None:
    ill = engine(0, 9, "Failed", "RestartsExhausted", message="failed 4 times in a row")
    found = explained(not_at_all("RestartsExhausted", "0/1 engines routable; qwen-main-0-e9: failed"), group(ill))
    assert found.serves is Serves.NOT
    assert found.sentence.endswith("qwen-main-0-e9 is Failed (RestartsExhausted): failed 4 times in a row.")
    assert "`kubectl rolloutfleet resume qwen`" in found.next_step


def test_engines_with_the_same_trouble_are_counted_and_not_listed() -> None:
    ill = [engine(index, 1, "Pending", "Unschedulable", message="0/2 nodes are available") for index in range(3)]
    found = explained(
        not_at_all("Unschedulable", "0/3 engines routable; qwen-main-0-e1: 0/2 nodes are available", desired=3),
        group(*ill),
    )
    assert "qwen-main-0-e1 is Pending (Unschedulable): 0/2 nodes are available; 2 more like it." in found.sentence


def test_an_engine_that_starts_again_says_how_its_last_life_ended() -> None:
    ended = {"reason": "PodDeleted", "message": "the pod was deleted"}
    new = engine(0, 2, "Starting", "Loading", message="SGLang does not answer yet", lastFailure=ended)
    found = explained(partly("Loading", "1/2 engines routable; qwen-main-0-e2: ..."), group(new, engine(1)))
    assert "its last life ended with PodDeleted (the pod was deleted)" in found.sentence
    assert "recovery.startupDeadlineSeconds" in found.next_step


def test_an_engine_that_catches_up_does_not_speak_of_its_last_life() -> None:
    ended = {"reason": "PodDeleted", "message": "the pod was deleted"}
    new = engine(0, 2, "Stale", "WeightsBehind", message="loads version 3", started=True, lastFailure=ended)
    found = explained(partly("WeightsBehind", "1/2 engines routable; qwen-main-0-e2: loads version 3"), group(new))
    assert found.sentence.endswith("qwen-main-0-e2 is Stale (WeightsBehind): loads version 3.")


def test_the_engine_that_the_condition_names_counts_and_not_a_worse_one_elsewhere() -> None:
    failed = group(engine(0, 5, "Failed", "OOMKilled", retryAt="T1"), name="decode", role="Decode")
    waiting = group(engine(0, 1, "Stale", "NoPeer", message="there is no engine"), name="prefill", role="Prefill")
    message = "0/2 engines routable; qwen-prefill-0-e1: there is no engine"
    found = explained(not_at_all("NoPeer", message), failed, waiting)
    assert "qwen-prefill-0-e1 is Stale (NoPeer)" in found.sentence


def test_of_an_external_engine_its_owner_is_to_be_asked() -> None:
    silent = engine(0, 2, "Starting", "NotAnswering", message="no answer", url="http://10.0.0.5:30000")
    found = explained(
        not_at_all("NotAnswering", "0/1 engines routable; qwen-external-0-e2: no answer"),
        group(silent, name="external", role="External"),
    )
    assert found.next_step.startswith("ask its owner")
    ours = explained(
        not_at_all("NotAnswering", "0/1 engines routable; qwen-main-0-e2: no answer"),
        group(engine(0, 2, "Starting", "NotAnswering", message="no answer")),
    )
    assert "ask its owner" not in ours.next_step


@pytest.mark.parametrize(
    ("ready", "said", "step"),
    [
        (
            condition("Ready", "False", "RouterNotReady", "no router replica has a complete worker table yet"),
            "qwen does not serve: RouterNotReady: no router replica has a complete worker table yet.",
            "`qwen-router-*`",
        ),
        (
            condition("Ready", "False", "ScaledToZero", "every group has 0 replicas"),
            "qwen does not serve: ScaledToZero: every group has 0 replicas.",
            "scale up",
        ),
        (
            condition("Ready", "True", "NameTaken", "ServerGroup a-b belongs to another server"),
            "qwen serves partly: NameTaken: ServerGroup a-b belongs to another server.",
            "rename the group",
        ),
        (
            condition("Ready", "True", "InvalidTemplate", "template.spec.hostPID: set by the operator"),
            "qwen serves partly: InvalidTemplate: template.spec.hostPID: set by the operator.",
            "correct the field",
        ),
        (
            condition("Ready", "False", "SomethingNew", "whatever the kubelet says"),
            "qwen does not serve: SomethingNew: whatever the kubelet says.",
            "SomethingNew is a word of Kubernetes'",
        ),
    ],
)
def test_what_is_no_engines_fault_is_said_as_the_condition_says_it(ready: Any, said: str, step: str) -> None:
    found = explained(server(ready), group(engine(0), engine(1)))
    assert found.sentence == said
    assert step in found.next_step


def test_a_server_that_the_operator_has_not_seen_sends_to_the_operator() -> None:
    found = explained(server(None))
    assert found.serves is Serves.NOT
    assert "rolloutfleet-operator" in found.next_step


def test_a_server_that_is_being_deleted_needs_nothing() -> None:
    body = server(SERVING)
    body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert explained(body) == Explanation(Serves.NOT, "qwen is being deleted.", "")


def test_a_change_that_the_operator_has_not_seen_is_mentioned() -> None:
    body = server(SERVING)
    body["metadata"]["generation"] = 2
    assert "the operator has not seen the last change: generation 2" in explained(body).sentence


# The runbook's words


def test_every_reason_of_the_runbook_has_a_next_step() -> None:
    found = parse(RUNBOOK)
    assert {"Loading", "OOMKilled", "Evicted", "NoEncoder", "CatchUpFailed"} <= {reason for reason, _ in found}
    assert all(found.values())


def test_the_first_row_about_a_reason_counts_and_links_become_text() -> None:
    rows = "\n## Part\n| reason | meaning | what to do |\n|---|---|---|\n"
    rows += "| Aa, Bb | m | see [the guide](g.md), `x` |\n| Aa with `Cc` | m | other |\n"
    rows += "| Bb (external engine) | m | ask |\n"
    table = "\n## Codes\n| code | meaning | what to do |\n|---|---|---|\n| Dd | m | do |\n"
    assert parse(rows + table) == {
        ("Aa", False): "see the guide, `x`",
        ("Bb", False): "see the guide, `x`",
        ("Bb", True): "ask",
    }


def test_a_reason_that_nobody_knows_has_no_advice() -> None:
    assert advice("NobodySaysThis") == ""
    assert advice("Loading", external=True) == advice("Loading")
