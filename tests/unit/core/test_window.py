# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A vote stands while the latest results failed, are enough, and are recent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core import window


if TYPE_CHECKING:
    from lightning_resilience.core.window import Window


WINDOW_S = 600.0


def after(*instants_s: float, start: Window = window.EMPTY) -> Window:
    """Return the window after failures at these instants."""
    for now_s in instants_s:
        start = window.record_failure(start, now_s=now_s, window_s=WINDOW_S)
    return start


def votes(seen: Window, *, now_s: float, trip_failures: int = 3) -> bool:
    """Tell whether the vote stands."""
    return window.wants_vote(seen, now_s=now_s, window_s=WINDOW_S, trip_failures=trip_failures)


def test_nothing_seen_is_no_vote() -> None:
    """A process that has seen nothing does not vote, whatever its clock says."""
    assert not votes(window.EMPTY, now_s=0.0)
    assert not votes(window.EMPTY, now_s=1e9, trip_failures=1)


@pytest.mark.parametrize(("failures", "stands"), [(1, False), (2, False), (3, True), (4, True)])
def test_the_threshold_makes_the_vote(failures: int, stands: bool) -> None:  # noqa: FBT001 - data
    """The vote stands from the third failure in a row on, not from the second."""
    seen = after(*range(failures))

    assert seen.failures == failures
    assert votes(seen, now_s=float(failures)) is stands


def test_one_success_withdraws_the_vote() -> None:
    """The first success forgets all failures: the vote is level-triggered."""
    seen = window.record_success(after(1, 2, 3, 4))

    assert seen == window.EMPTY
    assert not votes(seen, now_s=5)
    assert not votes(after(6, 7, start=seen), now_s=8)


def test_a_success_without_failures_is_free() -> None:
    """A success on the closed path makes no new object."""
    assert window.record_success(window.EMPTY) is window.EMPTY


@pytest.mark.parametrize(("age_s", "stands"), [(599.9, True), (600.0, True), (600.1, False)])
def test_the_vote_lapses_with_age(age_s: float, stands: bool) -> None:  # noqa: FBT001 - data
    """The vote lapses once the latest failure is older than the window."""
    seen = after(100, 101, 102)

    assert votes(seen, now_s=102 + age_s) is stands


@pytest.mark.parametrize(("gap_s", "failures"), [(599.9, 3), (600.0, 3), (600.1, 1)])
def test_a_gap_starts_anew(gap_s: float, failures: int) -> None:
    """A failure that comes later than the window after the one before counts as the first."""
    seen = after(10, 11, 11 + gap_s)

    assert seen.failures == failures


def test_the_window_slides_with_each_failure() -> None:
    """Rare failures in a row do add up: only the gap between two of them counts."""
    seen = after(0, 500, 1000, 1500)

    assert seen.failures == 4
    assert votes(seen, now_s=2000)


def test_hangs_trip_within_the_default_window() -> None:
    """Three attempts that hang until they are abandoned, with the longest delays, make a vote."""
    stall_s, delay_s = 60.0, 30.0

    seen = after(*(number * (stall_s + delay_s) for number in range(3)))

    assert votes(seen, now_s=seen.last_failure_at_s)


def test_an_early_clock_is_no_gap() -> None:
    """A first failure at a small or negative instant is a first failure."""
    assert after(-1000.0).failures == 1
    assert after(-1000.0, -999.0).failures == 2
    assert after(5e6).failures == 1


@given(
    st.lists(st.one_of(st.none(), st.floats(0.0, 1500.0)), max_size=40),
    st.floats(-1e6, 1e6),
    st.integers(1, 5),
)
def test_the_window_equals_the_list_it_replaces(
    gaps: list[float | None], start_s: float, trip_failures: int
) -> None:
    """Two numbers say what the full list of results would: the latest run without a long gap."""
    now_s = start_s
    seen, listed = window.EMPTY, list[float]()

    for gap in gaps:
        if gap is None:
            seen, listed = window.record_success(seen), []
            continue
        now_s += gap
        seen = window.record_failure(seen, now_s=now_s, window_s=WINDOW_S)
        if listed and now_s - listed[-1] > WINDOW_S:
            listed = []
        listed.append(now_s)

    assert seen.failures == len(listed)
    assert votes(seen, now_s=now_s, trip_failures=trip_failures) is (len(listed) >= trip_failures)
