# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What this process has lately seen of a dependency, and whether its host should vote.

A vote says "this host's latest results failed". It is *level-triggered*: it stands as long as the
window says so, is withdrawn on the first success, and lapses ``window_s`` after the last failure.
The window holds no list of results: consecutive failures are all that the rule needs, and a rank
that touches storage once in ten minutes would never fill a ratio over a hundred calls.

Failures that arrive together (one failed collective operation that a process sees as several
errors) are lumped by the caller, which reports one result per attempt.

Instants belong to this process's monotonic clock. Permanent, auth, capacity and cancelled results
say nothing about the dependency's health and are not recorded at all (``core.outcome``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


__all__ = ["EMPTY", "Window", "record_failure", "record_success", "wants_vote"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive failures of one dependency, as one process saw them.

    Args:
        failures: Failures since the last success that are no further apart than ``window_s``.
        last_failure_at_s: When the latest failure was reported, on this process's clock.
    """

    failures: int = 0
    last_failure_at_s: float = 0.0


EMPTY = Window()


def record_failure(window: Window, *, now_s: float, window_s: float) -> Window:
    """Add one counted failure.

    Args:
        window: What was known before.
        now_s: Now, on this process's clock.
        window_s: How long a failure is remembered, in seconds.

    Returns:
        The window after it. A failure after a gap longer than ``window_s`` starts anew.
    """
    stale = now_s - window.last_failure_at_s > window_s
    return replace(
        window,
        failures=1 if stale else window.failures + 1,
        last_failure_at_s=now_s,
    )


def record_success(window: Window) -> Window:
    """Forget all failures: the latest result did not fail."""
    return EMPTY if window.failures else window


def wants_vote(window: Window, *, now_s: float, window_s: float, trip_failures: int) -> bool:
    """Tell whether this host's vote should stand now.

    Args:
        window: What this process has seen.
        now_s: Now, on this process's clock.
        window_s: How long a failure is remembered, in seconds.
        trip_failures: Consecutive failures that make a vote.

    Returns:
        True while at least ``trip_failures`` failures in a row are recent enough.
    """
    return window.failures >= trip_failures and now_s - window.last_failure_at_s <= window_s
