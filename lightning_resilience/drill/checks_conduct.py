# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How the package conducts itself in any world: what it raises, and what it leaves in the store.

These are no promises of their own, but bugs whatever is promised: an error that is no answer to
anything that has happened, and keys of trips that nobody remembers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.drill.facts import Check
from lightning_resilience.drill.workload import DEPENDENCY
from lightning_resilience.errors import (
    BudgetExhaustedError,
    CircuitOpenError,
    JointError,
    RetriesExhaustedError,
    StoreUnavailableError,
)


if TYPE_CHECKING:
    from lightning_resilience.drill.facts import Facts
    from lightning_resilience.drill.process import Operation, Process


__all__ = ["BoundedCost", "BoundedKeys", "KnownErrors"]

# The present trip, the one before, and the one whose keys are just being removed.
_MOST_TRIPS: Final = 3


class KnownErrors(Check):
    """Looks at what operations raise.

    Args:
        facts: What is true.
    """

    promise = "errors"

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Look for what an error is the answer to."""
        error, process = operation.error, operation.process
        if error is None:
            return
        what = f"{process.name} ends {operation.kind} operation {operation.number} with {error!r}"
        if isinstance(error, StoreUnavailableError):
            holds = self.facts.had_trouble(process, operation.began_at_s)
            self.expect(holds, f"{what}, and the store has answered all the time")
        elif isinstance(error, RetriesExhaustedError):
            self.expect(operation.attempts, f"{what}, and it has sent nothing to storage")
        elif isinstance(error, CircuitOpenError):
            self._refused(now_s, operation, what)
        elif isinstance(error, KeyboardInterrupt):
            self.expect(process.hurries, f"{what}, and nobody has interrupted it")
        else:
            known = isinstance(error, (BudgetExhaustedError, JointError))
            self.expect(known, f"{what}, which is no answer to anything")

    def _refused(self, now_s: float, operation: Operation, what: str) -> None:
        if self.scenario.workload.when_open == "raise":
            return
        deadline_s = self.scenario.retry.deadline_s
        passed_s = (now_s - operation.began_at_s) * operation.process.host.clock.rate
        # The last sleep may be cut to what is left, and rounded.
        if passed_s < deadline_s - 1:
            self.fail(f"{what} after {passed_s:.3f} s; it waits, and deadline_s is {deadline_s:g}")


class BoundedCost(Check):
    """Looks at how often an operation asks the store.

    Waits grow, so that the questions of all who wait stay few: a fixed number for each operation,
    and a rate for as long as it lasts.

    Args:
        facts: What is true.
    """

    promise = "I7"

    _FIXED: Final = 400
    _PER_S: Final = 4.0

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Look at what an operation has cost."""
        lasted_s = now_s - operation.began_at_s
        most = self._FIXED + self._PER_S * lasted_s
        if operation.store_operations > most:
            self.fail(
                f"{operation.process.name} has asked the store {operation.store_operations} times "
                f"in {lasted_s:.3f} s of one {operation.kind} operation; {most:.0f} may be"
            )


class BoundedKeys(Check):
    """Counts keys that belong to trips.

    Args:
        facts: What is true.
    """

    promise = "keys"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        run = facts.keys.store_id.removesuffix("store_id")
        self._bells = f"{run}bell/{DEPENDENCY}/"
        self._starts = f"{run}i"
        self._places = f"/waiting/{DEPENDENCY}/"
        self._counts: dict[str, int] = {}
        self._deaths = 0

    def emptied(self, now_s: float) -> None:
        """Begin to count anew."""
        del now_s
        self._counts.clear()

    def changed(self, now_s: float, process: Process, what: str) -> None:
        """Note that somebody may have died before it could remove keys."""
        del now_s, process
        self._deaths += what in {"crashed", "interrupted"}

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Count a key that is new, or gone."""
        del now_s
        is_place = key.startswith(self._starts) and self._places in key
        if not (is_place or key.startswith(self._bells)):
            return
        prefix = key[: key.rindex("/") + 1]
        is_there = key in self.values
        self._counts[prefix] = self._counts.get(prefix, 0) + is_there - (before is not None)
        most = _MOST_TRIPS + self._deaths
        if self._counts[prefix] > most and not self.facts.had_trouble(process, 0.0):
            self.fail(f"{self._counts[prefix]} keys {prefix}… are in the store; {most} may be")
