# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The store of a simulated world keeps the contract of ``SharedStore`` that the real ones keep."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.drill.observer import Observers
from lightning_resilience.drill.process import Host, Process
from lightning_resilience.drill.scenario import Store
from lightning_resilience.drill.store_model import StoreModel
from lightning_resilience.drill.virtual import Agenda, HostClock, SeededDice
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols import effects as fx
from tests.contracts.shared_store import SharedStoreContract


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lightning_resilience.ports import SharedStore
    from lightning_resilience.protocols.effects import StoreEffect


class Room:
    """A simulated store that real threads share: whoever waits for an answer moves the clock."""

    def __init__(self, config: Store, *, seed: int = 0) -> None:
        self.config = config
        self.agenda = Agenda()
        self.changed = threading.Condition()
        self.store = StoreModel(
            self.agenda, config, dice=SeededDice(seed, "store"), observers=Observers(())
        )
        self._clients = 0

    def client(self) -> Process:
        """A process on a host of its own."""
        self._clients += 1
        number = self._clients
        host = Host(number, HostClock())
        return Process(number, 1, host=host, dice=SeededDice(0, f"client {number}"))

    def run_dry(self) -> None:
        """Let everything arrive that is on its way."""
        while len(self.agenda):
            self.agenda.step()


class SimulatedStore:
    """The port on top of the model: operations of several threads are under way at once."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._process = room.client()
        self._closed = False

    def get(self, key: str) -> bytes | None:
        """Read a key."""
        value: bytes | None = self._ask(fx.Get(key))
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read several at once."""
        values: list[bytes | None] = self._ask(fx.MultiGet(tuple(keys)))
        return values

    def set(self, key: str, value: bytes) -> None:
        """Write a key."""
        self._ask(fx.Set(key, value))

    def delete(self, key: str) -> bool:
        """Delete a key."""
        existed: bool = self._ask(fx.Delete(key))
        return existed

    def compare_and_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write a key if another value is there."""
        value: bytes = self._ask(fx.CompareAndSet(key, expected, desired))
        return value

    def add(self, key: str, amount: int) -> int:
        """Count."""
        total: int = self._ask(fx.Add(key, amount))
        return total

    def wait_for(self, key: str, timeout_s: float) -> bool:
        """Wait in real time for what other threads let happen in virtual time."""
        room = self._room
        with room.changed:
            self._require_open()
            watch = room.store.watch(self._process, key, lambda _value: None)

            def is_over() -> bool:
                room.run_dry()
                return self._closed or watch.is_over

            room.changed.wait_for(is_over, timeout=max(0.0, timeout_s))
            self._require_open()
            if isinstance(watch.value, BaseException):
                raise watch.value
            room.store.forget(watch)
            return watch.value is True

    def watcher(self) -> SimulatedStore:
        """Another client of the same server."""
        return SimulatedStore(self._room)

    def close(self) -> None:
        """Wake whoever waits on this handle."""
        with self._room.changed:
            self._closed = True
            self._room.changed.notify_all()

    def _require_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError("this handle of the simulated store is closed")

    def _ask(self, effect: StoreEffect) -> Any:
        room, answers = self._room, list[Any]()
        with room.changed:
            self._require_open()
            room.store.send(self._process, effect, answers.append, timeout_s=room.config.timeout_s)
        while not answers:
            # One step at a time, so that other threads send theirs in between.
            with room.changed:
                if not answers:
                    room.agenda.step()
                room.changed.notify_all()
        if isinstance(answers[0], BaseException):
            raise answers[0]
        return answers[0]


class SimulatedStoreContract(SharedStoreContract):
    """The whole contract, each handle a client of one simulated server."""

    config = Store()

    @pytest.fixture
    def room(self) -> Room:
        """An empty store."""
        return Room(self.config)

    @pytest.fixture
    def new_store(self, room: Room) -> Callable[[], SharedStore]:
        """Another client of the same server."""
        return lambda: SimulatedStore(room)


class TestSimulatedStore(SimulatedStoreContract):
    """A server that is well."""


class TestSimulatedStoreWithLateMessages(SimulatedStoreContract):
    """Every request is late by chance, so that they overtake each other; clients wait for it."""

    config = Store(late_requests=1.0, late_s=10.0, timeout_s=100.0)


class TestSimulatedStoreThatIsNotWaitedFor:
    """Every request comes after its client has given up on it."""

    @pytest.fixture
    def room(self) -> Room:
        """A store whose messages are under way for longer than clients wait."""
        return Room(Store(latency_s=3.0, timeout_s=2.0))

    @pytest.fixture
    def store(self, room: Room) -> SimulatedStore:
        """A client."""
        return SimulatedStore(room)

    @pytest.mark.parametrize(
        ("before", "expected", "after", "told_on_repeat"),
        [
            pytest.param(None, b"", b"mine", b"mine", id="missing, created"),
            pytest.param(None, b"read", None, b"read", id="vanished, and nothing is written"),
            pytest.param(b"read", b"read", b"mine", b"mine", id="as expected, replaced"),
            pytest.param(b"theirs", b"read", b"theirs", b"theirs", id="another, kept"),
        ],
    )
    def test_a_late_compare_and_set_is_one_of_the_four_cases(
        self,
        room: Room,
        store: SimulatedStore,
        *,
        before: bytes | None,
        expected: bytes,
        after: bytes | None,
        told_on_repeat: bytes,
    ) -> None:
        """What is there when it comes decides, and whoever asks again is told the truth."""
        if before is not None:
            room.store.cells.set("k", before)

        with pytest.raises(StoreUnavailableError, match="within 2 s"):
            store.compare_and_set("k", expected, b"mine")
        room.run_dry()

        assert room.store.cells.get("k") == after
        assert room.store.cells.compare_and_set("k", expected, b"mine") == told_on_repeat

    def test_a_late_addition_counts(self, room: Room, store: SimulatedStore) -> None:
        """Whoever adds again counts twice: this is why ``add`` is never repeated."""
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match="Add"):
                store.add("n", 1)
        room.run_dry()

        assert room.store.cells.get("n") == b"2"

    def test_a_late_write_brings_a_key_back_that_was_deleted_meanwhile(
        self, room: Room, store: SimulatedStore
    ) -> None:
        """A plain write knows of no expectation: this is why records are compared and set."""
        room.store.cells.set("k", b"old")

        with pytest.raises(StoreUnavailableError, match="Set"):
            store.set("k", b"mine")
        room.store.cells.delete("k")
        room.run_dry()

        assert room.store.cells.get("k") == b"mine"

    def test_a_late_compare_and_set_does_not_bring_back_a_key_that_vanished_meanwhile(
        self, room: Room, store: SimulatedStore
    ) -> None:
        """It was right when it was sent, and is not when it comes."""
        room.store.cells.set("k", b"read")

        with pytest.raises(StoreUnavailableError, match="CompareAndSet"):
            store.compare_and_set("k", b"read", b"mine")
        room.store.cells.delete("k")
        room.run_dry()

        assert room.store.cells.get("k") is None
