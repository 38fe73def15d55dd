# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The delays are what full jitter promises: uniform below the bound, at the cap as everywhere."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core import backoff
from lightning_resilience.core.backoff import BackoffKind


BASE_S = 1.0
CAP_S = 30.0
DRAWS = 5000
# Kolmogorov-Smirnov: the statistic of a right distribution exceeds this with a chance of 1e-6.
CRITICAL = math.sqrt(-math.log(1e-6 / 2) / (2 * DRAWS))

draws = st.floats(0.0, 1.0, exclude_max=True)
seconds = st.floats(1e-3, 1e6)


def distance_from_uniform(sample: list[float], upper: float) -> float:
    """Return the Kolmogorov-Smirnov statistic of a sample against U(0, upper)."""
    ordered = sorted(sample)
    count = len(ordered)
    return max(
        max((index + 1) / count - value / upper, value / upper - index / count)
        for index, value in enumerate(ordered)
    )


def sample_at(attempt: int, *, seed: int = 42) -> list[float]:
    """Return many delays after one attempt."""
    chance = random.Random(seed)
    return [
        backoff.delay_s(attempt, base_s=BASE_S, cap_s=CAP_S, draw=chance.random())
        for _ in range(DRAWS)
    ]


@pytest.mark.parametrize("attempt", [*range(1, 13), 60, 61, 1024, 10**6, 10**9])
def test_delays_are_uniform_below_the_bound(attempt: int) -> None:
    """The delay after attempt n is distributed as U(0, min(cap, base · 2^(n-1))), at every n."""
    upper = min(CAP_S, BASE_S * 2 ** min(attempt - 1, 100))

    sample = sample_at(attempt)

    assert distance_from_uniform(sample, upper) < CRITICAL
    assert max(sample) < upper


@pytest.mark.parametrize("attempt", [6, 7, 20, 10**6])
def test_the_wrong_schemes_would_be_seen(attempt: int) -> None:
    """The measure is sharp: a cap after the jitter, equal jitter and half a cap all fail it."""
    chance = random.Random(7)
    uniform = [chance.random() for _ in range(DRAWS)]
    exponential = BASE_S * 2 ** min(attempt - 1, 100)
    capped_last = [min(CAP_S, exponential + draw) for draw in uniform]
    clipped_draw = [min(CAP_S, exponential * draw) for draw in uniform]
    equal = [CAP_S / 2 + CAP_S / 2 * draw for draw in uniform]
    halved = [CAP_S / 2 * draw for draw in uniform]

    for scheme in (capped_last, equal, halved):
        assert distance_from_uniform(scheme, CAP_S) > CRITICAL
    if exponential > CAP_S * 1.1:
        assert distance_from_uniform(clipped_draw, CAP_S) > CRITICAL


def test_moments_at_the_cap_are_those_of_full_jitter() -> None:
    """At the cap the mean is half the cap, and the deviation 0.289 of it, not 0."""
    sample = sample_at(40)

    mean = math.fsum(sample) / DRAWS
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in sample) / DRAWS)

    assert mean == pytest.approx(CAP_S / 2, rel=0.03)
    assert deviation == pytest.approx(CAP_S / math.sqrt(12), rel=0.03)


@given(attempt=st.integers(1, 10**9), first=draws, second=draws)
def test_two_clients_differ_also_at_the_cap(attempt: int, first: float, second: float) -> None:
    """The cap is applied before the draw: draws that differ give delays that differ."""
    delays = [
        backoff.delay_s(attempt, base_s=1.0, cap_s=32.0, draw=draw) for draw in (first, second)
    ]

    # Powers of two as base and cap: no rounding can make two draws equal, but for the subnormal.
    assert (delays[0] == delays[1]) == (first == second)


