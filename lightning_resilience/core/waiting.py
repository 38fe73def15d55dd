# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How long a waiter may look away from an ill dependency.

Waiting is pushed, not polled: whoever moves a circuit to RECOVERING rings the bell of that trip,
and the waiters sleep on the bell. They wake by themselves for three reasons only, each rarer the
further back in line they stand:

* the probe is due: the two *nearest* waiters claim it, by their own sight;
* the prober is silent: the two nearest re-read every quarter of its lease, so that a dead one is
  replaced within one and a half leases;
* the bell's write may have been lost, or both of the nearest may be dead: those at the front
  re-read at the end of a chunk, the others of two, and claim what is overdue. Whoever finds that
  the circuit lets calls through rings for all.

The place in line comes from a ticket, a counter in the store. It is a hint only: a ticket whose
answer was lost puts its waiter at the end, and a place that nobody holds is covered by the chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.core.breaker_record import BreakerState
from lightning_resilience.core.lease import remaining_s


if TYPE_CHECKING:
    from lightning_resilience.core.breaker_config import BreakerConfig
    from lightning_resilience.core.breaker_record import BreakerView


__all__ = [
    "LONGEST_CHUNK_S",
    "VOICE_S",
    "chunk_s",
    "is_near",
    "is_probe_due",
    "is_time_to_speak",
    "next_probe_in_s",
    "next_wait_s",
    "stands_far_back",
]

LONGEST_CHUNK_S: Final = 150.0
"""Those at the front re-read at least this often, in seconds, and the others half as often."""

VOICE_S: Final = 28.0
"""Longest silence of a rank that speaks, in seconds; with a look around, less than 30."""

_NEAREST: Final = 2
_LOOKS_PER_LEASE: Final = 4
_MORE_PER_CHUNK: Final = 8
_CHUNKS_UNTIL_ALL: Final = 2
# A wait that ends exactly when the lease does may end an instant early by rounding.
_MARGIN_S: Final = 0.001


def chunk_s(*, joint_timeout_s: float) -> float:
    """Return the longest time between two reads of a waiter, in seconds."""
    return min(LONGEST_CHUNK_S, joint_timeout_s / 2)


def is_near(ticket: int | None, *, chunks: int = 0) -> bool:
    """Tell whether a waiter is one of those who see to the probe.

    They are the two with the lowest tickets; and the longer nobody rings, the more there are,
    because the first may have died.

    Args:
        ticket: Its place in line; None is one whose answer was lost, or that was not asked for.
        chunks: How often it has looked without having been woken.
    """
    nearest = _NEAREST * _MORE_PER_CHUNK ** min(chunks, _CHUNKS_UNTIL_ALL)
    return chunks >= _CHUNKS_UNTIL_ALL or (ticket is not None and ticket <= nearest)


def stands_far_back(ticket: tuple[str, int] | None, *, turn: int, slots: int) -> bool:
    """Tell whether a waiter need not ask for its place in line, because it cannot be near.

    Whoever was let in and failed has used its ticket, and stands before all who still hold one.

    Args:
        ticket: A ticket for a slot that was not used, with its store, or None.
        turn: How far the line before the slots had come.
        slots: How many are let in at once.
    """
    return ticket is not None and ticket[1] - turn > slots / 2


def _lease_s(view: BreakerView, config: BreakerConfig) -> float | None:
    state = BreakerState(view.record.state)
    if state is BreakerState.OPEN:
        return view.record.open_s
    if state is BreakerState.HALF_OPEN:
        return config.probe_lease_s
    return None


def next_probe_in_s(view: BreakerView, config: BreakerConfig, *, now_s: float) -> float | None:
    """Return in how many seconds this process may claim the probe, or None if never."""
    lease_s = _lease_s(view, config)
    return None if lease_s is None else remaining_s(view.sighting, lease_s=lease_s, now_s=now_s)


def is_probe_due(view: BreakerView, config: BreakerConfig, *, now_s: float) -> bool:
    """Tell whether this process may claim the probe now, by its own sight."""
    return next_probe_in_s(view, config, now_s=now_s) == 0


def next_wait_s(
    view: BreakerView, config: BreakerConfig, *, near: bool, longest_s: float, now_s: float
) -> float:
    """Return how long to sleep on the bell before the next look at the record.

    Args:
        view: What this process knows.
        config: The breaker's configuration.
        near: Whether this waiter is one of the two nearest.
        longest_s: Longest sleep, in seconds.
        now_s: Now, on this process's clock.

    Returns:
        Seconds, > 0.
    """
    due_in_s = next_probe_in_s(view, config, now_s=now_s)
    if not near or due_in_s is None:
        return longest_s
    if view.record.state == BreakerState.HALF_OPEN.value:
        due_in_s = min(due_in_s, config.probe_lease_s / _LOOKS_PER_LEASE)
    return min(due_in_s + _MARGIN_S, longest_s)


def is_time_to_speak(
    spoken_at_s: float | None, *, wait_s: float, voice_s: float, now_s: float
) -> bool:
    """Tell a waiter whether to say now what it waits for.

    It speaks when it begins, and whenever its silence would otherwise last longer than ``voice_s``:
    a job that waits without a word looks like a job that hangs, and one that speaks at every look
    hides what it says.

    Args:
        spoken_at_s: When it last spoke, on its own clock, or None.
        wait_s: How long it is about to look away, in seconds.
        voice_s: Longest silence, in seconds.
        now_s: Now, on its own clock.
    """
    return spoken_at_s is None or now_s - spoken_at_s + wait_s >= voice_s
