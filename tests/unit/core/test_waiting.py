# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Waiters look away for as long as they may, and no longer."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core import waiting
from lightning_resilience.core.breaker import BreakerConfig, BreakerState, BreakerView
from lightning_resilience.core.lease import Sighting
from lightning_resilience.core.records import BreakerRecord, encode


CONFIG = BreakerConfig()
SEEN_AT_S = 1000.0
NEVER = (BreakerState.CLOSED, BreakerState.RECOVERING, BreakerState.FORCED_OPEN)


def view_of(
    state: BreakerState, *, open_s: float = 20.0, seen_at_s: float = SEEN_AT_S
) -> BreakerView:
    """Return a view of a record in a state, first seen at an instant."""
    record = BreakerRecord(
        epoch=5, generation=1, state=state.value, limit=0, open_s=open_s, writer="w"
    )
    return BreakerView(
        record=record,
        raw=encode(record),
        read_at_s=seen_at_s,
        sighting=Sighting(version=("store", 5), first_seen_at_s=seen_at_s),
    )


@pytest.mark.parametrize(
    ("joint_timeout_s", "expected_s"),
    [(8.0, 4.0), (299.9, 149.95), (300.0, 150.0), (301.0, 150.0), (1440.0, 150.0)],
)
def test_a_chunk_is_bounded_twice(joint_timeout_s: float, expected_s: float) -> None:
    """A waiter re-reads every min(150 s, joint_timeout_s / 2)."""
    assert waiting.chunk_s(joint_timeout_s=joint_timeout_s) == expected_s


@pytest.mark.parametrize(
    ("ticket", "near"), [(1, True), (2, True), (3, False), (10**6, False), (None, False)]
)
def test_two_waiters_are_near(ticket: int | None, near: bool) -> None:  # noqa: FBT001 - data
    """The two lowest tickets are near; a ticket whose answer was lost is at the end of the line."""
    assert waiting.is_near(ticket) is near


@pytest.mark.parametrize("state", NEVER)
def test_nothing_to_probe_is_never_due(state: BreakerState) -> None:
    """Who passes needs no probe, and what an operator holds open is not probed."""
    view = view_of(state)

    assert waiting.next_probe_in_s(view, CONFIG, now_s=SEEN_AT_S + 1e6) is None
    assert not waiting.is_probe_due(view, CONFIG, now_s=SEEN_AT_S + 1e6)


@pytest.mark.parametrize(
    ("state", "length_s"),
    [(BreakerState.OPEN, 20.0), (BreakerState.HALF_OPEN, CONFIG.probe_lease_s)],
)
def test_a_probe_is_due_when_its_wait_is_over(state: BreakerState, length_s: float) -> None:
    """OPEN waits as long as its record says, HALF_OPEN as long as the lease, by own sight."""
    view = view_of(state)

    assert waiting.next_probe_in_s(view, CONFIG, now_s=SEEN_AT_S) == length_s
    assert waiting.next_probe_in_s(view, CONFIG, now_s=SEEN_AT_S + 3) == length_s - 3
    assert not waiting.is_probe_due(view, CONFIG, now_s=SEEN_AT_S + length_s - 0.5)
    assert waiting.is_probe_due(view, CONFIG, now_s=SEEN_AT_S + length_s)
    assert waiting.next_probe_in_s(view, CONFIG, now_s=SEEN_AT_S + length_s + 50) == 0


@pytest.mark.parametrize("state", BreakerState)
def test_who_is_far_sleeps_a_whole_chunk(state: BreakerState) -> None:
    """Only the two nearest wake for a probe; all others sleep until the bell or the chunk's end."""
    wait_s = waiting.next_wait_s(
        view_of(state), CONFIG, near=False, longest_s=150.0, now_s=SEEN_AT_S
    )

    assert wait_s == 150.0


@pytest.mark.parametrize("state", NEVER)
def test_nothing_due_sleeps_a_whole_chunk(state: BreakerState) -> None:
    """The nearest, too, sleep a whole chunk where no probe will be due."""
    wait_s = waiting.next_wait_s(
        view_of(state), CONFIG, near=True, longest_s=150.0, now_s=SEEN_AT_S
    )

    assert wait_s == 150.0


def test_the_nearest_wake_when_the_probe_is_due() -> None:
    """The nearest sleep in one go to the end of the open wait, and not a moment less."""
    wait_s = waiting.next_wait_s(
        view_of(BreakerState.OPEN), CONFIG, near=True, longest_s=150.0, now_s=SEEN_AT_S + 5
    )

    assert 15.0 < wait_s <= 15.01


def test_a_chunk_bounds_the_nearest_as_well() -> None:
    """No sleep is longer than the caller allows, for example its deadline."""
    wait_s = waiting.next_wait_s(
        view_of(BreakerState.OPEN, open_s=60.0),
        CONFIG,
        near=True,
        longest_s=3.0,
        now_s=SEEN_AT_S,
    )

    assert wait_s == 3.0


