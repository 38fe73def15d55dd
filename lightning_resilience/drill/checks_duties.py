# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What must follow: a claim that is due, a bell, a clean record after a restart, spread retries.

The other checks look at what is done; these at what is not. Nobody would be harmed at once by a
bell that is not rung, by a vote that a killed job has left, or by retries that come in step, and so
nothing else sees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.events import RetryScheduled
from lightning_resilience.core.records import FinalRecord
from lightning_resilience.drill.facts import Check
from lightning_resilience.drill.workload import DEPENDENCY


if TYPE_CHECKING:
    from lightning_resilience.core.events import Event
    from lightning_resilience.drill.facts import Facts
    from lightning_resilience.drill.process import Operation, Process


__all__ = ["ClearedVotes", "DueClaims", "LostRanks", "RungBells", "SpreadRetries"]

_HALF_OPEN: Final = "half_open"
_OPEN: Final = "open"
# Whoever looks once and finds a probe due may be about another thing; a waiter looks again.
_SPARED_LOOKS: Final = 2
_LETS_THROUGH: Final = frozenset({"closed", "recovering"})
# Delays that are compared with a new one.
_REMEMBERED: Final = 256
# A beat is every quarter of the timeout at the latest, and each takes an answer of the store.
_SIGNS_PER_TIMEOUT: Final = 2


@dataclass(slots=True)
class _Sight:
    """Since when one operation has seen an epoch, and its looks since a claim is due."""

    operation: Operation | None
    epoch: tuple[str, int]
    since_s: float
    looks: int = 0


class DueClaims(Check):
    """Looks whether a waiter claims the probe once it has seen for long enough that it is due.

    Args:
        facts: What is true.
    """

    promise = "I3"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._sights: dict[Process, _Sight] = {}

    def read(self, now_s: float, process: Process, key: str) -> None:
        """Count a look at an epoch in which a claim is due."""
        facts, record = self.facts, self.facts.record
        if key != facts.breaker_key or record is None or record.state not in {_OPEN, _HALF_OPEN}:
            return
        epoch = (record.store_id, record.epoch)
        sight = self._sights.get(process)
        if sight is None or sight.epoch != epoch or sight.operation is not process.operation:
            self._sights[process] = _Sight(process.operation, epoch, now_s)
            return
        due_s = self.scenario.breaker.probe_lease_s if record.holder else record.open_s
        way_s = 4 * self.scenario.store.latency_s + 2 * self.world.store.longest_queue_s
        if (now_s - sight.since_s - way_s) * process.host.clock.rate < due_s:
            return
        sight.looks += 1
        if sight.looks <= _SPARED_LOOKS or facts.had_trouble(process, sight.since_s):
            return
        if facts.stood_still(process, sight.since_s):
            return
        self.fail(
            f"{process.name} has looked {sight.looks} times since the probe is due in epoch "
            f"{record.epoch} ({record.state} since {facts.epoch_began_at_s:.3f} s), and does not "
            f"claim it; it is due after {due_s:g} s"
        )


@dataclass(slots=True)
class _Debt:
    """A bell that a process is to ring."""

    generation: int
    since_s: float
    life: int


class RungBells(Check):
    """Looks whether those who wait are woken: the bell of this trip is rung, and no other.

    Args:
        facts: What is true.
    """

    promise = "I3"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._prefix = facts.keys.bell(DEPENDENCY, 0).rpartition("/")[0] + "/"
        self._debts: dict[Process, _Debt] = {}

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Note who is to ring, and who rings."""
        del before
        if key.startswith(self._prefix):
            if key in self.values:
                self._rung(process, int(key.rpartition("/")[2]))
            return
        facts = self.facts
        old, new = facts.before, facts.record
        if key != facts.breaker_key or old is None or new is None:
            return
        if old.state == _HALF_OPEN and new.state in _LETS_THROUGH and old.store_id == new.store_id:
            self._debts[process] = _Debt(new.generation, now_s, facts.life)

    def _rung(self, process: Process, generation: int) -> None:
        debt = self._debts.get(process)
        if debt is None or debt.life != self.facts.life or self.scenario.store.late_requests:
            return
        if generation != debt.generation:
            self.fail(
                f"{process.name} rings the bell of trip {generation}, and has ended trip "
                f"{debt.generation}"
            )
        del self._debts[process]

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Look for a bell that was not rung."""
        process = operation.process
        debt = self._debts.pop(process, None)
        if debt is None or debt.life != self.facts.life:
            return
        if self.facts.had_trouble(process, debt.since_s):
            return
        self.fail(
            f"{process.name} has ended trip {debt.generation} at {debt.since_s:.6f} s, and "
            f"{now_s - debt.since_s:.3f} s later its operation is over and no bell was rung"
        )


