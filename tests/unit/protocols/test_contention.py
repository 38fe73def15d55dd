# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Who comes to a dependency while it recovers, or while the store is away: nobody is locked out.

Callers that do not wait leave nothing in the line, and find dead holders as well. A store that was
away is no reason to take anybody for dead, and one that nobody has asked has not come back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lightning_resilience.core.breaker import BreakerConfig, initial
from lightning_resilience.core.events import (
    BreakerChanged,
    LocalModeEnded,
    LocalModeEntered,
    SlotForgiven,
    StoreLost,
    ViewTrusted,
)
from lightning_resilience.core.outcome import classify
from lightning_resilience.core.records import SlotRecord, encode
from lightning_resilience.errors import CircuitOpenError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.circuit import Circuit, begin, refresh
from lightning_resilience.protocols.circuit_memory import Link, give_detour
from lightning_resilience.protocols.guard import GuardedCall, guard
from lightning_resilience.protocols.probe import Patience
from tests.scenes import CONFIG, KEYS, POLICY, Dependency
from tests.scripted_driver import Away, Pause, World


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import Effect, Protocol
    from tests.scripted_driver import Fault, Task


LEASE_S = 30.0
ASKING = (fx.Get, fx.MultiGet, fx.Set, fx.Delete, fx.CompareAndSet, fx.Add)


def circuit(name: str = "d", config: BreakerConfig = CONFIG) -> Circuit:
    """A process that has not yet looked."""
    return Circuit(name, config=config, keys=KEYS, host="h0")


def call(dependency: Dependency, *, when_open: str = "wait", **more: Any) -> GuardedCall:
    """One call of it."""
    patience = Patience(probe=dependency.probe, classify=classify, when_open=when_open)
    return GuardedCall(
        work=dependency.call,
        operation="save",
        target="a",
        policy=POLICY,
        patience=patience,
        **more,
    )


def begin_to_recover(world: World, *slots: SlotRecord) -> None:
    """Leave the record as it is right after a probe, and these slots."""
    first = initial(CONFIG, store_id="s", writer="w")
    record = msgspec.structs.replace(first, state="recovering", limit=1, epoch=5)
    world.values[KEYS.breaker("d")] = encode(record)
    for index, slot in enumerate(slots):
        world.values[KEYS.slot("d", index)] = encode(slot)


def be_away(world: World, *, since_s: float, until_s: float) -> None:
    """Let the store not answer for a time."""

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        is_away = since_s < world.now_s < until_s
        return Away() if is_away and isinstance(effect, ASKING) else None

    world.fault = fault


# --- callers that do not wait ----------------------------------------------------------------


def test_callers_that_do_not_wait_leave_no_line_that_bars_the_next() -> None:
    """Five are refused while the only slot is taken; whoever comes when it is free gets in."""
    world = World()
    dependency = Dependency(world, lasts_s=1.0)
    begin_to_recover(world)
    for name in range(6):
        protocol = guard(circuit(), call(dependency, when_open="raise"))
        world.spawn(protocol, name=name, at_s=0.1 * name)

    late = [
        world.spawn(guard(circuit(), call(dependency, when_open="raise")), name=name, at_s=at_s)
        for name, at_s in ((10, 10.0), (11, 20.0), (12, 30.0))
    ]
    world.run()

    assert [task.error for task in late] == [None] * 3
    refused = [task.error for task in world.tasks[1:6]]
    assert all(isinstance(error, CircuitOpenError) for error in refused)


def test_a_collective_call_waits_for_its_slot_also_where_nobody_waits_for_an_outage() -> None:
    """While the circuit recovers, all ranks get in one after the other, and none is refused."""
    world = World()
    begin_to_recover(world)
    dependency = Dependency(world, lasts_s=0.5)
    loading = call(dependency, when_open="raise", collective=True)

    tasks = [world.spawn(guard(circuit(), loading), name=rank) for rank in range(6)]
    world.run(limit_s=60)

    assert [task.error for task in tasks] == [None] * 6
    assert len(dependency.calls) == 6


