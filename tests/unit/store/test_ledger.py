"""Prompts are claimed once, kept while agents die, handed to a trainer once a life, and trained once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rolloutfleet.agent.store.audit import progress, prompts_in
from rolloutfleet.agent.store.errors import Fenced, Refused
from rolloutfleet.agent.store.handover import Group, Offer
from rolloutfleet.agent.store.ledger import Claim, GroupUpdate, Left, PromptId, Run
from unit.store.world import RUN, Store, finished, sample

# Agents


def test_prompts_come_in_the_order_of_the_epochs_each_once(store: Store) -> None:
    ledger = store.ledger()
    first = ledger.claim(5)
    assert [claim.id for claim in first] == [PromptId(0, prompt) for prompt in range(5)]
    more = ledger.claim(9, known=first)
    assert [claim.id for claim in more] == [PromptId(0, 5), *(PromptId(1, prompt) for prompt in range(3))]
    assert [claim.id for claim in ledger.claim(99, known=first + more)] == [PromptId(1, p) for p in (3, 4, 5)]
    assert ledger.claim(99, known=ledger.claim(99)) == [], "two epochs are all there is"


def test_a_claim_that_is_repeated_tells_what_is_held_and_takes_no_more(store: Store) -> None:
    ledger = store.ledger()
    assert ledger.claim(3) == ledger.claim(3)
    assert progress(store.connect(), "run").cursor == PromptId(0, 3)


def test_what_is_left_of_a_run_is_what_no_step_has(store: Store) -> None:
    ledger, handover = store.ledger(), store.handover()
    assert ledger.left() == Left(fresh=True, open=0, finished=0)
    claims = ledger.claim(12)
    assert ledger.left() == Left(fresh=False, open=12, finished=0)
    ledger.save([finished(claim) for claim in claims[:5]])
    handover.lease(1, groups=3)
    ledger.save([GroupUpdate(claims[5], outcome="dropped", reason="dull")])
    assert ledger.left() == Left(fresh=False, open=6, finished=2)
    assert ledger.left().comes
    ledger.save([finished(claim) for claim in claims[6:]])
    assert not ledger.left().comes
    assert store.ledger(run=replace(RUN, epochs=None)).left().fresh


def test_what_an_agent_had_begun_is_there_for_its_next_life_with_its_tokens(store: Store) -> None:
    ledger = store.ledger()
    claims = ledger.claim(2)
    begun = [sample(0), sample(1, status="aborted", tokens=2)]
    ledger.save([GroupUpdate(claims[1], begun)])
    again = store.ledger()
    assert [(c.id, c.claim) for c in again.claim(3)] == [(PromptId(0, 0), 2), (PromptId(0, 1), 2), (PromptId(0, 2), 1)]
    assert again.partials([PromptId(0, 0), PromptId(0, 1)]) == {PromptId(0, 0): [], PromptId(0, 1): begun}


def test_a_sample_that_is_saved_again_takes_the_place_of_the_former(store: Store) -> None:
    ledger = store.ledger()
    (claim,) = ledger.claim(1)
    for update in (sample(1, status="aborted", tokens=1), sample(1, status="aborted", tokens=4), sample(0)):
        assert ledger.save([GroupUpdate(claim, [update])]) == []
    assert ledger.partials([claim.id]) == {claim.id: [sample(0), sample(1, status="aborted", tokens=4)]}


def test_a_newer_agent_ends_the_older_one_which_can_write_nothing_any_more(store: Store) -> None:
    old = store.ledger("old", fence=3)
    (claim,) = old.claim(1)
    new = store.ledger("new", fence=4)
    for call in (lambda: old.save([finished(claim)]), lambda: old.claim(2), old.keep_alive):
        with pytest.raises(Fenced, match="session 1 was ended by another agent"):
            call()
    with pytest.raises(Fenced, match="an agent with fence 4 has taken over, this one has 3"):
        store.ledger("old", fence=3)
    assert [c.id for c in new.claim(1)] == [claim.id]
    assert progress(store.connect(), "run").states == {"open": 1}


def test_agents_that_share_a_run_never_hold_one_prompt_together(store: Store) -> None:
    one, two = store.ledger("one", shared=True), store.ledger("two", shared=True)
    assert {c.id for c in one.claim(3)} | {c.id for c in two.claim(3)} == {PromptId(0, p) for p in range(6)}
    one.save([GroupUpdate(claim, outcome="released") for claim in one.claim(3)])
    assert len(two.claim(6)) == 6


def test_an_agent_that_is_silent_loses_its_prompts_to_the_others_and_is_told_when_it_comes_back(store: Store) -> None:
    one = store.ledger("one", shared=True, session_seconds=10)
    two = store.ledger("two", shared=True, session_seconds=10)
    (claim,) = one.claim(1)
    one.save([GroupUpdate(claim, [sample(status="aborted")])])
    store.time += 9
    two.keep_alive()
    assert [c.id for c in two.claim(1)] == [PromptId(0, 1)], "still the first one's"
    store.time += 2
    assert [(c.id, c.claim) for c in two.claim(2, known=two.claim(1))] == [(PromptId(0, 0), 2)]
    with pytest.raises(Fenced):
        one.save([finished(claim)])
    assert two.partials([claim.id])[claim.id] == [sample(status="aborted")]


def test_a_restart_of_one_agent_leaves_those_that_share_the_run_alone(store: Store) -> None:
    one, two = store.ledger("one", shared=True), store.ledger("two", shared=True)
    one.claim(1)
    kept = two.claim(1)
    again = store.ledger("one", shared=True)
    assert two.claim(1) == kept
    assert [c.id for c in again.claim(1)] == [PromptId(0, 0)]


def test_an_end_that_is_told_twice_counts_once(store: Store) -> None:
    ledger = store.ledger()
    one, two = ledger.claim(2)
    assert ledger.save([finished(one)]) == []
    assert ledger.save([finished(one), GroupUpdate(two, outcome="dropped", reason="zero_std")]) == [one]
    assert ledger.save([GroupUpdate(two, outcome="dropped", reason="zero_std")]) == [two]
    found = progress(store.connect(), "run")
    assert (found.states, found.dropped) == ({"finished": 1, "dropped": 1}, {"zero_std": 1})


def test_what_belongs_to_an_earlier_claim_is_not_taken(store: Store) -> None:
    ledger = store.ledger()
    (early,) = ledger.claim(1)
    ledger.save([GroupUpdate(early, outcome="released")])
    (late,) = ledger.claim(1)
    assert (early.id, early.claim, late.claim) == (late.id, 1, 2)
    assert ledger.save([finished(early)]) == [early]
    assert ledger.save([finished(late)]) == []


def test_a_finished_group_is_whole_and_replaces_what_was_kept(store: Store) -> None:
    ledger = store.ledger()
    (claim,) = ledger.claim(1)
    ledger.save([GroupUpdate(claim, [sample(index, status="aborted") for index in range(4)])])
    ledger.save([finished(claim, n=2)])
    trainer = store.handover()
    trainer.lease(1, groups=1)
    assert trainer.read(1) == [Group(claim.id, [sample(0), sample(1)])]


def test_a_call_may_tell_of_one_prompt_twice_and_the_later_word_counts(store: Store) -> None:
    ledger = store.ledger()
    one, two = ledger.claim(2)
    begun = [sample(index, status="aborted") for index in range(4)]
    dropped = GroupUpdate(two, outcome="dropped", reason="zero_std")
    assert ledger.save([GroupUpdate(one, begun), GroupUpdate(two, begun), finished(one), dropped, finished(two)]) == [
        two
    ]
    trainer = store.handover()
    trainer.lease(1, groups=1)
    assert trainer.read(1) == [Group(one.id, [sample(0), sample(1)])]
    assert ledger.partials([two.id]) == {two.id: []}


@pytest.mark.parametrize(
    ("update", "said"),
    [
        (GroupUpdate(Claim(PromptId(0, 3), 1), [], "finished"), "prompt 3 of epoch 0: a finished group has no samples"),
        (
            GroupUpdate(Claim(PromptId(0, 3), 1), [sample(), sample(1, status="aborted")], "finished"),
            "a finished group has aborted samples",
        ),
        (GroupUpdate(Claim(PromptId(0, 3), 1), [sample(1), sample(1)], "finished"), "two samples have one index"),
        (GroupUpdate(Claim(PromptId(0, 3), 1), [], "dropped"), "dropped without a reason"),
    ],
)
def test_an_end_that_does_not_fit_is_refused(store: Store, update: GroupUpdate, said: str) -> None:
    with pytest.raises(Refused, match=said):
        store.ledger().save([update])


def test_other_data_under_the_name_of_a_run_is_refused(store: Store) -> None:
    store.ledger().claim(1)
    with pytest.raises(Refused, match="run run: it was started with data set sha256:abc of 6 prompts"):
        store.ledger(run=Run("run", source="sha256:def", epoch_size=6))
    with pytest.raises(Refused, match="its data set has no prompts"):
        store.ledger(run=Run("empty", source="sha256:def", epoch_size=0))


def test_a_run_may_be_given_more_epochs_later(store: Store) -> None:
    store.ledger().claim(99)
    more = store.ledger(run=Run(RUN.name, source=RUN.source, epoch_size=RUN.epoch_size, epochs=3))
    assert len(more.claim(99)) == 18


def test_runs_in_one_store_do_not_see_each_other(store: Store) -> None:
    other = Run("other", source="x", epoch_size=2, epochs=1)
    (claim,) = store.ledger(run=other).claim(1)
    store.ledger(run=other).claim(1)
    assert len(store.ledger().claim(6)) == 6
    assert progress(store.connect(), "other").states == {"open": 1}
    assert claim.id == PromptId(0, 0)


# Trainers


def fill(store: Store, groups: int, version: int = 1) -> None:
    ledger = store.ledger()
    for claim in ledger.claim(groups):
        store.time += 1
        ledger.save([finished(claim, version=version)])


def test_a_step_has_one_batch_whoever_asks_and_however_often(store: Store) -> None:
    fill(store, 4)
    trainer = store.handover()
    first = trainer.lease(1, groups=2)
    assert first == [PromptId(0, 0), PromptId(0, 1)]
    assert trainer.lease(1, groups=2) == first
    assert store.handover().lease(1, groups=4) == first, "another rank of the same trainer"
    assert trainer.lease(2, groups=2) == [PromptId(0, 2), PromptId(0, 3)]
    assert trainer.lease(3, groups=1) is None
    with pytest.raises(Refused, match="step 0: steps up to 2 have had their batches"):
        trainer.lease(0, groups=1)


def test_a_batch_waits_until_enough_groups_are_there(store: Store) -> None:
    fill(store, 3)
    trainer = store.handover()
    assert trainer.lease(1, groups=4) is None
    assert trainer.lease(1, groups=4, minimum=3) == [PromptId(0, p) for p in range(3)]


def test_groups_that_the_choice_leaves_wait_for_the_next_batch(store: Store) -> None:
    fill(store, 4)
    trainer = store.handover()

    def one_that_was_offered(offers: object) -> list[Offer]:
        assert isinstance(offers, list)
        assert offers[0] == Offer(PromptId(0, 0), samples=2, tokens=10, oldest_version=1)
        return offers[1:3]

    assert trainer.lease(1, groups=4, minimum=2, choose=one_that_was_offered) == [PromptId(0, 1), PromptId(0, 2)]
    assert trainer.lease(2, groups=2) == [PromptId(0, 0), PromptId(0, 3)]


def test_a_trainer_that_comes_back_gets_what_its_checkpoint_has_not_seen(store: Store) -> None:
    fill(store, 6)
    trainer = store.handover()
    batches = [trainer.lease(step, groups=2) for step in (1, 2, 3)]
    trainer.acknowledge(1)
    again = store.handover("second life", step=1)
    assert [again.lease(step, groups=2) for step in (2, 3)] == batches[1:]
    assert [group.id for group in again.read(2)] == batches[1]
    again.acknowledge(3)
    assert prompts_in(store.connect(), "run", "trained") == [(PromptId(0, p), 1 + p // 2) for p in range(6)]


def test_an_acknowledgement_that_was_lost_is_made_up_for_by_the_checkpoint(store: Store) -> None:
    fill(store, 4)
    trainer = store.handover()
    trainer.lease(1, groups=2)
    trainer.lease(2, groups=2)
    again = store.handover("second life", step=1)
    assert [id for id, _ in prompts_in(store.connect(), "run", "trained")] == [PromptId(0, 0), PromptId(0, 1)]
    assert again.lease(2, groups=2) == [PromptId(0, 2), PromptId(0, 3)]


def test_a_trainer_may_go_back_by_a_checkpoint_and_gets_the_same_samples(store: Store) -> None:
    fill(store, 6)
    trainer = store.handover()
    for step in (1, 2, 3):
        trainer.lease(step, groups=2)
        trainer.acknowledge(step)
    assert len(trainer.read(3)) == 2
    again = store.handover("second life", step=2)
    assert again.lease(3, groups=2) == [PromptId(0, 4), PromptId(0, 5)]
    assert [len(group.samples) for group in again.read(3)] == [2, 2]


def test_samples_of_checkpoints_before_the_last_are_deleted_and_generated_again_if_need_be(store: Store) -> None:
    fill(store, 6)
    trainer = store.handover()
    for step in (1, 2, 3):
        trainer.lease(step, groups=2)
        trainer.acknowledge(step)
    with pytest.raises(Refused, match="step 1: it has no batch, or its samples were deleted"):
        trainer.read(1)
    again = store.handover("from the start", step=0)
    assert progress(store.connect(), "run").states == {"open": 4, "finished": 2}
    assert [claim.id for claim in store.ledger().claim(4)] == [PromptId(0, p) for p in range(4)]
    assert again.lease(1, groups=2) == [PromptId(0, 4), PromptId(0, 5)]


def test_an_earlier_life_of_a_trainer_can_move_nothing(store: Store) -> None:
    fill(store, 4)
    old = store.handover("old")
    old.lease(1, groups=2)
    new = store.handover("new", step=0)
    new.lease(1, groups=1)
    for call in (lambda: old.acknowledge(1), lambda: old.lease(2, groups=1), lambda: old.read(1)):
        with pytest.raises(Fenced, match="trainer new has taken over from old"):
            call()
    assert progress(store.connect(), "run").states == {"leased": 1, "finished": 3}


def test_the_first_call_of_a_life_moves_and_its_repetition_does_not(store: Store) -> None:
    fill(store, 4)
    trainer = store.handover("life")
    batch = trainer.lease(1, groups=2)
    late_rank = store.handover("life")
    assert late_rank.lease(1, groups=2) == batch
    assert progress(store.connect(), "run").states == {"leased": 2, "finished": 2}


def test_an_acknowledgement_may_be_repeated_and_none_is_taken_for_what_was_never_handed_out(store: Store) -> None:
    fill(store, 4)
    trainer = store.handover()
    trainer.lease(1, groups=2)
    trainer.acknowledge(1)
    trainer.acknowledge(1)
    trainer.acknowledge(0)
    assert len(trainer.read(1)) == 2, "a repetition deletes nothing"
    with pytest.raises(Refused, match="step 2: it has no batch; the last one that has is 1"):
        trainer.acknowledge(2)


def test_groups_with_tokens_that_are_too_old_are_generated_again(store: Store) -> None:
    fill(store, 2, version=3)
    fill(store, 2, version=5)
    trainer = store.handover()
    assert trainer.lease(1, groups=2, oldest_version=4) == [PromptId(0, 2), PromptId(0, 3)]
    ledger = store.ledger()
    claims = ledger.claim(2)
    assert [(c.id, c.claim) for c in claims] == [(PromptId(0, 0), 2), (PromptId(0, 1), 2)]
    assert ledger.partials([claims[0].id]) == {claims[0].id: []}


def test_consumers_of_one_run_share_its_groups_and_acknowledge_each_their_own(store: Store) -> None:
    fill(store, 4)
    left, right = store.handover(consumer="left"), store.handover(consumer="right")
    assert left.lease(1, groups=2) == [PromptId(0, 0), PromptId(0, 1)]
    assert right.lease(1, groups=2) == [PromptId(0, 2), PromptId(0, 3)]
    left.acknowledge(1)
    store.handover("second life", consumer="right", step=0)
    assert progress(store.connect(), "run").states == {"trained": 2, "finished": 2}


def test_a_trainer_without_a_name_is_refused(store: Store) -> None:
    store.ledger()
    with pytest.raises(Refused, match="a name and a step from 0"):
        store.handover("", step=0)
    with pytest.raises(Refused, match="a name and a step from 0"):
        store.handover("life", step=-1)