@given(attempt=st.integers(1, 10**9), base_s=seconds, cap_s=seconds, draw=draws)
def test_a_delay_is_in_its_interval(attempt: int, base_s: float, cap_s: float, draw: float) -> None:
    """For all options a delay is at least 0, and less than its bound and its cap."""
    upper_s = backoff.upper_bound_s(attempt, base_s=base_s, cap_s=cap_s)

    delay_s = backoff.delay_s(attempt, base_s=base_s, cap_s=cap_s, draw=draw)

    assert 0 <= delay_s < upper_s <= cap_s


@given(
    attempt=st.integers(1, 2000),
    base_s=st.floats(1e-100, 1e100),
    cap_s=st.floats(1e-100, 1e100),
)
def test_the_bound_is_exact(attempt: int, base_s: float, cap_s: float) -> None:
    """The bound is min(cap, base · 2^(n-1)) for every base and cap, without overflow."""
    exact = min(Fraction(cap_s), Fraction(base_s) * 2 ** (attempt - 1))

    assert Fraction(backoff.upper_bound_s(attempt, base_s=base_s, cap_s=cap_s)) == exact


@pytest.mark.parametrize("attempt", [1024, 1025, 1026, 10**6, 10**9, 10**30])
def test_no_attempt_is_too_large(attempt: int) -> None:
    """No number of attempts overflows; the bound is the cap."""
    assert backoff.upper_bound_s(attempt, base_s=1.0, cap_s=30.0) == 30.0


def test_the_bound_doubles_from_the_base_to_the_cap() -> None:
    """The first delay is below the base, then the bound doubles, and never falls at the cap."""
    bounds = [backoff.upper_bound_s(n, base_s=1.0, cap_s=30.0) for n in range(1, 9)]

    assert bounds == [1, 2, 4, 8, 16, 30, 30, 30]


def test_what_is_before_the_first_attempt_counts_as_the_first() -> None:
    """A number below 1 does not make the bound smaller than the base."""
    assert backoff.upper_bound_s(0, base_s=1.0, cap_s=30.0) == 1.0
    assert backoff.upper_bound_s(-5, base_s=1.0, cap_s=30.0) == 1.0


def closed_form_attempts(outage_s: float, *, base_s: float, cap_s: float) -> float:
    """Return the expected number of attempts of one client in an outage, by renewal theory.

    Delays at the cap are U(0, cap), so their renewal rate is 2 / cap, and the expected number
    within a long time t is 2 t / cap + (variance - mean²) / (2 mean²) = 2 t / cap - 1 / 3.
    """
    bound_s, ramp_s, attempts = base_s, 0.0, 1
    while bound_s < cap_s:
        ramp_s += bound_s / 2
        attempts += 1
        bound_s *= 2
    return attempts + 2 * (outage_s - ramp_s) / cap_s - 1 / 3


@pytest.mark.parametrize(("outage_s", "base_s", "cap_s"), [(600, 1, 60), (300, 0.5, 30)])
def test_attempts_in_an_outage_follow_the_closed_form(
    outage_s: float, base_s: float, cap_s: float
) -> None:
    """A client makes as many attempts in an outage as renewal theory says: twice the unjittered."""
    chance = random.Random(3)
    runs = 2000

    total = 0
    for _ in range(runs):
        elapsed_s, attempt = 0.0, 0
        while elapsed_s < outage_s:
            attempt += 1
            elapsed_s += backoff.delay_s(attempt, base_s=base_s, cap_s=cap_s, draw=chance.random())
        total += attempt

    expected = closed_form_attempts(outage_s, base_s=base_s, cap_s=cap_s)
    assert total / runs == pytest.approx(expected, rel=0.02)


def test_a_thousand_clients_do_not_come_back_together() -> None:
    """After an outage the returns are spread over the cap: no tenth of it holds a fifth of them."""
    sample = sample_at(20, seed=11)

    slots = [0] * 10
    for delay_s in sample:
        slots[int(delay_s / CAP_S * 10)] += 1

    assert max(slots) < 0.2 * DRAWS
    assert min(slots) > 0


# The schemes that a drill compares ----------------------------------------------------------------

KINDS = list(BackoffKind)
HUGE = [1024, 1025, 1026, 10**6, 10**9, 10**30]


