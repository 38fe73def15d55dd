# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What may be removed now, from what is known of this run's saves."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core.retention import Decision, Removal, Retention, Stage


HERE = "/run/checkpoints"
OTHER = "/run/others"
A, B, C = (f"{HERE}/{name}.ckpt" for name in "abc")


def saved(*paths: str, known: Retention | None = None) -> Retention:
    """Return what is known once these were saved and verified, one after the other."""
    known = known or Retention()
    for path in paths:
        known = known.asked_to_save(path).ended(path, Stage.VERIFIED)
    return known


def decision(known: Retention, removal: Removal) -> Decision:
    """Decide, with two directories of callbacks."""
    return known.decide(removal, [HERE, OTHER])


def test_what_has_a_verified_successor_is_removed() -> None:
    """The order of ``ModelCheckpoint``: the new one is saved, then the old one removed."""
    known = saved(A, B)

    assert decision(known, known.removal(A)) is Decision.REMOVE


def test_the_last_good_one_stays_until_there_is_a_newer_one() -> None:
    """Whoever asks, and whatever else is there: an older one does not take its place."""
    known = saved(A, B)
    removal = known.removal(B)

    assert decision(known, removal) is Decision.WAIT
    assert decision(saved(C, known=known), removal) is Decision.REMOVE


@pytest.mark.parametrize("stage", [Stage.VERIFIED, Stage.FAILED])
def test_a_removal_waits_for_the_save_that_it_was_asked_for_after(stage: Stage) -> None:
    """While that is pending nobody knows; where it has failed, the old one is still the last."""
    known = saved(A).asked_to_save(B)
    removal = known.removal(A)

    before, after = decision(known, removal), decision(known.ended(B, stage), removal)

    assert before is Decision.WAIT
    assert after is (Decision.REMOVE if stage is Stage.VERIFIED else Decision.WAIT)


def test_after_a_failed_save_the_next_one_lets_the_removal_go() -> None:
    """Nothing that was asked for is forgotten."""
    known = saved(A).asked_to_save(B)
    removal = known.removal(A)

    known = saved(C, known=known.ended(B, Stage.FAILED))

    assert decision(known, removal) is Decision.REMOVE


def test_an_older_one_does_not_stand_for_the_one_that_has_failed() -> None:
    """With two kept, the worse is removed for the third: which is not there."""
    known = saved(A, B).asked_to_save(C)
    removal = known.removal(A)

    assert decision(known.ended(C, Stage.FAILED), removal) is Decision.WAIT


def test_what_an_earlier_start_has_saved_waits_for_the_first_save_of_this_one() -> None:
    """Nothing is known of it, and nothing of this run is there."""
    known = Retention()
    removal = known.removal(A)

    assert decision(known, removal) is Decision.WAIT
    assert decision(saved(B, known=known), removal) is Decision.REMOVE


def test_a_save_in_another_directory_is_no_successor() -> None:
    """Each callback's directory keeps its own last good one."""
    known = saved(A)
    removal = known.removal(A)

    assert decision(saved(f"{OTHER}/b.ckpt", known=known), removal) is Decision.WAIT


def test_a_successor_may_be_in_another_folder_of_the_directory() -> None:
    """A file name with a slash in it makes folders below the callback's directory."""
    known = saved(f"{HERE}/epoch=0/a.ckpt", f"{HERE}/epoch=1/a.ckpt")

    assert decision(known, known.removal(f"{HERE}/epoch=0/a.ckpt")) is Decision.REMOVE


def test_what_was_started_from_is_never_removed() -> None:
    """Not even where newer ones are there: the next start may need it."""
    known = saved(B, C, known=Retention().starting_from(A))

    assert decision(known, known.removal(A)) is Decision.RESUMED


def test_what_this_run_has_saved_is_not_what_it_was_started_from() -> None:
    """A tuner goes back to its own temporary file, and removes it then."""
    known = saved(A, B).starting_from(A)

    assert decision(known, known.removal(A)) is Decision.REMOVE


def test_what_is_outside_is_never_removed() -> None:
    """Books that were restored from a checkpoint may name files of another run."""
    known = saved(A, B)

    found = decision(known, known.removal("/elsewhere/a.ckpt"))

    assert found is Decision.OUTSIDE
    assert decision(known, known.removal(f"{HERE}-2/a.ckpt")) is Decision.OUTSIDE


def test_what_this_run_has_saved_outside_is_removed_once_it_is_written() -> None:
    """A tuner saves the state before it tries, and removes it afterwards."""
    known = Retention().asked_to_save("/elsewhere/.lr_find.ckpt")
    removal = known.removal("/elsewhere/.lr_find.ckpt")

    assert decision(known, removal) is Decision.WAIT
    known = known.ended("/elsewhere/.lr_find.ckpt", Stage.VERIFIED)
    assert decision(known, removal) is Decision.REMOVE


def test_without_directories_nothing_is_outside() -> None:
    """A run without checkpoint callbacks removes what its user says."""
    known = Retention()

    assert known.decide(known.removal(A), ()) is Decision.REMOVE


