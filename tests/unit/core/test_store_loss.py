# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""When the shared store is gone for everybody, and what each rank makes of it by itself."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core.records import FinalRecord, decode, encode
from lightning_resilience.core.spool import DEFERRABLE
from lightning_resilience.core.store_loss import (
    Refusals,
    SettledRecord,
    Unsettled,
    answer_of,
    deferred_final,
    has_another_way,
    is_deferred,
    known_answer,
    names_in,
    told_names,
    undone_error,
    unsettled_statement,
)
from lightning_resilience.errors import JointUnavailableError


AFTER_S = 10.0
FAILED = FinalRecord(op="save", failure="permanent", first_rank=0, error="denied", writer="w")
OK = FinalRecord(op="save", detail="digest", writer="w")


@given(
    heard=st.lists(
        st.tuples(st.floats(0.01, 8.0), st.sampled_from(["refused", "silent", "answer"]))
    )
)
def test_the_store_is_gone_only_after_refusals_and_nothing_else(
    heard: list[tuple[float, str]],
) -> None:
    """It is gone exactly where all that was heard for long enough, at the end, were refusals."""
    refusals, now_s = Refusals(), 0.0
    times: list[tuple[float, str]] = []
    for pause_s, what in heard:
        now_s += pause_s
        times.append((now_s, what))
        if what == "answer":
            refusals = Refusals()
        else:
            refusals = refusals.failed(is_refused=what == "refused", now_s=now_s)

    last_s = max((at_s for at_s, what in times if what != "refused"), default=0.0)
    first_s = min(
        (at_s for at_s, what in times if what == "refused" and at_s > last_s), default=None
    )
    is_gone = first_s is not None and now_s - first_s >= AFTER_S
    assert refusals.show_that_it_is_gone(after_s=AFTER_S, now_s=now_s) == is_gone


@pytest.mark.parametrize(
    "op", ["save", "exists", "remove", "link", "flush", "load", "pause", "list"]
)
def test_only_what_one_rank_does_and_no_other_needs_is_deferred(op: str) -> None:
    """A load or a pause has no other way, nor has a save by all ranks or without a spool."""

    def has(**other: object) -> bool:
        terms: dict[str, object] = {
            "workers": (0,),
            "defer_after_s": 1.0,
            "is_spooled": True,
            "is_answered": True,
        }
        return has_another_way(op, **{**terms, **other})  # type: ignore[arg-type]

    assert has() == (op in {*DEFERRABLE, "flush"})
    assert not has(workers=(0, 1))
    assert not has(defer_after_s=None)
    assert not has(is_spooled=False)
    assert not has(is_answered=False)


def test_what_stands_in_the_place_of_a_verdict_is_told_from_one() -> None:
    """It is no failure, and no verdict that any rank has written."""
    final = deferred_final("save", subject="a.ckpt", workers=(0,), why="gone")

    assert is_deferred(final)
    assert not final.failure
    assert not is_deferred(OK)
    assert not is_deferred(FinalRecord(op="save", detail=final.detail, writer="w"))


@given(
    deferred=st.lists(st.integers(1, 40), unique=True, max_size=20),
    before=st.integers(0, 45),
    failed=st.sets(st.integers(1, 40), max_size=10),
)
def test_what_rank_0_has_told_is_settled_and_the_rest_is_not(
    deferred: list[int], before: int, failed: set[int]
) -> None:
    """All before its own operation is known, and of that exactly the failures are failures."""
    mine = Unsettled(deferred=tuple(sorted(deferred)))
    told = SettledRecord(before=before, failures={str(seq): FAILED for seq in failed})
    told = decode(SettledRecord, encode(told), key="settled")

    rest, found = mine.heard(told)

    assert set(rest.deferred) == {seq for seq in deferred if seq >= before}
    assert set(found) == {seq for seq in deferred if seq < before} & failed


def test_nothing_is_settled_where_rank_0_has_told_nothing() -> None:
    """What is unknown stays unknown."""
    mine = Unsettled(deferred=(3, 4))

    assert mine.heard(None) == (mine, {})


def test_what_is_kept_is_bounded() -> None:
    """A store that is gone for days leaves no more behind than one that is gone for an hour."""
    mine = Unsettled()
    for seq in range(1000):
        mine = mine.with_deferred(seq).with_verdict(seq, FAILED)

    assert len(mine.deferred) == len(mine.failures) == 32
    assert mine.deferred[-1] == 999
    assert 999 in mine.failures


@pytest.mark.parametrize(
    ("saved", "names", "answer"),
    [
        (True, None, "True"),
        (True, frozenset(), "True"),
        (False, frozenset({"a.ckpt"}), "True"),
        (False, frozenset({"b.ckpt"}), "False"),
        (False, None, ""),
    ],
)
def test_whether_a_name_is_taken_is_answered_from_what_all_know(
    *,
    saved: bool,
    names: frozenset[str] | None,
    answer: str,
) -> None:
    """What the run has saved, or found at its start, is taken; where nobody knows, none says."""
    assert known_answer("a.ckpt", saved=saved, names=names) == answer


@given(names=st.sets(st.text(max_size=20), max_size=30))
def test_names_are_told_as_they_are(names: set[str]) -> None:
    """Every rank reads what rank 0 has listed."""
    assert names_in(told_names(names)) == frozenset(names)


def test_a_listing_that_is_too_long_is_not_told() -> None:
    """The shared store is no place for 100,000 names, and a part of them would be wrong."""
    assert told_names(f"step={step}.ckpt" for step in range(100_000)) == ""
    assert names_in("") is None


def test_the_error_of_work_that_was_lost_says_what_to_do() -> None:
    """It names the rank and the cause, and is no error that all ranks share."""
    error = undone_error("save", seq=7, rank=0, subject="a.ckpt", cause="OSError: disk is full")

    assert isinstance(error, JointUnavailableError)
    assert not error.in_step
    assert error.lost_ranks == (0,)
    assert "disk is full" in str(error)
    assert "a.ckpt" in str(error)
    assert "make room" in str(error)


def test_the_end_of_a_run_says_what_was_never_settled() -> None:
    """Nothing is said where nothing is open."""
    assert unsettled_statement(Unsettled()) == ""
    assert "last 1 operation of" in unsettled_statement(Unsettled(deferred=(4,)))
    assert "last 2 operations of" in unsettled_statement(Unsettled(deferred=(4, 5)))


@pytest.mark.parametrize("known", ["True", "False", ""])
@pytest.mark.parametrize("verdict", ["True", "False"])
def test_what_all_know_is_the_answer_only_where_there_is_no_verdict(
    verdict: str, known: str
) -> None:
    """A name that was freed since is free: storage has said so."""
    told = FinalRecord(op="exists", detail=verdict, writer="w")
    missed = deferred_final("exists", subject="a.ckpt", workers=(0,), why="gone")

    assert answer_of(told, known=known) == verdict
    assert answer_of(missed, known=known) == known
