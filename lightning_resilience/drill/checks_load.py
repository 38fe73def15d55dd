# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I5 and I7: what reaches storage was let in, and what the store is asked is bounded.

Counted where it arrives. A call that every rank makes at the same time needs a slot always, any
other one where the circuit is not closed, or has not been for longer than a view may be old. A
process that decides alone has slots of its own, which are its own business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.detour import GRACE_VIEWS
from lightning_resilience.drill.facts import EPSILON_S, Check


if TYPE_CHECKING:
    from lightning_resilience.drill.checks_slots import SlotCells, SlotClaim
    from lightning_resilience.drill.facts import Facts
    from lightning_resilience.drill.process import Operation, Process
    from lightning_resilience.drill.storage_model import Request


__all__ = ["Admitted", "CheapCalls", "DeadHolders"]

_NEVER_S: Final = float("-inf")
# What a check believes must not be what it checks.
_LETS_THROUGH: Final = frozenset({"closed", "recovering"})
_LOOKS_PER_LEASE: Final = 4
_LEASES: Final = 1.5


class Admitted(Check):
    """Counts calls at storage.

    Args:
        facts: What is true.
        slots: Knows who holds which slot.
    """

    promise = "I5"

    def __init__(self, facts: Facts, slots: SlotCells) -> None:
        super().__init__(facts)
        self._slots = slots
        self._running: dict[Request, int] = {}
        self._most = self.scenario.breaker.max_concurrent

    def began(self, now_s: float, request: Request) -> None:
        """Look by what right a call comes."""
        if request.kind != "call":
            return
        process, operation = request.process, request.operation
        claim = self._slots.claims.get(process)
        if claim is not None and self._comes_by(claim, operation):
            claim.is_used = True
            self._admitted(request, claim.index)
        elif self.facts.is_alone(process, operation):
            return
        elif operation.is_made_by_all:
            self.fail(
                f"{process.name} comes with attempt {request.attempt} of a {operation.kind} call, "
                "and has claimed no slot for it"
            )
        else:
            self._may_pass(now_s, process, operation)

    def ended(self, now_s: float, request: Request) -> None:
        """Count it no more."""
        del now_s
        self._running.pop(request, None)

    def _comes_by(self, claim: SlotClaim, operation: Operation) -> bool:
        if claim.is_used or claim.at_s < operation.began_at_s:
            return False
        # One whose answer was lost may have passed to another, and nobody needs it any more.
        is_free = self.facts.is_alone(operation.process, operation) or (
            self.facts.is_closed and not operation.is_made_by_all
        )
        return self._holds(claim) or not is_free

    def _holds(self, claim: SlotClaim) -> bool:
        record = self._slots.cells[claim.index].record
        return record is not None and record.holder == claim.nonce

    def _admitted(self, request: Request, index: int) -> None:
        process = request.process
        claim = self._slots.claims[process]
        lost = claim.life != self.facts.life or self.facts.stood_still(process, claim.at_s)
        if not self._holds(claim) and not lost:
            self.fail(f"{process.name} comes by slot {index}, which it does not hold any more")
        self._running[request] = index
        if len(self._running) > self._most:
            self._count()

    def _count(self) -> None:
        holders = [
            request
            for request, index in self._running.items()
            if not request.is_abandoned and self._slots.cells[index].holder is request.process
        ]
        if len(holders) > self._most:
            self.fail(f"{len(holders)} calls that were let in are in flight; {self._most} may be")

    def _may_pass(self, now_s: float, process: Process, operation: Operation) -> None:
        facts, config = self.facts, self.scenario.breaker
        if facts.record is None or facts.is_closed:
            return
        closed_at_s = facts.was_closed_at_s(now_s)
        view_s = config.view_max_age_s
        if facts.had_trouble(process, closed_at_s):
            view_s = GRACE_VIEWS * config.view_max_age_s + self.scenario.store.timeout_s
        # Whoever has waited for the circuit comes back over a spread of up to a second.
        view_s += min(1.0, self.scenario.ranks - 1.0)
        passed_s = (now_s - closed_at_s) * process.host.clock.rate
        if passed_s <= view_s + EPSILON_S or facts.stood_still(process, closed_at_s):
            return
        self.fail(
            f"{process.name} comes with a {operation.kind} call and no slot {passed_s:.3f} s after "
            f"the circuit was last closed; a view may be {view_s:g} s old"
        )


@dataclass(slots=True)
class _Watch:
    operation: Operation
    attempts: int
    since_s: float
    looked_at_s: float
    watched_s: float = 0.0