def test_what_was_saved_again_is_not_removed() -> None:
    """The removal was about what had that name before."""
    known = saved(A, B)
    removal = known.removal(A)

    assert decision(known.asked_to_save(A), removal) is Decision.AGAIN


def test_one_that_is_being_written_again_is_no_successor() -> None:
    """Its manifest is gone by then, and nobody knows what will be there."""
    known = saved(A, B).asked_to_save(B)

    assert decision(known, known.removal(A)) is Decision.WAIT
    known = saved(A, B).overwritten(B)
    assert decision(known, known.removal(A)) is Decision.WAIT


def test_a_target_stays_until_the_link_points_elsewhere() -> None:
    """To remove what the last link points to is to remove the last checkpoint."""
    last = f"{HERE}/last.ckpt"
    known = saved(B, known=saved(A).linked(last, A))
    removal = known.removal(A)

    assert decision(known, removal) is Decision.WAIT
    assert decision(known.linked(last, B), removal) is Decision.REMOVE
    assert decision(known.removed(last), removal) is Decision.REMOVE
    assert decision(saved(last, known=known), removal) is Decision.REMOVE


def test_both_stay_while_it_is_not_known_what_a_link_points_to() -> None:
    """The answer to a link may be lost, and the link made."""
    last = f"{HERE}/last.ckpt"
    known = saved(B, known=saved(A).linked(last, A)).linking(last, B)
    known = saved(C, known=known)

    assert decision(known, known.removal(A)) is Decision.WAIT
    assert decision(known, known.removal(B)) is Decision.WAIT
    assert decision(known.linked(last, C), known.removal(B)) is Decision.REMOVE


def test_a_link_is_no_checkpoint_of_its_own() -> None:
    """It is nothing without its target, so it is no successor of it."""
    known = saved(A).linked(f"{HERE}/last.ckpt", B)

    assert decision(known, known.removal(A)) is Decision.WAIT


def test_a_save_that_was_withdrawn_holds_nothing_up() -> None:
    """It was never handed over, so nobody will tell how it ended."""
    known = saved(A, B).asked_to_save(C).withdrawn(C).withdrawn(B)
    known = saved(f"{HERE}/d.ckpt", known=known)

    assert decision(known, known.removal(A)) is Decision.REMOVE


def test_what_was_written_under_another_name_is_the_earliest_pending() -> None:
    """A plugin may rename what it passes on; no removal must wait for ever for that."""
    known = saved(A).asked_to_save(B)
    removal = known.removal(A)

    assert decision(known.ended("/tmp/b", Stage.VERIFIED), removal) is Decision.REMOVE


def test_a_save_that_nobody_has_announced_counts() -> None:
    """It may have been asked for past the strategy."""
    known = saved(A).ended(B, Stage.VERIFIED)

    assert decision(known, known.removal(A)) is Decision.REMOVE


def test_names_may_turn_out_to_be_those_of_another() -> None:
    """A directory may be a link to another; what was started from keeps both names."""
    known = saved(A, B, known=Retention().starting_from(C)).linked(f"{HERE}/last.ckpt", B)

    known = known.renamed(lambda name: name.replace(HERE, OTHER))

    assert known.started_from == {C, f"{OTHER}/c.ckpt"}
    assert decision(known, known.removal(f"{OTHER}/a.ckpt")) is Decision.REMOVE
    assert known.links == ((f"{OTHER}/last.ckpt", f"{OTHER}/b.ckpt"),)


# Random sequences ---------------------------------------------------------------------------------


@dataclass
class Directory:
    """Storage and the queue of removals, as an adapter runs them on decisions.

    Args:
        known: What is known.
        good: Checkpoints that are there and verified.
        asked: Removals, in their order.
        pending: Saves that were handed over, in their order.
        numbers: Number of the save that wrote each name.
    """

    known: Retention
    good: set[str] = field(default_factory=set)
    asked: list[Removal] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    count: int = 0

    def save(self, path: str) -> None:
        """Hand a save over."""
        self.known = self.known.asked_to_save(path)
        self.pending.append(path)
        self.count += 1

    def end(self, *, well: bool) -> None:
        """Let the earliest save end, and carry out what may be."""
        if not self.pending:
            return
        path = self.pending.pop(0)
        self.known = self.known.ended(path, Stage.VERIFIED if well else Stage.FAILED)
        if well:
            self.good.add(path)
        self.clear_up()

    def remove(self, path: str) -> None:
        """Ask for a removal, and carry out what may be."""
        self.asked.append(self.known.removal(path))
        self.clear_up()

    def clear_up(self) -> None:
        """Carry out what may be, and check each."""
        for removal in list(self.asked):
            found = decision(self.known, removal)
            if found.is_never:
                self.asked.remove(removal)
            if found is not Decision.REMOVE:
                continue
            handed_over = self.count - len(self.pending)
            assert handed_over >= removal.asked_at, "it has overtaken a save"
            self.asked.remove(removal)
            self.good.discard(removal.path)
            self.known = self.known.removed(removal.path)


