# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The one place where time passes and dice are rolled.

The dice are private. Training scripts seed the module-level ``random`` alike on every rank
(Lightning's ``seed_everything`` does), so draws from there would make all ranks retry in the same
instant; and each draw would move the stream that the training reads. So the source here is our own,
seeded from the operating system, and it is seeded anew in a forked child, which would otherwise
repeat its parent's draws and, worse, its nonces.
"""

from __future__ import annotations

import os
import random
import time
from typing import Final


__all__ = ["SystemClock", "SystemDice", "monotonic_s", "unix_s"]

monotonic_s: Final = time.monotonic
"""The clock of ``SystemClock`` as a bare function, for a path that is counted in nanoseconds."""

unix_s: Final = time.time
"""Seconds since 1970, by this host's clock: for what a scheduler says of the end of a job only."""


class SystemClock:
    """This process's monotonic clock."""

    def now_s(self) -> float:
        """Seconds on the monotonic clock."""
        return time.monotonic()

    def sleep(self, duration_s: float) -> None:
        """Let time pass; Python's signal handlers run meanwhile."""
        time.sleep(duration_s)


class SystemDice:
    """A private source of chance.

    Args:
        rank: Mixed into the seed, so that ranks differ even on a host whose entropy is poor.
    """

    def __init__(self, *, rank: int = 0) -> None:
        self._rank = rank
        self._pid = -1
        self._source = random.Random()  # noqa: S311 - spreads load, guards no secret

    def draw(self) -> float:
        """A uniform number in [0, 1)."""
        return self._mine().random()

    def nonce(self) -> str:
        """A text that no other writer uses: 96 random bits."""
        return f"{self._mine().getrandbits(96):024x}"

    def _mine(self) -> random.Random:
        pid = os.getpid()
        if pid != self._pid:
            entropy = int.from_bytes(os.urandom(32), "big")
            self._source = random.Random((entropy << 64) ^ (pid << 32) ^ self._rank)  # noqa: S311
            self._pid = pid
        return self._source
