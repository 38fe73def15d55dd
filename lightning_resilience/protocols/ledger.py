# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What one process knows of a retry budget without asking: its own calls, and its own clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_resilience.core import budget as core, lease


if TYPE_CHECKING:
    from lightning_resilience.core.budget import BudgetConfig
    from lightning_resilience.core.lease import Sighting
    from lightning_resilience.core.records import BudgetRecord


__all__ = ["Ledger", "Untold"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Untold:
    """Calls that the job's budget does not know yet.

    Args:
        calls: How many.
        since_s: Since when they were made, on this process's clock.
        recent: How many of them belong to the last window.
    """

    calls: int
    since_s: float
    recent: int


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

    def note_calls(self, calls: int, *, now_s: float) -> None:
        """Count calls."""
        if self.told_at_s is None:
            self.told_at_s = now_s
        self.calls += calls

    def take_untold(self, *, now_s: float) -> Untold:
        """Take the calls that the job's budget does not know yet, in order to tell them.

        They are gone from here at once: another thread that charges meanwhile would tell the same
        calls again, and the job would be granted retries for calls that nobody has made.
        """
        calls, self.calls = self.calls, 0
        since_s, self.told_at_s = self.told_at_s, now_s
        since_s = now_s if since_s is None else since_s
        recent = core.recent_calls(
            calls, elapsed_s=now_s - since_s, window_s=self.config.budget_window_s
        )
        return Untold(calls=calls, since_s=since_s, recent=recent)

    def put_back(self, untold: Untold) -> None:
        """Keep calls for the next charge, because nobody was told of them."""
        self.calls += untold.calls
        self.told_at_s = untold.since_s
