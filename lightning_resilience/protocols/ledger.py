# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What one process knows of a retry budget without asking: its own calls, and its own clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_resilience.core import budget as core


if TYPE_CHECKING:
    from lightning_resilience.core.budget import BudgetConfig
    from lightning_resilience.core.lease import Sighting


__all__ = ["Ledger"]


class Ledger:
    """What one process remembers of one dependency's budget. Any thread.

    Args:
        config: The budget.

    Attributes:
        calls: Calls that were made here since the last charge.
        told_at_s: When that was, on this process's clock; the first call's time before it.
        bucket: Since when this process has seen the present bucket.
    """

    __slots__ = ("bucket", "calls", "config", "told_at_s")

    def __init__(self, config: BudgetConfig) -> None:
        self.config = config
        self.calls = 0
        self.told_at_s: float | None = None
        self.bucket: Sighting | None = None

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
