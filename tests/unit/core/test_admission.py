# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Slots are leases, tickets are hints, and what a freed slot says is what others go by."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core import admission
from lightning_resilience.core.admission import AdmissionConfig, Slot
from lightning_resilience.core.breaker import BreakerConfig, initial
from lightning_resilience.core.lease import Silence
from lightning_resilience.core.outcome import FailureClass, Outcome
from lightning_resilience.core.records import SlotRecord
from lightning_resilience.errors import ConfigError


if TYPE_CHECKING:
    from lightning_resilience.core.records import BreakerRecord


LEASE_S = 30.0

draws = st.floats(0.0, 1.0, exclude_max=True)
paces = st.none() | st.floats(1e-6, 1e6)


def slot(index: int = 0, **fields: Any) -> Slot:
    """A slot that somebody has used; without fields, one that nobody has."""
    if not fields:
        return Slot(index=index, raw=b"", record=None)
    record = SlotRecord(**{"writer": "w", **fields})
    return Slot(index=index, raw=msgspec.json.encode(record), record=record)


def held(index: int = 0, holder: str = "somebody", **fields: Any) -> Slot:
    """A slot that somebody holds."""
    return slot(index, holder=holder, **fields)


def unheard(*slots: Slot, for_s: float) -> dict[int, Silence]:
    """These slots as they are have been watched for so long."""
    return {
        each.index: Silence(version=(each.raw.decode(),), watched_s=for_s, looked_at_s=0.0)
        for each in slots
    }


def chosen(*slots: Slot, **options: Any) -> int | None:
    """Number of the slot that a waiter claims."""
    found = admission.choose(
        slots,
        **{
            "limit": len(slots),
            "silences": {},
            "lease_s": LEASE_S,
            "draw": 0.0,
            **options,
        },
    )
    return None if found is None else found.index


def breaker_in(state: str) -> BreakerRecord:
    """A breaker's record in a state."""
    record = initial(BreakerConfig(), store_id="store", writer="w")
    return msgspec.structs.replace(record, state=state)


# --- options ---------------------------------------------------------------------------------


def test_the_defaults_are_those_of_the_table() -> None:
    """A holder beats every 5 s, and is taken for dead after 30 s of silence."""
    assert AdmissionConfig() == AdmissionConfig(slot_lease_s=30.0, beat_every_s=5.0)


@pytest.mark.parametrize("name", ["slot_lease_s", "beat_every_s"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "5", None])
def test_what_is_no_duration_is_refused(name: str, value: Any) -> None:
    """Lease and beat are finite, positive numbers of seconds; the text names option and value."""
    with pytest.raises(ConfigError, match=rf"{name}=.*finite number of seconds > 0") as caught:
        AdmissionConfig(**{name: value})

    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("lease_s", "beat_s", "allowed"),
    [(30.0, 9.99, True), (30.0, 10.0, False), (30.0, 30.0, False), (0.31, 0.1, True)],
)
def test_two_late_beats_fit_into_the_lease(lease_s: float, beat_s: float, allowed: bool) -> None:  # noqa: FBT001 - data
    """Three beats are less than the lease, or one late beat would cost a living holder its slot."""
    if allowed:
        assert AdmissionConfig(slot_lease_s=lease_s, beat_every_s=beat_s).beat_every_s == beat_s
        return
    with pytest.raises(ConfigError) as caught:
        AdmissionConfig(slot_lease_s=lease_s, beat_every_s=beat_s)

    text = str(caught.value)
    assert f"3 · (beat_every_s={beat_s:g})={3 * beat_s:g}" in text
    assert "slot_lease_s" in text
    assert "30" in text


# --- who passes ------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["closed", "recovering"])
@pytest.mark.parametrize("collective", [True, False])
def test_only_a_single_caller_at_a_closed_circuit_needs_no_slot(
    state: str,
    collective: bool,  # noqa: FBT001 - data
) -> None:
    """A collective call always takes a slot; any call does while the circuit recovers."""
    needed = admission.needs_slot(breaker_in(state), collective=collective)

    assert needed is (collective or state == "recovering")


