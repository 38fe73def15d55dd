# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""An outage that ends, and a system that stays down: load that retries keep up by themselves.

Requests come at a rate that nothing slows down, as from users. One server answers them in turn, and
also those whose senders have long given up. Who has no answer after a timeout asks again, up to a
number of retries. An outage fills the queue; from then on every request waits for longer than its
timeout, so every one is sent as often as it may be. Let that be *A* times. Where λ · A is more than
the μ that the server can answer, the queue never gets shorter, although λ alone would be easy. So
the system is safe from this if and only if λ · A ≤ μ: delays do not change it, a budget does.

Sources: N. Bronson et al., "Metastable Failures in Distributed Systems", HotOS 2021, whose example
has a server for 300 requests per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_resilience.core import backoff, budget
from lightning_resilience.core.backoff import BackoffKind
from lightning_resilience.drill.virtual import Agenda
from lightning_resilience.protocols.ledger import Ledger


if TYPE_CHECKING:
    from lightning_resilience.core.budget import BudgetConfig
    from lightning_resilience.drill.virtual import SeededDice


__all__ = ["Aftermath", "OpenLoad", "aftermath"]

_BASE_S: Final = 1.0
_CAP_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoad:
    """What is asked of the server, and what it can do.

    Args:
        per_s: Requests per second, retries not counted.
        server_per_s: What the server can answer, in requests per second.
        timeout_s: After how long a sender gives up on an answer, in seconds.
        retries: How often it then asks again at most.
        kind: The delays before it does, with a base of 1 s and a cap of 20 s.
        budget: The budget of all retries; None for none. A retry that it denies is not made.
        outage_s: For how long the server stands still at the beginning, in seconds.
    """

    per_s: float
    server_per_s: float = 300.0
    timeout_s: float = 1.0
    retries: int = 1
    kind: BackoffKind = BackoffKind.NONE
    budget: BudgetConfig | None = None
    outage_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    """What came of it, over the last quarter of the time that was watched.

    Args:
        answered: Share of the requests and retries that were answered in time.
        sent_per_s: Requests and retries per second.
        queue_s: How long one that comes at the very end has to wait, in seconds.
    """

    answered: float
    sent_per_s: float
    queue_s: float


def aftermath(load: OpenLoad, dice: SeededDice, *, watched_s: float = 240.0) -> Aftermath:
    """Watch a system from the beginning of an outage on.

    Args:
        load: The system.
        dice: Chance, for the instants at which requests come and for delays.
        watched_s: For how long, in seconds.

    Returns:
        What it looks like at the end.
    """
    system = _System(load, dice, counted_from_s=watched_s * 0.75)
    system.agenda.at(0.0, system.begin)
    while (next_at_s := system.agenda.next_at_s()) is not None and next_at_s < watched_s:
        system.agenda.step()
    return Aftermath(
        answered=system.answered / max(1, system.sent),
        sent_per_s=system.sent / (watched_s * 0.25),
        queue_s=max(0.0, system.idle_at_s - watched_s),
    )


class _System:
    __slots__ = (
        "_budget",
        "_counted_from_s",
        "_dice",
        "_load",
        "agenda",
        "answered",
        "idle_at_s",
        "sent",
    )

    def __init__(self, load: OpenLoad, dice: SeededDice, *, counted_from_s: float) -> None:
        self.agenda = Agenda()
        self.answered = 0
        self.idle_at_s = load.outage_s
        self.sent = 0
        self._budget = None if load.budget is None else _Budget(load.budget)
        self._counted_from_s = counted_from_s
        self._dice = dice
        self._load = load

    def begin(self, _: object) -> None:
        """Let a request come, and the next one after it."""
        if self._budget is not None:
            self._budget.ledger.note_calls(1, now_s=self.agenda.now_s)
        self.send(1)
        self.agenda.after(self._dice.random.expovariate(self._load.per_s), self.begin)

    def send(self, attempt: int) -> None:
        """Queue an attempt. When its answer comes is certain already: nobody overtakes it."""
        now_s, load = self.agenda.now_s, self._load
        self.idle_at_s = max(self.idle_at_s, now_s) + 1 / load.server_per_s
        in_time = self.idle_at_s <= now_s + load.timeout_s
        if now_s >= self._counted_from_s:
            self.sent += 1
            self.answered += in_time
        if not in_time and attempt <= load.retries:
            self.agenda.after(load.timeout_s, self.give_up, attempt)

    def give_up(self, attempt: int) -> None:
        """Ask again after a delay, where the budget lets it."""
        if self._budget is not None and not self._budget.grants(self.agenda.now_s):
            return
        delay_s = backoff.delay_of(
            self._load.kind,
            attempt,
            base_s=_BASE_S,
            cap_s=_CAP_S,
            previous_s=0.0,
            draw=self._dice.draw(),
        )
        self.agenda.after(delay_s, self.send, attempt + 1)


class _Budget:
    """The product's own budget, as it is for one process that makes all the calls."""

    __slots__ = ("_record", "ledger")

    def __init__(self, config: BudgetConfig) -> None:
        self.ledger = Ledger(config)
        self._record = budget.created(origin="drill")

    def grants(self, now_s: float) -> bool:
        """Charge a retry, or tell that it is denied."""
        unchanged_s, uncharged_s = self.ledger.note_record(self._record, now_s=now_s)
        untold = self.ledger.take_untold(now_s=now_s)
        ruling = budget.rule(
            self.ledger.config,
            self._record,
            unchanged_s=unchanged_s,
            uncharged_s=uncharged_s,
            calls=untold.recent,
            writer="drill",
        )
        self._record = ruling.record
        self.ledger.note_record(self._record, now_s=now_s)
        if not ruling.granted:
            self.ledger.put_back(untold)
        return ruling.granted
