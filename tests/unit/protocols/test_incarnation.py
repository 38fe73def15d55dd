# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A start of the workers has one name on all nodes, and ends with what all have read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.keys import Keys
from lightning_resilience.core.records import decode
from lightning_resilience.core.restart import IncarnationRecord, ProgressRecord
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.incarnation import (
    Part,
    RoundGivenUpError,
    acknowledge,
    announce,
    await_acknowledged,
    give_up,
    name_for,
    name_round,
    present,
    progress_of,
    read_name,
    take_leave,
    tell_progress,
)
from tests.scripted_driver import Crash, Fault, Lost, Task, World, run


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import Protocol


KEYS = Keys(run_id="run", incarnation="")
START = IncarnationRecord(incarnation="3-x", nodes=2, writer="w")


def named(*, nodes: int, before: str) -> Protocol[IncarnationRecord]:
    """Name a round, as node 0 does."""
    return (yield from name_round((yield from name_for(nodes=nodes, before=before))))


@pytest.mark.parametrize("seed", range(10))
def test_all_nodes_of_a_round_have_the_same_name(seed: int) -> None:
    """Node 0 gives it, whenever it comes; the others wait for that."""
    world = World(seed=seed)
    readers = [
        world.spawn(read_name(deadline_at_s=1e9), name=name, at_s=0.3 * name)
        for name in range(1, 4)
    ]
    giver = world.spawn(named(nodes=4, before="3-x"), at_s=2.0)
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
    first = world.spawn(named(nodes=2, before=""))
    world.run()
    world.fault = lambda *_: None
    again = run(named(nodes=2, before=""), world)

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
    world.spawn(named(nodes=2, before=""), name=0)
    other = world.spawn(read_name(deadline_at_s=1030.0), name=1)
    world.run()

    assert isinstance(other.error, StoreUnavailableError)
    assert "node 0" in str(other.error)
    assert world.now_s <= 31.0


def test_a_round_that_was_given_up_gets_no_name() -> None:
    """Neither from a node 0 that comes late, nor for who has waited for it."""
    world = World()
    waiting = world.spawn(read_name(deadline_at_s=1e9), name=1)
    giving_up = world.spawn(give_up(nodes=3), name=2, at_s=5.0)
    late = world.spawn(named(nodes=3, before="3-x"), name=0, at_s=8.0)
    world.run()

    assert all(isinstance(each.error, RoundGivenUpError) for each in (waiting, giving_up, late))
    assert waiting.ended_at_s is not None
    assert waiting.ended_at_s < 8.0
    assert "all 3 nodes" in str(late.error)


def test_a_round_that_has_a_name_is_not_given_up() -> None:
    """Node 0 was faster: whoever has waited goes on with that."""
    world = World()
    found = run(named(nodes=3, before="3-x"), world)

    assert run(give_up(nodes=3), world) == found
    assert found.incarnation.startswith("4-")


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


def leaves(world: World, name: int, part: Part | None, *, hosts_store: bool = False) -> Task:
    """Let an agent leave a job that has ended."""
    leaving = take_leave(KEYS, part, hosts_store=hosts_store, linger_s=30.0)
    return world.spawn(leaving, name=name, at_s=2.0 * name)


def test_an_agent_acknowledges_as_the_node_that_it_was() -> None:
    """In the start that it had part in: there its number means something."""
    world = World()
    leaves(world, 1, Part(start=START, node=1))
    world.run()

    assert list(world.values) == [f"lr/run/i{START.incarnation}/acknowledged/1"]


def test_an_agent_without_a_part_acknowledges_nothing_in_the_place_of_another() -> None:
    """Node 0 has still to read how the job has ended, and the store waits for it."""
    world = World()
    run(announce(KEYS, START), world)
    host = leaves(world, 0, Part(start=START, node=1), hosts_store=True)
    leaves(world, 1, None)
    node = leaves(world, 5, Part(start=START, node=0))
    world.run()

    assert host.ended_at_s is not None
    assert node.ended_at_s is not None
    assert node.ended_at_s <= host.ended_at_s < 12.0


def test_a_host_without_a_part_waits_for_those_of_the_present_start() -> None:
    """The store is in the process of an agent that was replaced."""
    world = World()
    run(announce(KEYS, START), world)
    host = leaves(world, 0, None, hosts_store=True)
    for node in range(2):
        leaves(world, 2 + node, Part(start=START, node=node))
    world.run()

    assert host.ended_at_s is not None
    assert 6.0 <= host.ended_at_s < 8.0


def test_a_host_of_a_job_that_never_began_waits_for_nobody() -> None:
    """Nobody has a number that it could wait for."""
    world = World()
    host = leaves(world, 0, None, hosts_store=True)
    world.run()

    assert host.ended_at_s is not None
    assert host.ended_at_s < 1.0
