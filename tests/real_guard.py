# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Guarded calls as one process of a job makes them: the real driver, clock and dice.

The store is the process's own, and the circuit belongs to a hundred hosts, so that a single one
trips nothing: what is seen is the retry policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.protocols.circuit import Circuit, begin
from lightning_resilience.protocols.guard import Guarded, GuardedCall, guard
from lightning_resilience.protocols.probe import Patience
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.memory import MemoryStore
from lightning_resilience.runtime.system import SystemClock, SystemDice


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.events import Event
    from lightning_resilience.ports import CancelToken


FAST = RetryPolicy(
    base_delay_s=0.02,
    max_delay_s=1.0,
    throttle_base_delay_s=0.1,
    stall_timeout_s=10.0,
    deadline_s=30.0,
)
"""The defaults, scaled down."""


@dataclass
class Sink:
    """Keeps events."""

    events: list[Event] = field(default_factory=list)

    def emit(self, event: Event) -> None:
        """Keep it."""
        self.events.append(event)

    def emitted(self, kind: type[Event]) -> list[Any]:
        """The events of one kind, in order."""
        return [event for event in self.events if isinstance(event, kind)]


class Rank:
    """One rank, with a driver of its own.

    Args:
        rank: Its number.
        policy: How it retries.
    """

    def __init__(self, rank: int = 0, *, policy: RetryPolicy = FAST) -> None:
        self.sink = Sink()
        self._policy = policy
        self._driver = Driver(
            store=MemoryStore(), clock=SystemClock(), dice=SystemDice(rank=rank), sink=self.sink
        )

    def call(
        self, work: Callable[[CancelToken], Any], *, reading: bool = False, **options: Any
    ) -> Guarded:
        """Make one guarded call; raises what ends it."""
        circuit = Circuit(
            "s3://bucket:write",
            config=BreakerConfig(),
            keys=Keys(run_id="run", incarnation="1"),
            host="host",
            hosts=100,
        )

        def judge(error: BaseException) -> Any:
            return classify(error, reading=reading)

        call = GuardedCall(
            work=work,
            operation="save",
            target="a.ckpt",
            policy=self._policy,
            patience=Patience(probe=lambda _token: None, classify=judge),
            **options,
        )
        try:
            self._driver.run(begin(circuit, new_incarnation=True))
            return self._driver.run(guard(circuit, call))
        finally:
            self._driver.close()
