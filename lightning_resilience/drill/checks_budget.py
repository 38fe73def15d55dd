# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I4: no more retries than the job's budget grants, and each is charged before its backoff.

Two things are counted. At the store: charges, of which no ``budget_window_s`` may see more than the
quota; where the clocks' rates differ, more than two quotas (ε = 1, because a bucket that a fast
clock has put away is a younger one by a slow clock). At storage: retries. One that comes while the
circuit is closed, of a call whose attempt before began and ended under the same closed circuit,
must have been charged by its process after that attempt, and before it began to wait.

A process that decides alone has its share of the quota: no store is asked, so its retries are
counted at storage alone.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.events import AttemptFailed, RetryScheduled
from lightning_resilience.core.records import BudgetRecord
from lightning_resilience.drill.facts import EPSILON_S, Check


if TYPE_CHECKING:
    from lightning_resilience.core.events import Event
    from lightning_resilience.drill.facts import Facts
    from lightning_resilience.drill.process import Operation, Process
    from lightning_resilience.drill.storage_model import Request


__all__ = ["PaidRetries"]

_PARTS: Final = 4
_BUCKETS: Final = 5
# Life of the store, and generation: which closed circuit it is. None for one that is not closed.
_Closed = tuple[int, int] | None


@dataclass(slots=True)
class _Account:
    """What one process has paid, and how its latest attempt went.

    Attributes:
        credits: Charges that it has written since its latest attempt failed.
        calls: Operations that it has begun.
        operation: Whose attempt the latest was.
        began: Under which closed circuit that began.
        ended: Under which it failed; None until it has.
        ended_at_s: When it failed.
        alone: Retries that it has sent alone, when.
    """

    credits: int = 0
    calls: int = 0
    operation: Operation | None = None
    began: _Closed = None
    ended: _Closed = None
    ended_at_s: float = 0.0
    alone: deque[float] = field(default_factory=deque)


