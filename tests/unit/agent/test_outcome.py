"""What an update has come to is decided from labels and checksums alone."""

from __future__ import annotations

import pytest

from rolloutfleet.api.rollout_server import GroupChecksum
from rolloutfleet.api.weight_labels import weight_label
from rolloutfleet.plan.update import Aftermath, Outcome, Participant, outcome_of

OLD, NEW = 4, 5
FLEET = "5e1f0a27"
OLD_LABEL = weight_label(OLD, FLEET)
BEFORE = [GroupChecksum(group="qwen-main", revision="r1", checksum="old")]


def engine(index: int, *, group: str = "qwen-main", revision: str = "r1") -> Participant:
    return Participant(
        pod=f"{group}-{index}", uid=f"uid-{index}", url=f"http://{index}", group=group, revision=revision
    )


def took(index: int, checksum: str = "new", **where: str) -> Aftermath:
    return Aftermath(engine(index, **where), label=weight_label(NEW, FLEET), checksum=checksum)


def kept(index: int, error: str = "no room", checksum: str = "old", label: str = OLD_LABEL) -> Aftermath:
    return Aftermath(engine(index), error=error, label=label, checksum=checksum)


def lost(index: int) -> Aftermath:
    return Aftermath(engine(index), error="connection refused", reachable=False)


def decided(*aftermath: Aftermath, before: list[GroupChecksum] | None = None) -> Outcome:
    previous = BEFORE if before is None else before
    return outcome_of(aftermath, fleet=FLEET, target=NEW, previous=OLD, previous_checksums=previous)


def verdicts(outcome: Outcome) -> list[str]:
    return [verdict.outcome for verdict in outcome.verdicts]


def survivors(outcome: Outcome) -> list[str]:
    return [participant.pod for participant in outcome.survivors]


def test_all_engines_that_took_the_target_commit_it() -> None:
    outcome = decided(took(0), took(1))
    assert (outcome.version, outcome.committed) == (NEW, True)
    assert verdicts(outcome) == ["Committed", "Committed"]
    assert survivors(outcome) == ["qwen-main-0", "qwen-main-1"]
    assert outcome.checksums == (GroupChecksum(group="qwen-main", revision="r1", checksum="new"),)


def test_one_engine_is_enough_and_those_that_kept_the_old_version_fall_out() -> None:
    outcome = decided(kept(0), took(1), lost(2))
    assert (outcome.version, outcome.committed) == (NEW, True)
    assert verdicts(outcome) == ["Failed", "Committed", "Unreachable"]
    assert survivors(outcome) == ["qwen-main-1"]
    assert [verdict.message for verdict in outcome.verdicts] == ["no room", "", "connection refused"]


def test_an_engine_whose_load_failed_does_not_count_though_it_carries_the_new_label() -> None:
    outcome = decided(Aftermath(engine(0), error="broke off", label=weight_label(NEW, FLEET), checksum="new"), kept(1))
    assert (outcome.version, outcome.committed) == (OLD, False)
    assert survivors(outcome) == ["qwen-main-1"]


def test_the_majority_of_a_layout_says_what_its_checksum_is() -> None:
    outcome = decided(took(0, "torn"), took(1), took(2))
    assert verdicts(outcome) == ["Failed", "Committed", "Committed"]
    assert outcome.checksums[0].checksum == "new"
    assert "checksum torn" in outcome.verdicts[0].message


def test_a_tie_is_decided_the_same_way_in_any_order() -> None:
    one, other = took(0, "aaa"), took(1, "bbb")
    assert decided(one, other).checksums == decided(other, one).checksums
    assert survivors(decided(one, other)) == survivors(decided(other, one)) == ["qwen-main-0"]


def test_layouts_have_checksums_of_their_own() -> None:
    outcome = decided(took(0), took(0, "tp2", group="qwen-big"), took(1, "next", revision="r2"))
    assert verdicts(outcome) == ["Committed"] * 3
    assert [(c.group, c.revision, c.checksum) for c in outcome.checksums] == [
        ("qwen-big", "r1", "tp2"),
        ("qwen-main", "r1", "new"),
        ("qwen-main", "r2", "next"),
    ]


def test_if_nobody_took_it_the_old_version_and_its_checksums_stay() -> None:
    outcome = decided(kept(0), kept(1, error=""), lost(2))
    assert (outcome.version, outcome.committed) == (OLD, False)
    assert verdicts(outcome) == ["Committed", "Committed", "Unreachable"]
    assert survivors(outcome) == ["qwen-main-0", "qwen-main-1"]
    assert outcome.checksums == tuple(BEFORE)
    assert outcome.verdicts[0].message == "no room", "why it did not take the new one"


@pytest.mark.parametrize(
    "doubtful",
    [
        kept(0, checksum="torn"),
        kept(0, checksum=""),
        kept(0, label=""),
        kept(0, label=weight_label(3, FLEET)),
        kept(0, label=weight_label(OLD, "another")),
        kept(0, label=weight_label(NEW, FLEET)),
    ],
)
def test_an_engine_that_does_not_prove_the_old_version_is_not_continued(doubtful: Aftermath) -> None:
    outcome = decided(doubtful, kept(1))
    assert verdicts(outcome) == ["Failed", "Committed"]
    assert survivors(outcome) == ["qwen-main-1"]


def test_an_engine_that_was_labelled_before_labels_named_fleets_proves_the_old_version_too() -> None:
    assert survivors(decided(kept(0, label=str(OLD)), kept(1))) == ["qwen-main-0", "qwen-main-1"]


def test_an_engine_with_the_label_of_another_fleet_took_nothing() -> None:
    stranger = Aftermath(engine(0), label=weight_label(NEW, "another"), checksum="new")
    assert survivors(decided(stranger, took(1))) == ["qwen-main-1"]


def test_without_a_known_checksum_of_the_old_version_nobody_proves_it() -> None:
    assert survivors(decided(kept(0), before=[])) == []
    elsewhere = [GroupChecksum(group="qwen-main", revision="r0", checksum="old")]
    assert survivors(decided(kept(0), before=elsewhere)) == []


def test_a_message_fits_the_status_field() -> None:
    outcome = decided(Aftermath(engine(0), error="x" * 5000), took(1))
    assert len(outcome.verdicts[0].message) == 512