@pytest.mark.parametrize(
    ("state", "when_open", "waits"),
    [
        ("closed", "wait", True),
        ("closed", "raise", True),
        ("recovering", "wait", True),
        ("recovering", "raise", False),
    ],
)
def test_a_slot_at_a_closed_circuit_is_only_a_queue(
    state: str,
    when_open: str,
    waits: bool,  # noqa: FBT001 - data
) -> None:
    """Who does not wait for an ill dependency waits for a slot all the same while it is well."""
    assert (
        admission.waits_for_slot(breaker_in(state), collective=False, when_open=when_open) is waits
    )
    assert admission.waits_for_slot(breaker_in(state), collective=True, when_open=when_open)


@pytest.mark.parametrize("state", ["closed", "recovering"])
@pytest.mark.parametrize("collective", [True, False])
@pytest.mark.parametrize("when_open", ["wait", "raise"])
def test_who_needs_no_slot_comes_back_over_a_spread(
    state: str,
    collective: bool,  # noqa: FBT001 - data
    when_open: str,
) -> None:
    """The spread is for those that no ticket tells when to come, and that have waited at all."""
    spread = admission.spreads(breaker_in(state), collective=collective, when_open=when_open)

    assert spread is (state == "closed" and not collective and when_open == "wait")


@pytest.mark.parametrize("state", ["closed", "open", "recovering"])
@pytest.mark.parametrize("may_wait", [True, False])
def test_only_who_can_wait_lines_up_when_everybody_comes(
    state: str,
    may_wait: bool,  # noqa: FBT001 - data
) -> None:
    """A ticket comes first while the circuit recovers; of one that cannot wait it would be void."""
    first = admission.lines_up_first(breaker_in(state), may_wait=may_wait)

    assert first is (may_wait and state == "recovering")
    assert not admission.lines_up_first(None, may_wait=True)


# --- what is watched -------------------------------------------------------------------------


def watched(*looks: tuple[float, float, float], changes: tuple[int, ...] = ()) -> float:
    """Silence of one slot after looks (sent, answered, meant to look away); some find a change."""
    silences: dict[int, Silence] = {}
    version = 0
    for number, (sent_at_s, seen_at_s, away_s) in enumerate(looks):
        version += number in changes
        silences = admission.heard(
            silences,
            [held(3, took_s=float(version))],
            sent_at_s=sent_at_s,
            seen_at_s=seen_at_s,
            away_s=away_s,
            lease_s=LEASE_S,
        )
    return silences[3].watched_s


def test_only_time_that_was_watched_counts_as_silence() -> None:
    """From one answer to the next question, and no more of it than was meant to be looked away."""
    assert watched((0.0, 0.0, 0.0)) == 0.0
    assert watched((0.0, 0.0, 0.0), (5.0, 5.0, 5.0)) == 5.0
    # The store took 20 s to answer.
    assert watched((0.0, 0.0, 0.0), (5.0, 25.0, 5.0), (30.0, 30.0, 5.0)) == 10.0
    # This process was stopped for an hour.
    assert watched((0.0, 0.0, 0.0), (3600.0, 3600.0, 5.0)) == LEASE_S / 4
    # It meant to look away for 12 s, or for minutes: half a lease counts of that.
    assert watched((0.0, 0.0, 0.0), (12.0, 12.0, 12.0)) == 12.0
    assert watched((0.0, 0.0, 0.0), (150.0, 150.0, 150.0)) == LEASE_S / 2


def test_a_change_ends_the_silence() -> None:
    """A beat, or another holder: what was watched before says nothing any more."""
    looks = [(5.0 * number, 5.0 * number, 5.0) for number in range(6)]

    assert watched(*looks) == 25.0
    assert watched(*looks, changes=(3,)) == 10.0
    assert watched(*looks, changes=(5,)) == 0.0


# --- which slot ------------------------------------------------------------------------------


def test_an_unused_slot_is_free_and_has_let_in_nobody() -> None:
    """A cell that was never written counts as free, with turn 0."""
    unused, used = slot(), slot(turn=7)

    assert (unused.is_free, unused.turn) == (True, 0)
    assert (used.is_free, used.turn) == (True, 7)
    assert not held().is_free


def test_a_free_slot_below_the_limit_is_chosen() -> None:
    """Of a held and a free one the free one is taken; above the limit none is."""
    assert chosen(held(0), slot(1)) == 1
    assert chosen(held(0), slot(1), limit=1) is None
    assert chosen(slot(0), limit=0) is None


def test_a_silent_holder_gives_way_only_after_a_whole_lease() -> None:
    """A held slot is had once this waiter has seen its bytes for the lease, not before."""
    for watched_s, index in ((LEASE_S - 0.001, None), (LEASE_S, 0)):
        assert chosen(held(0), silences=unheard(held(0), for_s=watched_s)) == index


