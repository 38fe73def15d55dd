# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is in a slot is written by one holder, and all slots together say how far the line is."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, strategies as st

from lightning_resilience.core import slots as cells
from lightning_resilience.core.outcome import FailureClass, Outcome
from lightning_resilience.core.records import SlotRecord
from lightning_resilience.core.slots import Slot


def slot(index: int = 0, **fields: Any) -> Slot:
    """A slot that somebody has used; without fields, one that nobody has."""
    if not fields:
        return Slot(index=index, raw=b"", record=None)
    record = SlotRecord(**{"writer": "w", **fields})
    return Slot(index=index, raw=msgspec.json.encode(record), record=record)


def held(index: int = 0, holder: str = "somebody", **fields: Any) -> Slot:
    """A slot that somebody holds."""
    return slot(index, holder=holder, **fields)


def test_an_unused_slot_is_free_and_has_let_in_nobody() -> None:
    """A cell that was never written counts as free, with turn 0."""
    unused, used = slot(), slot(turn=7)

    assert (unused.is_free, unused.turn) == (True, 0)
    assert (used.is_free, used.turn) == (True, 7)
    assert not held().is_free


# --- what is written -------------------------------------------------------------------------


def test_a_claim_names_its_holder_and_keeps_what_the_slot_says() -> None:
    """The nonce is both holder and writer; pace and last result of the slot stay."""
    free = slot(turn=4, took_s=0.3, last="failed")

    record = cells.taken(free, ticket=9, holder="n1")

    assert record == SlotRecord(turn=9, holder="n1", took_s=0.3, last="failed", writer="n1")


@pytest.mark.parametrize(("ticket", "turn"), [(None, 4), (3, 3), (4, 4), (5, 5), (0, 0)])
def test_a_slot_names_the_ticket_that_it_has_let_in_last(ticket: int | None, turn: int) -> None:
    """Also where it is lower than the one before; a ticket that was lost leaves it as it is."""
    assert cells.taken(slot(turn=4), ticket=ticket, holder="n").turn == turn


def test_a_slot_nobody_has_used_can_be_taken() -> None:
    """The first claim makes the record."""
    assert cells.taken(slot(), ticket=None, holder="n") == SlotRecord(holder="n", writer="n")


def test_a_beat_changes_nothing_but_its_write() -> None:
    """The bytes differ, and everything else is the same: that is all that a beat says."""
    before = SlotRecord(turn=3, holder="n1", took_s=0.2, last="ok", writer="n1")

    after = cells.renewed(before, writer="n2")

    assert after == msgspec.structs.replace(before, writer="n2")


@pytest.mark.parametrize(
    ("failure", "took_s", "last"),
    [
        (None, 2.5, "ok"),
        (FailureClass.TRANSIENT, 0.2, "failed"),
        (FailureClass.THROTTLE, 0.2, "failed"),
        (FailureClass.UNKNOWN, 0.2, "failed"),
        (FailureClass.PERMANENT, 0.2, "ok"),
        (FailureClass.AUTH, 0.2, "ok"),
        (FailureClass.CAPACITY, 0.2, "ok"),
        (FailureClass.STALE, 0.2, "ok"),
        (FailureClass.CANCELLED, 0.2, "before"),
    ],
)
@pytest.mark.parametrize("before", ["", "ok", "failed"])
def test_a_freed_slot_says_how_its_call_ended(
    failure: FailureClass | None, took_s: float, last: str, before: str
) -> None:
    """Only a success tells the pace; only what counts for the breaker is a failure there."""
    was = SlotRecord(turn=3, holder="n1", took_s=0.2, last=before, writer="n1")

    free = cells.released(was, Outcome(failure=failure), generation=7, lasted_s=2.5, writer="n2")

    last = before if last == "before" else last
    generation = was.generation if failure is FailureClass.CANCELLED else 7
    assert free == SlotRecord(
        turn=3, holder="", took_s=took_s, last=last, generation=generation, writer="n2"
    )


# --- an outage that shows --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "others", "enough"),
    [
        (4, 0, True),
        (4, 1, False),
        (7, 0, True),
        (7, 1, False),
        (8, 1, True),
        (8, 2, False),
        (15, 1, True),
        (15, 2, False),
        (16, 2, True),
        (16, 3, False),
    ],
)
@pytest.mark.parametrize(
    "other", [slot(0, last="ok"), slot(0), slot(0, last="", turn=1), held(0, last="ok")]
)
def test_all_have_failed_but_for_one_in_eight(
    count: int,
    others: int,
    enough: bool,  # noqa: FBT001 - data
    other: Slot,
) -> None:
    """A success, an unknown end, or no use at all in more of them, and nobody votes at once."""
    slots = [slot(index, last="failed") for index in range(count)]
    slots[1 : 1 + others] = [replace(other, index=index) for index in range(1, 1 + others)]

    assert cells.all_have_failed(slots, own=0, generation=0, at_least=3) is enough


