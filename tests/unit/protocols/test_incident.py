# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that leave at once agree on one incident, the first cause, and wake the others."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_resilience.core.incident import IncidentRecord
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.records import decode, encode
from lightning_resilience.errors import CorruptRecordError, StoreUnavailableError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.incident import (
    first_incident,
    publish_incident,
    tell_incident,
)
from tests.scripted_driver import Away, Crash, Fault, Task, World, run


KEYS = Keys(run_id="run", incarnation="1")
INCIDENT = KEYS.joint("incident", 0)
BELL = KEYS.joint("failed", 0)


def record(kind: str, rank: int) -> IncidentRecord:
    """What a rank offers."""
    return IncidentRecord(rank=rank, kind=kind, error="E: text", step=3, writer=f"w{rank}")


def standing(world: World) -> IncidentRecord:
    """What stands in the end."""
    return decode(IncidentRecord, world.values[INCIDENT], key=INCIDENT)


def test_who_leaves_writes_the_record_and_then_rings() -> None:
    """Whoever is woken by the bell finds the record."""
    world = World()
    mine = record("error", 1)

    task = world.spawn(publish_incident(KEYS, mine))
    world.run()

    assert task.result == mine
    assert [type(effect) for effect in task.performed] == [fx.CompareAndSet, fx.Set]
    assert world.values[BELL]
    assert run(first_incident(KEYS), world) == mine


def test_who_only_tells_wakes_nobody() -> None:
    """The record is there for whoever looks, by the same order, and there is no bell."""
    world = World()

    run(tell_incident(KEYS, record("signal", 0)), world)
    standing_one = run(tell_incident(KEYS, record("error", 1)), world)
    run(tell_incident(KEYS, record("error", 2)), world)

    assert standing_one == record("error", 1)
    assert standing(world) == record("error", 1)
    assert BELL not in world.values


def test_nothing_stands_where_nobody_has_left() -> None:
    """No record is None, and no error."""
    assert run(first_incident(KEYS)) is None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kinds", [["echo", "error", "signal"], ["signal", "error", "error"]])
def test_ranks_that_leave_together_agree_on_a_cause(kinds: list[str], seed: int) -> None:
    """Whatever the order, an error stands in the end, and every writer of one knows which."""
    world = World(seed=seed)

    tasks = [
        world.spawn(publish_incident(KEYS, record(kind, rank)), name=rank, at_s=0.0)
        for rank, kind in enumerate(kinds)
    ]
    world.run()

    final = standing(world)
    assert final.kind == "error"
    assert all(task.result == final for task in tasks if kinds[task.name] == "error")


def test_a_later_echo_changes_nothing() -> None:
    """Who comes with less than what stands learns it, in one operation and the bell."""
    world = World()
    world.values[INCIDENT] = encode(record("error", 0))

    found = run(publish_incident(KEYS, record("echo", 1)), world)

    assert found == standing(world) == record("error", 0)


def test_a_store_that_came_back_empty_in_between_is_written_anew() -> None:
    """A record that was lost between two looks is not mistaken for one that stands."""

    def vanish(_task: Task, index: int, _effect: Any) -> Fault | None:
        if index == 1:
            world.values.pop(INCIDENT, None)
        return None

    world = World(fault=vanish)
    world.values[INCIDENT] = encode(record("signal", 0))
    found = run(publish_incident(KEYS, record("error", 1)), world)

    assert found == standing(world) == record("error", 1)


def test_a_record_that_does_not_decode_is_reported_and_wakes_all_the_same() -> None:
    """Nobody waits because somebody else has written nonsense."""
    world = World()
    world.values[INCIDENT] = b"nonsense"

    with pytest.raises(CorruptRecordError):
        run(publish_incident(KEYS, record("error", 1)), world)

    assert world.values[BELL]
    assert world.values[INCIDENT] == b"nonsense"


def test_a_store_that_is_away_is_asked_no_more_than_twice() -> None:
    """Who leaves does not wait: one try for the record, one for the bell."""
    world = World(fault=lambda *_: Away())
    task = world.spawn(publish_incident(KEYS, record("error", 1)))
    world.run()

    assert isinstance(task.error, StoreUnavailableError)
    assert len(task.performed) == 2


def test_a_rank_that_dies_before_the_bell_leaves_the_record() -> None:
    """Whoever leaves later reads it and rings."""
    world = World(fault=lambda task, index, _: Crash() if (task.name, index) == (0, 1) else None)

    world.spawn(publish_incident(KEYS, record("error", 0)), name=0)
    later = world.spawn(publish_incident(KEYS, record("echo", 1)), name=1, at_s=1.0)
    world.run()

    assert later.result == record("error", 0)
    assert world.values[BELL]
