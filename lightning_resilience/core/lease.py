# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""When may somebody else take over? Leases without synchronised clocks.

A permit is a lease, because its holder can die. But no host can read another's clock, so a record
holds no instant: it holds an *epoch* (which changes with every transition) and a *beat* (which its
holder changes while it works). An observer notes, on its own monotonic clock, when *it* first saw
this (epoch, beat), and treats the lease as expired once the pair has not changed for ``lease_s`` of
its own time.

* The holder's clock does not matter, nor does any offset between clocks; rates may differ by the
  margin that the lease has over the work it covers.
* Expiry gives liveness only. Safety comes from compare-and-set: whoever takes over makes a new
  epoch, and a result is applied only from the exact bytes that its own claim wrote.
* A newcomer waits a full lease before it takes over, by design.
* Where the mistake is expensive (a rank that is taken for lost ends the job), an observer counts
  only the time that it has really been looking (``Silence``): while it was stopped itself, or while
  the store did not answer, it can have missed nothing but its own view.
* Only the record's own change renews: a denied claim writes nothing, so it cannot keep a dead
  holder's lease alive.

Source: the same rule is used by Kubernetes' leader election (client-go ``leaderelection``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


__all__ = [
    "CLOCK_RATE_FACTOR",
    "Sighting",
    "Silence",
    "has_time_left",
    "is_expired",
    "listen",
    "observe",
    "remaining_s",
]

CLOCK_RATE_FACTOR: Final = 1.5
"""Monotonic clocks of two hosts are assumed to run at rates within this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """When one observer first saw a version of something, on the observer's own clock.

    Args:
        version: What was seen; any change of it restarts the lease.
        first_seen_at_s: When it was first seen. The clock is the observer's.
    """

    version: tuple[int | str, ...]
    first_seen_at_s: float


def observe(sighting: Sighting | None, version: tuple[int | str, ...], *, now_s: float) -> Sighting:
    """Note that ``version`` is what is there now.

    Args:
        sighting: What this observer saw before, or None.
        version: What it sees now.
        now_s: Now, on the observer's clock.

    Returns:
        The old sighting where nothing has changed, else a new one that starts now.
    """
    if sighting is not None and sighting.version == version:
        return sighting
    return Sighting(version=version, first_seen_at_s=now_s)


def remaining_s(sighting: Sighting, *, lease_s: float, now_s: float) -> float:
    """Return how long the observer still has to wait, in seconds; 0 where it need not."""
    # Elapsed time first, as a claim reports it: an instant of expiry would be rounded, and a lease
    # that looks over while its claim is still denied makes the observer claim in a loop.
    return max(0.0, lease_s - (now_s - sighting.first_seen_at_s))


def is_expired(sighting: Sighting, *, lease_s: float, now_s: float) -> bool:
    """Tell whether the observer has seen no change for at least ``lease_s`` seconds."""
    return remaining_s(sighting, lease_s=lease_s, now_s=now_s) == 0


def has_time_left(*, claimed_at_s: float, work_s: float, lease_s: float, now_s: float) -> bool:
    """Tell a holder whether its work would end before anybody may take over.

    A process can be paused between its claim and its work; so it looks at its own clock again right
    before the work starts.

    Args:
        claimed_at_s: When the claim was *sent*, on the holder's clock.
        work_s: Longest time that the work takes, in seconds.
        lease_s: The lease, in seconds.
        now_s: Now, on the holder's clock.

    Returns:
        True if the work fits into the lease, with the margin for clocks of different rates.
    """
    return now_s - claimed_at_s + work_s <= lease_s / CLOCK_RATE_FACTOR


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """For how long one observer has watched something not change.

    Args:
        version: What was seen; any change of it ends the silence.
        watched_s: Silence that the observer has watched, in seconds.
        looked_at_s: When its last look was answered, on its own clock.
    """

    version: tuple[int | str, ...]
    watched_s: float = 0.0
    looked_at_s: float


def listen(
    silence: Silence | None,
    version: tuple[int | str, ...],
    *,
    sent_at_s: float,
    seen_at_s: float,
    longest_gap_s: float,
) -> Silence:
    """Note what another look has shown.

    Between two looks counts the time from the one's answer to the other's question, and of that no
    more than the observer meant to look away: an observer that was stopped for a minute, or a store
    that answered late, is no reason to take somebody else for lost.

    Args:
        silence: What this observer knows so far, or None.
        version: What it sees now.
        sent_at_s: When it asked, on its own clock.
        seen_at_s: When it had the answer.
        longest_gap_s: How long it means to look away at most, in seconds.

    Returns:
        The silence after this look.
    """
    if silence is None or silence.version != version:
        return Silence(version=version, looked_at_s=seen_at_s)
    gap_s = min(longest_gap_s, max(0.0, sent_at_s - silence.looked_at_s))
    return Silence(version=version, watched_s=silence.watched_s + gap_s, looked_at_s=seen_at_s)