class DeadHolders(Check):
    """Looks whether a slot that a dead process holds is had again by those who wait.

    Whoever waits in line and looks, has watched a dead holder's slot for one and a half leases,
    and finds it unchanged once more, should have taken it.

    Args:
        facts: What is true.
        slots: Knows who holds which slot.
    """

    promise = "I5"

    def __init__(self, facts: Facts, slots: SlotCells) -> None:
        super().__init__(facts)
        self._slots = slots
        self._watches: dict[Process, _Watch] = {}
        self._has_died = False
        self._lease_s = self.scenario.admission.slot_lease_s

    def changed(self, now_s: float, process: Process, what: str) -> None:
        """Note that somebody may have died with a slot."""
        del now_s, process
        self._has_died = self._has_died or what in {"crashed", "ended", "interrupted"}

    def read(self, now_s: float, process: Process, key: str) -> None:
        """Add to what a waiter has watched."""
        operation = process.operation
        if not self._has_died or key not in self.facts.slot_of or operation is None:
            return
        if not operation.is_made_by_all or operation.ended_at_s is not None:
            return
        watch = self._watches.get(process)
        if watch is None or (watch.operation, watch.attempts) != (operation, operation.attempts):
            self._watches[process] = _Watch(operation, operation.attempts, now_s, now_s)
            return
        store = self.world.store
        way_s = 4 * self.scenario.store.latency_s + 2 * store.longest_queue_s
        gap_s = max(0.0, now_s - watch.looked_at_s - way_s) * process.host.clock.rate
        watch.watched_s += min(gap_s, self._lease_s / _LOOKS_PER_LEASE)
        watch.looked_at_s = now_s
        if watch.watched_s > _LEASES * self._lease_s:
            self._look(process, watch)

    def _look(self, process: Process, watch: _Watch) -> None:
        facts, record = self.facts, self.facts.record
        if (
            record is None
            or record.state not in _LETS_THROUGH
            or facts.is_alone(process, watch.operation)
        ):
            return
        if facts.had_trouble(process, watch.since_s) or facts.stood_still(process, watch.since_s):
            return
        if facts.epoch_began_at_s > watch.since_s:
            return
        for index, cell in enumerate(self._slots.cells[: record.limit]):
            holder = cell.holder
            if holder is None or holder.is_alive or cell.changed_at_s > watch.since_s:
                continue
            self.fail(
                f"{process.name} has watched slot {index} of {holder.name}, which is dead, for "
                f"{watch.watched_s:.3f} s and does not take it; the lease is {self._lease_s:g} s"
            )


@dataclass(slots=True)
class _View:
    """When a single call has last read the record, and nothing has failed since."""

    read_at_s: float = _NEVER_S


class CheapCalls(Check):
    """Looks at what a call of one rank costs the store while all is well.

    Args:
        facts: What is true.
    """

    promise = "I7"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._views: dict[Process, float] = {}
        self._read_at_s: dict[Process, float] = {}
        self._stirred_at_s = _NEVER_S

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Note that the record has changed: votes and new epochs cost what they cost."""
        del process, before
        if key == self.facts.breaker_key:
            self._stirred_at_s = now_s

    def emptied(self, now_s: float) -> None:
        """Note that the record has gone."""
        self._stirred_at_s = now_s

    def operation_began(self, now_s: float, operation: Operation) -> None:
        """Note when its process has looked last: it may not know that the circuit has closed."""
        del now_s
        self._read_at_s[operation.process] = self.facts.of(operation.process).read_at_s

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Look at what a call has cost."""
        process = operation.process
        viewed_at_s = self._views.pop(process, _NEVER_S)
        if not self._was_easy(operation):
            return
        facts, cost = self.facts, operation.store_operations
        if cost > 1:
            self.fail(f"{process.name} has asked the store {cost} times for one call; may be once")
        deeds = facts.of(process)
        read_at_s = deeds.read_at_s if deeds.read_at_s >= operation.began_at_s else viewed_at_s
        # The age of a view counts from when the read was sent, which is earlier.
        way_s = self.scenario.store.latency_s + self.world.store.longest_queue_s
        age_s = (operation.began_at_s - viewed_at_s + way_s) * process.host.clock.rate
        view_s = self.scenario.breaker.view_max_age_s
        if cost and age_s < view_s - EPSILON_S:
            self.fail(
                f"{process.name} asks the store again after {age_s:.3f} s; its view serves for "
                f"{view_s:g} s"
            )
        del now_s
        self._views[process] = read_at_s

    def _was_easy(self, operation: Operation) -> bool:
        """Tell whether a call had nothing to do with anything that had gone wrong."""
        facts, process = self.facts, operation.process
        began_at_s = operation.began_at_s
        record = facts.record
        return (
            operation.kind == "single"
            and operation.error is None
            and operation.attempts == 1
            and record is not None
            and facts.is_closed
            and not record.votes
            and (self._stirred_at_s < self._read_at_s[process] or self._read_at_s[process] < 0)
            and self._stirred_at_s < began_at_s
            and facts.of(process).in_row == 0
            and not facts.had_trouble(process, began_at_s)
            and not facts.stood_still(process, began_at_s)
            and not facts.is_alone(process, operation)
        )
