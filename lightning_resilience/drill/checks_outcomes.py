# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I8 and I3: a verdict is what the workers' outcomes make it, and comes when the last one is there.

Nobody is told of a success that storage has not seen: each worker's own request was served, and no
worker has reported a failure. A failure is one that somebody has reported, or a rank that is lost,
and none of the reports that its writer has seen is more severe. A report is made once, and for who
makes it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.records import FinalRecord, GateRecord, OutcomeRecord
from lightning_resilience.drill.checks_joint import is_mismatch
from lightning_resilience.drill.facts import Check
from lightning_resilience.drill.process import WORKER


if TYPE_CHECKING:
    from lightning_resilience.drill.facts import Facts
    from lightning_resilience.drill.process import Operation, Process
    from lightning_resilience.drill.storage_model import Request


__all__ = ["HonestVerdicts", "PromptVerdicts"]

_NEVER_S: Final = float("-inf")
_PARTS: Final = frozenset({"gate", "out", "final"})
# What a check believes must not be what it checks.
_SEVERITY: Final = (
    "cancelled",
    "permanent",
    "capacity",
    "auth",
    "unknown",
    "lost",
    "throttle",
    "transient",
    "stale",
    "",
)
# Count, look at the reports, make sure of the store, look at the gate, write.
_ROUND_TRIPS: Final = 8
_LONGEST_BEAT_S: Final = 5.0
_BEATS_PER_TIMEOUT: Final = 4
# As many as are under way, and those whose keys are removed together.
_MOST_KEPT: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    failure: str
    at_s: float
    life: int


@dataclass(slots=True)
class _Work:
    """What the workers of one joint operation have done.

    Attributes:
        reports: What each has reported.
        served: Whose request storage has served.
        looked_at_s: When each process has last read the reports.
        gates: Writers of its gates: one that refuses becomes the verdict, and nobody has worked.
    """

    reports: dict[int, _Report] = field(default_factory=dict)
    served: set[int] = field(default_factory=set)
    looked_at_s: dict[Process, float] = field(default_factory=lambda: defaultdict(lambda: _NEVER_S))
    gates: set[str] = field(default_factory=set)


def _workers(process: Process, ranks: int) -> tuple[int, ...]:
    operation = process.operation
    is_load = operation is not None and operation.is_made_by_all
    return tuple(range(ranks)) if is_load else (WORKER,)


def _asks_storage(process: Process) -> bool:
    operation = process.operation
    return operation is None or operation.is_guarded


def _least(reports: dict[int, _Report]) -> tuple[int, int]:
    """Return the most severe of some reports and the lowest rank that has made it."""
    return min((_SEVERITY.index(report.failure), rank) for rank, report in reports.items())


class _Outcomes(Check):
    """Keeps what workers of joint operations report."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self._works: dict[tuple[int, int], _Work] = {}
        self._prefix = facts.keys.store_id.removesuffix("store_id") + "i"

    def _of(self, process: Process, number: int) -> _Work:
        key = (process.incarnation, number)
        work = self._works.get(key)
        if work is None:
            work = self._works[key] = _Work()
            if len(self._works) > _MOST_KEPT:
                del self._works[next(iter(self._works))]
        return work

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Look at a report, and at a verdict."""
        raw = self.values.get(key)
        if raw is None or not key.startswith(self._prefix):
            return
        _, part, *numbers = key[len(self._prefix) :].split("/")
        if part in _PARTS:
            work = self._of(process, int(numbers[0]))
            if part == "gate":
                work.gates.add(self.decoded(GateRecord, key, raw).writer)
            elif part == "out":
                report = self.decoded(OutcomeRecord, key, raw)
                if report.rank != int(numbers[1]):
                    self.fail(f"{process.name} reports for rank {report.rank} in {key}")
                self._reported(process, work, report)
                made = _Report(failure=report.failure, at_s=now_s, life=self.facts.life)
                work.reports[report.rank] = made
            elif before != raw:
                final = self.decoded(FinalRecord, key, raw)
                if not final.is_open and final.writer not in work.gates:
                    self._decided(process, work, final)

    def _reported(self, process: Process, work: _Work, report: OutcomeRecord) -> None:
        """Look at a report."""

    def _decided(self, process: Process, work: _Work, final: FinalRecord) -> None:
        """Look at a verdict."""


