# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a run waits for at its end, the same on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core.records import FinalRecord
from lightning_resilience.core.run_end import RunEnd, is_lost, refusal_in, rest_of
from lightning_resilience.core.spool import DEFERRABLE
from lightning_resilience.core.store_loss import deferred_final
from lightning_resilience.errors import (
    CheckpointError,
    JointError,
    JointUnavailableError,
    StoreUnavailableError,
)


OTHERS = {"list", "load", "pause", "exists", "flush", "clear up"}


@pytest.mark.parametrize("op", sorted(DEFERRABLE - {"exists"}))
def test_the_end_waits_once_an_operation_was_begun_that_may_leave_something(op: str) -> None:
    """However it has ended: a rank that has missed its verdict would not know."""
    assert RunEnd().begun(op).is_due
    assert RunEnd().begun(op).begun("load").is_due


@given(ops=st.lists(st.sampled_from(sorted(OTHERS))))
def test_the_end_of_a_run_that_has_saved_nothing_waits_for_nothing(ops: list[str]) -> None:
    """Questions and loads leave nothing behind."""
    end = RunEnd()
    for op in ops:
        end = end.begun(op)

    assert not end.is_due


def test_what_is_written_in_the_background_is_always_waited_for() -> None:
    """Nothing that all ranks do together says whether there is any."""
    assert RunEnd(is_behind=True).is_due


def test_the_rest_is_what_rank_0_has_told() -> None:
    """Where nobody was told, nobody goes on to it: not even rank 0, which knows what it is."""
    told = FinalRecord(op="flush", detail="two files", writer="w")
    missed = deferred_final("flush", subject="run", workers=(0,), why="gone")

    assert rest_of(told) == "two files"
    assert rest_of(FinalRecord(op="flush", writer="w")) == ""
    assert rest_of(missed) == ""


@pytest.mark.parametrize(
    ("outcome", "is_lost_to_it"), [("lost", True), ("transient", False), ("permanent", False)]
)
def test_only_ranks_that_do_not_find_each_other_are_no_failure(
    *, outcome: str, is_lost_to_it: bool
) -> None:
    """What storage has refused fails the run; that somebody came late to its end does not."""
    assert is_lost(JointError("flush failed", outcome=outcome)) is is_lost_to_it
    assert is_lost(JointUnavailableError("gone", lost_ranks=(1, 2)))


def test_what_storage_has_refused_is_not_hidden_by_a_store_that_is_gone() -> None:
    """Nobody else could be told, so this rank says it."""
    refused, gone = CheckpointError("refused"), StoreUnavailableError("gone")
    told, deaf, late = (JointUnavailableError("no verdict") for _ in range(3))
    told.__cause__, deaf.__cause__ = refused, gone

    assert refusal_in(told) is refused
    assert refusal_in(deaf) is None
    assert refusal_in(late) is None
