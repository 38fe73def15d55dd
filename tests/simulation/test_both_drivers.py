# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The blocking driver and the simulator let a protocol see the same.

The same protocols run in both, with the same dice, and every effect is compared with what came of
it. What time does is left out: instants, and durations that were measured.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lightning_resilience.core.breaker_config import BreakerConfig
from lightning_resilience.drill.virtual import SeededDice
from lightning_resilience.errors import ResilienceError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.circuit import begin
from lightning_resilience.protocols.joint import perform
from lightning_resilience.runtime.driver import Driver
from lightning_resilience.runtime.memory import MemoryStore
from tests.drill_scenes import Bench
from tests.scenes import circuit, guarded, joint, member, part, patience


if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from lightning_resilience.core.events import Event
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Effect, Protocol


HANG_S = 20.0
CONFIG = BreakerConfig()
# Real time is made shorter, so that an open circuit costs a second of it and no protocol notices.
SPEED = 10.0


class FastClock:
    """The real clock, so much faster."""

    def now_s(self) -> float:
        """Seconds of it."""
        return SPEED * time.monotonic()

    def sleep(self, duration_s: float) -> None:
        """Let real time pass."""
        time.sleep(duration_s / SPEED)


class Sink:
    """Events come with their effects; nothing else is to be kept."""

    def emit(self, event: Event) -> None:
        """Take it."""


@dataclass
class Flaky:
    """Work that fails so many times, and probes that fail so many times."""

    calls: int = 0
    probes: int = 0
    error: Callable[[], BaseException] = lambda: ConnectionResetError("reset by peer")

    def call(self, token: CancelToken) -> str:
        """Do what a save does."""
        token.progress()
        self.calls -= 1
        return self._answer(self.calls)

    def probe(self, token: CancelToken) -> str:
        """Do what a probe does."""
        token.progress()
        self.probes -= 1
        return self._answer(self.probes)

    def _answer(self, left: int) -> str:
        if left >= 0:
            raise self.error()
        return "done"


@dataclass
class Log:
    """What one protocol has asked for, and what came of it."""

    entries: list[tuple[Any, Any]] = field(default_factory=list)

    def recorded(self, protocol: Protocol[Any]) -> Generator[Effect, Any, Any]:
        """Run a protocol, and write down each effect with its result."""
        send: Callable[[], Effect] = partial(protocol.send, None)
        while True:
            try:
                effect = send()
            except StopIteration as stop:
                self.entries.append(("returned", plain(stop.value)))
                return stop.value
            except ResilienceError as error:
                self.entries.append(("raised", type(error).__name__))
                return None
            try:
                value = yield effect
            except Exception as error:  # noqa: BLE001 - as the protocol sees it
                self.entries.append((asked(effect), f"{type(error).__name__}: {error}"))
                send = partial(protocol.throw, error)
            else:
                self.entries.append((asked(effect), plain(value)))
                send = partial(protocol.send, value)

    def told(self) -> list[Any]:
        """What it has reported, called and brought."""
        return [
            (name, value)
            for name, value in self.entries
            if name in ("returned", "raised")
            or (isinstance(name, tuple) and name[0] in ("Emit", "Call"))
        ]


ASKED: dict[type, Callable[[Any], Any]] = {
    fx.Sleep: lambda _effect: "Sleep",
    fx.WaitFor: lambda effect: ("WaitFor", effect.key),
    fx.Call: lambda effect: ("Call", effect.timeout_s, effect.is_leased),
    fx.Emit: lambda effect: ("Emit", type(effect.event).__name__, measured(effect.event)),
    fx.Set: lambda effect: ("Set", effect.key, plain(effect.value)),
    fx.CompareAndSet: lambda effect: (
        "CompareAndSet", effect.key, plain(effect.expected), plain(effect.desired),
    ),
}  # fmt: skip


def asked(effect: Effect) -> Any:
    """What an effect asks for, without what was measured."""
    return ASKED.get(type(effect), lambda other: other)(effect)


