# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I8 is seen to be kept and broken: gates, verdicts, and what ranks make of them."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_resilience.core.joint import error_of
from lightning_resilience.core.records import FinalRecord, GateRecord, encode
from lightning_resilience.errors import JointError, JointUnavailableError
from lightning_resilience.protocols.joint import JointResult
from tests.drill_news import KEYS, News, broken


VERDICT = "I8 OneVerdict"
TIMEOUT_S = 1440.0


def joined() -> News:
    """A world in which all four ranks are in a joint save, and storage has served its worker."""
    news = News()
    for rank in range(4):
        news.begin(rank, "joint")
        news.write(rank, KEYS.joint("arrived", rank), b"1")
    news.answer(news.send(0))
    return news


def leave(news: News, rank: int, final: FinalRecord, error: Any = None) -> None:
    """Let a rank return, or raise what follows from, a verdict."""
    error = error or error_of(final, seq=1)
    news.end(rank, result=JointResult(final=final), error=error)


def gate(news: News, rank: int, *, verdict: str = "fail", number: int = 0) -> GateRecord:
    """Let a rank write a gate."""
    writer = news.ranks[rank].dice.nonce()
    record = GateRecord(
        op="save", digest="", verdict=verdict, epoch=1, rank=rank, reason="open", writer=writer
    )
    news.write(rank, KEYS.joint("gate", 1, number), encode(record))
    return record


@pytest.mark.parametrize("failure", ["", "permanent"])
def test_one_verdict_for_all_is_silent(failure: str) -> None:
    """Whether all went well or not."""
    news = joined()
    first = 0 if failure else -1
    final = news.verdict(0, 1, failure=failure, first_rank=first, error="denied" if failure else "")

    for rank in range(4):
        leave(news, rank, final)


def test_a_verdict_that_is_not_in_the_store_is_seen() -> None:
    """Nobody makes one up."""
    news = joined()

    with broken(VERDICT):
        leave(news, 1, FinalRecord(op="save", writer="r1i1.1"))


def test_a_refusal_at_the_gate_stands_for_a_verdict() -> None:
    """All have read it there."""
    news = joined()
    writer = gate(news, 2).writer
    final = FinalRecord(
        op="save", failure="transient", first_rank=2, error="open", workers=(0,), writer=writer
    )

    for rank in range(4):
        leave(news, rank, final)


def test_a_verdict_that_changes_is_seen() -> None:
    """A late report changes nothing."""
    news = joined()
    news.verdict(0, 1)

    with broken(VERDICT):
        news.verdict(1, 1, failure="lost", first_rank=0)


def test_a_refusal_of_a_gate_that_nobody_has_written_is_seen() -> None:
    """All follow the gate that came first."""
    news = joined()
    gate(news, 1, verdict="proceed")

    with broken(VERDICT):
        news.verdict(2, 1, failure="transient", first_rank=2, error="open")


@pytest.mark.parametrize("is_draft", [True, False])
def test_a_verdict_in_the_place_of_no_ballot_is_seen(*, is_draft: bool) -> None:
    """Nothing, and a draft, may lie in two stores."""
    news = joined()
    if is_draft:
        news.final(1, 1, is_open=True, is_draft=True)

    with broken(VERDICT):
        news.final(0, 1)


@pytest.mark.parametrize("drawn_up_by", [None, 1])
def test_a_ballot_in_the_place_of_no_draft_of_its_own_is_seen(drawn_up_by: int | None) -> None:
    """Only its writer knows that it is not created any more."""
    news = joined()
    if drawn_up_by is not None:
        news.final(drawn_up_by, 1, is_open=True, is_draft=True)

    with broken(VERDICT):
        news.final(0, 1, is_open=True)


def test_a_gate_that_changes_is_seen() -> None:
    """The first to arrive decides for all."""
    news = joined()
    gate(news, 1, verdict="proceed")

    with broken(VERDICT):
        gate(news, 2)


