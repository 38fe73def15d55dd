# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is in a slot, and what all slots together say.

A slot is free, or held by a nonce. Of its latest call it remembers how that ended and how long it
took, so that whoever reads the slots sees how the dependency fares without another key.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.core.records import SlotRecord


if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_resilience.core.outcome import Outcome


__all__ = [
    "Slot",
    "all_have_failed",
    "distance",
    "pace_s",
    "released",
    "renewed",
    "taken",
    "turn_of",
]

_OK: Final = "ok"
_FAILED: Final = "failed"
_QUARTER: Final = 4
_SILENT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One slot as it was read.

    Args:
        index: Its number, from 0.
        raw: The cell's exact bytes; empty where nobody has used it.
        record: What they say, or None.
    """

    index: int
    raw: bytes
    record: SlotRecord | None

    @property
    def is_free(self) -> bool:
        """True where nobody holds it."""
        return self.record is None or not self.record.holder

    @property
    def turn(self) -> int:
        """Ticket that it has let in last."""
        return 0 if self.record is None else self.record.turn


def taken(slot: Slot, *, ticket: int | None, holder: str) -> SlotRecord:
    """Return the cell with which a waiter makes a slot its own.

    Args:
        slot: The slot as it was read.
        ticket: The waiter's ticket, or None.
        holder: A fresh nonce.
    """
    before = slot.record or SlotRecord(writer="")
    return msgspec.structs.replace(
        before, turn=before.turn if ticket is None else ticket, holder=holder, writer=holder
    )


def renewed(held: SlotRecord, *, writer: str) -> SlotRecord:
    """Return a holder's beat: the same record, by another write."""
    return msgspec.structs.replace(held, writer=writer)


def released(
    held: SlotRecord, outcome: Outcome, *, generation: int, lasted_s: float, writer: str
) -> SlotRecord:
    """Return the free cell that a holder leaves behind.

    Args:
        held: The cell as it was held.
        outcome: How the call ended. An interrupted one says nothing.
        generation: Number of the trip after which the call was let in.
        lasted_s: How long it took, in seconds.
        writer: Nonce of the write.
    """
    took_s = lasted_s if outcome.ok else held.took_s
    free = msgspec.structs.replace(held, holder="", took_s=took_s, writer=writer)
    if outcome.failure is FailureClass.CANCELLED:
        return free
    last = _FAILED if outcome.counts else _OK
    return msgspec.structs.replace(free, last=last, generation=generation)


def all_have_failed(slots: Sequence[Slot], *, own: int, generation: int, at_least: int) -> bool:
    """Tell whether the latest call in all slots has failed, but for one in eight.

    Whoever holds a slot may be stuck, and what it said last is of another time.

    It is what makes a host vote after its first failure, where every rank calls at the same time:
    to wait until one of them has failed several times in a row would take as many requests as there
    are ranks, and retries that the budget may deny.

    Args:
        slots: All slots as they were read.
        own: Number of the slot of the caller, whose call has just failed.
        generation: Number of the latest trip: what failed before it has been answered by it.
        at_least: Failures that are needed in all; with fewer slots, no number of them is enough.
    """
    failed = 1 + sum(
        slot.index != own
        and slot.record is not None
        and (slot.record.last, slot.record.generation) == (_FAILED, generation)
        for slot in slots
    )
    return failed >= max(at_least, len(slots) - len(slots) // _SILENT)


def turn_of(slots: Sequence[Slot]) -> int:
    """Return how far the line has come: the ticket that a quarter of the slots have passed.

    Not the highest: one who came early, because it had waited or had lost its place, would tell all
    others that it is their turn. Nor a count of those who were let in: tickets whose owners gave up
    would stand before everybody for ever.
    """
    turns = sorted((slot.turn for slot in slots), reverse=True)
    return turns[(len(turns) - 1) // _QUARTER] if turns else 0


def distance(ticket: int | None, turn: int) -> int:
    """Return how many tickets are to be let in before this one; 0 for one that was lost.

    Args:
        ticket: The ticket, or None.
        turn: How far the line has come.
    """
    return 0 if ticket is None else max(0, ticket - 1 - turn)


def pace_s(slots: Sequence[Slot]) -> float | None:
    """Return how long a call takes, in seconds: the median of what the slots say, if any does."""
    taken = [slot.record.took_s for slot in slots if slot.record is not None and slot.record.took_s]
    return statistics.median(taken) if taken else None