class HonestVerdicts(_Outcomes):
    """Looks whether reports and verdicts say what has happened.

    Args:
        facts: What is true.
    """

    promise = "I8"

    def ended(self, now_s: float, request: Request) -> None:
        """Note whom storage has served."""
        del now_s
        operation = request.operation
        if request.kind == "call" and request.failed is None and operation.is_joint:
            process = request.process
            self._of(process, operation.number).served.add(process.rank)

    def read(self, now_s: float, process: Process, key: str) -> None:
        """Note who has looked at the reports."""
        if key.startswith(self._prefix) and "/out/" in key:
            self._of(process, int(key.split("/")[-2])).looked_at_s[process] = now_s

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Look for a success of a rank whose own work has failed."""
        del now_s
        result, process = operation.result, operation.process
        if not operation.is_joint or operation.error is not None or result is None:
            return
        if result.error is not None:
            self.fail(
                f"{process.name} returns from joint operation {operation.number} as if all were "
                f"well, and its own work has ended with {result.error!r}"
            )

    def _reported(self, process: Process, work: _Work, report: OutcomeRecord) -> None:
        rank = report.rank
        if rank != process.rank:
            self.fail(f"{process.name} reports {report.failure or 'ok'!r} for rank {rank}")
        if not report.failure and rank not in work.served and _asks_storage(process):
            self.fail(f"{process.name} reports a success, and storage has not served it")
        before = work.reports.get(rank)
        if before is not None and before.failure != report.failure:
            self.fail(
                f"{process.name} reports {report.failure or 'ok'!r}, and has reported "
                f"{before.failure or 'ok'!r} before"
            )

    def _decided(self, process: Process, work: _Work, final: FinalRecord) -> None:
        workers = _workers(process, self.scenario.ranks)
        if not final.failure:
            self._succeeded(process, work, workers)
        elif len(workers) > 1:
            self._failed(process, work, final)

    def _succeeded(self, process: Process, work: _Work, workers: tuple[int, ...]) -> None:
        for rank in workers:
            report = work.reports.get(rank)
            if report is not None and report.failure:
                self.fail(
                    f"{process.name} decides that all went well, and rank {rank} has reported "
                    f"{report.failure!r} at {report.at_s:.6f} s"
                )
            if rank not in work.served and _asks_storage(process):
                self.fail(
                    f"{process.name} decides that all went well, and storage has not served "
                    f"rank {rank}"
                )

    def _failed(self, process: Process, work: _Work, final: FinalRecord) -> None:
        first = final.first_rank
        if is_mismatch(final, self.scenario):
            # Whoever has met another operation says so before it works.
            return
        if first not in final.lost_ranks:
            report = work.reports.get(first)
            if report is None or report.failure != final.failure:
                self.fail(
                    f"{process.name} decides {final.failure!r} of rank {first}, which has reported "
                    f"{'nothing' if report is None else report.failure or 'ok'!r}"
                )
        seen = self._seen(process, work)
        if not seen:
            return
        severity, rank = _least(seen)
        if (severity, rank) < (_SEVERITY.index(final.failure), first):
            self.fail(
                f"{process.name} decides {final.failure!r} of rank {first}, and rank {rank} has "
                f"reported {_SEVERITY[severity] or 'ok'!r} before it looked"
            )

    def _seen(self, process: Process, work: _Work) -> dict[int, _Report]:
        """Return the reports that a process must know: those before its look, and before its own.

        Whoever was interrupted does not look, and its own is the most severe that there is.
        """
        own = work.reports.get(process.rank)
        looked_at_s = work.looked_at_s[process]
        if own is not None and own.failure != _SEVERITY[0]:
            looked_at_s = max(looked_at_s, own.at_s)
        return {
            rank: report
            for rank, report in work.reports.items()
            if (report.at_s <= looked_at_s or rank == process.rank)
            and report.life == self.facts.life
        }


class PromptVerdicts(_Outcomes):
    """Looks whether the verdict comes when the last worker has reported.

    Whoever waits would find the reports at the end of its chunk. The last worker need not wait for
    that, because all are counted; a failure gives others a beat's time to fail as well.

    Args:
        facts: What is true.
    """

    promise = "I3"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        timeout_s = self.scenario.workload.joint_timeout_s
        self._beat_s = min(_LONGEST_BEAT_S, timeout_s / _BEATS_PER_TIMEOUT)

    def _decided(self, process: Process, work: _Work, final: FinalRecord) -> None:
        del final
        workers, reports = _workers(process, self.scenario.ranks), work.reports
        if len(workers) == 1 or len(reports) < len(workers):
            return
        last = max(reports, key=lambda rank: reports[rank].at_s)
        since_s = reports[last].at_s
        if any(self._may_be_late(rank, process, since_s) for rank in workers):
            return
        store = self.world.store
        way_s = 2 * self.scenario.store.latency_s + self.scenario.store.service_s
        bound_s = _ROUND_TRIPS * (way_s + store.longest_queue_s)
        if any(report.failure for report in reports.values()):
            bound_s += self._beat_s * self.scenario.clocks.rate
        late_s = self.world.agenda.now_s - since_s
        if late_s > bound_s:
            self.fail(
                f"all {len(workers)} workers have reported, rank {last} as the last, and the "
                f"verdict comes {late_s:.3f} s later; it comes within {bound_s:.3f} s"
            )

    def _may_be_late(self, rank: int, process: Process, since_s: float) -> bool:
        facts = self.facts
        worker = self.world.processes[(process.incarnation - 1) * self.scenario.ranks + rank]
        return (
            not worker.is_alive
            or facts.emptied_at_s > _NEVER_S
            or facts.had_trouble(worker, since_s)
            or facts.stood_still(worker, since_s)
        )