def test_the_own_slot_is_the_callers_failure_whatever_it_says() -> None:
    """The caller still holds it: what it says is how the call before ended."""
    slots = [slot(0, last="ok", holder="me"), *(slot(index, last="failed") for index in (1, 2))]

    assert cells.all_have_failed(slots, own=0, generation=0, at_least=3)
    assert not cells.all_have_failed(slots, own=1, generation=0, at_least=3)


def test_failures_before_the_latest_trip_say_nothing() -> None:
    """The circuit has opened on them once; in a slot that nobody has used since they stay."""
    slots = [slot(index, last="failed", generation=2) for index in range(4)]

    assert cells.all_have_failed(slots, own=0, generation=2, at_least=3)
    assert not cells.all_have_failed(slots, own=0, generation=3, at_least=3)


@pytest.mark.parametrize(("count", "enough"), [(1, False), (2, False), (3, True), (4, True)])
def test_fewer_slots_than_a_trip_takes_are_never_enough(count: int, enough: bool) -> None:  # noqa: FBT001 - data
    """With one slot its one failure must not stand for an outage; the own one counts as one."""
    slots = [slot(index, last="failed") for index in range(count)]

    assert cells.all_have_failed(slots, own=0, generation=0, at_least=3) is enough


# --- how far the line has come ---------------------------------------------------------------


turns_of_slots = st.lists(st.integers(0, 10**9), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("turns", "turn"),
    [
        ([], 0),
        ([7], 7),
        ([3, 9], 9),
        ([1, 2, 3, 4], 4),
        ([1, 2, 3, 4, 5], 4),
        ([5, 4, 3, 2, 1, 0, 0, 0], 4),
        ([*range(16)], 12),
        ([*range(17)], 12),
    ],
)
def test_the_line_has_come_as_far_as_a_quarter_of_the_slots(turns: list[int], turn: int) -> None:
    """Of 16 slots the fourth highest ticket counts; of four and fewer the highest."""
    assert cells.turn_of([slot(index, turn=each) for index, each in enumerate(turns)]) == turn


@given(turns=turns_of_slots, at=st.integers(0, 39), order=st.randoms(use_true_random=False))
def test_one_who_came_early_tells_nobody_that_it_is_their_turn(
    turns: list[int], at: int, order: Any
) -> None:
    """In five slots and more, no single ticket takes the line beyond where the others are."""
    assume(len(turns) > 4)
    at %= len(turns)
    early = [*turns[:at], 10**12, *turns[at + 1 :]]
    order.shuffle(early)

    turn = cells.turn_of([slot(index, turn=each) for index, each in enumerate(early)])

    assert turn <= max(turns)


@given(turns=turns_of_slots)
def test_the_turn_is_the_highest_that_a_quarter_have_reached(turns: list[int]) -> None:
    """A quarter of the slots, rounded up, let in that ticket or a later one, and none higher."""
    turn = cells.turn_of([slot(index, turn=each) for index, each in enumerate(turns)])

    needed = -(-len(turns) // 4)
    assert sum(each >= turn for each in turns) >= needed
    assert all(sum(each >= higher for each in turns) < needed for higher in turns if higher > turn)


def test_the_distance_is_what_is_to_be_let_in_before() -> None:
    """Right after the turn it is one's own; a lost ticket, and one passed over, is always next."""
    assert [cells.distance(ticket, 8) for ticket in (9, 10, 14, 8, 1)] == [0, 1, 5, 0, 0]
    assert cells.distance(None, 8) == 0
    assert cells.distance(3, 0) == 2


@given(
    tickets=st.integers(1, 60),
    gone=st.sets(st.integers(1, 60)),
    slots=st.integers(1, 16),
    order=st.randoms(use_true_random=False),
)
def test_tickets_that_were_given_up_are_passed_over(
    tickets: int, gone: set[int], slots: int, order: Any
) -> None:
    """Once so many have come as are a quarter of the slots, no lower ticket stands before anybody.

    The living come by their tickets, each to the slot that was used the longest time ago.
    """
    used = [slot(index) for index in range(slots)]
    living = [ticket for ticket in range(1, tickets + 1) if ticket not in gone]
    living.sort(key=lambda ticket: ticket + order.uniform(0, 3))

    for count, ticket in enumerate(living):
        record = cells.taken(used[count % slots], ticket=ticket, holder="n")
        used[count % slots] = replace(used[count % slots], record=record)

    quarter = -(-slots // 4)
    assume(len(living) >= quarter)
    assert cells.turn_of(used) >= min(living[-quarter:])
    assert cells.distance(min(living[-quarter:]), cells.turn_of(used)) == 0


# --- how long a call takes -------------------------------------------------------------------


@given(
    took=st.lists(st.none() | st.just(0.0) | st.floats(1e-3, 1e3), max_size=9),
)
def test_the_pace_is_the_median_of_what_the_slots_say(took: list[float | None]) -> None:
    """Slots that have not been used, or have seen no success, say nothing."""
    slots = [
        slot(index) if took_s is None else slot(index, took_s=took_s)
        for index, took_s in enumerate(took)
    ]
    told = [took_s for took_s in took if took_s]

    assert cells.pace_s(slots) == (statistics.median(told) if told else None)
