# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A start of the workers has one name on all nodes, and ends with what all have read."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_resilience.core.keys import Keys
from lightning_resilience.core.records import decode
from lightning_resilience.core.restart import IncarnationRecord, ProgressRecord
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.incarnation import (
    acknowledge,
    announce,
    await_acknowledged,
    name_round,
    present,
    progress_of,
    read_name,
    tell_progress,
)
from tests.scripted_driver import Crash, Fault, Lost, Task, World, run


KEYS = Keys(run_id="run", incarnation="")


@pytest.mark.parametrize("seed", range(10))
def test_all_nodes_of_a_round_have_the_same_name(seed: int) -> None:
    """Node 0 gives it, whenever it comes; the others wait for that."""
    world = World(seed=seed)
    readers = [
        world.spawn(read_name(deadline_at_s=1e9), name=name, at_s=0.3 * name)
        for name in range(1, 4)
    ]
    giver = world.spawn(name_round(nodes=4, before="3-x"), at_s=2.0)
    world.run()

    assert {task.result for task in readers} == {giver.result}
    assert giver.result.incarnation.startswith("4-")
    assert giver.result.nodes == 4


def test_a_round_has_one_name_however_often_it_is_given() -> None:
    """An agent whose answer was lost asks again."""

    def lose(task: Task, at: int, effect: Any) -> Fault | None:
        del task, at
        return Lost() if isinstance(effect, fx.CompareAndSet) else None

    world = World(fault=lose)
    first = world.spawn(name_round(nodes=2, before=""))
    world.run()
    world.fault = lambda *_: None
    again = run(name_round(nodes=2, before=""), world)

    assert isinstance(first.error, StoreUnavailableError)
    assert again == run(read_name(deadline_at_s=1e9), world)


@pytest.mark.parametrize("seed", range(5))
def test_the_present_start_is_the_one_that_was_announced_last(seed: int) -> None:
    """Announced once more, nothing changes."""
    world = World(seed=seed)
    names = [IncarnationRecord(incarnation=f"{n}-x", nodes=n, writer=f"{n}") for n in (1, 2, 2)]

    for name in names:
        run(announce(KEYS, name), world)

    assert run(present(KEYS), world) == names[-1]


def test_a_round_without_its_node_0_is_made_anew() -> None:
    """The others do not wait for ever, and say what to think of it."""
    world = World(fault=lambda task, at, _effect: Crash() if task.name == 0 and at == 1 else None)
    world.spawn(name_round(nodes=2, before=""), name=0)
    other = world.spawn(read_name(deadline_at_s=1030.0), name=1)
    world.run()

    assert isinstance(other.error, StoreUnavailableError)
    assert "node 0" in str(other.error)
    assert world.now_s <= 31.0


def test_before_the_first_start_there_is_none() -> None:
    """Nobody has named one, and nobody has told of progress."""
    assert run(present(KEYS)) is None
    assert run(progress_of(KEYS)) is None


def test_progress_is_the_farthest_that_was_told() -> None:
    """Whoever tells it, in whatever order."""
    world = World()
    for step, checkpoint_step in [(10, 8), (4, 2), (11, 8), (9, 9)]:
        run(tell_progress(KEYS, step=step, checkpoint_step=checkpoint_step), world)

    told = run(progress_of(KEYS), world)
    assert told == decode(ProgressRecord, world.values[KEYS.progress], key="progress")
    assert told is not None
    assert (told.step, told.checkpoint_step) == (11, 9)


def test_the_host_of_the_store_leaves_last() -> None:
    """When all have read how the job has ended."""
    world = World()
    host = world.spawn(await_acknowledged(KEYS, 3, linger_s=30.0))
    for node in range(3):
        world.spawn(acknowledge(KEYS, node), name=node + 1, at_s=2.0 * node)
    world.run()

    assert host.result is True
    assert host.ended_at_s is not None
    assert 4.0 <= host.ended_at_s < 6.0


def test_the_host_of_the_store_does_not_wait_for_ever() -> None:
    """A node that is gone acknowledges nothing."""
    world = World()
    host = world.spawn(await_acknowledged(KEYS, 2, linger_s=30.0))
    world.spawn(acknowledge(KEYS, 0), name=1)
    world.run()

    assert host.result is False
    assert host.ended_at_s is not None
    assert 30.0 <= host.ended_at_s < 30.1
