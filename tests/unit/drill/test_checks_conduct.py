# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Errors without a reason, questions without end, and keys that stay are seen."""

from __future__ import annotations

import pytest

from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.drill.scenario import Workload
from lightning_resilience.drill.workload import DEPENDENCY
from lightning_resilience.errors import (
    BudgetExhaustedError,
    CircuitOpenError,
    CorruptRecordError,
    InvalidTransitionError,
    JointError,
    RetriesExhaustedError,
    StoreUnavailableError,
)
from tests.drill_news import KEYS, News, broken


ERRORS = "errors KnownErrors"


@pytest.mark.parametrize(
    "error",
    [
        TypeError("a bug"),
        InvalidTransitionError("a bug"),
        CorruptRecordError("a bug"),
        StoreUnavailableError("it has answered"),
        RetriesExhaustedError("nothing was sent"),
        CircuitOpenError("it was to wait"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_answers_nothing_is_seen(error: BaseException) -> None:
    """Nothing that could explain it has happened."""
    news = News()
    news.begin(0)

    with broken(ERRORS):
        news.at(1.0).end(0, error=error)


@pytest.mark.parametrize(
    "error", [BudgetExhaustedError("denied"), JointError("all failed")], ids=repr
)
def test_an_error_that_is_an_answer_is_silent(error: Exception) -> None:
    """It says what the job has decided."""
    news = News()
    news.begin(0)

    news.end(0, error=error)


def test_a_refusal_is_silent_where_nobody_waits_or_the_deadline_is_over() -> None:
    """That is what was asked for."""
    raising = News(workload=Workload(when_open="raise"))
    raising.begin(0)
    raising.end(0, error=CircuitOpenError("open"))
    waiting = News(retry=RetryPolicy(deadline_s=30.0))
    waiting.begin(0)

    waiting.at(30.0).end(0, error=CircuitOpenError("open"))


def test_an_error_of_the_store_is_silent_where_that_was_away() -> None:
    """The host was cut off."""
    news = News()
    news.begin(0)
    news.ranks[0].host.cut_off_until_s = 5.0

    news.at(6.0).end(0, error=StoreUnavailableError("no answer"))


def test_an_interruption_is_silent_where_there_was_one() -> None:
    """Ctrl-C is what it looks like."""
    news = News()
    news.begin(0)
    news.ranks[0].hurries = True

    news.end(0, error=KeyboardInterrupt())


def test_an_operation_that_asks_without_end_is_seen() -> None:
    """Waits grow, so the questions stay few."""
    news = News()
    news.begin(0, "collective")
    news.at(100.0).end(0, cost=400)
    news.begin(0, "collective")

    with broken("I7 BoundedCost"):
        news.at(200.0).end(0, cost=40 * 100)


def test_keys_of_trips_that_are_over_are_seen() -> None:
    """Each trip removes those of the trip before the last."""
    news = News()
    for generation in (1, 2, 3):
        news.write(0, KEYS.bell(DEPENDENCY, generation), b"1")
    news.write(0, KEYS.bell(DEPENDENCY, 1), None)
    news.write(0, KEYS.bell(DEPENDENCY, 4), b"1")

    with broken("keys BoundedKeys"):
        news.write(0, KEYS.bell(DEPENDENCY, 5), b"1")


def test_who_dies_may_leave_a_key() -> None:
    """It was about to remove it."""
    news = News()
    news.crash(3)

    for generation in (1, 2, 3, 4):
        news.write(0, KEYS.bell(DEPENDENCY, generation), b"1")
