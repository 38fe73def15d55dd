# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I1 and I2 are seen to be kept and broken: probes and results, made up one by one."""

from __future__ import annotations

import pytest

from lightning_resilience.drill.scenario import Clocks
from tests.drill_news import CONFIG, RESET, News, broken


PROBE = "I1 OneProbe"
RESULTS = "I2 FencedResults"


def claimed(rank: int = 0) -> News:
    """A world in which a rank has just claimed the probe."""
    news = News(clocks=Clocks(rate=1.0))
    news.trip()
    news.claim(rank)
    return news


def test_one_probe_for_a_claim_is_silent() -> None:
    """Claim, probe, result; and a take-over after a lease of silence."""
    news = claimed()
    news.crash(0)
    news.claim(1, after_s=CONFIG.probe_lease_s)
    news.answer(news.send(1, "probe"))
    news.move(1, "recovering")

    assert news.record.state == "recovering"


def test_a_claim_before_its_time_is_seen() -> None:
    """The open wait, and the lease, are waited for by the claimer's own clock."""
    news = News()
    news.trip()

    with broken(PROBE):
        news.claim(0, after_s=CONFIG.open_for_s - 0.001)


def test_a_take_over_before_the_lease_is_over_is_seen() -> None:
    """The holder may be at work."""
    news = claimed()

    with broken(PROBE):
        news.claim(1, after_s=CONFIG.probe_lease_s - 0.001)


def test_a_claim_for_somebody_else_is_seen() -> None:
    """The permit is the claimer's own."""
    news = News()
    news.trip()

    with broken(PROBE):
        news.claim(0, holder=news.ranks[1].dice.nonce())


def test_a_second_probe_of_one_claim_is_seen() -> None:
    """One request is all that a claim is for."""
    news = claimed()
    news.answer(news.send(0, "probe"), RESET)

    with broken(PROBE):
        news.send(0, "probe")


def test_a_probe_without_a_claim_is_seen() -> None:
    """Whoever is not the holder does not probe."""
    news = claimed()

    with broken(PROBE):
        news.send(1, "probe")


def test_a_probe_after_the_claim_is_over_is_seen() -> None:
    """It would run beside that of whoever took over."""
    news = claimed()
    news.claim(1, after_s=CONFIG.probe_lease_s)

    with broken(PROBE):
        news.send(0, "probe")


def test_a_probe_that_may_outlast_its_lease_is_seen() -> None:
    """The holder looks at its clock before it sends."""
    news = claimed()

    with broken(PROBE):
        news.at(news.now_s + 1.5).send(0, "probe")


def test_two_probes_in_flight_are_seen() -> None:
    """The first has not been given up, though its time is over."""
    news = claimed()
    news.send(0, "probe")
    news.claim(1, after_s=CONFIG.probe_lease_s)

    with broken(PROBE):
        news.send(1, "probe")


@pytest.mark.parametrize("way", ["paused", "given up"])
def test_a_holder_that_stood_still_adds_one_probe(way: str) -> None:
    """Also one that was given up is nobody's any more."""
    news = claimed()
    first = news.send(0, "probe")
    news.claim(1, after_s=CONFIG.probe_lease_s)
    if way == "paused":
        news.pause(0)
    else:
        first.is_abandoned = True

    news.send(1, "probe")

    assert not first.ended_at_s


def test_alone_a_process_probes_no_oftener_than_its_open_wait() -> None:
    """What it decides alone is not in the store, but its probes are counted all the same."""
    news = News()
    news.create()
    news.go_alone(2)
    news.answer(news.send(2, "probe"), RESET)
    news.at(CONFIG.open_for_s).answer(news.send(2, "probe"), RESET)

    with broken(PROBE):
        news.at(2 * CONFIG.open_for_s - 0.1).send(2, "probe")


def test_alone_all_together_probe_as_one() -> None:
    """Each with a share: where all of them do at once, more come than chance explains."""
    news = News(ranks=64)
    news.create()
    with broken(PROBE):
        for turn in range(100):
            for rank in range(4):
                news.go_alone(rank)
                news.answer(news.send(rank, "probe"), RESET)
            news.at((turn + 1) * CONFIG.open_for_s)


# --- results ---------------------------------------------------------------------------------


def test_only_the_holder_ends_its_epoch() -> None:
    """A result of one process is not another's."""
    news = claimed()
    news.answer(news.send(0, "probe"))

    with broken(RESULTS):
        news.move(1, "recovering")


@pytest.mark.parametrize("answer", ["none", "running", "failed"])
def test_a_success_that_was_none_is_seen(answer: str) -> None:
    """The circuit recovers by an answer that storage has given."""
    news = claimed()
    if answer != "none":
        request = news.send(0, "probe")
        if answer == "failed":
            news.answer(request, RESET)

    with broken(RESULTS):
        news.move(0, "recovering")


def test_a_probe_that_was_answered_has_not_failed() -> None:
    """An open wait doubles for failures only."""
    news = claimed()
    news.answer(news.send(0, "probe"))

    with broken(RESULTS):
        news.move(0, "open", open_s=20.0)


def test_a_probe_that_was_released_says_nothing() -> None:
    """The holder had no time left, and says so."""
    news = claimed()
    news.move(0, "open")

    assert news.record.open_s == CONFIG.open_for_s


def test_a_result_from_before_the_epoch_is_seen() -> None:
    """A call that began before its epoch cannot speak for it."""
    news = News()
    news.create()
    late = news.send(2)
    for rank in (0, 1):
        news.fail(rank, times=CONFIG.trip_failures)
    news.change(0, votes=("host0",))
    news.move(1, "open", open_s=CONFIG.open_for_s)
    news.claim()
    news.answer(news.send(0, "probe"))
    news.move(0, "recovering")
    news.answer(late)

    with broken(RESULTS):
        news.move(2, "recovering", limit=2)


def test_one_result_moves_one_epoch() -> None:
    """A success is told once."""
    news = claimed()
    news.answer(news.send(0, "probe"))
    news.move(0, "recovering")
    news.take(0, 0)
    news.answer(news.send(0))
    news.move(0, "recovering", limit=2)

    with broken(RESULTS):
        news.move(0, "closed", open_s=CONFIG.open_for_s)


def test_a_success_is_no_failure() -> None:
    """A ramp goes down by a call that has failed at storage."""
    news = claimed()
    news.answer(news.send(0, "probe"))
    news.move(0, "recovering")
    news.at(news.now_s + 1.0).take(0, 0)
    news.answer(news.send(0))

    with broken(RESULTS):
        news.move(0, "open", open_s=20.0)
