# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I2 is seen to be kept and broken: votes, made up one by one."""

from __future__ import annotations

import pytest

from lightning_resilience.drill.checks_votes import needed_votes
from tests.drill_news import CONFIG, RESET, News, broken


VOTES = "I2 HonestVotes"


def voted() -> News:
    """A world in which the first host's vote stands."""
    news = News()
    news.create()
    news.fail(0, times=CONFIG.trip_failures)
    news.change(0, votes=("host0",))
    return news


@pytest.mark.parametrize(
    ("hosts", "fraction", "needed"),
    [(1, 0.25, 1), (2, 0.25, 2), (4, 0.25, 2), (32, 0.25, 8), (400, 1.0, 8), (50, 0.14, 7)],
)
def test_a_trip_needs_votes_as_designed(hosts: int, fraction: float, needed: int) -> None:
    """Never one host of several, and never more than eight."""
    assert needed_votes(hosts, fraction=fraction) == needed


def test_votes_that_lead_to_a_trip_are_silent() -> None:
    """Two hosts of four, each after three failures in a row."""
    news = News()

    news.trip()

    assert news.record.state == "open"


def test_a_vote_after_too_few_failures_is_seen() -> None:
    """Two in a row are not three."""
    news = News()
    news.create()
    news.fail(0, times=CONFIG.trip_failures - 1)

    with broken(VOTES):
        news.change(0, votes=("host0",))


def test_a_vote_after_a_success_is_seen() -> None:
    """Failures in a row end with it."""
    news = News()
    news.create()
    news.fail(0, times=CONFIG.trip_failures)
    news.begin(0)
    news.answer(news.send(0))

    with broken(VOTES):
        news.change(0, votes=("host0",))


def test_a_vote_after_one_failure_stands_where_all_have_failed() -> None:
    """As many failures of all as there are slots are enough."""
    news = News()
    news.create()
    for rank in range(4):
        news.fail(rank)

    news.change(0, votes=("host0",))

    assert news.record.votes == ("host0",)


def test_a_vote_for_another_host_is_seen() -> None:
    """Each speaks for its own."""
    news = voted()
    news.fail(1, times=CONFIG.trip_failures)

    with broken(VOTES):
        news.change(1, votes=("host0", "host2"))


def test_enough_votes_without_a_trip_are_seen() -> None:
    """Whoever makes the quorum full opens the circuit."""
    news = voted()
    news.fail(1, times=CONFIG.trip_failures)

    with broken(VOTES):
        news.change(1, votes=("host0", "host1"))


def test_a_trip_by_one_host_of_four_is_seen() -> None:
    """A broken link is its host's own business."""
    news = News()
    news.create()
    news.fail(0, times=CONFIG.trip_failures)

    with broken(VOTES):
        news.move(0, "open", open_s=CONFIG.open_for_s)


def test_a_trip_whose_last_vote_is_made_up_is_seen() -> None:
    """Also whoever opens the circuit must have failed."""
    news = voted()

    with broken(VOTES):
        news.move(1, "open", open_s=CONFIG.open_for_s)


def test_a_vote_is_withdrawn_after_a_success() -> None:
    """By its host, whose latest call has succeeded."""
    news = voted()
    news.begin(0)
    news.answer(news.send(0))

    news.change(0, votes=())

    assert news.record.votes == ()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_vote_that_is_taken_away_without_reason_is_seen(rank: int) -> None:
    """Not by its host that still fails, nor by another that does well."""
    news = voted()
    if rank:
        news.begin(1)
        news.answer(news.send(1))

    with broken(VOTES):
        news.at(60.0).change(rank, votes=())


def test_a_vote_lapses_after_its_window() -> None:
    """Whoever has seen it for that long drops it."""
    news = voted()

    news.at(CONFIG.window_s).change(1, votes=())

    assert news.record.votes == ()


def test_a_new_incarnation_clears_all_votes() -> None:
    """Its first rank does, before it does anything else."""
    news = voted()
    news.ranks[0].operation = None

    news.change(0, votes=())

    assert news.record.votes == ()


def test_a_vote_that_is_seen_for_too_long_is_seen_here_too() -> None:
    """A process that goes on with it in operation after operation does not drop old votes."""
    news = voted()
    news.read(1)
    with broken(VOTES):
        for turn in range(3):
            news.at(CONFIG.window_s + turn + 1.0).begin(1)
            news.read(1)


def test_whoever_fails_again_and_again_votes() -> None:
    """After so many failures in a row it does not come again without its host's vote."""
    news = News()
    news.at(1.0).create()
    for turn in range(CONFIG.trip_failures):
        news.at(2.0 + turn).begin(0)
        news.answer(news.send(0), RESET)
    news.begin(0)

    with broken(VOTES):
        news.at(10.0).send(0)


def test_whoever_succeeds_withdraws() -> None:
    """A vote that its own caster leaves standing would count with the next host's."""
    news = voted()
    news.at(5.0).begin(0)
    news.answer(news.send(0))

    with broken(VOTES):
        news.end(0)


def test_failures_alone_call_for_no_vote() -> None:
    """Nobody is told of them."""
    news = News()
    news.at(1.0).create()
    own = news.go_alone(0)
    for turn in range(CONFIG.trip_failures):
        news.at(2.0 + turn).begin(0)
        news.answer(news.send(0), RESET)
    news.ranks[0].circuit = own
    news.begin(0)

    news.at(10.0).send(0)