def test_the_silence_of_another_holder_is_not_this_ones() -> None:
    """A thread may note an older look after a newer: the slot has a living holder by then."""
    before, now = held(0, took_s=1.0), held(0, took_s=2.0)

    assert chosen(now, silences=unheard(before, for_s=1e9)) is None


def test_a_slot_that_was_never_looked_at_is_not_forgiven() -> None:
    """A newcomer waits a whole lease of its own: what it has not watched it does not claim."""
    assert chosen(held(0), silences={}) is None


def test_a_free_slot_is_preferred_to_a_silent_one() -> None:
    """Nobody is taken for dead while there is room."""
    silences = unheard(held(0), slot(1), for_s=99.0)

    for draw in (0.0, 0.5, 0.999):
        assert chosen(held(0), slot(1), silences=silences, draw=draw) == 1


@given(count=st.integers(1, 1024), draw=draws | st.just(math.nextafter(1.0, 0.0)))
def test_the_draw_chooses_among_all_that_are_free(count: int, draw: float) -> None:
    """Any draw below 1 names one of the free slots, and equal parts of it name each."""
    slots = [slot(index) for index in range(count)]

    index = chosen(*slots, draw=draw)

    assert index is not None
    assert index <= draw * count < index + 1


@st.composite
def _cells(draw: st.DrawFn) -> tuple[list[Slot], dict[int, Silence]]:
    kinds = draw(st.lists(st.sampled_from(["free", "unused", "held"]), max_size=6))
    fields: dict[str, dict[str, Any]] = {"free": {"turn": 1}, "unused": {}, "held": {"holder": "h"}}
    slots = [slot(at, **fields[kind]) for at, kind in enumerate(kinds)]
    known = draw(st.sets(st.sampled_from(range(6))))
    watched = [each for each in slots if each.index in known]
    silences: dict[int, Silence] = {}
    for each in watched:
        silences |= unheard(each, for_s=draw(st.floats(0.0, 2 * LEASE_S)))
    return slots, silences


@given(cells=_cells(), limit=st.integers(0, 8), draw=draws)
def test_what_is_chosen_is_one_of_those_that_may_be(
    cells: tuple[list[Slot], dict[int, Silence]], limit: int, draw: float
) -> None:
    """Compared with a list of candidates written down rule by rule: free ones, else silent ones."""
    slots, silences = cells
    free, silent = set(), set()
    for each in slots:
        if each.index < limit and (each.record is None or each.record.holder == ""):
            free.add(each.index)
        elif each.index < limit:
            watched_s = silences[each.index].watched_s if each.index in silences else 0.0
            silent |= {each.index} if watched_s >= LEASE_S else set()

    index = chosen(*slots, limit=limit, silences=silences, draw=draw)

    candidates = free or silent
    assert index in candidates if candidates else index is None


# --- what is written -------------------------------------------------------------------------


def test_a_claim_names_its_holder_and_keeps_what_the_slot_says() -> None:
    """The nonce is both holder and writer; pace and last result of the slot stay."""
    free = slot(turn=4, took_s=0.3, last="failed")

    record = admission.taken(free, ticket=9, holder="n1")

    assert record == SlotRecord(turn=9, holder="n1", took_s=0.3, last="failed", writer="n1")


@pytest.mark.parametrize(("ticket", "turn"), [(None, 4), (3, 4), (4, 4), (5, 5)])
def test_the_turn_of_a_slot_never_falls(ticket: int | None, turn: int) -> None:
    """It is the highest ticket that was let in; one that was lost leaves it as it is."""
    assert admission.taken(slot(turn=4), ticket=ticket, holder="n").turn == turn


def test_a_slot_nobody_has_used_can_be_taken() -> None:
    """The first claim makes the record."""
    assert admission.taken(slot(), ticket=None, holder="n") == SlotRecord(holder="n", writer="n")


def test_a_beat_changes_nothing_but_its_write() -> None:
    """The bytes differ, and everything else is the same: that is all that a beat says."""
    before = SlotRecord(turn=3, holder="n1", took_s=0.2, last="ok", writer="n1")

    after = admission.renewed(before, writer="n2")

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

    free = admission.released(
        was, Outcome(failure=failure), generation=7, lasted_s=2.5, writer="n2"
    )

    last = before if last == "before" else last
    generation = was.generation if failure is FailureClass.CANCELLED else 7
    assert free == SlotRecord(
        turn=3, holder="", took_s=took_s, last=last, generation=generation, writer="n2"
    )


