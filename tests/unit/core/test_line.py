# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A waiter comes when it is its turn, looks seldom before, and is never kept from a free slot."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core import line
from lightning_resilience.core.line import Queue
from lightning_resilience.core.records import SlotRecord
from lightning_resilience.core.slots import Slot


LEASE_S = 30.0
SLOTS = 16
GUESS_S = 0.05
"""A call takes so long as far as is known before any was timed."""

draws = st.floats(0.0, 1.0, exclude_max=True)
paces = st.none() | st.floats(1e-6, 1e6)


def queue(**fields: Any) -> Queue:
    """What one in front of full slots knows after its first look: a call takes a second."""
    return Queue(
        **{
            "ahead": 0,
            "limit": SLOTS,
            "slots": SLOTS,
            "is_free": False,
            "pace_s": 1.0,
            "turn": 100,
            "since_s": 0.0,
            "reached": 100,
            "moved_at_s": 0.0,
            **fields,
        }
    )


@st.composite
def queues(draw: st.DrawFn) -> Queue:
    """Whatever a waiter may know."""
    slots = draw(st.integers(1, 1024))
    return queue(
        ahead=draw(st.integers(0, 2**53)),
        slots=slots,
        limit=draw(st.integers(1, slots)),
        is_free=draw(st.booleans()),
        is_full=draw(st.booleans()),
        pace_s=draw(paces),
        per_ticket_s=draw(st.none() | st.floats(0.0, 1e9)),
        looks=draw(st.integers(0, 10**30)),
    )


def read(turn: int, *, slots: int = SLOTS, took_s: float = 1.0) -> list[Slot]:
    """Slots as they are read when the line has come to a ticket."""
    record = SlotRecord(turn=turn, took_s=took_s, writer="w")
    return [Slot(index=index, raw=b"r", record=record) for index in range(slots)]


def may_try(
    known: Queue, *, has_waited: bool, now_s: float, took_s: float = 0.0, is_last: bool = False
) -> bool:
    """Whether one tries after a look that has taken so long."""
    return line.may_try(
        known,
        has_waited=has_waited,
        is_last_chance=is_last,
        looked_at_s=now_s - took_s,
        now_s=now_s,
    )


def looked(
    *looks: tuple[float, int], ticket: int | None = 201, limit: int = SLOTS, is_free: bool = True
) -> Queue:
    """What is known after looks: when, and how far the line had come."""
    known: Queue | None = None
    for now_s, turn in looks:
        known = line.look_on(
            known, read(turn), ticket=ticket, limit=limit, is_free=is_free, now_s=now_s
        )
    assert known is not None
    return known


def wait_s(*, now_s: float = 0.0, draw: float = 0.5, **fields: Any) -> float:
    """How long the next look is away."""
    return line.next_look_s(queue(**fields), now_s=now_s, lease_s=LEASE_S, draw=draw)


# --- what a look tells -----------------------------------------------------------------------


def test_the_first_look_tells_the_place_and_the_pace() -> None:
    """How many stand before, what calls take, and from where on the line will be measured."""
    known = looked((7.0, 100), is_free=False)

    assert known == queue(ahead=100, since_s=7.0, moved_at_s=7.0)


def test_a_place_is_never_among_none() -> None:
    """With a limit of nothing, as of a circuit that has just opened, the sums are still defined."""
    assert looked((0.0, 100), limit=0).limit == 1


@pytest.mark.parametrize(("passed", "per_ticket_s"), [(15, None), (16, 0.25), (40, 0.1)])
def test_a_line_is_measured_once_all_slots_have_moved(
    passed: int, per_ticket_s: float | None
) -> None:
    """Time by tickets since the first look; fewer tickets than slots say nothing yet."""
    known = looked((10.0, 100), (14.0, 100 + passed))

    assert known.per_ticket_s == per_ticket_s
    assert (known.turn, known.since_s) == (100, 10.0)
    assert (known.reached, known.moved_at_s) == (100 + passed, 14.0)
    assert known.ahead == 100 - passed


def test_a_line_is_measured_over_all_looks() -> None:
    """The longer one has watched, the better is the measure."""
    assert looked((0.0, 100), (1.0, 120), (4.0, 140)).per_ticket_s == 0.1


