# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Where in training a joint operation is: the same on all ranks that are in lock-step.

It is the step, and how many joint operations there were at it. No paths: they may hold a metric
that is not the same on every rank, and only rank 0's counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["Whereabouts"]


class Whereabouts:
    """Counts the joint operations of one rank. Not for two threads at once.

    Args:
        step: Tells at which step of training this rank is.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._last = -1
        self._calls = 0

    def __call__(self) -> str:
        """Return where the next operation is; that one is counted."""
        step = self._step()
        self._calls = self._calls + 1 if step == self._last else 1
        self._last = step
        return f"step {step}, call {self._calls}"
