# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Standing in line for a slot: how far one's turn is, and when to look again.

A waiter knows its ticket, and sees at each look how far the line has come. It sleeps until its turn
should be, by how long a call takes and, once it has looked twice, by how fast the line has really
moved; comes a little early; and then looks again about once per call. So a few stand at the door of
the slots at any time, whatever the number of those who wait, and a waiter costs the store about two
looks.

* Nothing here lets anybody in: a free slot is taken by whoever claims it. Whoever looks too early,
  too late, or with a ticket that means nothing any more only costs time.
* A line that stands still has nobody in it: where a slot is free and no ticket is let in for as
  long as several calls take, whoever stands there takes it.
* Waits grow with the looks in vain. Constant ones overwhelm the store with a large job.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.slots import distance, pace_s, turn_of


if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_resilience.core.slots import Slot


__all__ = [
    "LOOKS_PER_LEASE",
    "Queue",
    "at_the_bell",
    "count_look",
    "first_look_s",
    "look_on",
    "may_try",
    "next_look_s",
    "queue_s",
    "with_ticket",
]

LOOKS_PER_LEASE: Final = 4
"""Whoever waits re-reads so often per lease, so that a dead holder is found within 1.5 of them."""

# Before any call has been timed: a small object's round trip. Only spreads the first looks.
_FIRST_PACE_S: Final = 0.05
# Share of a call's time between two looks of one who stands before the slots.
_SHARE: Final = 1.2
# A line that is measured moves by those who come in it: without a bound it would keep whatever pace
# it once had. Where nearly all slots are held at a look, it is rather the slots that are slow, some
# by a claim whose answer was lost.
_SLOWEST: Final = 1.15
_SLOWEST_IF_FULL: Final = 1.3
_FREE_IF_FULL: Final = 1 / 16
# Who has waited tries from this many times the slots on: a few at the door keep them busy, and all
# at once would overtake those whose turn it is.
_AT_THE_DOOR: Final = 1.5
# A ramp takes about so many calls, and a line in which nobody moves for longer stands still.
_STILL_AFTER_CALLS: Final = 4
# Whoever comes in turn comes a little early: of several who stand before the slots one finds each
# that comes free at once.
_EARLY: Final = 0.3
_GROWTH: Final = 1.3
_LOOKS_BEFORE_GROWTH: Final = 4
_MOST_GROWTH: Final = 4.0
_MOST_GUESSED_GROWTH: Final = 100.0
# Whoever has looked so often in vain is kept from its turn by something that the pace says nothing
# about, a holder that is dead or a call that hangs: from then on waits grow whatever the pace.
_LOOKS_AT_PACE: Final = 12
_MOST_EXPONENT: Final = 100


