# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How long to wait before a retry: capped exponential backoff with full jitter.

The delay before the retry after attempt *n* (the first attempt is 1) is a uniform draw from
``[0, min(cap, base · 2^(n-1)))``. Full jitter is the only one of the common schemes whose delays
still differ between clients once the cap is reached:

* jitter that is added *before* the cap disappears at the cap: every client then sleeps exactly
  ``cap`` seconds, for ever in step (stamina, tenacity's ``wait_exponential_jitter``, Polly v8);
* decorrelated jitter has an atom at the cap of 25–35 % of its draws;
* a generator that all ranks have seeded alike gives every rank the same draw. So the draw is handed
  in here, and the runtime takes it from a private source that no ``seed_everything`` reaches.

The price of full jitter is a mean delay of half the cap, hence twice the load of an unjittered
schedule with the same cap; choose ``cap`` between N/C and 2N/C (N callers, C requests per second
that the storage takes).

``delay_of`` has the other schemes as well: a drill compares with them, the product uses none.

Sources: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 (all five).
"""

from __future__ import annotations

from enum import Enum
from typing import Final


__all__ = ["BackoffKind", "delay_of", "delay_s", "upper_bound_s"]

# 2.0 ** 1024 raises OverflowError; a product that overflows is merely infinite, and every cap is
# less than that. No cap is near base · 2^1023, so that clamping there changes no result.
_LARGEST_EXPONENT: Final = 1023


class BackoffKind(Enum):
    """A scheme of delays. *v* is ``min(cap, base · 2^(n-1))`` after attempt *n*."""

    NONE = "none"
    """0: at once."""
    EXPONENTIAL = "exponential"
    """*v*: clients that fail together come back together, for ever."""
    EQUAL = "equal"
    """U(*v*/2, *v*): never soon."""
    FULL = "full"
    """U(0, *v*): the product's."""
    DECORRELATED = "decorrelated"
    """``min(cap, U(base, 3 · previous))``: grows with the draws, not with the attempts. The cap
    comes after the draw, as published: hence the atom at the cap."""


def upper_bound_s(attempt: int, *, base_s: float, cap_s: float) -> float:
    """Return the exclusive upper bound of the delay after ``attempt``.

    Args:
        attempt: Number of the attempt that failed; the first is 1. Any size: nothing overflows.
        base_s: Upper bound after the first attempt, in seconds.
        cap_s: Largest upper bound, in seconds.

    Returns:
        ``min(cap_s, base_s · 2^(attempt-1))`` in seconds.
    """
    exponent = min(max(attempt - 1, 0), _LARGEST_EXPONENT)
    return min(cap_s, base_s * 2.0**exponent)


def delay_s(attempt: int, *, base_s: float, cap_s: float, draw: float) -> float:
    """Return the delay before the retry after ``attempt``, with full jitter.

    Args:
        attempt: Number of the attempt that failed; the first is 1.
        base_s: Upper bound after the first attempt, in seconds.
        cap_s: Largest upper bound, in seconds. The cap is applied *before* the draw.
        draw: A uniform number in [0, 1) from a source that no two ranks share.

    Returns:
        A delay in ``[0, upper_bound_s(attempt))`` seconds.
    """
    return draw * upper_bound_s(attempt, base_s=base_s, cap_s=cap_s)


def delay_of(
    kind: BackoffKind,
    attempt: int,
    *,
    base_s: float,
    cap_s: float,
    previous_s: float,
    draw: float,
) -> float:
    """Return the delay before the retry after ``attempt``, with a given scheme.

    Args:
        kind: The scheme.
        attempt: Number of the attempt that failed; the first is 1. Any size: nothing overflows.
        base_s: Upper bound after the first attempt, in seconds; for decorrelated jitter the
            smallest delay.
        cap_s: Largest delay, in seconds.
        previous_s: The delay before ``attempt``, in seconds; anything up to ``base_s`` where there
            was none. Only decorrelated jitter looks at it.
        draw: A uniform number in [0, 1) from a source that no two ranks share.

    Returns:
        A delay in ``[0, cap_s]`` seconds.
    """
    if kind is BackoffKind.NONE:
        return 0.0
    if kind is BackoffKind.DECORRELATED:
        # Three times a previous delay may be infinite, which 0 must not be multiplied with.
        above_s = (max(previous_s, base_s) - base_s / 3) * draw * 3
        return min(cap_s, base_s + above_s)
    bound_s = upper_bound_s(attempt, base_s=base_s, cap_s=cap_s)
    if kind is BackoffKind.EXPONENTIAL:
        return bound_s
    jittered_s = draw * bound_s
    return jittered_s if kind is BackoffKind.FULL else bound_s / 2 + jittered_s / 2
