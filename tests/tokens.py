# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A cancel token that a test controls."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_resilience.core.moved import Moved
from lightning_resilience.errors import CallTimeoutError


@dataclass
class RecordingToken:
    """Counts marks of progress; cancelled by the test, at once or after so many marks."""

    cancelled: bool = False
    marks: int = 0
    cancel_after: int | None = None
    moved: Moved = field(default_factory=Moved)

    def progress(self, *, written: int = 0, sent: int = 0, read: int = 0) -> None:
        """Count, and cancel where the test asked for it."""
        self.marks += 1
        self.moved = self.moved.plus(written=written, sent=sent, read=read)
        if self.cancel_after is not None and self.marks >= self.cancel_after:
            self.cancelled = True

    def raise_if_cancelled(self) -> None:
        """Raise like a real token."""
        if self.cancelled:
            raise CallTimeoutError("cancelled by the test")
