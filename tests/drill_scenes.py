# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A simulated world in parts, for the tests of the drill: what is sent, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_resilience.drill.observer import Observer, Observers
from lightning_resilience.drill.process import Host, Operation, Process
from lightning_resilience.drill.scenario import Storage, Store
from lightning_resilience.drill.simulator import Simulator
from lightning_resilience.drill.storage_model import Request, StorageModel
from lightning_resilience.drill.store_model import StoreModel
from lightning_resilience.drill.virtual import Agenda, HostClock, SeededDice


if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from lightning_resilience.core.events import Event
    from lightning_resilience.protocols.effects import Effect, StoreEffect


__all__ = ["Bench", "Heard", "Seen", "told"]


class Seen(Observer):
    """Keeps all that it is told, as plain tuples that begin with the instant."""

    def __init__(self) -> None:
        self.writes: list[tuple[float, str, str, bytes | None]] = []
        self.reads: list[tuple[float, str, str]] = []
        self.emptied_at_s: list[float] = []
        self.requests: list[Request] = []
        self.events: list[tuple[float, str, Event]] = []
        self.changes: list[tuple[float, str, str]] = []
        self.world: list[tuple[float, str]] = []
        self.most_in_flight = 0
        self._in_flight = 0

    def wrote(self, now_s: float, process: Process, key: str, *, before: bytes | None) -> None:
        """Keep it."""
        self.writes.append((now_s, process.name, key, before))

    def read(self, now_s: float, process: Process, key: str) -> None:
        """Keep it."""
        self.reads.append((now_s, process.name, key))

    def emptied(self, now_s: float) -> None:
        """Keep it."""
        self.emptied_at_s.append(now_s)

    def began(self, now_s: float, request: Request) -> None:
        """Keep it, and count."""
        assert request.began_at_s == now_s
        self.requests.append(request)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)

    def ended(self, now_s: float, request: Request) -> None:
        """Count."""
        assert request.ended_at_s == now_s
        self._in_flight -= 1

    def emitted(self, now_s: float, process: Process, event: Event) -> None:
        """Keep it."""
        self.events.append((now_s, process.name, event))

    def changed(self, now_s: float, process: Process, what: str) -> None:
        """Keep it."""
        self.changes.append((now_s, process.name, what))

    def happened(self, now_s: float, what: str) -> None:
        """Keep it."""
        self.world.append((now_s, what))


@dataclass
class Heard:
    """What came back, and when."""

    answers: list[tuple[float, Any]] = field(default_factory=list)

    @property
    def at_s(self) -> float:
        """When the one answer came."""
        assert len(self.answers) == 1, self.answers
        return self.answers[0][0]

    @property
    def value(self) -> Any:
        """What the one answer was."""
        assert len(self.answers) == 1, self.answers
        return self.answers[0][1]


class Bench:
    """A clock, a store, storage, and a driver; no workload and no faults but those of a test."""

    def __init__(
        self, *, store: Store | None = None, storage: Storage | None = None, seed: int = 0
    ) -> None:
        self.agenda = Agenda()
        self.seen = Seen()
        self.config = store or Store()
        observers = Observers([self.seen])
        self.store = StoreModel(
            self.agenda, self.config, dice=SeededDice(seed, "store"), observers=observers
        )
        self.storage = StorageModel(
            self.agenda,
            storage or Storage(),
            dice=SeededDice(seed, "storage"),
            observers=observers,
        )
        self.simulator = Simulator(
            self.agenda,
            store=self.store,
            storage=self.storage,
            observers=observers,
            store_timeout_s=self.config.timeout_s,
        )

    def process(
        self, rank: int = 0, *, host: Host | None = None, clock: HostClock | None = None
    ) -> Process:
        """A process, on a host of its own where none is named."""
        where = host or Host(rank, clock or HostClock())
        return Process(rank, 1, host=where, dice=SeededDice(0, f"r{rank}i1"))

    def start(
        self, program: Generator[Effect, Any, Any], *, at_s: float = 0.0, **options: Any
    ) -> Process:
        """Let a process run a program."""
        process = self.process(**options)
        self.at(at_s, lambda: self.simulator.start(process, program))
        return process

    def at(self, when_s: float, action: Callable[[], object]) -> None:
        """Do something at an instant."""
        self.agenda.at(when_s, lambda _value: action())

    def ask(self, process: Process, effect: StoreEffect, *, at_s: float = 0.0) -> Heard:
        """Send an operation at an instant."""
        heard = Heard()
        self.at(
            at_s,
            lambda: self.store.send(
                process,
                effect,
                lambda value: heard.answers.append((self.agenda.now_s, value)),
                timeout_s=process.host.clock.lasts_s(self.config.timeout_s),
            ),
        )
        return heard

    def watch(self, process: Process, key: str, *, at_s: float = 0.0) -> Heard:
        """Wait for a key from an instant on."""
        heard = Heard()
        self.at(
            at_s,
            lambda: self.store.watch(
                process, key, lambda value: heard.answers.append((self.agenda.now_s, value))
            ),
        )
        return heard

    def request(
        self,
        process: Process,
        *,
        at_s: float = 0.0,
        on_end: Callable[[Request], None] | None = None,
    ) -> Request:
        """Let a request come to storage at an instant."""
        operation = Operation(process=process, kind="single", number=1)
        request = Request("call", process, operation, attempt=1)
        request.on_end = on_end
        self.at(at_s, lambda: self.storage.submit(request))
        return request

    def run(self, *, until_s: float = float("inf")) -> None:
        """Let everything happen until an instant."""
        while (next_at_s := self.agenda.next_at_s()) is not None and next_at_s <= until_s:
            self.agenda.step()


def told(values: Sequence[tuple[float, Any]]) -> list[Any]:
    """What was told, without the instants."""
    return [value for _, value in values]
