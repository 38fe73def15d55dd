# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a process that has ended is started again, and when.

One that ends soon after its start, again and again, will not stay: the port is taken, or the host
is full. One that has served for a while has earned all attempts anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_resilience.core.backoff import delay_s


__all__ = ["Supervision"]

_MOST_IN_A_ROW: Final = 6
_STEADY_S: Final = 60.0
_BASE_S: Final = 0.5
_CAP_S: Final = 10.0


@dataclass(slots=True)
class Supervision:
    """How often a process has ended. One thread.

    Args:
        in_a_row: Ends since it last served for a minute.
    """

    in_a_row: int = 0

    def pause_s(self, *, served_s: float, draw: float) -> float | None:
        """Return how long to wait before it is started again; None where it is not.

        Args:
            served_s: How long it has served this time, in seconds.
            draw: A uniform number in [0, 1).
        """
        self.in_a_row = 1 if served_s >= _STEADY_S else self.in_a_row + 1
        if self.in_a_row > _MOST_IN_A_ROW:
            return None
        return delay_s(self.in_a_row, base_s=_BASE_S, cap_s=_CAP_S, draw=draw)
