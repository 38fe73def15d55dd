# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""N clients that want to change one row at once: a published model of what jitter is good for.

The row has a version. A client reads it, and writes with it; the write succeeds if nobody else has
written in between, and then the client is done. Otherwise it backs off, and reads again. All begin
at the same instant, so that nobody gets anywhere unless they come apart.

The model and its numbers are those of the simulator behind M. Brooker, "Exponential Backoff And
Jitter" (AWS Architecture Blog, 2015). What it counts for five schemes of delays is public, so it
shows whether the virtual clock, the dice and the delays here are right, by figures from elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from lightning_resilience.core import backoff
from lightning_resilience.drill.virtual import Agenda


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.backoff import BackoffKind
    from lightning_resilience.drill.virtual import SeededDice


__all__ = ["BASE_S", "CAP_S", "Contention", "Delays", "contend", "delays_of"]

# A message takes the amount of a normal number, in seconds.
_LEG_S: Final = 0.010
_LEG_DEVIATION_S: Final = 0.002
BASE_S: Final = 0.005
CAP_S: Final = 2.0

Delays: TypeAlias = "Callable[[int, float, float], float]"
"""From a client's failures so far (≥ 1), its previous delay in seconds (0 for none), and a draw in
[0, 1), to its next delay in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """What came of it.

    Args:
        writes: Writes that the row has seen, those that failed included.
        lasted_s: When the last client knew that it was done, in seconds.
    """

    writes: int
    lasted_s: float


def delays_of(kind: BackoffKind) -> Delays:
    """Return the delays of a scheme, with the base and the cap of the published model."""

    def delay_s(failures: int, previous_s: float, draw: float) -> float:
        # These clients count a failure before they ask for the delay that belongs to it: the first
        # delay is drawn from twice the base.
        return backoff.delay_of(
            kind, failures + 1, base_s=BASE_S, cap_s=CAP_S, previous_s=previous_s, draw=draw
        )

    return delay_s


def contend(clients: int, delays: Delays, dice: SeededDice) -> Contention:
    """Let clients contend until every one of them has written.

    Args:
        clients: How many there are, ≥ 1.
        delays: How long a client waits after a write that failed.
        dice: Chance, for messages and delays.

    Returns:
        What it took.
    """
    row = _Row(delays, dice)
    for _ in range(clients):
        row.agenda.after(row.leg_s(), _Client(row).read)
    while row.agenda:
        row.agenda.step()
    return Contention(writes=row.writes, lasted_s=row.known_at_s)


class _Row:
    __slots__ = ("agenda", "delays", "dice", "known_at_s", "version", "writes")

    def __init__(self, delays: Delays, dice: SeededDice) -> None:
        self.agenda = Agenda()
        self.delays = delays
        self.dice = dice
        self.known_at_s = 0.0
        self.version = 0
        self.writes = 0

    def leg_s(self) -> float:
        return abs(self.dice.random.gauss(_LEG_S, _LEG_DEVIATION_S))


class _Client:
    """A client, by what it does at the row.

    Between two visits it only waits, for an answer, for its backoff and for its next message to
    arrive: these add up to one wait.
    """

    __slots__ = ("failures", "previous_s", "row")

    def __init__(self, row: _Row) -> None:
        self.row = row
        self.failures = 0
        self.previous_s = 0.0

    def read(self, _: object) -> None:
        row = self.row
        row.agenda.after(row.leg_s() + row.leg_s(), self.write, row.version)

    def write(self, version: int) -> None:
        row = self.row
        row.writes += 1
        if version == row.version:
            row.version += 1
            row.known_at_s = max(row.known_at_s, row.agenda.now_s + row.leg_s())
            return
        self.failures += 1
        self.previous_s = row.delays(self.failures, self.previous_s, row.dice.draw())
        row.agenda.after(row.leg_s() + self.previous_s + row.leg_s(), self.read)
