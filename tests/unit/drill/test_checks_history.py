# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I2 is seen to be kept and broken: writes of the breaker's record, made up one by one."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_resilience.core.records import Transition
from tests.drill_news import BREAKER, CONFIG, News, broken


HISTORY = "I2 OneHistory"


def recovering(**options: Any) -> News:
    """A circuit that recovers after an outage, at limit 1."""
    news = News(**options)
    news.trip()
    news.claim()
    news.answer(news.send(0, "probe"))
    news.move(0, "recovering")
    return news


def test_a_whole_story_is_silent() -> None:
    """Trip, failed probe, probe, ramp with a failure in it, and closed again."""
    news = News()
    news.trip()
    news.claim()
    news.answer(news.send(0, "probe"), ConnectionResetError())
    news.move(0, "open", open_s=20.0)
    news.claim(1)
    news.answer(news.send(1, "probe"))
    news.move(1, "recovering")
    for limit, failures, error in ((2, 0, None), (1, 1, ConnectionResetError()), (2, 1, None)):
        news.take(0, 0)
        news.answer(news.send(0), error)
        news.slot(0, 0, holder="", last="ok" if error is None else "failed", generation=1)
        news.move(0, "recovering", limit=limit, failures=failures)
    news.take(0, 0)
    news.answer(news.send(0))
    news.move(0, "closed", open_s=CONFIG.open_for_s, failures=0)

    assert news.record.epoch == 10


@pytest.mark.parametrize(
    ("state", "changes"),
    [
        ("recovering", {}),
        ("closed", {}),
        ("half_open", {"epoch": 4}),
        ("half_open", {"generation": 0}),
        ("half_open", {"generation": 2}),
        ("half_open", {"votes": ("host3",)}),
        ("half_open", {"holder": ""}),
        ("half_open", {"limit": 1}),
        ("half_open", {"open_s": 20.0}),
        ("half_open", {"history": ()}),
        ("half_open", {"history": (Transition(epoch=3, state="half_open", reason=""),)}),
        ("half_open", {"store_id": "local"}),
        ("half_open", {"writer": "r3i1.9"}),
    ],
    ids=str,
)
def test_a_step_that_is_not_right_is_seen(state: str, changes: dict[str, Any]) -> None:
    """From open leads one way, with one epoch, one generation and one history."""
    news = News()
    news.trip()

    with broken(HISTORY):
        news.at(60.0).move(0, state, **changes)


@pytest.mark.parametrize(
    ("state", "changes"),
    [
        ("recovering", {"limit": 4}),
        ("recovering", {"limit": 3}),
        ("recovering", {"limit": 2, "failures": 1}),
        ("closed", {"open_s": CONFIG.open_for_s}),
        ("open", {"open_s": CONFIG.open_for_s}),
    ],
    ids=str,
)
def test_a_ramp_that_is_not_right_is_seen(state: str, changes: dict[str, Any]) -> None:
    """The limit doubles, and a failure where nothing is left to halve doubles the open wait."""
    news = recovering()
    news.take(0, 0)
    news.answer(news.send(0))

    with broken(HISTORY):
        news.move(0, state, **changes)


def test_the_same_epoch_takes_votes_only() -> None:
    """A denied claim, a beat, or another holder may not write the record."""
    news = News()
    news.trip()
    news.claim()

    with broken(HISTORY):
        news.change(1, holder=news.ranks[1].dice.nonce())


def test_a_writer_signs_once() -> None:
    """Two writes of one nonce could each be taken for the other."""
    news = News()
    news.create()
    news.fail(0, times=3)
    news.change(0, votes=("host0",))
    writer = news.record.writer
    news.begin(0)
    news.answer(news.send(0))

    with broken(HISTORY):
        news.change(0, votes=(), writer=writer)


def test_a_record_is_never_deleted() -> None:
    """A key that is missing means that the store has lost everything."""
    news = News()
    news.create()

    with broken(HISTORY):
        news.write(0, BREAKER, None)


def test_what_does_not_decode_is_seen() -> None:
    """It is a bug of ours wherever it comes from."""
    news = News()
    news.create()

    with broken(HISTORY):
        news.write(0, BREAKER, b"{}")


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 2},
        {"state": "open"},
        {"limit": 1},
        {"votes": ("host0",)},
        {"open_s": 1.0},
        {"store_id": "local"},
    ],
    ids=str,
)
def test_a_first_record_is_closed_and_of_this_store(changes: dict[str, Any]) -> None:
    """Nobody begins anywhere else."""
    with broken(HISTORY):
        News().create(**changes)


def emptied() -> News:
    """A store that has lost a circuit in which a probe was under way, and has a new name."""
    news = News()
    news.trip()
    news.claim()
    news.ranks[3].dice.nonce()
    return news


def rebuilt(news: News, rank: int, **changes: Any) -> None:
    """Let a rank rebuild the record, right but for what is said otherwise."""
    seen = news.record
    news.at(news.now_s + 60.0).empty()
    entry = Transition(epoch=seen.epoch + 1, state="open", reason="rebuilt")
    right = {
        "epoch": entry.epoch,
        "generation": seen.generation,
        "state": "open",
        "limit": 0,
        "open_s": seen.open_s,
        "history": (*seen.history, entry),
    }
    news.create(rank, **{**right, **changes})


def test_a_record_is_rebuilt_one_epoch_later() -> None:
    """The state is the last that was seen, and the probe that was under way is over."""
    news = emptied()

    rebuilt(news, 1)

    assert (news.record.epoch, news.record.state) == (4, "open")


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 3},
        {"epoch": 5},
        {"state": "half_open"},
        {"state": "recovering", "limit": 1},
        {"generation": 2},
        {"holder": "r1i1.1"},
        {"votes": ("host1",)},
        {"history": ()},
    ],
    ids=str,
)
def test_a_record_that_nobody_has_seen_is_no_rebirth(changes: dict[str, Any]) -> None:
    """Neither another epoch nor another state comes out of nothing."""
    with broken(HISTORY):
        rebuilt(emptied(), 1, **changes)


def test_whoever_has_seen_a_record_does_not_begin_anew() -> None:
    """Its epochs would be taken for those of a job that has just begun."""
    news = emptied()
    news.remember(1)
    news.at(60.0).empty()

    with broken(HISTORY):
        news.create(1)


def test_who_has_seen_more_overrules_once() -> None:
    """A record that was reborn from an earlier epoch is replaced by one of a later."""
    news = emptied()
    seen = news.record
    news.at(60.0).empty()
    news.create(3)
    entry = Transition(epoch=seen.epoch + 1, state="open", reason="rebuilt")
    overruling = {
        "epoch": entry.epoch,
        "generation": seen.generation,
        "state": "open",
        "limit": 0,
        "history": (*seen.history, entry),
    }
    news.change(1, **overruling)

    assert news.record.epoch == 4
    with broken(HISTORY):
        news.change(2, **{**overruling, "epoch": 9})


def test_a_store_has_one_name() -> None:
    """It is given once, by somebody who makes it up."""
    news = News()
    news.create()

    with broken(HISTORY):
        news.name_store(1)