class PaidRetries(Check):
    """Counts charges at the store and retries at storage.

    Args:
        facts: What is true.
    """

    promise = "I4"

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        budget = self.scenario.budget
        self._window_s = budget.budget_window_s
        self._epsilon = 0 if self.scenario.clocks.rate == 1 else 1
        self._record: BudgetRecord | None = None
        self._bucket_at_s = 0.0
        self._charged_at_s = 0.0
        self._charges: deque[float] = deque()
        self._calls = 0
        self._accounts: dict[Process, _Account] = {}

    def _of(self, process: Process) -> _Account:
        account = self._accounts.get(process)
        if account is None:
            account = self._accounts[process] = _Account()
        return account

    # --- charges -------------------------------------------------------------------------------

    def emptied(self, now_s: float) -> None:
        """Forget the budget: it is gone."""
        del now_s
        self._record = None
        self._charges.clear()

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Look at a change of the budget."""
        del before
        if key != self.facts.budget_key:
            return
        raw = self.values.get(key)
        if raw is None:
            self.fail(f"{process.name} has deleted the budget")
        old, new = self._record, self.decoded(BudgetRecord, key, raw)
        self._record = new
        if not process.wrote(new.writer):
            self.fail(f"{process.name} signs the budget as {new.writer!r}")
        if old is None:
            self._created(process, new, now_s=now_s)
            return
        if new.origin != old.origin:
            self.fail(f"{process.name} makes budget {new.origin!r} of {old.origin!r}")
        charged = self._aged(process, old, new, now_s=now_s)
        if new.bucket != old.bucket:
            self._bucket_at_s = now_s
            self._charged_at_s = now_s if charged else self._charged_at_s
        if charged:
            self._charged(now_s, process, new)

    def _created(self, process: Process, new: BudgetRecord, *, now_s: float) -> None:
        self._bucket_at_s = self._charged_at_s = now_s
        if any(new.retries) or any(new.calls) or not process.wrote(new.origin):
            self.fail(f"{process.name} makes a budget that is not empty: {new}")

    def _aged(
        self, process: Process, old: BudgetRecord, new: BudgetRecord, *, now_s: float
    ) -> bool:
        """Return whether a retry was charged; fail unless that and the age is all that changed."""
        ended = new.bucket - old.bucket
        rate, bucket_s = process.host.clock.rate, self._window_s / _PARTS
        seen_s = (now_s - self._bucket_at_s) * rate
        if ended < 0 or seen_s < ended * bucket_s - EPSILON_S:
            self.fail(f"{process.name} ends {ended} buckets of {bucket_s:g} s after {seen_s:.6f} s")
        quiet_s = (now_s - self._charged_at_s) * rate
        for quiet in range(min(ended, math.floor(quiet_s / bucket_s + EPSILON_S)) + 1):
            moved = _moved(old.retries, ended, quiet)
            rest = (new.retries[0] - moved[0], *new.retries[1:])
            if rest in {(0, *moved[1:]), (1, *moved[1:])}:
                break
        else:
            self.fail(
                f"{process.name} makes of the retries {old.retries} in {ended} buckets, "
                f"{quiet_s:.3f} s after the last charge, {new.retries}"
            )
        return bool(rest[0])

    def _charged(self, now_s: float, process: Process, new: BudgetRecord) -> None:
        self._charged_at_s = now_s
        self._of(process).credits += 1
        read = self.facts.of(process).read
        if read is not None and read.state != "closed" and not self.scenario.store.late_requests:
            self.fail(
                f"{process.name} charges a retry, and has read with the budget that the circuit is "
                f"{read.state} (epoch {read.epoch})"
            )
        charges, budget = self._charges, self.scenario.budget
        while charges and charges[0] <= now_s - self._window_s:
            charges.popleft()
        charges.append(now_s)
        # A charge that was performed and not answered, and that another one has replaced since, is
        # made again, and with it the same calls are told again.
        told = 2 if self.facts.had_trouble(process, 0.0) else 1
        if sum(new.calls) > self._calls * told:
            self.fail(f"the budget knows of {sum(new.calls)} calls; {self._calls} were made")
        quota = budget.retry_floor + math.floor(budget.retry_ratio * sum(new.calls))
        most = quota * (1 + self._epsilon)
        if sum(new.retries) > quota or len(charges) > most:
            self.fail(
                f"{len(charges)} retries are charged within {self._window_s:g} s (the budget says "
                f"{sum(new.retries)}); the quota is {quota}, and {most} may be"
            )

    # --- attempts ------------------------------------------------------------------------------

    def operation_began(self, now_s: float, operation: Operation) -> None:
        """Count a call."""
        del now_s
        account = self._of(operation.process)
        account.calls += 1
        account.credits = 0
        self._calls += 1

    def emitted(self, now_s: float, process: Process, event: Event) -> None:
        """Note the end of an attempt, and look what is charged when a backoff begins."""
        if isinstance(event, AttemptFailed):
            account = self._of(process)
            account.ended = self._closed_for(process)
            account.ended_at_s = now_s
            account.credits = 0
        elif isinstance(event, RetryScheduled):
            self._must_have_paid(process, "begins to wait for a retry")

    def began(self, now_s: float, request: Request) -> None:
        """Look whether a retry is paid."""
        if request.kind != "call":
            return
        process, operation = request.process, request.operation
        account = self._of(process)
        is_retry = request.attempt > 1 and account.operation is operation
        if is_retry and self.facts.is_alone(process, operation):
            self._alone(now_s, process, account)
        elif is_retry:
            self._must_have_paid(process, f"comes with attempt {request.attempt}")
        account.credits = 0
        account.operation, account.ended = operation, None
        account.began = self._closed_for(process)

    def _closed_for(self, process: Process) -> _Closed:
        """Return which closed circuit a process follows now, the job's or its own."""
        facts, operation = self.facts, process.operation
        record, life = facts.record, facts.life
        if operation is not None and facts.is_alone(process, operation):
            detour = None if process.circuit is None else process.circuit.detour
            view = None if detour is None else detour.circuit.view
            record, life = None if view is None else view.record, -1
        if record is None or record.state != "closed":
            return None
        return life, record.generation

    def _must_have_paid(self, process: Process, what: str) -> None:
        account = self._of(process)
        closed = account.began
        if closed is None or closed != account.ended or closed != self._closed_for(process):
            return
        if account.credits or closed[0] < 0:
            return
        facts = self.facts
        if facts.of(process).missed_at_s >= account.ended_at_s and facts.had_trouble(
            process, account.ended_at_s
        ):
            return
        self.fail(
            f"{process.name} {what} under a closed circuit, and has charged nothing since its "
            f"attempt failed at {account.ended_at_s:.6f} s"
        )

    def _alone(self, now_s: float, process: Process, account: _Account) -> None:
        if account.began is None or account.began != self._closed_for(process):
            return
        if account.began[0] >= 0:
            return
        budget = self.scenario.budget
        share = budget.retry_floor / self.scenario.ranks
        window_s = process.host.clock.lasts_s(self._window_s / min(1.0, share))
        most = max(1, math.floor(share)) + math.floor(budget.retry_ratio * account.calls)
        alone = account.alone
        while alone and alone[0] <= now_s - window_s:
            alone.popleft()
        alone.append(now_s)
        if len(alone) > 2 * most:
            self.fail(
                f"{process.name}, alone, comes with {len(alone)} retries within {window_s:.3f} s; "
                f"its share is {most}, and what was charged before may come with it: {2 * most}"
            )


def _moved(counts: tuple[int, ...], ended: int, quiet: int) -> tuple[int, ...]:
    """Return counts by age after some buckets have ended; the present one was used until then."""
    if not ended:
        return counts
    moved = [0] * _BUCKETS
    for age, count in enumerate(counts):
        older = age + ended if age else 1 + quiet
        if older < _BUCKETS:
            moved[older] += count
    return tuple(moved)