# --- an outage that shows --------------------------------------------------------------------


def test_all_have_failed_only_where_every_other_slot_says_so() -> None:
    """One success, one slot never used, or one of unknown end is enough not to vote at once."""
    failed = [slot(index, last="failed") for index in range(4)]

    assert admission.all_have_failed(failed, own=0, generation=0, at_least=3)
    for other in (slot(2, last="ok"), slot(2), slot(2, last="", turn=1)):
        assert not admission.all_have_failed(
            [*failed[:2], other, failed[3]], own=0, generation=0, at_least=3
        )


def test_the_own_slot_is_the_callers_failure_whatever_it_says() -> None:
    """The caller still holds it: what it says is how the call before ended."""
    slots = [slot(0, last="ok", holder="me"), *(slot(index, last="failed") for index in (1, 2))]

    assert admission.all_have_failed(slots, own=0, generation=0, at_least=3)
    assert not admission.all_have_failed(slots, own=1, generation=0, at_least=3)


def test_failures_before_the_latest_trip_say_nothing() -> None:
    """The circuit has opened on them once; in a slot that nobody has used since they stay."""
    slots = [slot(index, last="failed", generation=2) for index in range(4)]

    assert admission.all_have_failed(slots, own=0, generation=2, at_least=3)
    assert not admission.all_have_failed(slots, own=0, generation=3, at_least=3)


@pytest.mark.parametrize(("count", "enough"), [(1, False), (2, False), (3, True), (4, True)])
def test_fewer_slots_than_a_trip_takes_are_never_enough(count: int, enough: bool) -> None:  # noqa: FBT001 - data
    """With one slot its one failure must not stand for an outage; the own one counts as one."""
    slots = [slot(index, last="failed") for index in range(count)]

    assert admission.all_have_failed(slots, own=0, generation=0, at_least=3) is enough


# --- when to come ----------------------------------------------------------------------------


def test_the_distance_is_what_is_to_be_let_in_before() -> None:
    """Right after the highest that was let in it is one's turn; a lost ticket is always next."""
    slots = [slot(0, turn=5), held(1, turn=8), slot(2)]

    assert [admission.distance(ticket, slots) for ticket in (9, 10, 14, 8, 1)] == [0, 1, 5, 0, 0]
    assert admission.distance(None, slots) == 0
    assert admission.distance(3, []) == 2


@given(
    tickets=st.integers(1, 40),
    gone=st.sets(st.integers(1, 40)),
    slots=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
)
def test_tickets_that_were_given_up_cost_nothing(
    tickets: int, gone: set[int], slots: int, order: Any
) -> None:
    """However many tickets are abandoned, the last living waiter comes to distance 0.

    The living come by their ticket, a little out of order, each to any slot; afterwards nobody with
    a lower ticket is counted as standing before anybody.
    """
    cells = [slot(index) for index in range(slots)]
    living = [ticket for ticket in range(1, tickets + 1) if ticket not in gone]
    living.sort(key=lambda ticket: ticket + order.uniform(0, 3))
    entered: list[int] = []

    for ticket in living:
        ahead = admission.distance(ticket, cells)
        assert ahead == max(0, ticket - 1 - max(entered, default=0))
        at = order.randrange(slots)
        record = admission.taken(cells[at], ticket=ticket, holder="n")
        cells[at] = replace(cells[at], record=record)
        entered.append(ticket)

    if entered:
        assert admission.distance(max(entered) + 1, cells) == 0


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

    assert admission.pace_s(slots) == (statistics.median(told) if told else None)


def test_the_first_pace_that_is_known_ends_the_guessing() -> None:
    """Looks count up, and anew from none at all once calls are timed, or are no longer."""
    assert admission.count_look(4, before_s=None, now_s=None) == 5
    assert admission.count_look(4, before_s=0.1, now_s=9.0) == 5
    assert admission.count_look(4, before_s=None, now_s=0.1) == 0
    assert admission.count_look(4, before_s=0.1, now_s=None) == 0


