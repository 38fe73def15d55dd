# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I2: a circuit opens by votes of enough hosts, and each vote stands for calls that have failed.

A vote is cast by a process of the host that it names, whose latest calls have failed at storage, or
whose latest has, where as many have failed in all as there are slots, but for one in eight. It is
withdrawn by a process of that host whose latest call has succeeded, dropped by whoever has seen it
for ``window_s``, and cleared by the first rank of a new incarnation before it does anything else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.breaker_record import BreakerState
from lightning_resilience.drill.facts import EPSILON_S, Check


if TYPE_CHECKING:
    from lightning_resilience.core.records import BreakerRecord
    from lightning_resilience.drill.checks_history import OneHistory
    from lightning_resilience.drill.facts import Deeds, Facts
    from lightning_resilience.drill.process import Operation, Process
    from lightning_resilience.drill.storage_model import Request


__all__ = ["HonestVotes", "needed_votes"]

_MOST_VOTES: Final = 8
# One in so many slots may be held by somebody stuck, and say nothing.
_STUCK: Final = 8
# The operation in which a vote becomes too old may have asked the breaker before that.
_SPARED_OPERATIONS: Final = 2


def needed_votes(hosts: int, *, fraction: float) -> int:
    """Return of how many hosts a trip needs the votes, as the design says it."""
    # The rounding of a product does not add a host.
    share = math.ceil(fraction * hosts - EPSILON_S)
    return min(hosts, max(2, min(share, _MOST_VOTES)))


@dataclass(slots=True)
class _Sight:
    """One process's sight of one vote."""

    since_s: float
    operations: list[Operation | None] = field(default_factory=list)


@dataclass(slots=True)
class _Row:
    """One process's failures in a row in the present epoch."""

    since_s: float
    failures: int = 0