names = st.integers(0, 30).map(lambda number: f"{HERE}/{number}.ckpt")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("save"), st.just("")),
        st.tuples(st.sampled_from(["well", "badly"]), st.just("")),
        st.tuples(st.just("remove"), names),
    ),
    max_size=60,
)


def carry_out(steps: list[tuple[str, str]], started_from: str) -> Directory:
    """Carry out a sequence; every save has a name of its own."""
    directory = Directory(known=Retention().starting_from(started_from), good={started_from})
    had = False
    for step, path in steps:
        if step == "save":
            directory.save(f"{HERE}/{directory.count}.ckpt")
        elif step == "remove":
            directory.remove(path)
        else:
            directory.end(well=step == "well")
        own = directory.good - {started_from}
        had = had or bool(own)
        assert bool(own) == had, "the last good one was removed"
        assert started_from in directory.good
    return directory


@given(steps=steps, start=names)
def test_once_there_was_a_verified_one_there_is_never_none(
    steps: list[tuple[str, str]], start: str
) -> None:
    """For all orders of saves, failures and removals; and no removal overtakes a save."""
    carry_out(steps, start.replace(".ckpt", "-start.ckpt"))


@given(steps=steps)
def test_in_the_end_all_is_removed_that_is_not_protected(steps: list[tuple[str, str]]) -> None:
    """Once newer ones are verified, nothing is left of what was asked for."""
    directory = carry_out(steps, f"{HERE}/start.ckpt")
    # One whose name is being saved again is no longer meant.
    known, waits = directory.known, Decision.WAIT
    asked = {each.path for each in directory.asked if decision(known, each) is waits}

    while directory.pending:
        directory.end(well=True)
    directory.save(f"{HERE}/newest.ckpt")
    directory.end(well=True)

    assert directory.asked == []
    assert not asked & directory.good


def test_the_save_that_is_being_written_is_the_earliest_that_is_pending() -> None:
    """In the background a later one of that path may have been asked for already."""
    known = Retention().asked_to_save(A).asked_to_save(B).asked_to_save(A)

    first = known.number_being_saved(A)
    then = known.ended(A, Stage.SPOOLED)

    assert (first, known.number_of(A)) == (1, 3)
    assert then.number_being_saved(A) == 3
    assert {save.number: save.stage for save in then.saves}[1] is Stage.SPOOLED


def test_a_save_under_another_name_has_the_number_that_its_end_will_have() -> None:
    """Also one that nobody had asked for."""
    pending = Retention().asked_to_save(A)
    none = saved(A)

    assert pending.number_being_saved(B) == 1
    number = none.number_being_saved(B)
    assert none.ended(B, Stage.SPOOLED).number_of(B) == number == 2


# What one save replaces ---------------------------------------------------------------------------

ELSEWHERE = "/run/hpc_ckpt_1.ckpt"
NEXT = "/run/hpc_ckpt_2.ckpt"


@pytest.mark.parametrize("stage", Stage)
def test_what_one_save_replaces_is_removed_once_that_is_verified(stage: Stage) -> None:
    """Outside of all directories as well; one that waits, has failed or is spooled does not do."""
    known = Retention().asked_to_save(NEXT)
    known = known if stage is Stage.PENDING else known.ended(NEXT, stage)

    found = decision(known, known.removal(ELSEWHERE, replaced_by=NEXT))

    assert found is (Decision.REMOVE if stage is Stage.VERIFIED else Decision.WAIT)
    assert known.is_verified(NEXT) == (stage is Stage.VERIFIED)


def test_another_save_does_not_stand_for_the_one_that_replaces() -> None:
    """However new it is."""
    known = saved(A, ELSEWHERE, B)

    assert decision(known, known.removal(A, replaced_by=NEXT)) is Decision.WAIT
    assert not known.is_verified(NEXT)


def test_of_two_saves_of_the_name_that_replaces_the_latest_counts() -> None:
    """A good one that is being written again is none any more."""
    known = saved(NEXT).asked_to_save(NEXT)

    assert decision(known, known.removal(ELSEWHERE, replaced_by=NEXT)) is Decision.WAIT


def test_what_the_run_has_started_from_stays_whatever_replaces_it() -> None:
    """It is the one to go back to."""
    known = saved(NEXT, known=Retention().starting_from(ELSEWHERE))

    assert decision(known, known.removal(ELSEWHERE, replaced_by=NEXT)) is Decision.RESUMED


def test_what_is_saved_again_or_linked_to_stays_whatever_replaces_it() -> None:
    """As for every other removal."""
    known = saved(NEXT)
    removal = known.removal(ELSEWHERE, replaced_by=NEXT)

    assert decision(saved(ELSEWHERE, known=known), removal) is Decision.AGAIN
    assert decision(known.linked("/run/last.ckpt", ELSEWHERE), removal) is Decision.WAIT
