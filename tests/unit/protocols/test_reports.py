# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What rank 0 tells the agents when a fit begins."""

from __future__ import annotations

import pytest

from lightning_resilience.core.incident import IncidentRecord
from lightning_resilience.core.keys import Keys
from lightning_resilience.core.records import decode
from lightning_resilience.core.restart import StorageRecord
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.incident import publish_incident, tell_incident
from lightning_resilience.protocols.reports import tell_start
from tests.scripted_driver import World, run


KEYS = Keys(run_id="run", incarnation="1-n")
MINE = IncidentRecord(rank=0, kind="error", error="E: text", step=3, writer="w")


def urls(world: World) -> tuple[str, ...]:
    """What the agents read."""
    return decode(StorageRecord, world.values[KEYS.storage], key=KEYS.storage).urls


def test_what_another_fit_has_told_is_kept() -> None:
    """A restart waits for all that the job has used."""
    world = World()

    run(tell_start(KEYS, ["s3://b/a"]), world)
    run(tell_start(KEYS, ["s3://b/c"]), world)

    assert urls(world) == ("s3://b/a", "s3://b/c")


def test_what_is_there_already_costs_one_read() -> None:
    """A fit like the one before writes nothing."""
    world = World()
    run(tell_start(KEYS, ["s3://b/a"]), world)

    task = world.spawn(tell_start(KEYS, ["s3://b/a"]))
    world.run()

    stores = [type(each) for each in task.performed if not isinstance(each, fx.Nonce)]
    assert stores == [fx.MultiGet]


def test_a_name_of_the_users_own_is_told() -> None:
    """Under it are the circuits; the agents' own name is no news."""
    world = World()

    run(tell_start(KEYS, [], run_id=KEYS.run_id), world)
    assert KEYS.storage not in world.values
    run(tell_start(KEYS, [], run_id="mine"), world)
    run(tell_start(KEYS, ["s3://b/a"], run_id="mine"), world)

    told = decode(StorageRecord, world.values[KEYS.storage], key=KEYS.storage)
    assert (told.run_id, told.urls) == ("mine", ("s3://b/a",))


@pytest.mark.parametrize("seed", range(10))
def test_two_that_tell_at_once_are_both_heard(seed: int) -> None:
    """Of two jobs that share a run id by mistake, too."""
    world = World(seed=seed)
    for name in range(3):
        world.spawn(tell_start(KEYS, [f"s3://b/{name}"]), name=name)

    world.run()

    assert sorted(urls(world)) == ["s3://b/0", "s3://b/1", "s3://b/2"]


def test_an_incident_that_the_workers_have_survived_is_taken_back() -> None:
    """A program may catch what one fit raises, and begin another."""
    world = World()
    run(tell_incident(KEYS, MINE), world)

    run(tell_start(KEYS, []), world)

    assert KEYS.joint("incident", 0) not in world.values
    assert KEYS.storage not in world.values


def test_an_incident_that_an_agent_knows_of_stays() -> None:
    """It has seen a worker end: no fit goes on without that one."""
    world = World()
    run(publish_incident(KEYS, MINE), world)

    run(tell_start(KEYS, []), world)

    assert KEYS.joint("incident", 0) in world.values
