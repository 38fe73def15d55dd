# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I2: a circuit opens by votes of enough hosts, and each vote stands for calls that have failed.

A vote is cast by a process of the host that it names, whose latest calls have failed at storage, or
whose latest has, where as many have failed in all as there are slots. It is withdrawn by a process
of that host whose latest call has succeeded, dropped by whoever has seen it for ``window_s``, and
cleared by the first rank of a new incarnation before it does anything else.
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


__all__ = ["HonestVotes", "needed_votes"]

_MOST_VOTES: Final = 8
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
        self._first_at_s.clear()
        self._sights.clear()
        is_trip = (old.state, new.state) == (BreakerState.CLOSED.value, BreakerState.OPEN.value)
        if is_trip and self._history.is_step:
            self._tripped(now_s, process, old)

    def emptied(self, now_s: float) -> None:
        """Forget the votes: they are gone."""
        del now_s
        self._first_at_s.clear()
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

    def _cast(self, now_s: float, process: Process, host: str, *, votes: int) -> None:
        self._first_at_s.setdefault(host, now_s)
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
        everybody = max(config.max_concurrent, config.trip_failures)
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
