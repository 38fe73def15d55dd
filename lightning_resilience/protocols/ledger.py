# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What one process knows of a retry budget without asking: its own calls, and its own clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.core import budget as core, lease


if TYPE_CHECKING:
    from lightning_resilience.core.budget import BudgetConfig
    from lightning_resilience.core.lease import Sighting
    from lightning_resilience.core.records import BudgetRecord


__all__ = ["Ledger"]


class Ledger:
    """What one process remembers of one dependency's budget. Any thread.

    Args:
        config: The budget.

    Attributes:
        calls: Calls that were made here since the last charge.
        told_at_s: When that was, on this process's clock; the first call's time before it.
        bucket: Since when this process has seen the present bucket.
        charge: Since when it has seen that with the same retries.
    """

    __slots__ = ("bucket", "calls", "charge", "config", "told_at_s")

    def __init__(self, config: BudgetConfig) -> None:
        self.config = config
        self.calls = 0
        self.told_at_s: float | None = None
        self.bucket: Sighting | None = None
        self.charge: Sighting | None = None

    def note_record(self, record: BudgetRecord, *, now_s: float) -> tuple[float, float]:
        """Take note of a record that is there now.

        Args:
            record: The record.
            now_s: Now, on this process's clock: never earlier than it was there.

        Returns:
            For how long this process has seen its present bucket, and that with the same retries,
            in seconds.
        """
        bucket = (record.origin, record.bucket)
        self.bucket = lease.observe(self.bucket, bucket, now_s=now_s)
        self.charge = lease.observe(self.charge, (*bucket, record.retries[0]), now_s=now_s)
        return now_s - self.bucket.first_seen_at_s, now_s - self.charge.first_seen_at_s

    def note_call(self, *, now_s: float) -> None:
        """Count a call."""
        if self.told_at_s is None:
            self.told_at_s = now_s
        self.calls += 1

    def tell(self, *, now_s: float) -> None:
        """Forget the calls that the job's budget knows now."""
        self.calls = 0
        self.told_at_s = now_s

    def untold(self, *, now_s: float) -> int:
        """Return how many calls of the last window have not been told."""
        elapsed_s = 0.0 if self.told_at_s is None else now_s - self.told_at_s
        return core.recent_calls(
            self.calls, elapsed_s=elapsed_s, window_s=self.config.budget_window_s
        )
