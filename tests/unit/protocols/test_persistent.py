# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Store operations are repeated while the store is away, for a bounded time."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.events import StoreLost, StoreReturned
from lightning_resilience.errors import JointUnavailableError, StoreUnavailableError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.persistent import Persistence, Witness, with_persistence
from tests.scripted_driver import STORE_EFFECTS, Away, Fault, Interrupt, Task, World


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import Effect, Protocol
    from tests.scripted_driver import Striking


REPEATABLE = [
    fx.Get("key"),
    fx.MultiGet(("key",)),
    fx.Set("key", b"value"),
    fx.Delete("key"),
    fx.CompareAndSet("key", b"", b"value"),
    fx.WaitFor("key", 1.0),
]


def one(effect: Effect) -> Protocol[Any]:
    """A protocol of one effect."""
    return (yield effect)


def persistence(patience_s: float) -> Persistence:
    """Raise what a joint operation raises."""

    def error(lost_for_s: float, last: StoreUnavailableError) -> Exception:
        return JointUnavailableError(f"{lost_for_s:.1f} s: {last}")

    return Persistence(op="save", patience_s=patience_s, error=error)


def away_until(world: World, back_at_s: float) -> Striking:
    """A fault that keeps the store away until an instant."""

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        gone = isinstance(effect, STORE_EFFECTS) and world.now_s < back_at_s
        return Away() if gone else None

    return fault


@pytest.mark.parametrize("effect", REPEATABLE, ids=lambda effect: type(effect).__name__)
def test_an_operation_is_repeated_until_the_store_is_back(effect: Effect) -> None:
    """What may be repeated ends well once the store answers, and it is told."""
    world = World()
    world.fault = away_until(world, 10.0)
    task = world.spawn(with_persistence(one(effect), persistence(60.0)))

    world.run()

    assert task.error is None
    assert task.ended_at_s is not None
    assert task.ended_at_s >= 10.0
    assert len(task.emitted(StoreLost)) == 1
    (returned,) = task.emitted(StoreReturned)
    assert returned.lost_for_s >= 10.0 - 0.01


@pytest.mark.parametrize("effect", REPEATABLE, ids=lambda effect: type(effect).__name__)
def test_patience_ends(effect: Effect) -> None:
    """A store that stays away for the patience ends it with the error that was given."""
    world = World()
    world.fault = away_until(world, float("inf"))
    task = world.spawn(with_persistence(one(effect), persistence(60.0)))

    world.run()

    assert isinstance(task.error, JointUnavailableError)
    assert isinstance(task.error.__cause__, StoreUnavailableError)
    assert task.ended_at_s is not None
    assert 60.0 <= task.ended_at_s <= 65.0


def test_no_patience_raises_at_once() -> None:
    """With on_store_loss "raise" (patience 0) the first failure ends it, without a repeat."""
    world = World()
    world.fault = away_until(world, float("inf"))
    task = world.spawn(with_persistence(one(fx.Get("key")), persistence(0.0)))

    world.run()

    assert isinstance(task.error, JointUnavailableError)
    assert task.store_operations() == 1


def test_add_is_never_repeated() -> None:
    """An add whose answer was lost may have counted: it is not sent again."""
    world = World()
    world.fault = away_until(world, 10.0)
    task = world.spawn(with_persistence(one(fx.Add("counter", 1)), persistence(60.0)))

    world.run()

    assert isinstance(task.error, StoreUnavailableError)
    assert sum(isinstance(effect, fx.Add) for effect in task.performed) == 1


def test_repeats_grow_apart() -> None:
    """Repeats are load on the store: in a minute of absence there are few of them."""
    world = World()
    world.fault = away_until(world, float("inf"))
    task = world.spawn(with_persistence(one(fx.Get("key")), persistence(60.0)))

    world.run()

    assert 10 <= task.store_operations() <= 60


def test_a_failure_of_work_is_no_failure_of_the_store() -> None:
    """Only store operations are repeated: work that says the store is away is not done again."""
    calls = []

    def work(_token: object) -> None:
        calls.append(1)
        raise StoreUnavailableError("the user's own store")

    world = World()
    task = world.spawn(with_persistence(one(fx.Call(work)), persistence(60.0)))

    world.run()

    assert isinstance(task.error, StoreUnavailableError)
    assert len(calls) == 1


def test_an_interruption_ends_the_repeats_at_once() -> None:
    """Ctrl-C in the middle of the repeats passes through; nothing is repeated after it."""
    interruption = KeyboardInterrupt()
    world = World()
    away = away_until(world, float("inf"))

    def fault(task: Task, index: int, effect: Effect) -> Fault | None:
        if isinstance(effect, fx.Sleep) and world.now_s > 5:
            return Interrupt(interruption)
        return away(task, index, effect)

    world.fault = fault
    task = world.spawn(with_persistence(one(fx.Get("key")), persistence(3600.0)))

    world.run(limit_s=30)

    assert task.error is interruption