def delay_of(
    kind: BackoffKind,
    attempt: int,
    *,
    draw: float,
    previous_s: float = 0.0,
    base_s: float = BASE_S,
    cap_s: float = CAP_S,
) -> float:
    """Return a delay with the base and the cap of this file."""
    return backoff.delay_of(
        kind, attempt, base_s=base_s, cap_s=cap_s, previous_s=previous_s, draw=draw
    )


@pytest.mark.parametrize(
    ("kind", "attempt", "previous_s", "draw", "expected_s"),
    [
        (BackoffKind.NONE, 7, 4.0, 0.9, 0.0),
        (BackoffKind.EXPONENTIAL, 1, 0.0, 0.9, 1.0),
        (BackoffKind.EXPONENTIAL, 4, 4.0, 0.1, 8.0),
        (BackoffKind.EXPONENTIAL, 6, 16.0, 0.1, 30.0),
        (BackoffKind.EQUAL, 1, 0.0, 0.0, 0.5),
        (BackoffKind.EQUAL, 4, 0.0, 0.5, 6.0),
        (BackoffKind.EQUAL, 60, 0.0, 0.5, 22.5),
        (BackoffKind.FULL, 4, 0.0, 0.5, 4.0),
        (BackoffKind.FULL, 60, 0.0, 0.5, 15.0),
        (BackoffKind.DECORRELATED, 1, 0.0, 0.5, 2.0),
        (BackoffKind.DECORRELATED, 99, 1.0, 0.5, 2.0),
        (BackoffKind.DECORRELATED, 2, 5.0, 0.5, 8.0),
        (BackoffKind.DECORRELATED, 2, 5.0, 0.0, 1.0),
        (BackoffKind.DECORRELATED, 2, 30.0, 0.5, 30.0),
    ],
)
def test_each_scheme_is_its_formula(
    kind: BackoffKind, attempt: int, previous_s: float, draw: float, expected_s: float
) -> None:
    """A delay is the published formula of its scheme, at the first attempt as at the cap."""
    found_s = delay_of(kind, attempt, previous_s=previous_s, draw=draw)

    assert found_s == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attempt", HUGE)
def test_no_scheme_overflows(kind: BackoffKind, attempt: int) -> None:
    """No attempt and no previous delay is too large for any scheme, also where the draw is 0."""
    for previous_s in (0.0, 1.7e308):
        for draw in (0.0, 0.5, math.nextafter(1.0, 0.0)):
            assert 0 <= delay_of(kind, attempt, previous_s=previous_s, draw=draw) <= CAP_S


def test_a_draw_of_0_after_the_longest_delay_is_the_base() -> None:
    """Decorrelated jitter never multiplies 0 with something infinite."""
    assert delay_of(BackoffKind.DECORRELATED, 2, previous_s=1.7e308, draw=0.0) == BASE_S


@pytest.mark.parametrize("kind", [BackoffKind.EQUAL, BackoffKind.FULL])
def test_a_cap_comes_before_the_jitter(kind: BackoffKind) -> None:
    """Where the cap is reached, equal and full jitter have no value that comes twice."""
    chance = random.Random(5)

    sample = [delay_of(kind, 40, draw=chance.random()) for _ in range(DRAWS)]

    assert len(set(sample)) == DRAWS
    assert max(sample) < CAP_S


def test_decorrelated_jitter_has_an_atom_at_the_cap() -> None:
    """In the long run a third of its delays is the cap itself, and their mean is 0.56 of it."""
    chance = random.Random(5)
    sample, previous_s = [], 0.5

    for _ in range(20 * DRAWS):
        previous_s = delay_of(
            BackoffKind.DECORRELATED, 2, base_s=0.5, previous_s=previous_s, draw=chance.random()
        )
        sample.append(previous_s)

    assert sample.count(CAP_S) / len(sample) == pytest.approx(0.337, abs=0.02)
    assert math.fsum(sample) / len(sample) / CAP_S == pytest.approx(0.561, abs=0.02)