def test_what_a_ramp_lets_in_measures_nothing() -> None:
    """It lets in ever more, so that what has passed says nothing about what follows."""
    known = looked((0.0, 100), (9.0, 140), limit=SLOTS - 1)

    assert known.per_ticket_s is None
    assert (known.turn, known.since_s) == (140, 9.0)


def test_a_ramp_in_which_nothing_moves_is_watched_all_the_same() -> None:
    """Who is next may be dead while it lasts, too."""
    assert looked((0.0, 100), (9.0, 100), limit=1).since_s == 0.0


def test_a_line_that_goes_back_is_another_one() -> None:
    """A store that came back empty begins anew: nothing of before is used."""
    known = looked((0.0, 100), (1.0, 140), (9.0, 5))

    assert known.per_ticket_s is None
    assert (known.turn, known.since_s, known.reached, known.moved_at_s) == (5, 9.0, 5, 9.0)


def test_looks_in_vain_are_counted() -> None:
    """The first is none; each after it is one, whether or not the line has moved."""
    assert [
        looked(*((float(at), turn) for at, turn in enumerate(turns))).looks
        for turns in ([100], [100, 100], [100, 100, 140], [100, 5, 5, 5])
    ] == [0, 1, 2, 3]


def test_the_first_pace_that_is_known_ends_the_guessing() -> None:
    """Looks count up, and anew from none at all once calls are timed, or are no longer."""
    assert line.count_look(4, before_s=None, now_s=None) == 5
    assert line.count_look(4, before_s=0.1, now_s=9.0) == 5
    assert line.count_look(4, before_s=None, now_s=0.1) == 0
    assert line.count_look(4, before_s=0.1, now_s=None) == 0


def test_a_ticket_that_was_drawn_later_sets_the_place() -> None:
    """It stands behind where the line was; one whose answer was lost does not keep its owner."""
    known = queue(ahead=0)

    assert line.with_ticket(known, 111, turn=100) == replace(known, ahead=10)
    assert line.with_ticket(known, 90, turn=100).ahead == 0
    assert line.with_ticket(queue(ahead=5), None, turn=100).ahead == 0


# --- who may try -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "limit", "may"),
    [(0, 1, True), (1, 1, False), (15, 16, True), (16, 16, False), (3, 4, True), (4, 4, False)],
)
def test_who_has_just_come_leaves_a_slot_to_those_whose_turn_it_is(
    ahead: int,
    limit: int,
    may: bool,  # noqa: FBT001 - data
) -> None:
    """Only the first ``limit`` in line try at their first look, free slot or not."""
    for is_free in (True, False):
        known = queue(ahead=ahead, limit=limit, is_free=is_free)
        assert may_try(known, has_waited=False, now_s=1e9) is may


@pytest.mark.parametrize(
    ("ahead", "slots", "may"),
    [(23, 16, True), (24, 16, False), (1, 1, True), (2, 1, False), (2, 2, True), (3, 2, False)],
)
@pytest.mark.parametrize("limit", [1, 16])
def test_who_has_waited_tries_a_little_before_its_turn(
    ahead: int,
    slots: int,
    may: bool,  # noqa: FBT001 - data
    limit: int,
) -> None:
    """One and a half times as many as there are slots stand at the door, whatever the limit."""
    known = queue(ahead=ahead, slots=slots, limit=limit, is_free=True, looks=1)

    assert may_try(known, has_waited=True, now_s=1.0) is may


@pytest.mark.parametrize(("pace_s", "still_s"), [(1.0, 4.0), (20.0, 80.0), (None, 4 * GUESS_S)])
def test_a_line_that_stands_still_bars_no_free_slot(pace_s: float | None, still_s: float) -> None:
    """Where nobody has come for a slot in the time of four calls, whoever waits takes it."""
    known = queue(ahead=10**9, is_free=True, pace_s=pace_s, looks=3)

    for now_s, may in ((still_s * 0.999, False), (still_s, True)):
        assert may_try(known, has_waited=True, now_s=now_s) is may
        assert not may_try(replace(known, is_free=False), has_waited=True, now_s=now_s)
        assert not may_try(known, has_waited=False, now_s=now_s)