class ClearedVotes(Check):
    """Looks whether a new incarnation begins without the votes of the one before.

    Args:
        facts: What is true.
    """

    promise = "I2"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        work = self.scenario.workload
        # Whoever may go alone, and has no joint operation before it, does not ask before it begins.
        self._asks = work.has_joint or not self.scenario.may_go_alone
        self._cast_by: dict[str, Process] = {}

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Note who has cast which vote."""
        del now_s, before
        record = self.facts.record
        if key != self.facts.breaker_key or record is None:
            return
        cast_by = self._cast_by
        self._cast_by = {host: cast_by.get(host, process) for host in record.votes}

    def operation_began(self, now_s: float, operation: Operation) -> None:
        """Look at the votes when the first rank begins."""
        del now_s
        process, facts = operation.process, self.facts
        if not self._asks or process.rank or operation.number > 1 or facts.record is None:
            return
        if facts.is_lossy or facts.had_trouble(process, 0.0):
            return
        for host in facts.record.votes:
            cast_by = self._cast_by.get(host, process)
            if cast_by.incarnation < process.incarnation:
                self.fail(
                    f"{process.name} begins, and the vote of {host} still stands, which "
                    f"{cast_by.name} has cast"
                )


class LostRanks(Check):
    """Looks whether a rank that is taken for lost has been silent.

    Args:
        facts: What is true.
    """

    promise = "I8"

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Look at a verdict that names somebody."""
        del before
        if "/final/" not in key or key not in self.values:
            return
        final = self.decoded(FinalRecord, key, self.values[key])
        number = int(key.rpartition("/")[2])
        for rank in final.lost_ranks:
            self._must_be_silent(now_s, self._of_rank(process, rank), process, number=number)

    def _of_rank(self, process: Process, rank: int) -> Process:
        ranks, incarnation = self.scenario.ranks, process.incarnation
        return self.world.processes[(incarnation - 1) * ranks + rank]

    def _must_be_silent(
        self, now_s: float, lost: Process, process: Process, *, number: int
    ) -> None:
        facts, timeout_s = self.facts, self.scenario.workload.joint_timeout_s
        operation = lost.operation
        if not lost.is_alive or operation is None or not operation.is_joint:
            return
        if operation.number != number:
            return
        if (now_s - operation.began_at_s) * self.scenario.clocks.rate < timeout_s / 2:
            # It was taken for one that does not come, and has come too late, maybe just now.
            return
        since_s = now_s - _SIGNS_PER_TIMEOUT * timeout_s * self.scenario.clocks.rate
        if facts.stood_still(lost, since_s) or facts.had_trouble(lost, since_s):
            return
        self.fail(
            f"{process.name} takes {lost.name} for lost in joint operation {number}, which is in "
            f"it since {operation.began_at_s:.3f} s, lives, and has reached the store all the time"
        )


class SpreadRetries(Check):
    """Looks whether the delays before retries differ.

    Full jitter is a draw below the cap: two delays are never equal, and none is the cap.

    Args:
        facts: What is true.
    """

    promise = "I4"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._delays: dict[float, str] = {}

    def emitted(self, now_s: float, process: Process, event: Event) -> None:
        """Compare a delay with those before."""
        del now_s
        if not isinstance(event, RetryScheduled):
            return
        delay_s, delays = event.delay_s, self._delays
        if delay_s in delays:
            self.fail(
                f"{process.name} comes back after {delay_s!r} s, exactly as {delays[delay_s]} did"
            )
        delays[delay_s] = process.name
        if len(delays) > _REMEMBERED:
            del delays[next(iter(delays))]
