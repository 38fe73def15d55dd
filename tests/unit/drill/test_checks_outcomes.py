# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I8 and I3 are seen to be kept and broken: what workers report, and what is made of it."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_resilience.core.records import FinalRecord, GateRecord, OutcomeRecord, encode
from lightning_resilience.drill.scenario import Store
from lightning_resilience.protocols.joint import JointResult
from tests.drill_news import KEYS, RESET, News, broken


HONEST = "I8 HonestVerdicts"
PROMPT = "I3 PromptVerdicts"
WORKERS = (0, 1, 2, 3)


def loading(*served: int, **options: Any) -> News:
    """A world in which all four ranks load, and storage has served some of them."""
    news = News(**options)
    news.create()
    for rank in WORKERS:
        news.begin(rank, "load")
        news.write(rank, KEYS.joint("arrived", rank), b"1")
    for rank in served:
        news.take(rank, rank)
        news.answer(news.send(rank))
    return news


def report(news: News, rank: int, failure: str = "", *, by: int | None = None) -> None:
    """Let a rank report how its part has ended."""
    outcome = OutcomeRecord(rank=rank, failure=failure)
    news.write(rank if by is None else by, KEYS.joint("out", 1, rank), encode(outcome))


def decide(news: News, rank: int, **fields: Any) -> FinalRecord:
    """Let a rank write the verdict."""
    return news.verdict(rank, 1, **{"op": "load", "workers": WORKERS, **fields})


def look(news: News, rank: int) -> None:
    """Let a rank read all reports."""
    for read in news.to.read:
        read(news.now_s, news.ranks[rank], KEYS.joint("out", 1, 0))


def test_a_success_of_all_is_silent() -> None:
    """Storage has served each, and each has said so."""
    news = loading(*WORKERS)
    for rank in WORKERS:
        report(news, rank)

    decide(news, 3)


def test_the_most_severe_failure_is_silent() -> None:
    """Of two that are equally severe the lower rank is the first cause."""
    news = loading(0)
    report(news, 0)
    for rank, failure in ((1, "transient"), (2, "permanent"), (3, "permanent")):
        report(news, rank, failure)

    decide(news, 3, failure="permanent", first_rank=2)


def test_a_success_without_a_worker_is_seen() -> None:
    """Storage has not served it, whatever the others have reported."""
    news = loading(0, 1, 2)
    for rank in (0, 1, 2):
        report(news, rank)

    with broken(HONEST):
        decide(news, 2)


def test_a_success_in_spite_of_a_failure_is_seen() -> None:
    """Also where the store has lost that report meanwhile."""
    news = loading(*WORKERS)
    report(news, 0, "permanent")
    news.empty()
    for rank in (1, 2, 3):
        report(news, rank)

    with broken(HONEST):
        decide(news, 3)


@pytest.mark.parametrize(
    ("failure", "first_rank"), [("transient", 1), ("permanent", 3), ("auth", 2), ("permanent", 0)]
)
def test_a_failure_that_is_not_the_most_severe_is_seen(failure: str, first_rank: int) -> None:
    """Another class, another rank, or one that nobody has reported."""
    news = loading(0)
    report(news, 0)
    for rank, reported in ((1, "transient"), (2, "permanent"), (3, "permanent")):
        report(news, rank, reported)

    with broken(HONEST):
        decide(news, 3, failure=failure, first_rank=first_rank)


def test_who_decides_need_not_know_what_is_reported_later() -> None:
    """It has looked before; after a look, it has to."""
    news = loading()
    report(news, 1, "transient")
    look(news, 1)
    report(news.at(0.5), 2, "permanent")

    decide(news, 1, failure="transient", first_rank=1)


def test_what_was_seen_counts() -> None:
    """The more severe report was there when the decider looked last."""
    news = loading()
    report(news, 1, "transient")
    report(news.at(0.5), 2, "permanent")
    look(news.at(1.0), 1)

    with broken(HONEST):
        decide(news, 1, failure="transient", first_rank=1)


def test_a_success_that_storage_has_not_seen_is_no_report() -> None:
    """Nobody reports what it hopes for."""
    news = loading()

    with broken(HONEST):
        report(news, 1)


def test_a_report_for_another_rank_is_seen() -> None:
    """Each speaks for itself."""
    news = loading(1)

    with broken(HONEST):
        report(news, 1, by=2)


def test_a_report_that_changes_is_seen() -> None:
    """The first is what others may have decided by; the same once more is put back."""
    news = loading()
    report(news, 1, "transient")
    report(news, 1, "transient")

    with broken(HONEST):
        report(news, 1, "permanent")


def test_a_gate_that_refuses_is_nobodys_outcome() -> None:
    """Its own record is what all have read."""
    news = loading()
    writer = news.ranks[2].dice.nonce()
    gate = GateRecord(
        op="load", digest="", verdict="fail", epoch=1, rank=2, reason="open", writer=writer
    )
    news.write(2, KEYS.joint("gate", 1, 0), encode(gate))
    for is_draft in (True, False):
        ballot = FinalRecord(op="load", writer=writer, is_open=True, is_draft=is_draft)
        news.write(2, KEYS.joint("final", 1), encode(ballot))

    final = FinalRecord(
        op="load", failure="transient", first_rank=2, workers=WORKERS, writer=writer
    )
    news.write(2, KEYS.joint("final", 1), encode(final))


def test_a_return_in_spite_of_an_own_failure_is_seen() -> None:
    """Whose own work has failed does not go on."""
    news = loading(*WORKERS)
    for rank in WORKERS:
        report(news, rank)
    final = decide(news, 3)

    with broken(HONEST):
        news.end(1, result=JointResult(final=final, error=RESET))


def test_a_verdict_that_comes_late_is_seen() -> None:
    """All have reported, and nothing stands in the way."""
    news = loading(*WORKERS)
    for rank in WORKERS:
        report(news, rank)

    with broken(PROMPT):
        decide(news.at(3.0), 3)


@pytest.mark.parametrize("why", ["failure", "loss", "pause", "death"])
def test_a_verdict_may_come_late_for_a_reason(why: str) -> None:
    """A failure gives others a beat, answers are lost, or the last one cannot speak."""
    news = loading(*WORKERS, **({"store": Store(lost_answers=0.01)} if why == "loss" else {}))
    for rank in WORKERS:
        report(news, rank, "transient" if why == "failure" and rank == 3 else "")
    if why == "pause":
        news.pause(3)
    elif why == "death":
        news.crash(3)

    failed = {"failure": "transient", "first_rank": 3} if why == "failure" else {}
    decide(news.at(3.0), 2, **failed)
