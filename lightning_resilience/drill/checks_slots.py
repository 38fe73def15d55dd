# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I5: who is let in holds a slot, no slot has two holders, and none is lost.

The slots are cells in the store, so a map of them is kept from what is written there: a cell is
created free, claimed from free, renewed and freed by its holder, and taken over from a holder that
has said nothing for a lease. A request that has to hold a slot must come from a process that has
written its claim and sent nothing for it yet. So never more are in flight than there are slots, but
for those that were given up, or forgiven because their process stood still, and run on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.core.breaker_record import passes
from lightning_resilience.core.records import SlotRecord
from lightning_resilience.drill.facts import EPSILON_S, Check
from lightning_resilience.drill.workload import DEPENDENCY


if TYPE_CHECKING:
    from lightning_resilience.core.records import BreakerRecord
    from lightning_resilience.drill.facts import Facts
    from lightning_resilience.drill.process import Process


__all__ = ["Cell", "SlotCells", "SlotClaim"]

_FREE: Final = SlotRecord(writer="")


@dataclass(slots=True)
class Cell:
    """One slot, as it was written last.

    Args:
        record: What is there; None where nothing is.
        holder: The process that has claimed it, or None while it is free.
        changed_at_s: When it was written.
    """

    record: SlotRecord | None = None
    holder: Process | None = None
    changed_at_s: float = 0.0


@dataclass(slots=True)
class SlotClaim:
    """A process's latest claim of a slot.

    Args:
        index: Which slot.
        nonce: The holder's nonce in it.
        at_s: When it was written.
        life: In which life of the store.
        is_used: Whether a request has been sent for it.
    """

    index: int
    nonce: str
    at_s: float
    life: int
    is_used: bool = False


