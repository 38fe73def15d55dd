# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I5 and I7 are seen to be kept and broken: what reaches storage, and what the store is asked."""

from __future__ import annotations

import pytest

from tests.drill_news import CONFIG, RESET, News, broken


ADMITTED = "I5 Admitted"
DEAD = "I5 DeadHolders"
CHEAP = "I7 CheapCalls"
LEASE_S = 30.0


def made() -> News:
    """A world with a closed circuit."""
    news = News()
    news.create()
    return news


def test_a_collective_call_without_a_slot_is_seen() -> None:
    """Also under a closed circuit."""
    news = made()
    news.begin(0, "collective")

    with broken(ADMITTED):
        news.send(0)


def test_a_claim_lets_one_request_in() -> None:
    """The second attempt claims anew."""
    news = made()
    news.begin(0, "collective")
    news.take(0, 0)
    news.answer(news.send(0), RESET)

    with broken(ADMITTED):
        news.send(0)


def test_a_claim_of_an_earlier_operation_lets_nobody_in() -> None:
    """It was for that."""
    news = made()
    news.begin(0, "collective")
    news.take(0, 0)
    news.at(1.0).begin(0, "collective")

    with broken(ADMITTED):
        news.send(0)


def test_who_has_lost_its_slot_does_not_come() -> None:
    """Somebody else has it, and nothing has stopped its holder since."""
    news = made()
    news.begin(0, "collective")
    news.take(0, 0)
    news.at(LEASE_S).begin(1, "collective")
    news.take(1, 0)

    with broken(ADMITTED):
        news.send(0)


def test_who_stood_still_may_come_late() -> None:
    """Between its claim and its request it was stopped, and is forgiven."""
    news = made()
    news.begin(0, "collective")
    news.take(0, 0)
    news.at(LEASE_S).begin(1, "collective")
    news.take(1, 0)
    news.pause(0)

    news.send(0)


def test_a_single_call_needs_no_slot_while_the_circuit_is_closed() -> None:
    """Nor as long as a view may be old after that."""
    news = made()
    news.begin(3)
    news.send(3)
    for rank in (0, 1):
        news.fail(rank, times=3)
    news.change(0, votes=("host0",))
    news.move(1, "open", open_s=CONFIG.open_for_s)
    news.begin(2)

    news.at(CONFIG.view_max_age_s).send(2)


def test_a_single_call_under_an_open_circuit_is_seen() -> None:
    """Its view is older than a view may be."""
    news = News()
    news.trip()
    news.begin(2)

    with broken(ADMITTED):
        news.at(CONFIG.view_max_age_s + 1.1).send(2)


def test_alone_a_call_is_its_process_own_business() -> None:
    """It has slots of its own."""
    news = News()
    news.trip()
    news.begin(2, "collective")
    news.go_alone(2)

    news.at(60.0).send(2)


def waiting() -> News:
    """A world in which a dead rank holds slot 0, and another one waits."""
    news = made()
    news.begin(0, "collective")
    news.take(0, 0)
    news.crash(0)
    news.at(1.0).begin(1, "collective")
    return news


def test_a_waiter_that_takes_a_dead_holders_slot_in_time_is_silent() -> None:
    """After a lease of watching."""
    news = waiting()
    for second in range(1, 32, 5):
        news.at(float(second)).look(1)

    news.at(32.0).take(1, 0)


def test_a_waiter_that_leaves_a_dead_holders_slot_alone_is_seen() -> None:
    """It has watched for one and a half leases, and looks once more."""
    news = waiting()

    with broken(DEAD):
        for second in range(1, 60, 5):
            news.at(float(second)).look(1)


# --- what the store is asked -----------------------------------------------------------------


def easy(news: News, *, at_s: float, cost: int) -> None:
    """Let a single call succeed at once."""
    news.at(at_s).begin(2)
    if cost:
        news.read(2)
    news.answer(news.send(2))
    news.end(2, cost=cost)


@pytest.mark.parametrize("later_s", [1.0, 4.9])
def test_a_call_that_costs_one_read_and_then_none_is_silent(later_s: float) -> None:
    """The view serves while it is fresh, and then is read again."""
    news = made()
    easy(news, at_s=10.0, cost=1)
    easy(news, at_s=10.0 + later_s, cost=0)

    easy(news, at_s=10.0 + CONFIG.view_max_age_s, cost=1)


def test_a_call_that_costs_two_questions_is_seen() -> None:
    """All is well, and one read says so."""
    news = made()

    with broken(CHEAP):
        easy(news, at_s=10.0, cost=2)


def test_a_read_under_a_fresh_view_is_seen() -> None:
    """It says nothing that is not known."""
    news = made()
    easy(news, at_s=10.0, cost=1)

    with broken(CHEAP):
        easy(news, at_s=12.0, cost=1)


def test_a_lost_claim_is_no_right_that_a_call_needs() -> None:
    """Its answer was lost, another has the slot, and a closed circuit asks for none."""
    news = made()
    news.begin(0, "single")
    news.take(0, 0)
    news.at(LEASE_S).begin(1, "collective")
    news.take(1, 0)

    news.at(LEASE_S + 1.0).send(0)
