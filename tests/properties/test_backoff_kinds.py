# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What holds for every scheme of delays, with every base, cap, attempt and draw."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, strategies as st

from lightning_resilience.core import backoff
from lightning_resilience.core.backoff import BackoffKind


kinds = st.sampled_from(BackoffKind)
attempts = st.integers(1, 10**9)
draws = st.floats(0.0, 1.0, exclude_max=True)
seconds = st.floats(1e-3, 1e6)
# Up to the largest number there is: three times that is infinite.
any_seconds = st.floats(0.0, allow_infinity=False, allow_nan=False)


@given(kind=kinds, attempt=attempts, base_s=seconds, cap_s=seconds, last_s=any_seconds, draw=draws)
def test_no_delay_is_longer_than_the_cap(
    kind: BackoffKind, attempt: int, base_s: float, cap_s: float, last_s: float, draw: float
) -> None:
    """For all options a delay is a number between 0 and the cap."""
    delay_s = backoff.delay_of(
        kind, attempt, base_s=base_s, cap_s=cap_s, previous_s=last_s, draw=draw
    )

    assert 0 <= delay_s <= cap_s


@given(attempt=attempts, base_s=seconds, cap_s=seconds, draw=draws)
def test_the_schemes_are_in_order(attempt: int, base_s: float, cap_s: float, draw: float) -> None:
    """With one draw, full jitter is at most equal jitter, and that at most the whole bound."""
    none_s, full_s, equal_s, bound_s = (
        backoff.delay_of(kind, attempt, base_s=base_s, cap_s=cap_s, previous_s=0.0, draw=draw)
        for kind in (
            BackoffKind.NONE,
            BackoffKind.FULL,
            BackoffKind.EQUAL,
            BackoffKind.EXPONENTIAL,
        )
    )

    assert none_s <= full_s <= equal_s <= bound_s
    assert equal_s >= bound_s / 2


@given(attempt=attempts, base_s=seconds, cap_s=seconds, draw=draws)
def test_full_jitter_is_that_of_the_product(
    attempt: int, base_s: float, cap_s: float, draw: float
) -> None:
    """What a drill calls full jitter is the very delay that the product takes."""
    options = {"base_s": base_s, "cap_s": cap_s, "draw": draw}

    assert backoff.delay_of(
        BackoffKind.FULL, attempt, previous_s=0.0, **options
    ) == backoff.delay_s(attempt, **options)


@given(first=attempts, second=attempts, base_s=seconds, last_s=seconds, draw=draws)
def test_decorrelated_jitter_follows_the_previous_delay_only(
    first: int, second: int, base_s: float, last_s: float, draw: float
) -> None:
    """It is uniform from the base to three times the previous delay, whatever the attempt."""
    delays = [
        backoff.delay_of(
            BackoffKind.DECORRELATED,
            attempt,
            base_s=base_s,
            cap_s=1e9,
            previous_s=last_s,
            draw=draw,
        )
        for attempt in (first, second)
    ]

    upper = 3 * max(Fraction(last_s), Fraction(base_s))
    exact = Fraction(base_s) + (upper - Fraction(base_s)) * Fraction(draw)
    assert delays[0] == delays[1]
    assert abs(Fraction(delays[0]) - exact) <= exact / 10**12