class SlotCells(Check):
    """Looks at every write of a slot.

    Args:
        facts: What is true.

    Attributes:
        cells: All slots.
        claims: The latest claim of each process, until its slot is free again.
    """

    promise = "I5"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.cells = [Cell() for _ in facts.slot_of]
        self.claims: dict[Process, SlotClaim] = {}
        self._turn_key = facts.keys.turn(DEPENDENCY)
        self._lease_s = self.scenario.admission.slot_lease_s

    def emptied(self, now_s: float) -> None:
        """Forget the slots: they are gone."""
        for cell in self.cells:
            cell.record, cell.holder, cell.changed_at_s = None, None, now_s

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Look at a change of a slot."""
        del before
        index = self.facts.slot_of.get(key)
        if index is None:
            return
        raw = self.values.get(key)
        if raw is None:
            self.fail(f"{process.name} has deleted slot {index}")
        cell, new = self.cells[index], self.decoded(SlotRecord, key, raw)
        if not process.wrote(new.writer):
            self.fail(f"{process.name} signs slot {index} as {new.writer!r}")
        old = cell.record or _FREE
        if not old.holder and not new.holder:
            self._created(process, index, new)
        elif not old.holder:
            self._claimed(process, index, new, now_s=now_s)
        elif new.holder == old.holder:
            self._renewed(process, index, new)
        elif not new.holder:
            self._freed(process, index, new, now_s=now_s)
        else:
            self._taken_over(process, index, new, now_s=now_s)
        cell.record, cell.changed_at_s = new, now_s

    def _claimed(self, process: Process, index: int, new: SlotRecord, *, now_s: float) -> None:
        old = self.cells[index].record or _FREE
        same = msgspec.structs.replace(new, turn=old.turn, holder=old.holder, writer=old.writer)
        if same != old or new.holder != new.writer:
            self.fail(f"{process.name} claims slot {index} and makes of {old} {new}")
        drawn = int(self.values.get(self._turn_key, b"0"))
        if new.turn != old.turn and new.turn > drawn and not self.facts.life:
            self.fail(
                f"{process.name} enters slot {index} with ticket {new.turn}; {drawn} were drawn"
            )
        self._must_be_usable(process, index)
        self.cells[index].holder = process
        self.claims[process] = SlotClaim(index, new.holder, now_s, self.facts.life)

    def _created(self, process: Process, index: int, new: SlotRecord) -> None:
        is_new = self.cells[index].record is None
        if not is_new or new != msgspec.structs.replace(_FREE, writer=new.writer):
            self.fail(f"{process.name} writes slot {index}, which is free, to {new}")

    def _must_be_usable(self, process: Process, index: int) -> None:
        read = self.facts.of(process).read
        limits = [_limit(record) for record in (read, self.facts.record)]
        # A claim that comes late rests on a look that is older than the latest.
        if index >= max(limits) and not self.scenario.store.late_requests:
            self.fail(
                f"{process.name} claims slot {index}; the limit was {limits[0]} when it looked and "
                f"is {limits[1]} now"
            )

    def _renewed(self, process: Process, index: int, new: SlotRecord) -> None:
        old = self.cells[index].record or _FREE
        if not process.wrote(old.holder):
            self.fail(f"{process.name} renews slot {index}, which {old.holder!r} holds")
        if msgspec.structs.replace(new, writer=old.writer) != old or new.writer == old.writer:
            self.fail(f"{process.name} renews slot {index} and makes of {old} {new}")

    def _freed(self, process: Process, index: int, new: SlotRecord, *, now_s: float) -> None:
        cell = self.cells[index]
        old = cell.record or _FREE
        if not process.wrote(old.holder):
            self.fail(f"{process.name} frees slot {index}, which {old.holder!r} holds")
        if new.turn != old.turn:
            self.fail(f"{process.name} frees slot {index} and changes its turn to {new.turn}")
        if new.took_s != old.took_s:
            self._must_have_taken(now_s, process, new.took_s)
        if new.last != old.last and not self.scenario.store.late_requests:
            self._must_have_ended(process, index, new.last)
        cell.holder = None
        claim = self.claims.get(process)
        if claim is not None and claim.nonce == old.holder:
            del self.claims[process]

    def _must_have_taken(self, now_s: float, process: Process, took_s: float) -> None:
        operation = process.operation
        began_at_s = 0.0 if operation is None else operation.began_at_s
        most_s = (now_s - began_at_s) * process.host.clock.rate + EPSILON_S
        if not 0 <= took_s <= most_s and not self.scenario.store.late_requests:
            self.fail(
                f"{process.name} says that a call took {took_s:.3f} s; its operation began "
                f"{most_s:.3f} s ago"
            )

    def _must_have_ended(self, process: Process, index: int, last: str) -> None:
        call = self.facts.of(process).call
        if process.host.cut_off_from_storage_until_s > 0 or call is None:
            return
        fails = call.is_abandoned or (call.failed is not None and self.facts.counts(call.failed))
        if last != ("failed" if fails else "ok") or call.began_at_s < 0:
            answer = "was given up" if call.is_abandoned else repr(call.failed)
            self.fail(f"{process.name} leaves slot {index} with {last!r}; its call {answer}")

    def _taken_over(self, process: Process, index: int, new: SlotRecord, *, now_s: float) -> None:
        cell = self.cells[index]
        holder = cell.holder
        watched_s = (now_s - cell.changed_at_s) * process.host.clock.rate
        if watched_s < self._lease_s - EPSILON_S:
            self.fail(
                f"{process.name} takes slot {index} after {watched_s:.6f} s of silence; the lease "
                f"is {self._lease_s:g} s"
            )
        away_s, times = self.facts.store_away_s(cell.changed_at_s)
        # Of each time in which nobody could beat, half a lease may be taken for silence.
        heard_s = watched_s - away_s * process.host.clock.rate + times * self._lease_s / 2
        if heard_s < self._lease_s - EPSILON_S:
            self.fail(
                f"{process.name} takes slot {index} after {watched_s:.6f} s, in which the store "
                f"was away for {away_s:.6f} s; the lease is {self._lease_s:g} s"
            )
        if holder is not None and self._shows_life(holder, cell.changed_at_s):
            self.fail(
                f"{process.name} takes slot {index} from {holder.name}, whose call runs and "
                f"whose way to the store is free"
            )
        cell.record = msgspec.structs.replace(cell.record or _FREE, holder="")
        # What a holder says of itself is the same before and after, whoever it is.
        self._claimed(process, index, new, now_s=now_s)

    def _shows_life(self, holder: Process, since_s: float) -> bool:
        call = self.facts.of(holder).call
        is_calling = call is not None and call.ended_at_s is None and not call.is_abandoned
        return (
            is_calling
            and holder.is_alive
            and not self.facts.stood_still(holder, since_s)
            and not self.facts.had_trouble(holder, since_s)
        )


def _limit(record: BreakerRecord | None) -> int:
    return record.limit if record is not None and passes(record) else 0
