# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""How often one client asks a dependency that is down: an attempt fails, a delay, and again.

N clients that know nothing of each other ask N times as often, whatever their delays are. Jitter
spreads attempts, it saves none: this is the load that a shared breaker and a budget are for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_resilience.core import backoff
from lightning_resilience.drill.virtual import Agenda


if TYPE_CHECKING:
    from lightning_resilience.core.backoff import BackoffKind
    from lightning_resilience.drill.virtual import SeededDice


__all__ = ["LoneClient", "attempts_during"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoneClient:
    """How a client behaves.

    Args:
        kind: The scheme of its delays.
        base_s: Its base, in seconds.
        cap_s: Its cap, in seconds.
        failing_s: How long an attempt takes to fail, in seconds, > 0.
    """

    kind: BackoffKind
    base_s: float
    cap_s: float
    failing_s: float


def attempts_during(outage_s: float, client: LoneClient, dice: SeededDice) -> int:
    """Count the attempts that a client begins during an outage, the first in its first instant.

    Args:
        outage_s: How long the outage lasts, in seconds.
        client: How the client behaves.
        dice: Chance for its delays.

    Returns:
        How many there are, ≥ 1 where the outage lasts at all.
    """
    agenda = Agenda()
    attempts = 0

    def attempt(previous_s: float) -> None:
        nonlocal attempts
        if agenda.now_s >= outage_s:
            return
        attempts += 1
        delay_s = backoff.delay_of(
            client.kind,
            attempts,
            base_s=client.base_s,
            cap_s=client.cap_s,
            previous_s=previous_s,
            draw=dice.draw(),
        )
        agenda.after(client.failing_s + delay_s, attempt, delay_s)

    agenda.at(0.0, attempt, 0.0)
    while agenda:
        agenda.step()
    return attempts