def measured(event: Event) -> Any:
    """An event's fields, without durations."""
    return plain(msgspec.json.encode(event))


def plain(value: Any) -> Any:
    """A result, without instants and durations."""
    if isinstance(value, bytes) and value.startswith(b"{"):
        value = msgspec.json.decode(value)
    if isinstance(value, float):
        return "a number"
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return value


def blocking(protocols: Sequence[Callable[[], Protocol[Any]]]) -> list[Log]:
    """Run protocols in real threads, each with its own driver, on one store."""
    store = MemoryStore()
    logs = [Log() for _ in protocols]

    def run(rank: int) -> None:
        driver = Driver(
            store=store.watcher(),
            clock=FastClock(),
            dice=SeededDice(0, f"r{rank}i1"),
            sink=Sink(),
        )
        driver.run(logs[rank].recorded(protocols[rank]()))
        driver.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(protocols))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    return logs


def simulated(protocols: Sequence[Callable[[], Protocol[Any]]]) -> list[Log]:
    """Run protocols in virtual time."""
    bench = Bench()
    logs = [Log() for _ in protocols]
    for rank, protocol in enumerate(protocols):
        bench.start(logs[rank].recorded(protocol()), rank=rank)
    bench.run()
    assert bench.simulator.living == 0
    return logs


def call(flaky: Flaky) -> Protocol[Any]:
    """Begin, and make one guarded call."""
    mine = circuit()
    done = yield from guarded(mine, flaky)  # type: ignore[arg-type]  # it works and probes
    return done.value


SCENES: dict[str, Callable[[], Flaky]] = {
    "a healthy call": Flaky,
    "a call with retries": lambda: Flaky(calls=2),
    "a call that fails for good": lambda: Flaky(calls=9, error=lambda: PermissionError("denied")),
    "a trip, a probe and a recovery": lambda: Flaky(calls=CONFIG.trip_failures, probes=0),
    "a trip, a probe that fails, and a recovery": lambda: Flaky(
        calls=CONFIG.trip_failures, probes=1
    ),
}


@pytest.mark.parametrize("name", SCENES)
def test_a_call_is_the_same_in_both_drivers(name: str) -> None:
    """Effect by effect, from the first look at the store to the last word."""
    [expected] = blocking([lambda: call(SCENES[name]())])
    [found] = simulated([lambda: call(SCENES[name]())])

    assert found.entries == expected.entries


def save(rank: int, flaky: Flaky, *, comes_late_s: float) -> Protocol[Any]:
    """One rank of a joint save on which rank 0 works."""
    mine = circuit()
    # One after the other: which of two comes first in one instant is nobody's promise.
    yield fx.Sleep(0.3 * rank)
    yield from begin(mine, new_incarnation=rank == 0)
    yield fx.Sleep(comes_late_s)

    def work() -> Protocol[Any]:
        return (yield from guarded(mine, flaky)).value  # type: ignore[arg-type]  # as above

    operation = joint(mine, patience(flaky))  # type: ignore[arg-type]  # it probes
    mine_to_do = part(work) if rank == 0 else None
    result = yield from perform(member(rank), operation, mine_to_do)
    return result.final.failure, result.final.detail, type(result.error).__name__


@pytest.mark.parametrize("late", [0, 1], ids=["the worker", "the other"])
@pytest.mark.parametrize(
    "make",
    [Flaky, lambda: Flaky(calls=1), lambda: Flaky(calls=9, error=lambda: PermissionError("no"))],
    ids=["well", "a retry", "for good"],
)
def test_a_joint_save_is_the_same_in_both_drivers(make: Callable[[], Flaky], late: int) -> None:
    """Rank by rank: what it reports, calls and brings, whoever comes first.

    Which of two ranks is the faster one at a key is left to them, in both drivers.
    """
    ranks = [
        lambda rank=rank: save(rank, make(), comes_late_s=0.5 * (rank == late)) for rank in range(2)
    ]

    expected, found = blocking(ranks), simulated(ranks)

    for rank in range(2):
        assert found[rank].told() == expected[rank].told()