@pytest.mark.parametrize(("pace_s", "stale_s"), [(1.0, 1.0), (None, GUESS_S)])
def test_a_look_that_took_as_long_as_a_call_claims_nothing(
    pace_s: float | None, stale_s: float
) -> None:
    """So many have asked the store meanwhile that what was free is taken: first the ticket."""
    known = queue(is_free=True, pace_s=pace_s)

    assert may_try(known, has_waited=False, now_s=64.0, took_s=stale_s * 0.99)
    assert not may_try(known, has_waited=False, now_s=64.0, took_s=stale_s * 1.01)


def test_who_has_no_time_to_wait_claims_after_a_slow_look_as_well() -> None:
    """Nothing else is left to it; and whoever has waited comes in turn, however slow the store."""
    known = queue(is_free=True)

    assert may_try(known, has_waited=False, now_s=64.0, took_s=9.0, is_last=True)
    assert may_try(known, has_waited=True, now_s=64.0, took_s=9.0)


def test_a_line_that_moves_is_not_overtaken() -> None:
    """However long ago the first look was, and though a slot is free at this one."""
    looks = [(float(second), 100 + 16 * second) for second in range(50)]
    known = looked(*looks, ticket=10**6)

    assert not may_try(known, has_waited=True, now_s=49.0)


@pytest.mark.parametrize("moved", [16, 80, 10**5])
@pytest.mark.parametrize("between", [(), (2.0,), (1.5, 2.5, 3.5, 4.5)])
def test_a_line_that_stops_bars_no_free_slot_however_it_moved_before(
    moved: int, between: tuple[float, ...]
) -> None:
    """Those who are next may have died together, long after the line was measured."""
    before = [(0.0, 100), *((at_s, 100 + moved) for at_s in (1.0, *between))]

    for now_s, may in ((4.9, False), (5.0, True), (400.0, True)):
        known = looked(*before, (now_s, 100 + moved), ticket=10**6)
        assert may_try(known, has_waited=True, now_s=now_s) is may


@pytest.mark.parametrize("moved", [0, 1, 5, 15])
def test_a_line_that_has_hardly_moved_stands_still(moved: int) -> None:
    """Fewer tickets in the time of four calls than there are slots: that is no line of living."""
    known = looked((0.0, 100), (1.0, 100 + moved), (4.0, 100 + moved), ticket=10**6)

    assert may_try(known, has_waited=True, now_s=4.0)


def test_a_line_that_moves_on_after_it_stood_still_is_measured_anew() -> None:
    """From where and since when it stood, or the pause would count as its pace."""
    known = looked((0.0, 100), (1.0, 140), (101.0, 140), (103.0, 180))

    assert (known.turn, known.since_s) == (140, 1.0)
    assert known.per_ticket_s == 102.0 / 40
    assert looked((0.0, 100), (1.0, 140), (101.0, 140)).moved_at_s == 1.0
    assert line.queue_s(known) == pytest.approx(20 * 1.15 / 16)


@given(
    turns=st.lists(st.integers(0, 10**6), max_size=12),
    ticket=st.integers(1, 10**9),
    limit=st.integers(0, 64),
    slots=st.integers(1, 64),
    pace_s=st.floats(0.0, 1e3),
    lease_s=st.floats(0.1, 1e3),
    draw=draws,
)
def test_whoever_waits_at_a_free_slot_gets_it(
    turns: list[int],
    ticket: int,
    limit: int,
    slots: int,
    pace_s: float,
    lease_s: float,
    draw: float,
) -> None:
    """Liveness: whatever was seen before, where nothing moves any more it may try after few looks.

    Nobody else comes, and a slot is to be had at each look; the looks are those of the waiter.
    """
    known: Queue | None = None
    now_s = 0.0
    for turn in turns:
        known = line.look_on(
            known,
            read(turn, slots=slots, took_s=pace_s),
            ticket=ticket,
            limit=limit,
            is_free=True,
            now_s=now_s,
        )
        now_s += line.next_look_s(known, now_s=now_s, lease_s=lease_s, draw=draw)
    left = 40
    while known is None or not may_try(known, has_waited=True, now_s=now_s):
        left -= 1
        assert left
        known = line.look_on(
            known,
            read(turns[-1] if turns else 7, slots=slots, took_s=pace_s),
            ticket=ticket,
            limit=limit,
            is_free=True,
            now_s=now_s,
        )
        now_s += line.next_look_s(known, now_s=now_s, lease_s=lease_s, draw=draw)