class HonestVotes(Check):
    """Looks at who votes, withdraws, and trips.

    Args:
        facts: What is true.
        history: Knows which writes are transitions.
    """

    promise = "I2"

    def __init__(self, facts: Facts, history: OneHistory) -> None:
        super().__init__(facts)
        self._history = history
        scenario = self.scenario
        self._needed = needed_votes(scenario.hosts, fraction=scenario.breaker.quorum_fraction)
        # Since when each host's vote has stood in this epoch, in whatever number of pieces.
        self._first_at_s: dict[str, float] = {}
        # Who has cast each vote that stands, and when.
        self._casts: dict[str, tuple[Process, float]] = {}
        # Failures in a row of each process in the present epoch.
        self._rows: dict[Process, _Row] = {}
        self._ok_at_s: dict[str, float] = {}
        self._sights: dict[str, dict[Process, _Sight]] = {}

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Look at a change of the votes, and at a trip."""
        del before
        old, new = self.facts.before, self.facts.record
        if key != self.facts.breaker_key or old is None or new is None:
            return
        if new.epoch == old.epoch:
            self._changed(process, set(old.votes), set(new.votes), now_s=now_s)
            return
        self._forget()
        is_trip = (old.state, new.state) == (BreakerState.CLOSED.value, BreakerState.OPEN.value)
        if is_trip and self._history.is_step:
            self._tripped(now_s, process, old)

    def emptied(self, now_s: float) -> None:
        """Forget the votes: they are gone."""
        del now_s
        self._forget()

    def _forget(self) -> None:
        self._first_at_s.clear()
        self._casts.clear()
        self._rows.clear()
        self._sights.clear()

    def read(self, now_s: float, process: Process, key: str) -> None:
        """Look whether a process leaves a vote standing that it has seen for too long."""
        record = self.facts.record
        if key != self.facts.breaker_key or record is None or not record.votes:
            return
        for host in record.votes:
            sight = self._sights.setdefault(host, {}).setdefault(process, _Sight(now_s))
            seen_s = (now_s - sight.since_s) * process.host.clock.rate
            if seen_s > self.scenario.breaker.window_s:
                self._is_old(process, host, sight, seen_s=seen_s)

    def _is_old(self, process: Process, host: str, sight: _Sight, *, seen_s: float) -> None:
        facts = self.facts
        if facts.had_trouble(process, sight.since_s) or facts.stood_still(process, sight.since_s):
            return
        if process.operation in sight.operations:
            return
        if len(sight.operations) >= _SPARED_OPERATIONS:
            window_s = self.scenario.breaker.window_s
            self.fail(
                f"{process.name} has seen the vote of {host} for {seen_s:.3f} s, in "
                f"{len(sight.operations) + 1} operations since window_s ({window_s:g}), and leaves "
                "it there"
            )
        sight.operations.append(process.operation)

    # --- who does not vote, or not withdraw ----------------------------------------------------

    def ended(self, now_s: float, request: Request) -> None:
        """Count failures in a row under one closed epoch."""
        process = request.process
        if request.kind != "call" or request.is_abandoned or not process.is_alive:
            return
        if self.facts.is_alone(process, request.operation):
            # What it learns alone is told to nobody.
            self._rows.pop(process, None)
        elif request.failed is None:
            self._rows.pop(process, None)
            self._ok_at_s[process.host.name] = now_s
        elif self.facts.counts(request.failed):
            row = self._rows.setdefault(process, _Row(now_s))
            if request.began_at_s > self.facts.epoch_began_at_s:
                row.failures += 1

    def began(self, now_s: float, request: Request) -> None:
        """Look whether somebody comes again who should have voted."""
        process, facts = request.process, self.facts
        row = self._rows.get(process)
        if request.kind != "call" or row is None or not facts.is_closed:
            return
        record, config = facts.record, self.scenario.breaker
        if record is None or row.failures < config.trip_failures:
            return
        has_voted = process.host.name in record.votes
        has_aged = (now_s - row.since_s) * process.host.clock.rate > config.window_s
        if has_voted or has_aged or self._ok_at_s.get(process.host.name, -1.0) >= row.since_s:
            return
        if self._is_excused(process, request.operation, row.since_s):
            return
        self.fail(
            f"{process.name} comes again after {row.failures} failures in a row, and "
            f"{process.host.name} has no vote; trip_failures is {config.trip_failures}"
        )

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Look whether somebody leaves its vote standing after it has succeeded."""
        del now_s
        process, facts = operation.process, self.facts
        host = process.host.name
        caster, cast_at_s = self._casts.get(host, (None, 0.0))
        ok = facts.of(process).ok
        if operation.error is not None or caster is not process or ok is None:
            return
        if ok.operation is not operation or ok.began_at_s < cast_at_s:
            return
        if not self._is_excused(process, operation, cast_at_s):
            self.fail(f"{process.name} has succeeded and leaves the vote of {host} standing")

    def _is_excused(self, process: Process, operation: Operation, since_s: float) -> bool:
        facts = self.facts
        return (
            facts.is_alone(process, operation)
            or facts.had_trouble(process, since_s)
            or facts.stood_still(process, since_s)
        )

    # --- changes -------------------------------------------------------------------------------

    def _changed(self, process: Process, old: set[str], new: set[str], *, now_s: float) -> None:
        for host in new - old:
            self._cast(now_s, process, host, votes=len(new))
        gone = old - new
        if len(gone) > 1 or (gone and self._begins(process)):
            self._cleared(process, gone, new)
        elif gone:
            self._withdrawn(now_s, process, *gone)
        for host in gone:
            self._sights.pop(host, None)
            self._casts.pop(host, None)

    def _cast(self, now_s: float, process: Process, host: str, *, votes: int) -> None:
        self._first_at_s.setdefault(host, now_s)
        self._casts[host] = (process, now_s)
        if host != process.host.name:
            self.fail(f"{process.name} on {process.host.name} votes for {host}")
        if votes >= self._needed:
            self.fail(
                f"{votes} of {self.scenario.hosts} hosts have voted and the circuit does not open; "
                f"{self._needed} are enough"
            )
        self._must_have_failed(now_s, process)

    def _tripped(self, now_s: float, process: Process, old: BreakerRecord) -> None:
        hosts = {*old.votes, process.host.name}
        if len(hosts) < self._needed:
            self.fail(
                f"the circuit opens by the votes of {len(hosts)} of {self.scenario.hosts} hosts; "
                f"{self._needed} are needed"
            )
        if process.host.name in old.votes:
            self.fail(f"{process.name} opens the circuit, and its host's vote stood already")
        self._must_have_failed(now_s, process)

    def _must_have_failed(self, now_s: float, process: Process) -> None:
        if any(host.cut_off_from_storage_until_s > 0 for host in self.world.hosts):
            # What does not arrive at storage is not counted there, and fails all the same.
            return
        facts, config = self.facts, self.scenario.breaker
        deeds = facts.of(process)
        slots = config.max_concurrent
        everybody = max(slots - slots // _STUCK, config.trip_failures)
        has_failed = self._failures(deeds) >= config.trip_failures
        if not has_failed and not (deeds.failures and facts.failures_before >= everybody):
            self.fail(
                f"{process.name} votes after {deeds.failures} failures in a row at storage; it "
                f"takes {config.trip_failures}, or one and {everybody} of all (there were "
                f"{facts.failures_before})"
            )
        ended_at_s = None if deeds.failed is None else deeds.failed.ended_at_s
        if deeds.has_abandoned or ended_at_s is None or facts.stood_still(process, ended_at_s):
            return
        age_s = (now_s - ended_at_s - facts.late_s) * process.host.clock.rate
        if age_s > config.window_s:
            self.fail(
                f"{process.name} votes for a failure {age_s:.3f} s ago; window_s is "
                f"{config.window_s:g}"
            )

    def _failures(self, deeds: Deeds) -> int:
        """Return how many failures in a row a process may count in this epoch."""
        before, read = self.facts.before, deeds.read
        if before is None or read is None or read.epoch != before.epoch:
            # It was overtaken between its look and its vote.
            return deeds.failures
        if deeds.failed_at_s and self.facts.emptied_at_s >= deeds.failed_at_s[0]:
            # A store that was lost may have the same epoch once more.
            return deeds.failures
        began_at_s = self.facts.before_began_at_s
        recent = sum(at_s >= began_at_s for at_s in deeds.failed_at_s)
        # One that ended before the epoch began may be reported after it.
        return min(deeds.failures, recent + 1)

    def _begins(self, process: Process) -> bool:
        return process.rank == 0 and process.operation is None

    def _cleared(self, process: Process, gone: set[str], new: set[str]) -> None:
        if new or not self._begins(process):
            self.fail(
                f"{process.name} takes {len(gone)} votes away at once; that may only the first "
                "rank do, of all votes, when it begins"
            )

    def _withdrawn(self, now_s: float, process: Process, host: str) -> None:
        facts, config = self.facts, self.scenario.breaker
        stood_s = (now_s - self._first_at_s.get(host, now_s)) * process.host.clock.rate
        if stood_s >= config.window_s - EPSILON_S:
            return
        deeds = facts.of(process)
        ok_at_s = None if deeds.ok is None else deeds.ok.ended_at_s
        is_own = host == process.host.name and ok_at_s is not None
        if is_own and ok_at_s is not None:
            is_latest = deeds.result is deeds.ok and not deeds.has_abandoned
            is_late = now_s - ok_at_s <= facts.late_s or facts.stood_still(process, ok_at_s)
            if is_latest or is_late:
                return
        self.fail(
            f"{process.name} on {process.host.name} takes the vote of {host} away after "
            f"{stood_s:.3f} s; its latest success at storage was at {ok_at_s} s, and window_s is "
            f"{config.window_s:g}"
        )