def test_last_words_of_an_interrupted_protocol_are_tried_once() -> None:
    """After an interruption nobody waits for a store that is away: last words get one attempt."""
    interruption = KeyboardInterrupt()

    def inner() -> Protocol[None]:
        try:
            yield fx.Sleep(1.0)
        except KeyboardInterrupt:
            yield fx.Set("last", b"words")
            raise

    def fault(_task: Task, index: int, _effect: Effect) -> Fault | None:
        return Interrupt(interruption) if index == 0 else Away()

    world = World(fault=fault)
    task = world.spawn(with_persistence(inner(), persistence(3600.0)))

    world.run(limit_s=1.0)

    assert isinstance(task.error, JointUnavailableError)
    assert task.store_operations() == 1


def test_patience_is_for_the_whole_protocol() -> None:
    """Once patience has ended, the protocol's further operations do not start it anew."""

    def inner() -> Protocol[None]:
        try:
            yield fx.Get("key")
        except JointUnavailableError:
            yield fx.Set("out", b"failed")

    world = World()
    world.fault = away_until(world, float("inf"))
    task = world.spawn(with_persistence(inner(), persistence(60.0)))

    world.run()

    assert isinstance(task.error, JointUnavailableError)
    assert task.ended_at_s is not None
    assert task.ended_at_s <= 66.0


@pytest.mark.parametrize("effect", [fx.Get("key"), fx.Add("key", 1)], ids=["Get", "Add"])
def test_the_stores_own_error_keeps_its_cause(effect: Effect) -> None:
    """Where it is raised as it is, it is not made its own cause, and says what caused it."""
    world = World()
    error = StoreUnavailableError("no answer")
    error.__cause__ = ConnectionResetError("reset by peer")
    world.fault = lambda _task, _index, struck: (
        Interrupt(error) if isinstance(struck, STORE_EFFECTS) else None
    )
    as_it_is = Persistence(op="save", patience_s=1.0, error=lambda _lost_for_s, last: last)

    task = world.spawn(with_persistence(one(effect), as_it_is))
    world.run()

    assert task.error is error
    assert isinstance(error.__cause__, ConnectionResetError)


class Noting(Witness):
    """Notes what it is told, and says that the store is gone at the third refusal."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def has_answered(self) -> None:
        """Note an answer."""
        self.heard.append("answer")

    def has_failed(self, error: StoreUnavailableError, *, now_s: float) -> Exception | None:
        """Note a failure."""
        del now_s
        self.heard.append("refusal" if error.is_refused else "silence")
        return JointUnavailableError("gone") if self.heard.count("refusal") > 2 else None


@pytest.mark.parametrize("effect", REPEATABLE, ids=lambda effect: type(effect).__name__)
def test_a_witness_ends_the_patience(effect: Effect) -> None:
    """What it says is raised at once, and for all that the protocol still does."""
    witness, world = Noting(), World()

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        return Away(is_refused=True) if isinstance(effect, STORE_EFFECTS) else None

    def stubborn() -> Protocol[Any]:
        with contextlib.suppress(JointUnavailableError):
            yield effect
        return (yield effect)

    world.fault = fault
    task = world.spawn(with_persistence(stubborn(), replace(persistence(60.0), witness=witness)))
    world.run()

    assert isinstance(task.error, JointUnavailableError)
    assert str(task.error) == "gone"
    assert witness.heard == ["refusal"] * 3


def test_a_witness_hears_answers_and_what_is_no_refusal() -> None:
    """A wait that ends without its key is no answer: it may never have had a connection."""
    witness, world = Noting(), World()
    world.fault = away_until(world, 1.0)

    def talk() -> Protocol[Any]:
        yield fx.Get("key")
        yield fx.WaitFor("never", 5.0)
        yield fx.Sleep(1.0)

    world.spawn(with_persistence(talk(), replace(persistence(60.0), witness=witness)))
    world.run()

    assert set(witness.heard[:-1]) == {"silence"}
    assert witness.heard[-1] == "answer"


def test_a_wait_for_a_key_is_brief_once_the_store_was_away() -> None:
    """Whoever waits in a store that has lost what it held looks around soon."""
    witness, world = Noting(), World()
    world.fault = away_until(world, 1.0)
    waiting = one(fx.WaitFor("never", 1000.0))
    task = world.spawn(with_persistence(waiting, replace(persistence(60.0), witness=witness)))
    world.run()

    assert task.result is False
    assert task.ended_at_s is not None
    assert task.ended_at_s <= 10.0
