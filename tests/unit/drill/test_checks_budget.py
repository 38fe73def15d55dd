# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I4 is seen to be kept and broken: charges and retries, made up one by one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from lightning_resilience.core.budget import BudgetConfig
from lightning_resilience.core.events import AttemptFailed, RetryScheduled
from lightning_resilience.core.records import encode
from lightning_resilience.drill.checks_budget import PaidRetries
from lightning_resilience.drill.scenario import Clocks
from lightning_resilience.drill.workload import DEPENDENCY
from lightning_resilience.protocols.circuit_memory import learn
from tests.drill_news import RESET, News, broken


PAID = "I4 PaidRetries"
FLOOR = 3
BUCKET_S = 15.0
TOLD: dict[str, Any] = {
    "dependency": DEPENDENCY,
    "operation": "single",
    "target": "1.ckpt",
    "failure": "transient",
    "error": "reset",
}


def made(*, at_s: float = 0.0, **options: Any) -> News:
    """A world with a closed circuit and a budget of three retries a minute."""
    news = News(budget=BudgetConfig(retry_floor=FLOOR), **options)
    news.at(at_s).create()
    news.budget(3)
    return news


def failed(news: News, rank: int = 0) -> None:
    """Let a rank's first attempt fail."""
    news.begin(rank)
    news.answer(news.send(rank), RESET)
    news.say(rank, AttemptFailed(**TOLD, attempt=1))


def charge(news: News, rank: int, *retries: int, **fields: Any) -> None:
    """Let a rank charge."""
    news.budget(rank, retries=retries, **fields)


def test_a_retry_that_is_charged_first_is_silent() -> None:
    """Attempt, charge, backoff, retry."""
    news = made()
    failed(news)
    charge(news, 0, 1, 0, 0, 0, 0)
    news.say(0, RetryScheduled(**TOLD, attempt=2, delay_s=1.0))

    news.at(1.0).send(0)


def test_a_retry_that_nobody_has_paid_is_seen() -> None:
    """It comes under the circuit under which the attempt before failed."""
    news = made()
    failed(news)

    with broken(PAID):
        news.at(1.0).send(0)


def test_a_charge_of_another_process_pays_for_nobody() -> None:
    """Each pays for its own."""
    news = made()
    failed(news)
    charge(news, 1, 1, 0, 0, 0, 0)

    with broken(PAID):
        news.at(1.0).send(0)


def test_a_charge_after_the_backoff_is_seen() -> None:
    """Those who wait in it would not be counted."""
    news = made()
    failed(news)

    with broken(PAID):
        news.say(0, RetryScheduled(**TOLD, attempt=2, delay_s=1.0))


def test_what_follows_an_outage_is_not_charged() -> None:
    """The attempt failed under a circuit that has opened since."""
    news = made()
    failed(news)
    for rank in (0, 1):
        news.fail(rank, times=3)
    news.change(0, votes=("host0",))
    news.move(1, "open", open_s=10.0)

    news.at(1.0).send(0)


def test_more_than_the_quota_is_seen() -> None:
    """Three retries a minute are three."""
    news = made()
    for used in range(1, FLOOR + 1):
        failed(news)
        charge(news, 0, used, 0, 0, 0, 0)
    failed(news)

    with broken(PAID):
        charge(news, 0, FLOOR + 1, 0, 0, 0, 0)


def test_two_charges_in_one_are_seen() -> None:
    """One retry, one charge."""
    news = made()
    failed(news)

    with broken(PAID):
        charge(news, 0, 2, 0, 0, 0, 0)


def test_a_refund_is_seen() -> None:
    """A retry that succeeds was load all the same."""
    news = made()
    failed(news)
    charge(news, 0, 1, 0, 0, 0, 0)

    with broken(PAID):
        charge(news, 0, 0, 0, 0, 0, 0)


def test_a_bucket_that_has_ended_is_put_away() -> None:
    """What was charged to it is one bucket older."""
    news = made()
    failed(news)
    charge(news, 0, 1, 0, 0, 0, 0)
    news.at(BUCKET_S)
    failed(news)

    charge(news, 0, 1, 1, 0, 0, 0, bucket=1)


@pytest.mark.parametrize(
    ("at_s", "ended", "retries"),
    [
        (BUCKET_S, 1, (1, 1, 0, 0, 0)),
        (BUCKET_S + 1.0, 1, (1, 0, 0, 0, 0)),
        (BUCKET_S + 1.0, 2, (1, 0, 1, 0, 0)),
        (2 * BUCKET_S, 1, (1, 0, 0, 1, 0)),
    ],
    ids=["too early", "forgotten", "two at once", "one too old"],
)
def test_a_charge_that_ages_too_fast_is_seen(
    at_s: float, ended: int, retries: tuple[int, ...]
) -> None:
    """No window ever holds more than the quota, because each bucket counts for its time."""
    news = made(at_s=1.0)
    failed(news)
    charge(news, 0, 1, 0, 0, 0, 0)
    news.at(at_s)
    failed(news)

    with broken(PAID):
        charge(news, 0, *retries, bucket=ended)


def test_calls_that_nobody_has_made_are_seen() -> None:
    """Each allows for a tenth of a retry."""
    news = made()
    failed(news)

    with broken(PAID):
        charge(news, 0, 1, 0, 0, 0, 0, calls=(10, 0, 0, 0, 0))


@pytest.mark.parametrize(("at_s", "bucket", "is_right"), [(74.0, 4, False), (75.0, 5, True)])
def test_a_budget_forgets_after_its_window_only(
    at_s: float, bucket: int, *, is_right: bool
) -> None:
    """What was charged just before a bucket's end is younger than the bucket."""
    news = made()
    news.at(BUCKET_S - 0.1)
    failed(news)
    charge(news, 0, 1, 0, 0, 0, 0)
    news.at(at_s)
    failed(news)

    with nullcontext() if is_right else broken(PAID):
        charge(news, 0, 1, 0, 0, 0, 0, bucket=bucket)


@pytest.mark.parametrize(("rate", "is_right"), [(1.0, False), (1.2, True)])
def test_clocks_of_one_rate_allow_for_one_quota(rate: float, *, is_right: bool) -> None:
    """A window of the fastest clock is shorter, and two quotas may come within a true one."""
    news = made(clocks=Clocks(rate=rate))
    check = next(check for check in news.to.all if isinstance(check, PaidRetries))
    check._charges.extend([0.0] * FLOOR)
    failed(news)

    with nullcontext() if is_right else broken(PAID):
        charge(news, 0, 1, 0, 0, 0, 0)


def test_alone_a_process_has_its_share() -> None:
    """One of four has one retry of three; what was charged before may come with it, and no more."""
    news = made()
    own = news.go_alone(0)
    learn(own, encode(news.record), read_at_s=0.0, seen_at_s=0.0)
    failed(news)

    with broken(PAID):
        for attempt in range(2, 5):
            news.answer(news.send(0), RESET)
            news.say(0, AttemptFailed(**TOLD, attempt=attempt))