# --- how long the queue takes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "limit", "calls"),
    [
        (0, 16, 0.0),
        (8, 16, 0.5),
        (32, 16, 2.0),
        # One, two, four and eight are let in before all sixteen are.
        (0, 1, 0.0),
        (1, 1, 1.0),
        (2, 1, 1.5),
        (3, 1, 2.0),
        (15, 1, 4.0),
        (31, 1, 5.0),
        (8, 8, 1.0),
        (7, 8, 7 / 8),
        (24, 8, 2.0),
        (17, 9, 1.5),
    ],
)
def test_a_queue_takes_the_ramp_and_then_the_slots(ahead: int, limit: int, calls: float) -> None:
    """By the pace, as long as the line has not been measured."""
    assert line.queue_s(queue(ahead=ahead, limit=limit, pace_s=3.0)) == pytest.approx(3.0 * calls)
    assert line.queue_s(queue(ahead=ahead, limit=limit, pace_s=None)) == pytest.approx(
        GUESS_S * calls
    )


@pytest.mark.parametrize(
    ("per_ticket_s", "expected_s"), [(0.0, 0.0), (0.01, 0.4), (0.05, 2.0), (1.0, 40 * 1.15 / 16)]
)
def test_a_measured_queue_takes_what_it_took_but_not_much_longer_than_it_should(
    per_ticket_s: float, expected_s: float
) -> None:
    """What has held it up may be over; at more than 1.15 of the ideal nobody would find out."""
    known = queue(ahead=40, per_ticket_s=per_ticket_s)

    assert line.queue_s(known) == pytest.approx(expected_s)


def test_a_slow_line_before_full_slots_is_believed_further() -> None:
    """Nobody is missing there: some slots are held by who waits for an answer that was lost."""
    known = queue(ahead=40, per_ticket_s=1.0, is_full=True)

    assert line.queue_s(known) == pytest.approx(40 * 1.3 / 16)


@pytest.mark.parametrize(
    ("slots", "free", "is_full"),
    [(16, 0, True), (16, 1, True), (16, 2, False), (4, 0, True), (4, 1, False), (64, 4, True)],
)
def test_slots_are_full_where_one_in_sixteen_at_most_is_free(
    slots: int,
    free: int,
    is_full: bool,  # noqa: FBT001 - data
) -> None:
    """One is always being given back."""
    held = SlotRecord(turn=9, holder="h", writer="h")
    cells = [
        replace(cell, record=cell.record if cell.index < free else held)
        for cell in read(9, slots=slots)
    ]

    seen = line.look_on(None, cells, ticket=30, limit=slots, is_free=bool(free), now_s=1.0)

    assert seen.is_full is is_full


@given(known=queues())
def test_a_measured_queue_is_bounded_by_the_ideal(known: Queue) -> None:
    """Finite, not negative, and at most 1.3 of what the pace says; else the ramp comes on top."""
    found = line.queue_s(known)

    pace = GUESS_S if known.pace_s is None else known.pace_s
    ideal_s = pace * known.ahead / known.slots
    ramp_s = pace * math.ceil(math.log2(known.slots))
    slowest = 1.3 if known.is_full else 1.15
    most_s = slowest * ideal_s if known.per_ticket_s is not None else ideal_s + ramp_s
    assert math.isfinite(found)
    assert 0 <= found <= most_s * (1 + 1e-9)


@given(known=queues(), more=st.integers(1, 1000))
def test_who_stands_further_back_waits_no_shorter(known: Queue, more: int) -> None:
    """The estimate grows with the place."""
    further = replace(known, ahead=known.ahead + more)

    assert line.queue_s(further) >= line.queue_s(known) * (1 - 1e-9)


# --- when to look ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "expected_s"), [(0.0, 4.0 * 5 - 0.6), (0.5, 4.0 * 5 - 1.2), (0.999, 4.0 * 5 - 1.798)]
)
def test_whoever_is_woken_comes_a_little_before_its_turn(draw: float, expected_s: float) -> None:
    """Three tenths of a call early on average, drawn apart by as much."""
    known = queue(ahead=31, limit=1, pace_s=4.0, is_free=True)

    assert line.first_look_s(known, draw=draw) == pytest.approx(expected_s, abs=0.01)