def count_look(looks: int, *, before_s: float | None, now_s: float | None) -> int:
    """Return how many looks in vain count, after another one.

    Args:
        looks: Looks that counted so far.
        before_s: The pace at the look before, in seconds, or None.
        now_s: The pace now, in seconds, or None. The first that is known ends the guessing, and
            what was looked at before says nothing any more.
    """
    return looks + 1 if (before_s is None) == (now_s is None) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What one waiter knows of the line before it, from its looks.

    Args:
        ahead: Tickets that are to be let in before its own.
        limit: How many are let in at once now, ≥ 1.
        slots: How many are let in at once when all is well, ≥ 1.
        is_free: Whether a slot was to be had at the last look: free, or held by one that is silent.
        is_full: Whether nearly all slots were held then.
        pace_s: How long a call takes, in seconds; None where no call has told.
        turn: How far the line had come when this waiter first looked, or when it last stood still.
        since_s: When that was, on the waiter's clock.
        reached: How far it had come at the last look.
        moved_at_s: When it was first seen there, on the waiter's clock.
        per_ticket_s: Time that one more ticket has taken since, in seconds; None before any.
        looks: Looks in vain so far.
    """

    ahead: int
    limit: int
    slots: int
    is_free: bool
    is_full: bool = False
    pace_s: float | None
    turn: int
    since_s: float
    reached: int
    moved_at_s: float
    per_ticket_s: float | None = None
    looks: int = 0


def at_the_bell(
    slots: int,
    *,
    ticket: int | None,
    place: int | None,
    turn: int,
    limit: int,
    pace_s: float | None,
    now_s: float,
) -> Queue:
    """Return what one knows who was woken with all others, and has not looked since.

    Args:
        slots: How many are let in at once when all is well.
        ticket: Its ticket, or None where it has none.
        place: Its place among those who were let in and have failed, from 1; they come before all
            who hold a ticket. None where it has none.
        turn: How far the line had come before.
        limit: How many are let in at once at the beginning.
        pace_s: How long a call took before, in seconds, or None.
        now_s: Now, on its clock.
    """
    return Queue(
        ahead=(place or 1) - 1 if ticket is None else distance(ticket, turn),
        limit=limit,
        slots=slots,
        is_free=True,
        pace_s=pace_s,
        turn=turn,
        since_s=now_s,
        reached=turn,
        moved_at_s=now_s,
    )


def look_on(
    queue: Queue | None,
    slots: Sequence[Slot],
    *,
    ticket: int | None,
    limit: int,
    is_free: bool,
    now_s: float,
) -> Queue:
    """Note what another look has shown.

    Args:
        queue: What this waiter knows so far, or None.
        slots: All slots as they were read.
        ticket: The waiter's ticket, or None.
        limit: How many are let in at once now.
        is_free: Whether a slot is to be had.
        now_s: Now, on the waiter's clock.
    """
    turn = turn_of(slots)
    seen = Queue(
        ahead=distance(ticket, turn),
        limit=max(1, limit),
        slots=len(slots),
        is_free=is_free,
        is_full=_are_full(slots),
        pace_s=pace_s(slots),
        turn=turn,
        since_s=now_s,
        reached=turn,
        moved_at_s=now_s,
    )
    if queue is None:
        return seen
    looks = count_look(queue.looks, before_s=queue.pace_s, now_s=seen.pace_s)
    passed = turn - queue.turn
    if passed and (passed < 0 or limit < seen.slots):
        # Another store, or a ramp, which says nothing about what follows.
        return replace(seen, looks=looks)
    moved_at_s = queue.moved_at_s if turn == queue.reached else now_s
    seen = replace(seen, moved_at_s=moved_at_s, looks=looks)
    if now_s - moved_at_s >= _still_s(seen):
        # However well it moved before: those who are next may be no more.
        return replace(seen, since_s=moved_at_s)
    return replace(
        seen,
        turn=queue.turn,
        since_s=queue.since_s,
        per_ticket_s=(now_s - queue.since_s) / passed if passed >= seen.slots else None,
    )


def _are_full(slots: Sequence[Slot]) -> bool:
    return sum(slot.is_free for slot in slots) <= len(slots) * _FREE_IF_FULL


def may_try(
    queue: Queue, *, has_waited: bool, is_last_chance: bool, looked_at_s: float, now_s: float
) -> bool:
    """Tell whether to claim a slot that is free.

    Who has only just come leaves it to those whose turn it is, or all who come at the same time
    would claim the same few slots. Who has waited tries a little before its turn, and any slot that
    nobody comes for.

    Args:
        queue: What this waiter knows.
        has_waited: Whether it has waited for its turn.
        is_last_chance: Whether it has no time to wait for its turn.
        looked_at_s: When it sent its latest look, on its clock.
        now_s: Now, on its clock.
    """
    if not has_waited:
        # A store that takes so long to answer was asked by many, and what was free then has been
        # claimed since.
        is_fresh = now_s - looked_at_s < _pace_s(queue)
        return queue.ahead < queue.limit and (is_fresh or is_last_chance)
    return queue.ahead < _AT_THE_DOOR * queue.slots or _stands_still(queue, now_s=now_s)


def with_ticket(queue: Queue, ticket: int | None, *, turn: int) -> Queue:
    """Note the ticket that a waiter has drawn after its first look.

    Args:
        queue: What it knows.
        ticket: The ticket, or None where the answer was lost.
        turn: How far the line had come at that look.
    """
    return replace(queue, ahead=distance(ticket, turn))


def queue_s(queue: Queue) -> float:
    """Return how long a queue takes until one who stands behind it is let in, in seconds.

    While the limit is below the number of slots it doubles with each call that succeeds, so that
    the first rounds let in few.
    """
    if queue.per_ticket_s is not None:
        # However slow it is: what has held it up may be over, and then nobody would come.
        slowest = _SLOWEST_IF_FULL if queue.is_full else _SLOWEST
        slowest_s = slowest * _pace_s(queue) / queue.slots
        return queue.ahead * min(queue.per_ticket_s, slowest_s)
    ahead, limit, rounds = queue.ahead, queue.limit, 0
    while limit < queue.slots and ahead >= limit:
        ahead -= limit
        limit *= 2
        rounds += 1
    return _pace_s(queue) * (rounds + ahead / min(limit, queue.slots))


def first_look_s(queue: Queue, *, draw: float) -> float:
    """Return how long one who was woken with all others waits before it looks, in seconds.

    Args:
        queue: What it knew before it waited, at the limit with which the ramp begins.
        draw: A uniform number in [0, 1).
    """
    return max(0.0, queue_s(queue) - _pace_s(queue) * _EARLY * (0.5 + draw))


def next_look_s(queue: Queue, *, now_s: float, lease_s: float, draw: float) -> float:
    """Return how long to wait before the next look, in seconds.

    Args:
        queue: What this waiter knows.
        now_s: Now, on the waiter's clock.
        lease_s: Lease of a slot, in seconds.
        draw: A uniform number in [0, 1).

    Returns:
        The time that the queue ahead takes, a little less; and at least a jittered share of the
        pace, which grows with the looks in vain, because constant waits overwhelm the store. It is
        capped at a quarter of the lease, so that whoever is next in line finds a dead holder within
        one and a half leases.
    """
    pace = _pace_s(queue)
    looks = queue.looks
    if queue.pace_s is None:
        growth = min(_MOST_GUESSED_GROWTH, _power(looks))
    else:
        growth = min(_MOST_GROWTH, _power(looks - _LOOKS_BEFORE_GROWTH)) * _power(
            looks - _LOOKS_AT_PACE
        )
    share_s = min(pace * _SHARE * (0.5 + draw) * growth, lease_s / LOOKS_PER_LEASE)
    wait_s = max(0.0, queue_s(queue) - pace * _EARLY * (0.5 + draw))
    if _stands_still(queue, now_s=now_s):
        wait_s = min(wait_s, share_s * math.log2(2 + queue.ahead))
    return max(wait_s, share_s)


def _pace_s(queue: Queue) -> float:
    return _FIRST_PACE_S if queue.pace_s is None else queue.pace_s


def _stands_still(queue: Queue, *, now_s: float) -> bool:
    """Tell whether a slot is free and nobody comes for it, so that those ahead may be no more."""
    if not queue.is_free or queue.per_ticket_s is not None:
        return False
    return not queue.looks or now_s - queue.since_s >= _still_s(queue)


def _still_s(queue: Queue) -> float:
    return _STILL_AFTER_CALLS * _pace_s(queue)


def _power(looks: int) -> float:
    # A larger exponent would overflow, and every wait is at its cap long before.
    return float(_GROWTH ** max(0, min(looks, _MOST_EXPONENT)))
