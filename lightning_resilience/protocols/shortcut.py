# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The way past the gate while all is well, one for all guards of a breaker in this process.

Any thread may use it. The leave to take it is one immutable value, which is replaced whole: whoever
has read it knows both until when and by which view.
"""

from __future__ import annotations

from lightning_resilience.core.fast_path import NO_PASSAGE


__all__ = ["Shortcut"]


class Shortcut:
    """Whether calls of one breaker may go straight, and how many did.

    Attributes:
        passage: The leave to go straight.
        calls: Calls that went straight and succeeded, and that the budget does not know of yet.
            Threads may lose some of each other's, and a budget that knows of fewer calls grants
            fewer retries.
    """

    __slots__ = ("calls", "passage")

    def __init__(self) -> None:
        self.passage = NO_PASSAGE
        self.calls = 0

    def close(self) -> None:
        """Send the next calls to the gate."""
        self.passage = NO_PASSAGE

    def take_calls(self) -> int:
        """Return how many calls went straight, and begin to count anew."""
        calls, self.calls = self.calls, 0
        return calls
