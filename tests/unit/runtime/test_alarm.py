# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""An alarm rings once, asks for nothing meanwhile, and ends when it is told to."""

from __future__ import annotations

import threading

import pytest

from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.runtime.alarm import Alarm
from lightning_resilience.runtime.memory import MemoryStore
from lightning_resilience.runtime.system import SystemDice


HANG_S = 10.0


class Shaky(MemoryStore):
    """A store whose first waits fail."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.waits = 0

    def watcher(self) -> Shaky:
        """Be its own."""
        return self

    def wait_for(self, key: str, timeout_s: float) -> bool:
        """Fail, or wait."""
        self.waits += 1
        if self.waits <= self.failures:
            message = "away"
            raise StoreUnavailableError(message)
        return super().wait_for(key, timeout_s)


class Low:
    """Dice whose pauses are short."""

    def draw(self) -> float:
        """Draw next to nothing."""
        return 0.01

    def nonce(self) -> str:
        """Make none."""
        return ""


def running() -> list[threading.Thread]:
    """Return the alarms' threads."""
    return [thread for thread in threading.enumerate() if "alarm" in thread.name]


def test_it_rings_once_when_the_key_is_there() -> None:
    """It rings from its own thread, which then ends."""
    store, rang = MemoryStore(), threading.Event()
    alarm = Alarm(store, "key", rang.set, dice=SystemDice(rank=0))
    assert not rang.is_set()

    store.set("key", b"1")

    assert rang.wait(HANG_S)
    alarm.close()
    assert running() == []


def test_it_does_not_ring_after_it_was_closed() -> None:
    """Who closes it hears nothing, and its thread ends in the middle of its wait."""
    store, rang = MemoryStore(), threading.Event()
    alarm = Alarm(store, "key", rang.set, dice=SystemDice(rank=0))

    alarm.close()
    alarm.close()
    store.set("key", b"1")

    assert running() == []
    assert not rang.is_set()


def test_a_store_that_is_away_for_a_while_is_asked_again() -> None:
    """It goes on when the store is back, without a word."""
    store, rang = Shaky(3), threading.Event()
    store.set("key", b"1")

    alarm = Alarm(store, "key", rang.set, dice=Low())

    assert rang.wait(HANG_S)
    assert store.waits == 4
    alarm.close()


def test_it_ends_while_the_store_is_away() -> None:
    """Its pauses do not outlast it."""
    store, rang = Shaky(1_000_000), threading.Event()
    alarm = Alarm(store, "key", rang.set, dice=SystemDice(rank=0))

    alarm.close()

    assert running() == []
    assert not rang.is_set()


def test_it_may_be_closed_by_what_it_calls() -> None:
    """Closing from the alarm's own thread waits for nobody."""
    store, closed = MemoryStore(), threading.Event()

    def ring() -> None:
        alarm.close()
        closed.set()

    alarm = Alarm(store, "key", ring, dice=SystemDice(rank=0))
    store.set("key", b"1")

    assert closed.wait(HANG_S)
    alarm.close()


@pytest.fixture(autouse=True)
def _no_threads() -> None:
    assert running() == []
