# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What a simulated job resumes from, on how many ranks, and how much may go wrong meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from lightning_resilience.drill.virtual import SeededDice


__all__ = ["LoadPlan", "Place", "random_load"]


class Place(str, Enum):
    """Where the checkpoints are."""

    OBJECTS = "objects"
    """In object storage: each node copies them, and who waits for that has no slot."""
    SHARED = "shared"
    """On a shared filesystem: each node copies them."""
    LOCAL = "local"
    """On the disk of the only node: one rank checks them, and all read them where they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """One job that resumes, and is started again until it has.

    Args:
        place: Where its checkpoints are.
        nodes: On how many nodes it runs.
        ranks: How many ranks a node has.
        slots: How many may read at once (``max_concurrent``).
        saved: How many checkpoints there are.
        is_renewed: Whether all of them had the same name, so that only the last one is left.
        spooled: How many newer ones an earlier start has left on its nodes.
        is_cached: Whether the newest one is in every node's cache, fetched by an earlier start.
        has_older: Whether a process of an earlier start still lives: it saves, and removes.
        older_s: After how long it does so, in seconds from the first start.
        attempts: How many attempts each operation has.
        room: How many checkpoints a node's cache has room for.
        faults: How many operations may fail, be lost or abandoned.
        crashes: How many processes may be killed.
        stops: How often a process may stand still for a while, short or long.
        outages: How often the storage may be away for a while.
        flips: How many copies may be damaged on their way.
        damages: How many checkpoints may be damaged by nobody's request, in storage or in a cache.
        turns: How often another process may be the next than the one whose turn it is.
    """

    place: Place = Place.OBJECTS
    nodes: int = 2
    ranks: int = 2
    slots: int = 2
    saved: int = 2
    is_renewed: bool = False
    spooled: int = 0
    is_cached: bool = False
    has_older: bool = False
    older_s: float = 0.0
    attempts: int = 2
    room: int = 2
    faults: int = 0
    crashes: int = 0
    stops: int = 0
    outages: int = 0
    flips: int = 0
    damages: int = 0
    turns: int = 0

    @property
    def starts(self) -> int:
        """After how many starts one must have come to its end: each trouble may cost one."""
        troubles = (self.faults, self.crashes, self.stops, self.outages, self.flips, self.damages)
        # Two by an older process: it may replace what was chosen, and remove it.
        return 2 + sum(troubles) + 2 * self.has_older

    def __str__(self) -> str:
        """Every field, in one line."""
        told = ((each.name, getattr(self, each.name)) for each in fields(self))
        return ", ".join(f"{k}={v.value if isinstance(v, Enum) else v}" for k, v in told)


def random_load(dice: SeededDice) -> LoadPlan:
    """Draw a job.

    Args:
        dice: The dice.
    """
    chance = dice.random
    place = chance.choice(list(Place))
    is_local = place is Place.LOCAL
    return LoadPlan(
        place=place,
        nodes=1 if is_local else chance.randint(1, 3),
        ranks=chance.randint(1, 4),
        slots=chance.randint(1, 3),
        saved=chance.randint(0, 3),
        is_renewed=chance.choice((True, False, False)),
        spooled=chance.choice((0, 0, 1, 2)),
        is_cached=chance.choice((True, False)) and not is_local,
        has_older=chance.choice((True, False, False)),
        attempts=chance.randint(1, 3),
        room=chance.randint(1, 3),
        faults=chance.choice((0, 0, 1, 2, 4)),
        crashes=chance.choice((0, 0, 1, 2)),
        stops=chance.choice((0, 0, 1, 2)),
        outages=chance.choice((0, 0, 1)),
        flips=chance.choice((0, 0, 1, 2)),
        damages=chance.choice((0, 0, 1, 2)),
        turns=chance.choice((0, 20, 10_000)),
        # Drawn last; a load takes about eight seconds.
        older_s=round(chance.uniform(0.0, 8.0), 2),
    )