@given(known=queues(), draw=draws)
def test_the_first_look_is_never_in_the_past(known: Queue, draw: float) -> None:
    """Who is next comes at once, everybody no later than the queue takes, and all at some time."""
    found = line.first_look_s(known, draw=draw)

    assert math.isfinite(found)
    assert 0 <= found <= line.queue_s(known)
    if not known.ahead:
        assert found == 0


@given(known=queues(), now_s=st.floats(0.0, 1e9), draw=draws)
def test_a_wait_is_finite_and_positive(known: Queue, now_s: float, draw: float) -> None:
    """At most the queue's time or a quarter of a lease, whichever is longer, and never nothing."""
    found = line.next_look_s(known, now_s=now_s, lease_s=LEASE_S, draw=draw)

    assert math.isfinite(found)
    assert 0 < found <= max(line.queue_s(known), LEASE_S / 4)


@given(looks=st.integers(0, 10**30), slots=st.integers(1, 1024), pace=paces, draw=draws)
def test_whoever_is_next_looks_at_least_four_times_per_lease(
    looks: int, slots: int, pace: float | None, draw: float
) -> None:
    """No pace and no number of looks keeps the next in line away for more than a quarter lease."""
    found = wait_s(looks=looks, slots=slots, limit=slots, pace_s=pace, draw=draw)

    assert 0 < found <= LEASE_S / 4


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_whoever_stands_far_back_looks_when_its_turn_should_be(draw: float) -> None:
    """As early as one who was woken; the looks in vain do not matter while the queue is longer."""
    for looks in (0, 3):
        found = wait_s(ahead=320, pace_s=2.0, looks=looks, draw=draw)
        assert found == pytest.approx(40.0 - 2.0 * 0.3 * (0.5 + draw))


@pytest.mark.parametrize(
    ("looks", "growth"),
    [(0, 1.0), (4, 1.0), (5, 1.3), (6, 1.69), (9, 3.71293), (10, 4.0), (12, 4.0)],
)
@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_waits_by_a_known_pace_grow_to_four_times(looks: int, growth: float, draw: float) -> None:
    """1.2 of a call, jittered by half either way; times 1.3 a look from the fifth on, at most 4."""
    expected_s = 1.2 * 0.5 * (0.5 + draw) * growth

    assert wait_s(looks=looks, pace_s=0.5, draw=draw) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("looks", "growth"), [(13, 4 * 1.3), (22, 4 * 1.3**10), (10**6, LEASE_S / 4 / 0.0024)]
)
def test_after_a_dozen_looks_in_vain_waits_grow_on(looks: int, growth: float) -> None:
    """What keeps a waiter from its turn for so long is not the calls whose pace is known."""
    assert wait_s(looks=looks, pace_s=0.002) == pytest.approx(0.0024 * growth)


@pytest.mark.parametrize(
    ("looks", "growth"),
    [(0, 1.0), (1, 1.3), (10, 1.3**10), (17, 1.3**17), (18, 100.0), (10**6, 100.0)],
)
def test_waits_by_a_guess_grow_to_a_hundred_times(looks: int, growth: float) -> None:
    """Where no call has been timed yet, the guess of 50 ms may be far off."""
    assert wait_s(looks=looks, pace_s=None) == pytest.approx(1.2 * GUESS_S * growth)


def test_equal_waits_are_drawn_apart() -> None:
    """Two waiters with the same place and pace come at different times."""
    for ahead in (0, 40):
        assert wait_s(ahead=ahead, draw=0.1) != wait_s(ahead=ahead, draw=0.9)


def test_a_free_slot_is_looked_at_again_soon_however_long_the_line() -> None:
    """Those before may be no more: a thousand dead tickets cost a few looks, not hours."""
    known: dict[str, Any] = {"ahead": 1022, "pace_s": 10.0, "is_free": True}

    assert wait_s(**known) == LEASE_S / 4 * 10
    assert wait_s(**known, looks=1, now_s=40.0) == LEASE_S / 4 * 10
    assert wait_s(**known, looks=1, now_s=39.9) > 600
    assert wait_s(**{**known, "is_free": False}) > 600
    assert wait_s(**known, per_ticket_s=1.0) > 600


def test_the_longer_the_line_the_later_the_look_at_a_free_slot() -> None:
    """Where the line is real, those far behind leave the slot to those before them."""
    waits = [wait_s(ahead=ahead, is_free=True) for ahead in (0, 30, 100, 1000)]

    assert waits == sorted(set(waits))
