# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Rows of failed saves: what counts, when the run ends, and what is said then."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core.joint import advice_for, conflict_error, error_of
from lightning_resilience.core.outcome import FailureClass, classify
from lightning_resilience.core.records import FinalRecord
from lightning_resilience.core.save_failures import (
    SaveFailure,
    SaveFailures,
    error_at_end,
    error_at_limit,
    event_of,
    failure_of,
    is_outage,
)
from lightning_resilience.errors import JointError, JointUnavailableError


FATAL = {FailureClass.CANCELLED, FailureClass.LOST}


def verdict(failure: str = "permanent", *, seq: int = 4, error: str = "OSError: no") -> JointError:
    """Return what all ranks raise for a save."""
    final = FinalRecord(
        op="save", subject="s3://b/x.ckpt", failure=failure, first_rank=0, error=error, writer="w"
    )
    made = error_of(final, seq=seq)
    assert made is not None
    return made


def failure(step: int, *, seq: int = 0) -> SaveFailure:
    """Return a failure at a step."""
    return failure_of(verdict(seq=seq or step), step=step)


def rows(limit: int, **kinds: list[int]) -> SaveFailures:
    """Return rows with failures at these steps."""
    made = SaveFailures(limit=limit, rows={})
    for kind, steps in kinds.items():
        for step in steps:
            made = made.failed(kind, failure(step))
    return made


@pytest.mark.parametrize("outcome", FailureClass)
def test_a_failure_counts_unless_a_rank_is_lost_or_interrupted(outcome: FailureClass) -> None:
    """Whatever storage says may be tolerated; with a rank gone there is nobody to go on with."""
    error = verdict(outcome.value)

    assert rows(2).counts(error) == (outcome not in FATAL)
    assert not rows(1).counts(error)


@pytest.mark.parametrize("outcome", FailureClass)
def test_an_outage_is_what_passes_and_what_all_ranks_go_on_from(outcome: FailureClass) -> None:
    """A denial is none, and where a rank is out of step nobody goes on."""
    error, alone = verdict(outcome.value), JointError("no", outcome=outcome.value)

    assert is_outage(error) == (outcome in {FailureClass.TRANSIENT, FailureClass.THROTTLE})
    assert not is_outage(alone)


def test_ranks_that_are_out_of_step_do_not_go_on() -> None:
    """Neither the rank that notices it, nor the others, which are told by the verdict."""
    found = FinalRecord(op="save", digest="step 3", writer="w")
    noticed = conflict_error(found, op="exists", digest="step 3", seq=4, rank=1)
    assert noticed is not None
    told = verdict(error=classify(noticed).error)

    assert not rows(9).counts(noticed)
    assert not rows(9).counts(told)


def test_a_rank_that_does_not_know_the_verdict_does_not_go_on() -> None:
    """The others may have gone on, or not."""
    assert not rows(9).counts(JointUnavailableError("no store", outcome="transient"))


@given(
    limit=st.integers(1, 5),
    attempts=st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=40),
)
def test_the_run_ends_with_so_many_failures_of_a_kind_and_no_success_between(
    limit: int, attempts: list[tuple[str, bool]]
) -> None:
    """Each kind is counted by itself, and only a success of it begins its count anew."""
    made = rows(limit)
    for step, (kind, succeeds) in enumerate(attempts, start=1):
        made = made.succeeded(kind) if succeeds else made.failed(kind, failure(step))

        ends = [ok for name, ok in attempts[:step] if name == kind]
        in_a_row = ends[::-1].index(True) if True in ends else len(ends)
        assert len(made.rows.get(kind, ())) == in_a_row
        assert succeeds or made.ends_run(kind) == (in_a_row >= limit)
        assert all(made.rows.values())


def test_the_last_failure_in_a_row_names_all_before_it() -> None:
    """The error says which number it is, and lists the others with their steps, the first first."""
    error = error_at_limit(rows(3, a=[2, 4, 6], b=[5]), "a")

    text = str(error)
    assert "number 3 in a row" in text
    assert "max_consecutive_save_failures=3" in text
    assert text.startswith("save of s3://b/x.ckpt failed on all ranks (joint operation 6)")
    assert text.index("At step 2, save of") < text.index("At step 4, save of")
    assert "At step 5" not in text
    assert text.count(advice_for(FailureClass.PERMANENT)) == 1
    assert (error.op, error.seq, error.outcome, error.first_rank) == ("save", 6, "permanent", 0)
    assert error.in_step


def test_what_was_never_made_up_for_is_raised_at_the_end() -> None:
    """All standing failures, of whatever kind, in the order in which they happened."""
    error = error_at_end(rows(3, b=[6], a=[2, 4]))

    assert error is not None
    places = [str(error).index(f"At step {step},") for step in (2, 4, 6)]
    assert places == sorted(places)
    assert (error.seq, error.in_step) == (6, True)


def test_nothing_is_raised_at_the_end_where_later_saves_made_up_for_it() -> None:
    """A success of the kind takes its failures off the list."""
    assert error_at_end(rows(3)) is None
    assert error_at_end(rows(3, a=[2, 4]).succeeded("a")) is None
    assert error_at_end(rows(3, a=[2], b=[2]).succeeded("b")) is not None


def test_the_report_has_the_numbers() -> None:
    """Which step, the how manieth, of how many, and why."""
    event = event_of(rows(3, a=[2, 4]), "a")

    assert (event.step, event.number, event.limit) == (4, 2, 3)
    assert (event.outcome, event.first_rank) == ("permanent", 0)
    assert "OSError: no" in event.error
