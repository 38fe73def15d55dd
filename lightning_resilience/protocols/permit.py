# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A slot that this process holds: kept by beats while its call runs, and then given back.

Every beat and the giving back are written over exactly what this holder has written last. Where
that is not there, somebody else took the holder for dead, and nothing is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.core import slots as cells
from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.core.records import SlotRecord, encode
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.effects import CompareAndSet, Local, Nonce, Now, Renewal
from lightning_resilience.protocols.shared_cell import write


if TYPE_CHECKING:
    from lightning_resilience.core.outcome import Outcome
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["Permit", "leave"]

# An answer that was lost may have been executed, and then the second try is what tells.
_LEAVING_TRIES: Final = 3
# But a store that takes its whole timeout is away, and whoever has its result does not wait for it.
_LEAVING_S: Final = 1.0


class Permit(Renewal):
    """A slot that this process holds.

    Args:
        key: The slot's key.
        record: What it holds now.
        index: The slot's number.
        every_s: How often to beat, in seconds.
        entered_at_s: When it was taken, on this process's clock.
        generation: Number of the trip after which it was taken.
        is_own: Whether it is in this process's own store.

    Attributes:
        is_lost: Whether somebody else was seen in it: this holder was taken for dead.
    """

    def __init__(
        self,
        key: str,
        record: SlotRecord,
        *,
        index: int,
        every_s: float,
        entered_at_s: float,
        generation: int = 0,
        is_own: bool = False,
    ) -> None:
        self.key = key
        self.record = record
        self.index = index
        self.raw = encode(record)
        self.every_s = every_s
        self.entered_at_s = entered_at_s
        self.generation = generation
        self.is_lost = False
        self._is_own = is_own
        # A beat that was not answered: it may be there.
        self._unanswered: SlotRecord | None = None

    def request(self, nonce: str) -> CompareAndSet | Local | None:
        """Return the next beat; the last one again where its answer was lost."""
        if self.is_lost:
            return None
        if self._unanswered is None:
            self._unanswered = cells.renewed(self.record, writer=nonce)
        beat = CompareAndSet(self.key, self.raw, encode(self._unanswered))
        return Local(beat) if self._is_own else beat

    def answered(self, returned: bytes) -> None:
        """Take note of what is in the slot now."""
        beat, self._unanswered = self._unanswered, None
        if beat is not None and returned == encode(beat):
            self.record, self.raw = beat, returned
        else:
            self.is_lost = True

    def expectations(self) -> tuple[bytes, ...]:
        """What may be in the slot if it is still this holder's."""
        if self._unanswered is None:
            return (self.raw,)
        return (self.raw, encode(self._unanswered))


def leave(permit: Permit, outcome: Outcome) -> Protocol[None]:
    """Give a slot back; nothing where somebody else has it already.

    Args:
        permit: The slot.
        outcome: How the call ended.
    """
    if permit.is_lost:
        return
    now_s: float = yield Now()
    writer: str = yield Nonce()
    free = encode(
        cells.released(
            permit.record,
            outcome,
            generation=permit.generation,
            lasted_s=now_s - permit.entered_at_s,
            writer=writer,
        )
    )
    permit.is_lost = True
    # Whoever was interrupted does not wait for one answer after the other: the lease does the rest.
    tries = 1 if outcome.failure is FailureClass.CANCELLED else _LEAVING_TRIES
    for left in reversed(range(tries)):
        error = yield from _give_back(permit, free)
        if error is None:
            return
        failed_at_s: float = yield Now()
        if not left or failed_at_s - now_s > _LEAVING_S:
            raise error


def _give_back(permit: Permit, free: bytes) -> Protocol[StoreUnavailableError | None]:
    try:
        for expected in permit.expectations():
            written = yield from write(permit.key, expected, free)
            if written.won:
                break
    except StoreUnavailableError as error:
        return error
    return None
