# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I5 is seen to be kept and broken: writes of slots, made up one by one."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_resilience.drill.scenario import Store
from lightning_resilience.drill.workload import DEPENDENCY
from tests.drill_news import KEYS, RESET, News, broken


CELLS = "I5 SlotCells"
LEASE_S = 30.0


def held(**options: Any) -> News:
    """A world in which the first rank has slot 0, and calls."""
    news = News(**options)
    news.create()
    news.begin(0, "collective")
    news.take(0, 0)
    return news


def test_a_slot_that_is_taken_renewed_and_freed_is_silent() -> None:
    """And then taken by the next."""
    news = held()
    request = news.send(0)
    news.at(5.0).slot(0, 0)
    news.answer(request)
    news.slot(0, 0, holder="", took_s=5.0, last="ok")
    news.begin(1, "collective")

    news.take(1, 0)


def test_a_slot_that_is_created_free_is_silent() -> None:
    """Before everybody comes, somebody makes them."""
    news = News()
    news.create()

    news.slot(2, 3)


@pytest.mark.parametrize(
    "fields", [{"last": "ok"}, {"took_s": 1.0}, {"turn": 3}, {"generation": 1}], ids=str
)
def test_a_slot_that_is_created_with_a_past_is_seen(fields: dict[str, Any]) -> None:
    """Nothing has happened in it."""
    news = News()
    news.create()

    with broken(CELLS):
        news.slot(2, 3, **fields)


def test_two_holders_of_one_slot_are_seen() -> None:
    """Who claims a slot that is held has not looked, or has not compared."""
    news = held()
    news.begin(1, "collective")

    with broken(CELLS):
        news.at(1.0).take(1, 0)


@pytest.mark.parametrize("limit", [0, 1])
def test_a_slot_above_the_limit_is_seen(limit: int) -> None:
    """While the circuit recovers only the first are usable, and none while it is open."""
    news = News()
    news.trip()
    if limit:
        news.claim()
        news.answer(news.send(0, "probe"))
        news.move(0, "recovering")
    news.begin(1, "collective")

    with broken(CELLS):
        news.take(1, limit)


def test_a_slot_that_another_one_frees_is_seen() -> None:
    """Also after it was forgiven, a slot is its holder's."""
    news = held()

    with broken(CELLS):
        news.slot(1, 0, holder="")


def test_a_beat_changes_nothing_else() -> None:
    """It says that its holder lives."""
    news = held()

    with broken(CELLS):
        news.slot(0, 0, turn=9)


def test_a_beat_of_another_one_is_seen() -> None:
    """Nobody keeps another's slot alive."""
    news = held()

    with broken(CELLS):
        news.slot(1, 0)


@pytest.mark.parametrize(
    ("fields", "error"), [({"last": "ok"}, RESET), ({"last": "failed"}, None)], ids=str
)
def test_a_slot_says_how_the_call_has_really_ended(
    fields: dict[str, Any], error: Exception | None
) -> None:
    """Others vote by it."""
    news = held()
    news.answer(news.send(0), error)

    with broken(CELLS):
        news.slot(0, 0, holder="", **fields)


def test_an_instant_in_the_place_of_a_duration_is_seen() -> None:
    """No call took longer than its operation."""
    news = held()
    news.answer(news.at(1.0).send(0))

    with broken(CELLS):
        news.slot(0, 0, holder="", took_s=1001.0, last="ok")


def test_a_dead_holder_is_forgiven_after_a_lease() -> None:
    """Its process is gone."""
    news = held()
    news.send(0)
    news.crash(0)
    news.begin(1, "collective")

    news.at(LEASE_S).take(1, 0)


def test_a_holder_that_is_forgiven_too_early_is_seen() -> None:
    """A lease is a lease by the clock of whoever waits."""
    news = held()
    news.crash(0)

    with broken(CELLS):
        news.at(LEASE_S - 0.001).take(1, 0)


def test_a_holder_that_lives_is_never_forgiven() -> None:
    """Its call runs, nothing stops it, and its beats have been left out."""
    news = held()
    news.send(0)

    with broken(CELLS):
        news.at(LEASE_S + 1.0).take(1, 0)


@pytest.mark.parametrize("reason", ["paused", "cut off", "lossy"])
def test_a_holder_that_cannot_beat_is_forgiven(reason: str) -> None:
    """Nobody can tell it from a dead one."""
    news = held(store=Store(lost_answers=0.01 if reason == "lossy" else 0.0))
    news.send(0)
    if reason == "paused":
        news.at(LEASE_S).pause(0)
    if reason == "cut off":
        news.ranks[0].host.cut_off_until_s = 5.0

    news.at(LEASE_S + 1.0).take(1, 0)


def test_a_slot_is_never_deleted() -> None:
    """Whoever holds it would hold nothing."""
    news = held()

    with broken(CELLS):
        news.write(0, KEYS.slot(DEPENDENCY, 0), None)


def test_a_ticket_that_nobody_has_drawn_is_seen() -> None:
    """Tickets come from one counter."""
    news = News()
    news.create()
    news.write(0, KEYS.turn(DEPENDENCY), b"2")
    news.take(0, 0, turn=2)

    with broken(CELLS):
        news.take(1, 1, turn=3)
