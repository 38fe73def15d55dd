# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A lease needs no common clock: only how long *this* observer has seen no change."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core import lease
from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.lease import Sighting, Silence


VERSION = ("store", 7)
# Monotonic clocks start at a boot or at anything else; within this, a millisecond is far above the
# distance of two floats.
clocks = st.floats(-1e9, 1e9)
durations = st.floats(1e-3, 1e4)
rates = st.floats(1 / lease.CLOCK_RATE_FACTOR, lease.CLOCK_RATE_FACTOR)


def test_the_first_sight_starts_the_lease() -> None:
    """Who has seen nothing yet counts from now."""
    sighting = lease.observe(None, VERSION, now_s=12.5)

    assert sighting == Sighting(version=VERSION, first_seen_at_s=12.5)


def test_the_same_version_keeps_its_sighting() -> None:
    """Looking again does not renew a lease."""
    first = lease.observe(None, VERSION, now_s=1.0)

    assert lease.observe(first, ("store", 7), now_s=100.0) is first


@pytest.mark.parametrize("version", [("store", 8), ("store", 6), ("other", 7), ("store", 7, 1)])
def test_any_change_starts_anew(version: tuple[int | str, ...]) -> None:
    """Another epoch, higher or lower, another store or another beat renew the lease."""
    first = lease.observe(None, VERSION, now_s=1.0)

    assert lease.observe(first, version, now_s=3.0) == Sighting(
        version=version, first_seen_at_s=3.0
    )


def test_a_version_that_comes_back_starts_anew() -> None:
    """A version that changed and changed back was alive in between."""
    first = lease.observe(None, VERSION, now_s=1.0)
    between = lease.observe(first, ("store", 8), now_s=2.0)

    assert lease.observe(between, VERSION, now_s=3.0).first_seen_at_s == 3.0


@pytest.mark.parametrize(
    ("now_s", "remaining_s", "expired"),
    [(10.0, 8.0, False), (14.0, 4.0, False), (17.5, 0.5, False), (18.0, 0.0, True), (99, 0, True)],
)
def test_a_lease_expires_after_its_time(
    now_s: float,
    remaining_s: float,
    expired: bool,  # noqa: FBT001 - data
) -> None:
    """The lease is over at exactly its length after the first sight, and stays over."""
    sighting = Sighting(version=VERSION, first_seen_at_s=10.0)

    assert lease.remaining_s(sighting, lease_s=8.0, now_s=now_s) == remaining_s
    assert lease.is_expired(sighting, lease_s=8.0, now_s=now_s) is expired


@given(
    first_s=st.integers(-(10**6), 10**6),
    offset_s=st.integers(-(10**9), 10**9),
    later_s=st.integers(0, 100),
    lease_s=st.integers(1, 50),
)
def test_the_offset_of_a_clock_does_not_matter(
    first_s: int, offset_s: int, later_s: int, lease_s: int
) -> None:
    """Two observers whose clocks differ by anything decide the same after the same time."""
    decisions = {
        lease.is_expired(
            lease.observe(None, VERSION, now_s=start_s), lease_s=lease_s, now_s=start_s + later_s
        )
        for start_s in (first_s, first_s + offset_s)
    }

    assert decisions == {later_s >= lease_s}


@given(first_s=clocks, lease_s=durations, later_s=durations)
def test_expiry_is_what_a_claim_will_say(first_s: float, lease_s: float, later_s: float) -> None:
    """A lease is expired exactly if the time without change, as a claim reports it, is enough.

    A lease that looks expired while the claim is denied would make its observer claim in a loop.
    """
    now_s = first_s + later_s
    sighting = lease.observe(None, VERSION, now_s=first_s)

    expired = lease.is_expired(sighting, lease_s=lease_s, now_s=now_s)

    assert expired is (now_s - first_s >= lease_s)
    assert expired is (lease.remaining_s(sighting, lease_s=lease_s, now_s=now_s) == 0)


@given(first_s=clocks, lease_s=durations, part=st.floats(0.0, 1.0))
def test_sleeping_what_remains_is_enough(first_s: float, lease_s: float, part: float) -> None:
    """After sleeping what remains the lease is expired, or a millisecond more suffices."""
    sighting = lease.observe(None, VERSION, now_s=first_s)
    now_s = first_s + part * lease_s

    woken_at_s = now_s + lease.remaining_s(sighting, lease_s=lease_s, now_s=now_s)

    assert lease.is_expired(sighting, lease_s=lease_s, now_s=woken_at_s + 0.001)


@given(first_s=clocks, lease_s=durations, part=st.floats(0.0, 0.999))
def test_a_lease_never_ends_early(first_s: float, lease_s: float, part: float) -> None:
    """Before its time a lease has time left, also by rounding."""
    sighting = lease.observe(None, VERSION, now_s=first_s)
    now_s = first_s + part * lease_s

    assert lease.is_expired(sighting, lease_s=lease_s, now_s=now_s) is (now_s - first_s >= lease_s)
    assert lease.remaining_s(sighting, lease_s=lease_s, now_s=now_s) <= lease_s * (1 + 1e-9)