def test_who_has_just_come_leaves_a_slot_to_those_whose_turn_it_is() -> None:
    """Only the first ``limit`` in line try at once; who has waited takes whatever is free."""
    assert admission.may_try(0, limit=1, has_waited=False)
    assert admission.may_try(15, limit=16, has_waited=False)
    assert not admission.may_try(1, limit=1, has_waited=False)
    assert not admission.may_try(0, limit=0, has_waited=False)
    assert admission.may_try(10**9, limit=1, has_waited=True)


def wait_s(**options: Any) -> float:
    """How long the next look is away."""
    return admission.next_look_s(
        **{
            "ahead": 0,
            "looks": 0,
            "slots": 16,
            "is_free": False,
            "pace_s": 1.0,
            "lease_s": LEASE_S,
            "draw": 0.0,
            **options,
        }
    )


@given(looks=st.integers(0, 10**30), slots=st.integers(1, 1024), pace=paces, draw=draws)
def test_whoever_is_next_looks_at_least_four_times_per_lease(
    looks: int, slots: int, pace: float | None, draw: float
) -> None:
    """No pace and no number of looks keeps the next in line away for more than a quarter lease."""
    found = wait_s(looks=looks, slots=slots, pace_s=pace, draw=draw)

    assert 0 < found <= LEASE_S / 4


@given(
    ahead=st.integers(0, 2**53),
    looks=st.integers(0, 10**30),
    slots=st.integers(1, 1024),
    pace=paces,
    draw=draws,
)
def test_a_wait_is_finite_and_no_earlier_than_the_queue_allows(
    ahead: int, looks: int, slots: int, pace: float | None, draw: float
) -> None:
    """It is the queue's time, a twentieth early at most, or the growing share if that is longer."""
    found = wait_s(ahead=ahead, looks=looks, slots=slots, pace_s=pace, draw=draw)

    queue_s = ahead * (0.05 if pace is None else pace) / slots
    assert math.isfinite(found)
    assert 0.95 * queue_s * (1 - 1e-12) <= found <= max(queue_s, LEASE_S / 4)


@pytest.mark.parametrize(
    ("looks", "growth"), [(0, 1.0), (1, 1.3), (2, 1.69), (5, 3.71293), (6, 4.0), (12, 4.0)]
)
@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
def test_waits_by_a_known_pace_grow_to_four_times(looks: int, growth: float, draw: float) -> None:
    """Half a call, jittered by half either way, times 1.3 for each look in vain, at most 4."""
    expected_s = 2.0 / 2 * (0.5 + draw) * growth

    assert wait_s(looks=looks, pace_s=2.0, draw=draw) == pytest.approx(expected_s)


@pytest.mark.parametrize(("looks", "share_s"), [(13, 0.0052), (22, 0.05514), (10**6, LEASE_S / 4)])
def test_after_a_dozen_looks_in_vain_waits_grow_on(looks: int, share_s: float) -> None:
    """What keeps a waiter from its turn for so long is not the calls whose pace is known."""
    assert wait_s(looks=looks, pace_s=0.002, draw=0.5) == pytest.approx(share_s, rel=1e-3)


@pytest.mark.parametrize(
    ("looks", "growth"), [(0, 1.0), (10, 1.3**10), (18, 100.0), (10**6, 100.0)]
)
def test_waits_by_a_guess_grow_to_a_hundred_times(looks: int, growth: float) -> None:
    """Where no call has been timed yet, the guess of 50 ms may be far off."""
    assert wait_s(looks=looks, pace_s=None, draw=0.5) == pytest.approx(0.025 * growth)


def test_equal_waits_are_drawn_apart() -> None:
    """Two waiters with the same place and pace come at different times."""
    for options in ({"ahead": 0}, {"ahead": 40}):
        assert wait_s(**options, draw=0.1) < wait_s(**options, draw=0.9)


def test_a_free_slot_is_looked_at_again_soon_however_long_the_line() -> None:
    """Those before may be no more: a thousand dead tickets cost a few looks, not hours."""
    waits = [wait_s(ahead=1000, is_free=free, pace_s=10.0, draw=0.5) for free in (True, False)]

    assert waits[0] < LEASE_S / 4 * 11
    assert waits[1] > 600


def test_the_longer_the_line_the_later_the_look_at_a_free_slot() -> None:
    """Where the line is real, those far behind leave the slot to those before them."""
    waits = [wait_s(ahead=ahead, is_free=True) for ahead in (0, 10, 100, 1000)]

    assert waits == sorted(set(waits))
