# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Any rank asks, rank 0 hears the most urgent, and all ranks take the same."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from lightning_resilience.core.agenda import AgendaItem, AgendaKind, AgendaRecord, record_of
from lightning_resilience.errors import JointUnavailableError, StoreUnavailableError
from lightning_resilience.protocols.agenda import ask, listen, put, take
from tests.scenes import member
from tests.scripted_driver import STORE_EFFECTS, Away, Lost, World


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import Effect
    from tests.scripted_driver import Fault, Task


def wanted(kind: AgendaKind, rank: int) -> AgendaRecord:
    """What a rank asks for."""
    item = AgendaItem(kind=kind, reason=f"rank {rank}")
    return record_of(item, rank=rank, writer=f"{kind.value} of {rank}")


ALL = [wanted(kind, rank) for kind, rank in zip(AgendaKind, (3, 2, 1, 0), strict=True)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
@pytest.mark.parametrize("apart_s", [0.0, 1.0])
def test_the_cell_ends_with_the_most_urgent_whatever_the_order(
    order: tuple[int, ...], apart_s: float
) -> None:
    """Ranks that ask at once, or one after the other, leave the one item that is acted on."""
    world = World()
    for place, index in enumerate(order):
        record = ALL[index]
        who = member(rank=record.rank, world_size=4)
        world.spawn(ask(who, 1, record), name=record.rank, at_s=place * apart_s)
    world.run()

    heard = world.spawn(listen(member(rank=0, world_size=4), 1))
    world.run()
    assert heard.result == ALL[0]


def test_an_ask_costs_one_operation_of_the_store() -> None:
    """A rank that is alone in wanting something writes once."""
    world = World()

    task = world.spawn(ask(member(rank=1), 1, wanted(AgendaKind.STOP, 1)))
    world.run()

    assert task.store_operations() == 1


def test_an_ask_whose_answer_was_lost_may_be_repeated() -> None:
    """The cell holds the item once, whether or not the first one was heard of."""

    def fault(_task: Task, index: int, _effect: Effect) -> Fault | None:
        return Lost() if index == 0 else None

    world = World(fault=fault)
    record = wanted(AgendaKind.STOP, 1)
    first = world.spawn(ask(member(rank=1), 1, record))
    world.run()
    world.fault = lambda *_: None

    world.spawn(ask(member(rank=1), 1, record))
    world.run()

    assert isinstance(first.error, StoreUnavailableError)
    heard = world.spawn(listen(member(rank=0), 1))
    world.run()
    assert heard.result == record


def test_an_ask_goes_on_where_the_store_comes_back_empty() -> None:
    """A less urgent item that was found, and is gone at the next look, is no reason to give up."""
    world = World()
    world.spawn(ask(member(rank=0), 1, wanted(AgendaKind.SAVE, 0)))
    world.run()

    def fault(_task: Task, index: int, _effect: Effect) -> Fault | None:
        if index == 1:
            world.values.clear()
        return None

    world.fault = fault
    record = wanted(AgendaKind.STOP, 1)
    world.spawn(ask(member(rank=1), 1, record), name=1)
    world.run()

    world.fault = lambda *_: None
    heard = world.spawn(listen(member(rank=0), 1))
    world.run()
    assert heard.result == record


def test_listening_outlasts_a_store_that_is_away() -> None:
    """It hears what is asked for after an outage of the store as well as before."""
    world = World()

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        return Away() if isinstance(effect, STORE_EFFECTS) and world.now_s < 300.0 else None

    world.fault = fault
    heard = world.spawn(listen(member(rank=0), 1))
    record = wanted(AgendaKind.STOP, 1)
    world.spawn(ask(member(rank=1), 1, record), name=1, at_s=400.0)
    world.run()

    assert heard.result == record
    assert heard.ended_at_s is not None
    assert heard.ended_at_s < 401.0


def test_what_was_asked_for_under_another_number_is_not_heard() -> None:
    """Each item has its own cell, so what is over is never acted on again."""
    world = World()
    world.spawn(ask(member(rank=1), 1, wanted(AgendaKind.STOP, 1)), name=1)
    later = wanted(AgendaKind.FAIL, 1)
    world.spawn(ask(member(rank=1), 2, later), name=1, at_s=5.0)

    heard = world.spawn(listen(member(rank=0), 2))
    world.run()

    assert heard.result == later


def test_all_ranks_take_what_rank_zero_has_put() -> None:
    """Every rank reads the same record, with one operation of the store."""
    world = World()
    record = wanted(AgendaKind.PAUSE, 2)
    world.spawn(put(member(rank=0, world_size=4), 1, record))
    world.run()

    tasks = [world.spawn(take(member(rank=r, world_size=4), 1), name=r) for r in range(4)]
    world.run()

    assert [task.result for task in tasks] == [record] * 4
    assert [task.store_operations() for task in tasks] == [1] * 4


def test_a_rank_that_finds_nothing_makes_nothing_up() -> None:
    """Where rank 0 could not write it, or the store has lost it, taking is an error at once."""
    world = World()

    task = world.spawn(take(member(rank=1), 1))
    world.run()

    assert isinstance(task.error, JointUnavailableError)
    assert "item 1" in str(task.error)


def test_a_rank_that_cannot_read_tries_for_as_long_as_in_any_joint_operation() -> None:
    """It gives up with the error that names the store, after its patience and not before."""
    world = World(fault=lambda *_: Away())
    who = member(rank=1)

    task = world.spawn(take(who, 1))
    world.fault = lambda _task, _index, effect: (
        Away() if isinstance(effect, STORE_EFFECTS) else None
    )
    world.run()

    assert isinstance(task.error, JointUnavailableError)
    assert task.ended_at_s is not None
    assert task.ended_at_s >= who.store_patience_s


def test_keys_stay_few_over_many_items() -> None:
    """Two numbers are kept, for a rank that still reads the last one."""
    world = World()
    who = member(rank=0)
    for number in range(1, 200):
        world.spawn(ask(who, number, wanted(AgendaKind.SAVE, 0)))
        world.run()
        world.spawn(put(who, number, wanted(AgendaKind.SAVE, 0)))
        world.run()
        read = world.spawn(take(who, number))
        world.run()
        assert read.error is None

    assert len(world.values) == 4


def test_an_item_that_did_not_arrive_is_not_put() -> None:
    """A write that the store has lost is no reason to let all ranks look for it."""

    def fault(_task: Task, index: int, _effect: Effect) -> Fault | None:
        if index == 1:
            world.values.clear()
        return None

    world = World(fault=fault)

    task = world.spawn(put(member(rank=0), 1, wanted(AgendaKind.STOP, 1)))
    world.run()

    assert isinstance(task.error, StoreUnavailableError)