def test_two_verdicts_of_one_operation_are_seen() -> None:
    """Also where the store has lost the first between them."""
    news = joined()
    leave(news, 0, news.verdict(0, 1))
    news.crash(0)
    news.at(TIMEOUT_S).empty()
    lost = news.verdict(1, 1, failure="lost", first_rank=0, lost_ranks=(0,))

    with broken(VERDICT):
        leave(news, 1, lost)


def test_an_error_that_does_not_follow_from_the_verdict_is_seen() -> None:
    """Type and text are the same on every rank."""
    news = joined()
    final = news.verdict(0, 1, failure="permanent", first_rank=0, error="denied")

    with broken(VERDICT):
        leave(news, 1, final, JointError("something else"))


def test_a_rank_that_is_taken_for_lost_too_early_is_seen() -> None:
    """It has shown that it lives a moment ago."""
    news = joined()
    news.at(TIMEOUT_S - 1.0).write(0, KEYS.joint("beat", 0), b"r0i1.5")

    with broken(VERDICT):
        news.at(TIMEOUT_S + 5.0).verdict(1, 1, failure="lost", first_rank=0, lost_ranks=(0,))


def test_a_rank_that_was_silent_for_long_enough_is_lost() -> None:
    """Whoever waits has watched it all the time."""
    news = joined()
    news.crash(0)

    final = news.at(TIMEOUT_S + 5.0).verdict(1, 1, failure="lost", first_rank=0, lost_ranks=(0,))

    leave(news, 1, final)


@pytest.mark.parametrize("named", [True, False])
def test_who_cannot_learn_the_verdict_had_no_way_to_the_store(named: bool) -> None:  # noqa: FBT001 - data
    """And its error names it."""
    news = joined()
    error = JointUnavailableError("away", seq=1, lost_ranks=(2,) if named else ())
    if not named:
        news.ranks[2].host.cut_off_until_s = 30.0

    with broken(VERDICT):
        news.at(40.0).end(2, error=error)


def test_who_was_cut_off_may_say_so() -> None:
    """It raises, and returns no verdict."""
    news = joined()
    news.ranks[2].host.cut_off_until_s = 30.0

    news.at(40.0).end(2, error=JointUnavailableError("away", seq=1, lost_ranks=(2,)))


def test_a_verdict_that_is_removed_too_early_is_seen() -> None:
    """Somebody has not read it yet."""
    news = joined()
    leave(news, 0, news.verdict(0, 1))

    with broken(VERDICT):
        news.write(0, KEYS.joint("final", 1), None)


def test_a_verdict_that_all_have_left_behind_is_removed() -> None:
    """All are in the next operation."""
    news = joined()
    final = news.verdict(0, 1)
    for rank in range(4):
        leave(news, rank, final)
        news.begin(rank, "joint")

    news.write(0, KEYS.joint("final", 1), None)


def spoiled(news: News, rank: int) -> None:
    """Let a rank say that nobody can know the verdict of operation 3."""
    writer = news.ranks[rank].dice.nonce()
    ballot = FinalRecord(op="save", lost_ranks=(3,), is_open=True, writer=writer)
    news.write(rank, KEYS.joint("final", 3), encode(ballot))


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_ballot_is_spoiled_only_where_something_was_lost(is_lost: bool) -> None:  # noqa: FBT001 - data
    """At any time since the joint operation before, also where other calls came between."""
    news = joined()
    leave(news, 1, news.verdict(0, 1))
    if is_lost:
        for what in ("store_gone begins", "store_gone ends"):
            for happened in news.to.happened:
                happened(10.0, what)
    news.at(20.0).begin(1, "single")
    news.end(1)
    news.at(30.0).begin(1, "joint")

    if is_lost:
        spoiled(news, 1)
    else:
        with broken(VERDICT):
            spoiled(news, 1)


def test_a_key_of_another_incarnation_is_seen() -> None:
    """An earlier start of the job is over."""
    news = joined()

    with broken(VERDICT):
        news.write(0, "lr/drill/i2/final/1", b"")
