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

Sources: M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 (full jitter).
"""

from __future__ import annotations

from typing import Final


__all__ = ["delay_s", "upper_bound_s"]

# 2.0 ** 1024 raises OverflowError; a product that overflows is merely infinite, and every cap is
# less than that. No cap is near base · 2^1023, so that clamping there changes no result.
_LARGEST_EXPONENT: Final = 1023


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
