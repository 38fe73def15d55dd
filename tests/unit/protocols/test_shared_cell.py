# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A shared cell is changed by one writer at a time, and everybody knows who it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.persistent import Persistence, with_persistence
from lightning_resilience.protocols.shared_cell import create, update, write
from tests.scripted_driver import Away, Fault, Lost, Task, World, run


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import Effect, Protocol
    from tests.scripted_driver import Striking


def persistent(inner: Protocol[Any]) -> Protocol[Any]:
    """Repeat store operations, as joint operations do."""
    return with_persistence(
        inner, Persistence(op="test", patience_s=60.0, error=lambda _s, error: error)
    )


def lose_answer_of(number: int) -> Striking:
    """A fault that lets the ``number``-th compare-and-set happen, and loses its answer."""
    seen = 0

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        nonlocal seen
        seen += isinstance(effect, fx.CompareAndSet)
        return Lost() if isinstance(effect, fx.CompareAndSet) and seen == number else None

    return fault


def append(raw: bytes, nonce: str) -> bytes:
    """A change that keeps all earlier ones."""
    return raw + b"," + nonce.encode()


def test_a_writer_whose_expectation_holds_wins() -> None:
    """A write from the bytes that are there replaces them and says so."""
    world = World()
    world.values["cell"] = b"before"

    written = run(write("cell", b"before", b"after"), world)

    assert (written.won, written.raw, written.gone) == (True, b"after", False)
    assert world.values["cell"] == b"after"


def test_a_writer_whose_expectation_fails_learns_what_is_there() -> None:
    """A write from other bytes changes nothing and returns what is there."""
    world = World()
    world.values["cell"] = b"somebody else's"

    written = run(write("cell", b"before", b"after"), world)

    assert (written.won, written.raw, written.gone) == (False, b"somebody else's", False)
    assert world.values["cell"] == b"somebody else's"


def test_a_key_that_vanished_is_gone_not_unchanged() -> None:
    """A store that returns the expectation has lost the key: nobody won, and it is gone."""
    world = World()

    written = run(write("cell", b"before", b"after"), world)

    assert not written.won
    assert written.gone
    assert world.values == {}


def test_only_one_creator_wins_and_all_learn_what_was_created() -> None:
    """Of many who create the same key, one wins, and the others get its bytes."""
    world = World(seed=3)
    tasks = [world.spawn(create("cell", f"by {name}".encode()), name=name) for name in range(8)]

    world.run()

    winners = [task for task in tasks if task.result.won]
    assert len(winners) == 1
    assert {task.result.raw for task in tasks} == {world.values["cell"]}


@pytest.mark.parametrize("seed", range(20))
def test_two_writers_of_equal_states_never_both_win(seed: int) -> None:
    """Writers that want the very same state are told apart by their nonces."""
    world = World(seed=seed)
    world.values["cell"] = b"closed|n0"
    tasks = []
    for name in range(2):
        change = lambda raw, nonce: f"open|{nonce}".encode() if raw == b"closed|n0" else None  # noqa: E731
        tasks.append(world.spawn(update("cell", b"closed|n0", change), name=name))

    world.run()

    assert sum(task.result.won for task in tasks) == 1
    assert {task.result.raw for task in tasks} == {world.values["cell"]}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_write_whose_answer_was_lost_says_won_when_repeated(number: int) -> None:
    """A repeated compare-and-set finds its own bytes there, and each change is made once."""
    world = World(fault=lose_answer_of(number))
    world.values["cell"] = b"0"

    def three() -> Protocol[list[bool]]:
        won, raw = [], b"0"
        for _ in range(3):
            written = yield from update("cell", raw, append)
            won.append(written.won)
            raw = written.raw
        return won

    won = run(persistent(three()), world)

    assert won == [True, True, True]
    assert world.values["cell"].count(b",") == 3


def test_a_lost_answer_is_not_a_victory_where_another_has_written_since() -> None:
    """A repeat that finds other bytes decides anew from those, never from old ones."""
    world = World(fault=lose_answer_of(1))
    world.values["cell"] = b"0"
    first = world.spawn(persistent(update("cell", b"0", append)))
    world.at(0.0016, lambda: world.values.update(cell=world.values["cell"] + b",other"))

    world.run()

    assert first.result.won
    assert b",other" in world.values["cell"]


@pytest.mark.parametrize("seed", range(10))
def test_every_change_of_contending_writers_is_there_once(seed: int) -> None:
    """Writers that decide anew after each conflict lose no change."""
    world = World(seed=seed)
    world.values["cell"] = b"0"
    tasks = [world.spawn(update("cell", b"0", append), name=name) for name in range(6)]

    world.run(limit_s=10)

    won = sum(task.result.won for task in tasks)
    assert won == world.values["cell"].count(b",") == 6


def test_a_writer_that_always_loses_gives_up() -> None:
    """The loop is bounded: with a rival that is always faster, it ends and says not won."""
    world = World()
    world.values["cell"] = b"0"

    def rival(_task: Task, index: int, effect: Effect) -> None:
        if isinstance(effect, fx.CompareAndSet):
            world.values["cell"] = f"rival {index}".encode()

    world.fault = rival
    task = world.spawn(update("cell", b"0", append))

    world.run(limit_s=60)

    assert not task.result.won
    assert not task.result.gone
    assert task.result.raw.startswith(b"rival")
    assert task.store_operations() < 50


def test_nothing_is_written_where_there_is_nothing_to_do() -> None:
    """A change that returns None costs no store operation."""
    world = World()
    task = world.spawn(update("cell", b"as it is", lambda _raw, _nonce: None))

    world.run()

    assert task.store_operations() == 0
    assert (task.result.won, task.result.raw) == (False, b"as it is")


def test_a_store_that_is_away_is_the_callers_business() -> None:
    """Without persistence, a store that does not answer ends the write with its error."""
    world = World(fault=lambda _task, _index, _effect: Away())

    with pytest.raises(StoreUnavailableError):
        run(write("cell", b"", b"x"), world)
