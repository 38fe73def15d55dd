# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I8 where the store is gone: who defers has reason to, nobody is left behind, and all is settled.

A save that was left without a verdict is done, or staged on the node of who made it. Whoever
defers was there when the server was gone, and for long enough; or has met another store than it
had. Once a rank has deferred and the worker has left, the others leave within a bound, also where
the store is back. And after the next verdict every rank knows how what it had deferred has ended.

At the end of the run all ranks wait for what may be left, or none does, whatever each has heard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.core.store_loss import is_deferred
from lightning_resilience.drill.facts import EPSILON_S, Check
from lightning_resilience.drill.process import ENDS, WORKER
from lightning_resilience.drill.scenario import StoreGone


if TYPE_CHECKING:
    from lightning_resilience.drill.facts import Facts
    from lightning_resilience.drill.process import Operation, Process


__all__ = ["Deferrals", "SameEnd"]

_NEVER_S: Final = float("-inf")
# Looks at a store that does not answer: a pause, and the client's patience.
_LONGEST_PAUSE_S: Final = 5.0
_LOOKS: Final = 4
# A rank may be refused for that long, then be alone with the store for that long, and once more
# where the store is lost while it is.
_PATIENCES: Final = 3


class Deferrals(Check):
    """Looks at joint operations that are left without a verdict.

    Args:
        facts: What is true.
    """

    promise = "I8"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._after_s = self.scenario.workload.defer_after_s
        self._gone = [fault for fault in self.scenario.faults if isinstance(fault, StoreGone)]
        # When the first rank has deferred an operation, and when its worker has left it.
        self._first_s: dict[tuple[int, int], float] = {}
        self._worker_left_s: dict[tuple[int, int], float] = {}
        self._before_s: dict[str, float] = {}
        self._deferred: set[str] = set()

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Look at how a rank leaves a joint operation."""
        if not operation.is_joint or not self._after_s:
            return
        process, result = operation.process, operation.result
        number = (process.incarnation, operation.number)
        if process.rank == WORKER:
            self._worker_left_s[number] = now_s
        deferred = result is not None and is_deferred(result.final)
        if deferred:
            self._must_have_reason(now_s, operation)
            self._deferred.add(process.name)
            self._first_s.setdefault(number, now_s)
            if process.rank == WORKER and operation.has_work and result.value is None:
                self.fail(f"{process.name} defers a save that is neither made nor staged")
        else:
            self._deferred.discard(process.name)
            if result is not None and not result.final.failure:
                self._must_be_settled(operation)
        self._must_not_be_late(now_s, operation, number)
        self._before_s[process.name] = operation.began_at_s

    def _must_have_reason(self, now_s: float, operation: Operation) -> None:
        process = operation.process
        if not operation.is_of_one:
            self.fail(f"{process.name} defers a {operation.kind}, which has no other way")
        # From the operation before on: what it knows of the store it has from there, and that may
        # have gone after it had read its verdict.
        since_s = self._before_s.get(process.name, _NEVER_S)
        was_gone = any(
            fault.at_s <= now_s and fault.at_s + fault.for_s >= since_s for fault in self._gone
        )
        # One that had deferred before is in a store that it has not had a verdict from.
        if not was_gone and process.name not in self._deferred:
            self.fail(
                f"{process.name} defers joint operation {operation.number}, and the store's server "
                "was there all the time"
            )
        self._must_have_waited(now_s, process)

    def _must_have_waited(self, now_s: float, process: Process) -> None:
        """Look, at the first loss of all, whether it has lasted; a later one is known already."""
        if self.facts.life or process.name in self._deferred:
            return
        waited_s = now_s - self._gone_since_s(now_s)
        if 0 < waited_s * process.host.clock.rate < self._after_s - EPSILON_S:
            self.fail(
                f"{process.name} defers after {waited_s:.3f} s without a server; defer_after_s is "
                f"{self._after_s:g}"
            )

    def _gone_since_s(self, now_s: float) -> float:
        """Return since when the server has been gone, also where one fault follows on another."""
        since_s = now_s
        for fault in sorted(self._gone, key=lambda each: each.at_s, reverse=True):
            if fault.at_s <= since_s <= fault.at_s + fault.for_s:
                since_s = fault.at_s
        return since_s

    def _must_be_settled(self, operation: Operation) -> None:
        process = operation.process
        if operation.unsettled and not self.facts.had_trouble(process, operation.began_at_s):
            self.fail(
                f"{process.name} has a verdict of joint operation {operation.number}, and does not "
                f"know how {operation.unsettled} have ended"
            )

    def _must_not_be_late(
        self, now_s: float, operation: Operation, number: tuple[int, int]
    ) -> None:
        process = operation.process
        first_s, worker_s = self._first_s.get(number), self._worker_left_s.get(number)
        if first_s is None or worker_s is None or self._was_held_up(process, first_s):
            return
        since_s = max(first_s, worker_s, operation.began_at_s)
        bound_s = self._bound_s()
        if now_s - since_s > bound_s:
            self.fail(
                f"{process.name} leaves joint operation {operation.number} {now_s - since_s:.3f} s "
                f"after others that have deferred it; the bound is {bound_s:.3f} s"
            )

    def _was_held_up(self, process: Process, since_s: float) -> bool:
        """Tell whether a rank was cut off by itself, or has stood still."""
        facts = self.facts
        return (
            facts.is_lossy
            or facts.stood_still(process, since_s)
            or process.host.cut_off_until_s >= since_s
        )

    def _bound_s(self) -> float:
        look_s = self.scenario.store.timeout_s + _LONGEST_PAUSE_S
        away_s = max((fault.for_s for fault in self._gone), default=0.0)
        patience_s = _PATIENCES * self._after_s + _LOOKS * look_s
        return patience_s * self.scenario.clocks.rate + min(away_s, patience_s)


class SameEnd(Check):
    """Looks whether the ranks of one start end their run alike.

    Args:
        facts: What is true.
    """

    promise = "I8"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._waits: dict[int, dict[str, bool]] = {}
        self._not_told: set[str] = set()

    def operation_began(self, now_s: float, operation: Operation) -> None:
        """Note who waits at its end for what may be left, and who goes on to it."""
        del now_s
        if operation.kind == ENDS[0]:
            self._note(operation.process, waits=True)
        elif operation.kind in ENDS and operation.process.name in self._not_told:
            self.fail(f"{operation.process.name} goes on to what is left, and was told of nothing")

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Note who was told nothing of what is left."""
        del now_s
        result = operation.result
        if operation.kind == ENDS[0] and result is not None and is_deferred(result.final):
            self._not_told.add(operation.process.name)

    def changed(self, now_s: float, process: Process, what: str) -> None:
        """Note who has come to its end without that."""
        del now_s
        last = process.operation
        went_well = last is not None and last.error is None and last.kind not in ENDS
        if what == "ended" and went_well:
            self._note(process, waits=False)

    def _note(self, process: Process, *, waits: bool) -> None:
        before = self._waits.setdefault(process.incarnation, {})
        for name, other in before.items():
            if other is not waits:
                one, two = (process.name, name) if waits else (name, process.name)
                self.fail(f"{one} waits at its end for what may be left, and {two} has gone on")
        before[process.name] = waits
