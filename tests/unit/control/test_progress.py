"""Statuses that only tell of a normal way wait a moment; whatever else rests on a status is written at once."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rolloutfleet.control.progress import PROGRESS_SECONDS, PROOF_SECONDS, Progress, only_progress, patience
from rolloutfleet.plan.actions import Action, ApplyStatus, CreatePod, Emit, Register, Requeue
from rolloutfleet.plan.observed import WorkerKind

NOW = 1000.0
ENGINE = {
    "index": 0,
    "epoch": 1,
    "revision": "r",
    "phase": "Pending",
    "reason": "NotScheduled",
    "pod": "p",
    "podUid": "u",
}
GROUP: dict[str, Any] = {
    "lastEpoch": 1,
    "routable": 1,
    "conditions": [{"type": "Ready", "status": "False", "reason": "NotScheduled"}],
    "engines": [ENGINE],
}
SERVER: dict[str, Any] = {
    "conditions": [
        {"type": "Ready", "status": "False", "reason": "NotScheduled"},
        {"type": "Progressing", "status": "True", "reason": "EnginesStarting"},
        {"type": "Degraded", "status": "False", "reason": "AsExpected"},
    ],
    "engines": {"desired": 2, "ready": 0, "routable": 1, "failed": 0},
}


def group(engine: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    return {**copy.deepcopy(GROUP), "engines": [{**ENGINE, **(engine or {})}], **changed}


def server(condition: dict[str, str] | None = None, engines: dict[str, int] | None = None) -> dict[str, Any]:
    status = copy.deepcopy(SERVER)
    status["engines"] |= engines or {}
    for index, known in enumerate(status["conditions"]):
        if condition is not None and known["type"] == condition["type"]:
            status["conditions"][index] = condition
    return status


@pytest.mark.parametrize(
    "after",
    [
        group({"phase": "Starting", "reason": "Loading", "url": "http://10.0.0.1:30000", "started": True}),
        group({"phase": "Serving", "reason": "", "servingSince": "2026-01-01T00:00:10+00:00"}),
        group(ready=1, replicas=1, routable=2, weightVersion=0, selector="a=b"),
        group(conditions=[{"type": "Ready", "status": "False", "reason": "Loading", "message": "other"}]),
    ],
)
def test_steps_on_the_normal_way_are_progress(after: dict[str, Any]) -> None:
    assert only_progress(GROUP, after)


@pytest.mark.parametrize(
    "after",
    [
        group(lastEpoch=2),
        group({"epoch": 2}),
        group({"podUid": "other"}),
        group({"podUid": ""}),
        group({"restarts": 1}),
        group({"retryAt": "2026-01-01T00:00:10+00:00"}),
        group({"phase": "Failed"}),
        group({"weightVersion": 0}),
        group({"drainUntil": "2026-01-01T00:00:10+00:00"}),
        group({"silentSince": "2026-01-01T00:00:10+00:00"}),
        group(measured=[{"revision": "r", "version": 0, "checksum": "c"}]),
        group(routable=0),
        group(conditions=[{"type": "Ready", "status": "True", "reason": "Serving"}]),
        group(engines=[]),
    ],
)
def test_lives_checksums_and_whether_it_serves_are_not(after: dict[str, Any]) -> None:
    assert not only_progress(GROUP, after)


def test_that_a_life_has_its_pods_can_wait_and_that_it_lost_them_cannot() -> None:
    made, bare = group(), group({"pod": "", "podUid": ""})
    assert only_progress(bare, made)
    assert not only_progress(made, bare)
    assert not only_progress(bare, group({"epoch": 2})), "another life"


@pytest.mark.parametrize(
    ("after", "progress"),
    [
        (server({"type": "Ready", "status": "False", "reason": "Loading"}), True),
        (server(engines={"ready": 1, "routable": 2}), True),
        ({**server(), "training": {"fence": 3}}, True),
        (server({"type": "Ready", "status": "True", "reason": "Serving"}), False),
        (server({"type": "Degraded", "status": "True", "reason": "ErrImagePull"}), False),
        (server({"type": "Progressing", "status": "False", "reason": "Stable"}), False),
        (server(engines={"failed": 1}), False),
        (server(engines={"routable": 0}), False),
    ],
)
def test_of_a_server_what_flips_is_told_at_once(after: dict[str, Any], progress: bool) -> None:
    assert only_progress(SERVER, after) is progress


def test_the_first_status_of_a_server_that_starts_can_wait() -> None:
    assert only_progress({}, server(engines={"routable": 0}))


def statuses(after: dict[str, Any]) -> list[Action]:
    emit = Emit(kind="ServerGroup", name="g", uid="u", warning=False, reason="EngineServing", message="")
    return [ApplyStatus(kind="ServerGroup", name="g", uid="u", status=after), CreatePod({}), emit]


def kinds(actions: list[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_progress_waits_with_its_events_and_is_written_when_the_time_is_up() -> None:
    progress, held = Progress(), {("ServerGroup", "g"): GROUP}
    changed = statuses(group({"phase": "Starting"}))

    first = progress.held_back(changed, held, NOW)
    assert kinds(first) == ["Requeue", "CreatePod"]
    later = progress.held_back(changed, held, NOW + PROGRESS_SECONDS / 2)
    assert later[0] == Requeue(seconds=PROGRESS_SECONDS / 2)
    due = progress.held_back(changed, held, NOW + PROGRESS_SECONDS)
    assert due == changed
    assert kinds(progress.held_back(changed, held, NOW + 9)) == ["Requeue", "CreatePod"]


def test_what_is_urgent_takes_waiting_progress_with_it() -> None:
    progress, held = Progress(), {("ServerGroup", "g"): GROUP}
    progress.held_back(statuses(group({"phase": "Starting"})), held, NOW)

    urgent = statuses(group({"epoch": 2, "phase": "Starting"}, lastEpoch=2))
    assert progress.held_back(urgent, held, NOW) == urgent


def test_events_of_other_objects_and_earlier_ones_stay() -> None:
    put_back = Emit(kind="ServerGroup", name="g", uid="u", warning=True, reason="HandEditPutBack", message="")
    other = Emit(kind="RolloutServer", name="g", uid="u", warning=False, reason="Ready", message="")
    actions = [put_back, *statuses(group({"phase": "Starting"})), other]

    kept = Progress().held_back(actions, {("ServerGroup", "g"): GROUP}, NOW)
    assert put_back in kept
    assert other in kept
    assert kinds(kept) == ["Emit", "Requeue", "CreatePod", "Emit"]


def test_a_busy_operator_tells_of_progress_later_but_tells() -> None:
    assert patience(2.0, waiting=0) == 2.0
    assert patience(2.0, waiting=4) == 3.0
    assert patience(2.0, waiting=10_000) == 4.0
    assert patience(0.0, waiting=100) == 0.0

    progress, held = Progress(), {("ServerGroup", "g"): GROUP}
    changed = statuses(group({"phase": "Starting"}))
    progress.held_back(changed, held, NOW, seconds=10)
    assert progress.held_back(changed, held, NOW + 3, seconds=2) == changed, "the crowd has gone"


def proofs(*versions: int | None, under_way: str = "WeightsUnproved") -> dict[str, Any]:
    """A status of engines that all answer; those without a version wait with this reason."""
    engines = [
        {
            **ENGINE,
            "index": index,
            "phase": "Stale",
            "reason": "NotRegistered" if version is not None else under_way,
            "url": f"http://10.0.0.{index}:30000",
            **({"weightVersion": version} if version is not None else {}),
        }
        for index, version in enumerate(versions)
    ]
    measured = [{"revision": "r", "version": 0, "checksum": "c"}] if any(v is not None for v in versions) else []
    return {**copy.deepcopy(GROUP), "engines": engines, "measured": measured}


def registrations(after: dict[str, Any]) -> list[Action]:
    to_add = [
        Register(router="r", router_uid="r", router_url="", url=engine["url"], kind=WorkerKind(), training_key="")
        for engine in after["engines"]
        if "weightVersion" in engine
    ]
    return [ApplyStatus(kind="ServerGroup", name="g", uid="u", status=after), *to_add]


def test_first_proofs_wait_for_those_under_way_and_no_router_is_told_before_they_are_written() -> None:
    progress, held = Progress(), {("ServerGroup", "g"): proofs(None, None)}
    some = registrations(proofs(0, None))
    assert kinds(progress.held_back(some, held, NOW)) == ["Requeue"]
    assert kinds(progress.held_back(some, held, NOW + PROOF_SECONDS / 2)) == ["Requeue"]
    every = registrations(proofs(0, 0))
    assert progress.held_back(every, held, NOW + PROOF_SECONDS / 2) == every


def test_proofs_wait_a_tenth_of_a_second_at_most_however_long_progress_has_waited() -> None:
    progress, held = Progress(), {("ServerGroup", "g"): proofs(None, None)}
    progress.held_back(statuses(proofs(None, None)), held, NOW - 1)
    some = registrations(proofs(0, None))
    assert kinds(progress.held_back(some, held, NOW)) == ["Requeue"]
    assert progress.held_back(some, held, NOW + PROOF_SECONDS + 0.01) == some


@pytest.mark.parametrize("under_way", ["ErrImagePull", "WeightsBehind"])
def test_proofs_do_not_wait_for_engines_that_will_not_be_proved_in_a_moment(under_way: str) -> None:
    some = registrations(proofs(0, None, under_way=under_way))
    assert Progress().held_back(some, {("ServerGroup", "g"): proofs(None, None, under_way=under_way)}, NOW) == some


def test_engines_that_were_proved_before_are_registered_while_proofs_of_others_wait() -> None:
    held = {("ServerGroup", "g"): proofs(0, None, None)}
    actions = Progress().held_back(registrations(proofs(0, 0, None)), held, NOW)
    assert [action.url for action in actions if isinstance(action, Register)] == ["http://10.0.0.0:30000"]


def test_another_engines_end_does_not_wait_with_the_proofs() -> None:
    held = {("ServerGroup", "g"): proofs(None, None, None)}
    after = proofs(0, None, None)
    after["engines"][2] |= {"epoch": 2, "podUid": "", "restarts": 1}
    assert Progress().held_back(registrations(after), held, NOW) == registrations(after)