@pytest.mark.parametrize(("later_s", "expected_s"), [(0.0, 2.0), (5.0, 2.0), (7.0, 1.0)])
def test_the_nearest_watch_the_prober(later_s: float, expected_s: float) -> None:
    """While somebody probes, the nearest look every quarter of the lease, or sooner if it ends."""
    wait_s = waiting.next_wait_s(
        view_of(BreakerState.HALF_OPEN),
        CONFIG,
        near=True,
        longest_s=150.0,
        now_s=SEEN_AT_S + later_s,
    )

    assert wait_s == pytest.approx(expected_s, abs=0.01)


@given(
    seen_at_s=st.floats(-1e9, 1e9),
    part=st.floats(0.0, 2.0),
    near=st.booleans(),
    state=st.sampled_from(BreakerState),
    longest_s=st.floats(0.05, 150.0),
)
def test_a_wait_is_positive_and_bounded(
    seen_at_s: float,
    part: float,
    near: bool,  # noqa: FBT001 - data
    state: BreakerState,
    longest_s: float,
) -> None:
    """No wait is 0, so no waiter spins, and none is longer than the caller allows."""
    wait_s = waiting.next_wait_s(
        view_of(state, seen_at_s=seen_at_s),
        CONFIG,
        near=near,
        longest_s=longest_s,
        now_s=seen_at_s + 20 * part,
    )

    assert 0 < wait_s <= longest_s


@given(seen_at_s=st.floats(-1e9, 1e9), open_s=st.floats(0.1, 3600.0), part=st.floats(0.0, 1.0))
def test_who_wakes_finds_the_probe_due(seen_at_s: float, open_s: float, part: float) -> None:
    """After one sleep of a near waiter the probe is due: rounding does not send it back to bed."""
    view = view_of(BreakerState.OPEN, open_s=open_s, seen_at_s=seen_at_s)
    now_s = seen_at_s + part * open_s

    woken_at_s = now_s + waiting.next_wait_s(view, CONFIG, near=True, longest_s=1e6, now_s=now_s)

    assert waiting.is_probe_due(view, CONFIG, now_s=woken_at_s)


@given(phase=st.floats(0.0, 1.0))
def test_a_dead_prober_is_replaced_within_one_and_a_half_leases(phase: float) -> None:
    """A near waiter that first sees a claim a quarter of a lease late claims within 1.5 leases."""
    lease_s = CONFIG.probe_lease_s
    now_s = SEEN_AT_S + phase * lease_s / 4
    view = view_of(BreakerState.HALF_OPEN, seen_at_s=now_s)

    looks = 0
    while not waiting.is_probe_due(view, CONFIG, now_s=now_s):
        now_s += waiting.next_wait_s(view, CONFIG, near=True, longest_s=150.0, now_s=now_s)
        looks += 1

    assert now_s - SEEN_AT_S <= 1.5 * lease_s
    assert looks <= 6


def test_the_longest_chunk_is_half_the_stores_timeout() -> None:
    """A waiter re-reads at least every 150 s."""
    assert waiting.LONGEST_CHUNK_S == 150.0


@pytest.mark.parametrize(
    ("ticket", "turn", "slots", "far"),
    [
        (None, 0, 16, False),
        (None, -100, 16, False),
        (("s", 108), 100, 16, False),
        (("s", 109), 100, 16, True),
        (("s", 90), 100, 16, False),
        (("s", 101), 100, 1, True),
        (("s", 100), 100, 1, False),
        (("s", 102), 100, 3, True),
        (("s", 101), 100, 3, False),
    ],
)
def test_who_holds_a_ticket_beyond_half_the_slots_stands_far_back(
    ticket: tuple[str, int] | None,
    turn: int,
    slots: int,
    far: bool,  # noqa: FBT001 - data
) -> None:
    """Those who were let in and failed stand before it; who holds none may be one of them."""
    assert waiting.stands_far_back(ticket, turn=turn, slots=slots) is far


@pytest.mark.parametrize(
    ("spoken_at_s", "wait_s", "speaks"),
    [
        (None, 0.0, True),
        (1000.0, 27.9, False),
        (1000.0, 28.0, True),
        (990.0, 17.9, False),
        (990.0, 18.0, True),
    ],
)
def test_a_waiter_speaks_before_its_silence_is_too_long(
    spoken_at_s: float | None,
    wait_s: float,
    speaks: bool,  # noqa: FBT001 - data
) -> None:
    """When it begins, and where the sleep that it begins would end too late to speak in time."""
    now = waiting.is_time_to_speak(spoken_at_s, wait_s=wait_s, voice_s=28.0, now_s=1000.0)

    assert now is speaks


def test_a_rank_is_never_silent_for_half_a_minute() -> None:
    """Two seconds are left for the look around that follows a sleep."""
    assert waiting.VOICE_S == 28.0
