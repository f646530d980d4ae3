"""Each end and each stage of a recovery is told once: by the status write that first has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutfleet.api.server_group import EngineStatus, Recovery, ServerGroupStatus
from rolloutfleet.plan.actions import Action, ApplyStatus
from rolloutfleet.plan.recovery_times import STAGES, Reached, ends, reached
from unit.plan.world import World, rollout_server

FIRST = Recovery(epoch=2, reason="OOMKilled", detected="2026-01-01T00:00:00.000+00:00")


def status(*recoveries: Recovery, index: int = 0) -> ServerGroupStatus:
    return ServerGroupStatus(engines=(EngineStatus(index=index, epoch=9, recoveries=recoveries),))


def test_a_stage_is_told_with_its_reason_and_the_time_since_the_end_was_learned() -> None:
    after = FIRST.model_copy(update={"replaced": "2026-01-01T00:00:00.250+00:00"})
    assert reached(status(FIRST), status(after)) == [("replaced", "OOMKilled", 0.25)]
    later = after.model_copy(update={"loaded": "2026-01-01T00:00:30Z", "caught_up": "2026-01-01T00:00:31Z"})
    assert reached(status(after), status(later)) == [("loaded", "OOMKilled", 30), ("caught_up", "OOMKilled", 31)]
    done = later.model_copy(update={"routable": "2026-01-01T01:00:00+00:00"})
    assert reached(status(later), status(done)) == [("routable", "OOMKilled", 3600)]


def test_what_an_older_status_has_already_is_not_told_again() -> None:
    done = FIRST.model_copy(update={stage: "2026-01-01T00:00:01Z" for stage in STAGES})
    assert len(reached(status(FIRST), status(done))) == 4
    assert reached(status(done), status(done)) == []
    assert ends(status(done), status(done)) == []
    assert reached(status(done), status()) == [], "old recoveries leave the list"


def test_an_end_is_told_when_its_recovery_begins_even_if_the_list_was_full() -> None:
    second = Recovery(epoch=3, reason="PodDeleted", detected="2026-01-01T00:10:00Z")
    assert ends(status(), status(FIRST)) == ["OOMKilled"]
    assert ends(status(FIRST), status(FIRST, second)) == ["PodDeleted"]
    assert ends(status(FIRST), status(second)) == ["PodDeleted"]


def test_engines_are_told_apart_by_their_index() -> None:
    assert ends(status(FIRST, index=0), status(FIRST, index=1)) == ["OOMKilled"]


def test_the_clocks_of_two_operators_make_no_negative_time() -> None:
    early = FIRST.model_copy(update={"replaced": "2025-12-31T23:59:59Z"})
    assert reached(status(FIRST), status(early)) == [("replaced", "OOMKilled", 0.0)]


STAMPS = st.sampled_from(["", "2026-01-01T00:00:01Z", "2026-01-01T00:01:00Z"])
RECOVERIES = st.builds(
    Recovery,
    epoch=st.integers(1, 4),
    reason=st.sampled_from(["OOMKilled", "Hung"]),
    detected=st.just("2026-01-01T00:00:00Z"),
    replaced=STAMPS,
    loaded=STAMPS,
    caught_up=STAMPS,
    routable=STAMPS,
)
STATUSES = st.builds(
    lambda lives: ServerGroupStatus(
        engines=tuple(
            EngineStatus(index=index, epoch=9, recoveries=tuple(recoveries)) for index, recoveries in enumerate(lives)
        )
    ),
    st.lists(st.lists(RECOVERIES, max_size=3, unique_by=lambda recovery: recovery.epoch), max_size=3),
)


@given(STATUSES, STATUSES)
def test_a_write_that_repeats_the_last_one_tells_nothing(old: ServerGroupStatus, new: ServerGroupStatus) -> None:
    assert reached(new, new) == []
    stages = sum(bool(getattr(r, stage)) for engine in new.engines for r in engine.recoveries for stage in STAGES)
    assert len(reached(old, new)) <= len(reached(ServerGroupStatus(), new)) == stages
    assert all(seconds >= 0 for _, _, seconds in reached(old, new))


# As the plan writes it


class Listening(World):
    """What is told by each status that its plans write."""

    def __init__(self, server: dict[str, Any]) -> None:
        super().__init__(server)
        self.told: list[Reached] = []
        self.ended: list[str] = []

    def perform(self, action: Action) -> None:
        if isinstance(action, ApplyStatus) and action.kind == "ServerGroup":
            old = ServerGroupStatus.model_validate(self.children[f"ServerGroup/{action.name}"].get("status") or {})
            new = ServerGroupStatus.model_validate(action.status)
            self.told += reached(old, new)
            self.ended += ends(old, new)
        super().perform(action)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda world, pod: world.crash_pod(pod), "EngineExited"),
        (lambda world, pod: world.delete_pod(pod), "PodDeleted"),
    ],
)
def test_one_engine_that_ends_is_told_as_one_end_and_four_stages_in_order(
    end: Callable[[World, str], None], reason: str
) -> None:
    world = Listening(rollout_server(replicas=3))
    world.settle()
    assert world.told == []
    assert world.ended == []
    end(world, world.group_status()["engines"][0]["pod"])
    world.settle()
    assert len(world.listed()) == 3
    assert world.ended == [reason]
    assert [stage for stage, _, _ in world.told] == list(STAGES)
    assert {cause for _, cause, _ in world.told} == {reason}
    assert [seconds for _, _, seconds in world.told] == sorted(seconds for _, _, seconds in world.told)