@given(holder_rate=rates, seen_after_s=st.floats(0.0, 100.0), paused_s=st.floats(0.0, 20.0))
def test_a_holder_that_starts_ends_before_a_take_over(
    holder_rate: float, seen_after_s: float, paused_s: float
) -> None:
    """Work that its holder may still start ends before any observer's lease does.

    True time runs with the observer's clock; the holder's is slower or faster by up to the stated
    factor. The claim is sent at 0, and no observer can see it before.
    """
    lease_s, work_s = 8.0, 4.0

    allowed = lease.has_time_left(
        claimed_at_s=0.0, work_s=work_s, lease_s=lease_s, now_s=paused_s * holder_rate
    )

    ends_at_s = paused_s + work_s / holder_rate
    if allowed:
        assert ends_at_s <= seen_after_s + lease_s + 1e-9


@pytest.mark.parametrize(
    ("now_s", "fits"), [(100.0, True), (101.0, True), (102.0, True), (102.001, False), (200, False)]
)
def test_a_paused_holder_does_not_start(now_s: float, fits: bool) -> None:  # noqa: FBT001 - data
    """Work of 4 s fits into two thirds of a lease of 9 s until 2 s after the claim."""
    assert lease.has_time_left(claimed_at_s=100.0, work_s=4.0, lease_s=9.0, now_s=now_s) is fits


@given(probe_timeout_s=st.floats(0.1, 100.0), spare_s=st.floats(0.0, 10.0))
def test_a_valid_config_leaves_time_for_the_claim(probe_timeout_s: float, spare_s: float) -> None:
    """With any lease that the config allows, a claim may take its half second."""
    lease_s = 1.5 * (probe_timeout_s + 0.5) + 1 + spare_s
    config = BreakerConfig(
        probe_timeout_s=probe_timeout_s,
        probe_lease_s=lease_s,
        open_for_s=lease_s + 1,
        max_open_for_s=lease_s + 1,
        view_max_age_s=0.1,
    )

    assert lease.has_time_left(
        claimed_at_s=0.0,
        work_s=config.probe_timeout_s,
        lease_s=config.probe_lease_s,
        now_s=0.5,
    )


def test_clocks_are_assumed_to_run_within_one_and_a_half() -> None:
    """The stated assumption about clock rates is the one that the margins are made for."""
    assert lease.CLOCK_RATE_FACTOR == 1.5


def listened(*looks: tuple[float, float, str], longest_gap_s: float = 2.0) -> Silence:
    """What is known after looks of (sent, answered, version)."""
    silence: Silence | None = None
    for sent_at_s, seen_at_s, version in looks:
        silence = lease.listen(
            silence,
            (version,),
            sent_at_s=sent_at_s,
            seen_at_s=seen_at_s,
            longest_gap_s=longest_gap_s,
        )
    assert silence is not None
    return silence


def test_silence_is_the_time_between_looks() -> None:
    """Three looks a second apart at the same version are two seconds of silence."""
    assert listened((0.0, 0.0, "a"), (1.0, 1.0, "a"), (2.0, 2.0, "a")).watched_s == 2.0


def test_any_change_ends_a_silence() -> None:
    """Whoever has changed something in between starts from nothing."""
    assert listened((0.0, 0.0, "a"), (2.0, 2.0, "a"), (3.0, 3.0, "b")).watched_s == 0.0


def test_an_answer_that_is_late_is_not_the_others_silence() -> None:
    """A store that answers after ten seconds adds nothing: the answer may be ten seconds old."""
    assert listened((0.0, 0.0, "a"), (1.0, 11.0, "a"), (12.0, 12.0, "a")).watched_s == 2.0


def test_a_stop_of_the_observer_counts_as_one_look_away() -> None:
    """An observer that was frozen for a minute has watched for as long as it meant to look away."""
    assert listened((0.0, 0.0, "a"), (60.0, 60.0, "a")).watched_s == 2.0


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), min_size=2, max_size=20),
    st.floats(0.1, 10.0),
)
def test_nobody_watches_longer_than_has_passed(
    looks: list[tuple[float, float]], longest_gap_s: float
) -> None:
    """Whatever the delays, the silence is no longer than the time from first to last look."""
    times, now_s = [], 0.0
    for away_s, answer_s in looks:
        times.append((now_s + away_s, now_s + away_s + answer_s, "a"))
        now_s += away_s + answer_s

    silence = listened(*times, longest_gap_s=longest_gap_s)

    assert silence.watched_s <= times[-1][1] - times[0][1] + 1e-9
    assert silence.watched_s <= longest_gap_s * (len(looks) - 1) + 1e-9