def test_callers_that_do_not_wait_find_a_dead_holder_too() -> None:
    """The only slot of the ramp is held by the dead: who comes again after a lease takes it."""
    world = World()
    dependency = Dependency(world)
    begin_to_recover(world, SlotRecord(holder="dead", writer="dead"))
    mine = circuit()
    refused = []

    def come_again() -> Protocol[float]:
        while True:
            try:
                yield from guard(mine, call(dependency, when_open="raise"))
            except CircuitOpenError as error:
                refused.append(error)
            else:
                return world.now_s
            yield fx.Sleep(LEASE_S / 4)

    task = world.spawn(come_again(), name=1)
    world.run(limit_s=10 * LEASE_S)

    assert LEASE_S <= task.result <= 1.5 * LEASE_S
    assert "All 1 slots" in str(refused[0])
    assert [event.slot for event in task.emitted(SlotForgiven)] == [0]


def test_what_another_thread_has_seen_since_is_not_what_let_a_call_in() -> None:
    """A failure of the epoch that let it in does not halve the ramp of a later one."""
    world = World()
    mine = circuit()
    dependency = Dependency(world, heals_at_s=5.0)
    world.spawn(begin(mine, new_incarnation=True))
    world.run()
    seen: list[int] = []

    def fail_once() -> ConnectionResetError:
        dependency.heals_at_s = 0.0
        return ConnectionResetError("reset by peer")

    dependency.error = fail_once

    def overtake() -> None:
        begin_to_recover(world)
        world.spawn(refresh(mine), name=1)

    def fault(task: Task, _index: int, effect: Effect) -> Fault | None:
        if task.name or seen or not isinstance(effect, fx.CompareAndSet):
            return None
        seen.append(1)
        world.at(world.now_s + 0.1, overtake)
        return Pause(1.0)

    world.fault = fault
    task = world.spawn(guard(mine, call(dependency, collective=True)))
    world.run()

    assert task.error is None
    assert seen
    assert not [event for event in task.emitted(BreakerChanged) if "failed" in event.reason]


# --- a store that was away -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lasts_s", [36.0, 40.5, 45.0])
def test_a_store_that_was_away_for_a_lease_takes_no_slot_from_who_lives(
    lasts_s: float, seed: int
) -> None:
    """Nobody could beat, and nobody could see it: the calls that go on keep their slots."""
    config = replace(CONFIG, max_concurrent=4)
    world = World(seed=seed)
    dependency = Dependency(world, lasts_s=120.0)
    be_away(world, since_s=20.0, until_s=20.0 + lasts_s)

    patient: dict[str, Any] = {"collective": True, "store_patience_s": 100.0, "timeout_s": 500.0}
    for name in range(8):
        world.spawn(guard(circuit(config=config), call(dependency, **patient)), name=name)
    world.run()

    assert [task.error for task in world.tasks] == [None] * 8
    assert not any(task.emitted(SlotForgiven) for task in world.tasks)
    assert sorted(dependency.calls)[4] >= 120.0


def test_a_holder_that_died_is_forgiven_within_one_and_a_half_leases() -> None:
    """Exactly: after a lease since its last beat was seen, and no later than half a lease more."""
    config = replace(CONFIG, max_concurrent=1)
    for seed in range(20):
        world = World(seed=seed)
        dependency = Dependency(world, lasts_s=0.01)
        world.values[KEYS.slot("d", 0)] = encode(SlotRecord(holder="dead", writer="beat"))

        for name in range(5):
            waiter = guard(circuit(config=config), call(dependency, collective=True))
            world.spawn(waiter, name=name)
        world.run()

        assert LEASE_S <= dependency.calls[0] <= 1.5 * LEASE_S
        assert sum(len(task.emitted(SlotForgiven)) for task in world.tasks) == 1


