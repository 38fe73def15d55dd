# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Virtual time and seeded chance: the only sources of both in a simulated world.

One ``Agenda`` says what happens next. Every instant on it is of one virtual clock that nobody in
the world can read: a process sees its host's ``HostClock``, which has an offset and a rate of its
own, so that code which compares instants of two hosts goes wrong here as it would on a cluster.

Chance comes from ``SeededDice``, one for each thing that needs it, each seeded by the world's seed
and a name. So what one process draws does not depend on how often another one does, and a run is
decided by its seed alone: neither by the hash seed of the interpreter nor by its memory.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.validation import check_seconds


if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["Agenda", "HostClock", "SeededDice"]

# No real wait is shorter. And where the virtual clock shows a large number and a host's a small
# one, a shorter wait could be lost in rounding, and its loop would turn for ever in one instant.
_SHORTEST_S: Final = 1e-6


class Agenda:
    """What happens when, on the virtual clock.

    Entries of one instant happen in the order in which they were made.

    Attributes:
        now_s: The present instant of the virtual clock, in seconds.
        happened: Entries that have happened.
    """

    __slots__ = ("_entries", "_made", "happened", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.happened = 0
        self._entries: list[tuple[float, int, Callable[[Any], object], Any]] = []
        self._made = 0

    def __len__(self) -> int:
        """Entries that are still to come."""
        return len(self._entries)

    def at(self, when_s: float, action: Callable[[Any], object], value: Any = None) -> None:  # noqa: ANN401 - whatever the action takes
        """Let ``action(value)`` happen at an instant, or now where that is over.

        Args:
            when_s: The instant, in seconds of the virtual clock.
            action: What happens.
            value: What it is called with.
        """
        self._made += 1
        heapq.heappush(self._entries, (when_s, self._made, action, value))

    def after(self, delay_s: float, action: Callable[[Any], object], value: Any = None) -> None:  # noqa: ANN401 - whatever the action takes
        """Let ``action(value)`` happen in ``delay_s`` seconds."""
        self.at(self.now_s + delay_s, action, value)

    def step(self) -> None:
        """Let the next entry happen.

        Raises:
            IndexError: There is none.
        """
        when_s, _, action, value = heapq.heappop(self._entries)
        self.now_s = max(self.now_s, when_s)
        self.happened += 1
        action(value)

    def next_at_s(self) -> float | None:
        """Return when the next entry happens, or None where there is none."""
        return self._entries[0][0] if self._entries else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostClock:
    """A host's monotonic clock, as its processes read it.

    Args:
        offset_s: What it shows when the virtual clock shows 0, in seconds.
        rate: Its seconds per second of the virtual clock, > 0.

    Raises:
        ConfigError: The rate is not above 0.
    """

    offset_s: float = 0.0
    rate: float = 1.0

    def __post_init__(self) -> None:
        check_seconds("rate", self.rate)

    def read_s(self, now_s: float) -> float:
        """Return what it shows at an instant of the virtual clock."""
        return self.offset_s + self.rate * now_s

    def lasts_s(self, duration_s: float) -> float:
        """Return how long a duration of this clock lasts on the virtual one, in seconds.

        It is 0 for one that is not above 0, and at least a microsecond for every other one.
        """
        return max(_SHORTEST_S, duration_s / self.rate) if duration_s > 0 else 0.0


class SeededDice:
    """Chance that a seed and a name decide.

    Args:
        seed: The world's seed.
        name: Whose dice they are. Two names have nothing in common.
    """

    __slots__ = ("_nonces", "name", "random")

    def __init__(self, seed: int, name: str) -> None:
        # Text is hashed by the generator itself, not by the interpreter's hash seed.
        self.random = random.Random(f"{seed}/{name}")  # noqa: S311 - a replay needs it
        self.name = name
        self._nonces = 0

    def draw(self) -> float:
        """Return a uniform number in [0, 1)."""
        return self.random.random()

    def nonce(self) -> str:
        """Return a text that nobody else uses; it says whose it is."""
        self._nonces += 1
        return f"{self.name}.{self._nonces}"