@pytest.mark.parametrize("lasts_s", [36.0, 60.0, 100.0, 130.0])
def test_one_long_look_away_takes_no_slot_from_who_lives(lasts_s: float) -> None:
    """Who has far to its turn looks away for minutes: the store may have been away all the time."""
    config = replace(CONFIG, max_concurrent=4)
    world = World()
    dependency = Dependency(world, lasts_s=400.0)
    be_away(world, since_s=5.0, until_s=5.0 + lasts_s)
    for index in range(4):
        world.values[KEYS.slot("d", index)] = encode(SlotRecord(took_s=200.0, writer="before"))

    patient: dict[str, Any] = {"collective": True, "store_patience_s": 200.0, "timeout_s": 900.0}
    for name in range(30):
        world.spawn(guard(circuit(config=config), call(dependency, **patient)), name=name)
    world.run(limit_s=100_000)

    assert not any(task.emitted(SlotForgiven) for task in world.tasks)


@pytest.mark.parametrize("took_s", [0.001, 0.01, 0.1, 1.0])
def test_a_dead_holder_costs_few_looks_however_fast_calls_are(took_s: float) -> None:
    """The pace of fast calls says nothing about a slot that nobody gives back for a lease."""
    config = replace(CONFIG, max_concurrent=1)
    world = World()
    dead = SlotRecord(holder="dead", writer="beat", took_s=took_s)
    world.values[KEYS.slot("d", 0)] = encode(dead)
    dependency = Dependency(world, lasts_s=took_s)

    for name in range(5):
        waiter = guard(circuit(config=config), call(dependency, collective=True))
        world.spawn(waiter, name=name)
    world.run()

    assert LEASE_S <= dependency.calls[0] <= 1.5 * LEASE_S
    assert max(task.store_operations() for task in world.tasks) <= 60


def test_a_store_is_left_alone_while_a_view_is_trusted() -> None:
    """Calls on a trusted view do not each wait for a store that has just not answered."""
    world = World()
    dependency = Dependency(world)
    mine = circuit()
    give_detour(mine, link=Link(), processes=4)
    be_away(world, since_s=3.0, until_s=1e9)
    terms: dict[str, Any] = {"may_go_alone": True, "store_patience_s": 0.1}

    def job() -> Protocol[None]:
        yield from begin(mine, new_incarnation=False)
        yield fx.Sleep(6.0)
        for _ in range(60):
            yield from guard(mine, call(dependency, **terms))
            yield fx.Sleep(0.25)

    task = world.spawn(job(), name=1)
    world.run()

    trusted = len(task.emitted(ViewTrusted))
    assert len(dependency.calls) == 60
    assert 1 <= trusted <= 8
    assert task.emitted(StoreLost) == []
    assert task.emitted(LocalModeEnded) == []


def test_a_store_that_nobody_has_asked_has_not_come_back() -> None:
    """A call on a view that is fresh does not end the time alone of the whole process."""
    world = World()
    dependency = Dependency(world)
    link = Link()
    lost, fresh = circuit("lost"), circuit("fresh")
    for each in (lost, fresh):
        give_detour(each, link=link, processes=4)
    be_away(world, since_s=1.0, until_s=1e9)
    terms: dict[str, Any] = {"may_go_alone": True, "store_patience_s": 0.5}

    def job() -> Protocol[None]:
        yield from begin(lost, new_incarnation=False)
        yield from begin(fresh, new_incarnation=False)
        yield fx.Sleep(1.5)
        yield from guard(lost, call(dependency, collective=True, **terms))
        yield fx.Sleep(1.2)
        yield from guard(fresh, call(dependency, **terms))

    task = world.spawn(job(), name=1)
    world.run()

    assert len(dependency.calls) == 2
    assert len(task.emitted(LocalModeEntered)) == 1
    assert task.emitted(LocalModeEnded) == []
    assert link.lost_since_s is not None
