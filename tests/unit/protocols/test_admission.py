# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Never more calls in flight than slots, everybody served, and no slot lost."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.events import SlotAwaited, SlotForgiven, StoreLost
from lightning_resilience.core.records import SlotRecord, decode, encode
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.errors import CircuitOpenError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.admission import enter
from lightning_resilience.protocols.circuit import begin, refresh
from tests.scenes import (
    CONFIG,
    DEPENDENCY,
    KEYS,
    Dependency,
    circuit,
    guarded,
    patience,
    put,
    record,
)
from tests.scripted_driver import STORE_EFFECTS, Away, Fault, Interrupt, Lost, Pause, Task, World


if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Effect


SLOTS = CONFIG.max_concurrent
LEASE_S = 30.0
ONE_SLOT = BreakerConfig(max_concurrent=1)
TWO_SLOTS = BreakerConfig(max_concurrent=2)


def cells(world: World) -> list[SlotRecord]:
    """The slots that somebody has used, as they are in the store."""
    prefix = KEYS.slot(DEPENDENCY, 0)[:-1]
    return [
        decode(SlotRecord, raw, key=key)
        for key, raw in sorted(world.values.items())
        if key.startswith(prefix)
    ]


def begun(
    world: World, count: int, *, hosts: int = 1, config: BreakerConfig = CONFIG
) -> list[Circuit]:
    """Circuits of processes that have read the record; what follows happens from now on."""
    fault, world.fault = world.fault, lambda _task, _index, _effect: None
    circuits = [
        circuit(f"host {index % hosts}", hosts=hosts, config=config) for index in range(count)
    ]
    for index, mine in enumerate(circuits):
        world.spawn(begin(mine, new_incarnation=True), name=index)
    world.run()
    world.tasks.clear()
    world.fault = fault
    return circuits


def look_again(world: World, circuits: list[Circuit]) -> None:
    """Let all read what the record is now, as whoever has waited for it does."""
    fault, world.fault = world.fault, lambda _task, _index, _effect: None
    for index, mine in enumerate(circuits):
        world.spawn(refresh(mine), name=index)
    world.run()
    world.tasks.clear()
    world.fault = fault


def call(
    world: World,
    dependency: Dependency,
    mine: Circuit,
    *,
    name: int = 0,
    at_s: float | None = None,
    lasts_s: float | None = None,
    **options: Any,
) -> Task:
    """Start a collective call of a process; it calls the dependency, or just takes its time."""

    def work(token: CancelToken) -> None:
        dependency.calls.append(world.now_s)
        token.spend(lasts_s)  # type: ignore[attr-defined]

    if lasts_s is not None:
        options["work"] = work
    options = {"collective": True, **options}
    return world.spawn(guarded(mine, dependency, **options), name=name, at_s=at_s)


def count_claims(tasks: list[Task]) -> int:
    """How many compare-and-sets on slots were sent."""
    prefix = KEYS.slot(DEPENDENCY, 0)[:-1]
    return sum(
        isinstance(effect, fx.CompareAndSet) and effect.key.startswith(prefix)
        for task in tasks
        for effect in task.performed
    )


def die(task: Task, world: World) -> None:
    """Let a process die in the middle of its call."""
    task.crashed = True
    task.protocol.close()
    task.ended_at_s = world.now_s


# --- an outage and its end -------------------------------------------------------------------


@dataclass(frozen=True)
class Outage:
    """How a job of many callers went through an outage.

    Args:
        dependency: Who was called when.
        tasks: The callers.
        heals_at_s: When the dependency was well again.
    """

    dependency: Dependency
    tasks: Sequence[Task]
    heals_at_s: float

    @property
    def lag_s(self) -> float:
        """Time from healing to the start of the first probe that finds it."""
        return (
            min(at for at, _ in self.dependency.probes if at >= self.heals_at_s) - self.heals_at_s
        )

    @property
    def served_s(self) -> float:
        """Time from healing until the last caller has its result."""
        return max(task.ended_at_s or math.inf for task in self.tasks) - self.heals_at_s

    @property
    def drain_s(self) -> float:
        """Time from the first call that succeeds to the end of the last."""
        first = min(at for at in self.dependency.calls if at >= self.heals_at_s)
        return max(self.dependency.calls) + self.dependency.lasts_s - first

    @property
    def requests(self) -> int:
        """Calls that reached the dependency while it was ill."""
        return sum(at < self.heals_at_s for at in self.dependency.calls)


def outage(
    callers: int, *, lasts_s: float, seed: int, heals_at_s: float = 100.0, timed: bool = False
) -> Outage:
    """Let callers on 8 hosts call at once into an outage that ends after a while.

    Where calls were ``timed`` the job has called before, and the slots tell how long that took.
    """
    world = World(seed=seed)
    for index in range(SLOTS * timed):
        before = SlotRecord(took_s=lasts_s, last="ok", writer=f"w{index}")
        world.values[KEYS.slot(DEPENDENCY, index)] = encode(before)
    dependency = Dependency(world, heals_at_s=heals_at_s, lasts_s=lasts_s)
    tasks = [
        world.spawn(
            guarded(circuit(f"host {name % 8}", hosts=8), dependency, collective=True), name=name
        )
        for name in range(callers)
    ]
    world.run(most_effects=1_000_000)
    assert [task.error for task in tasks] == [None] * callers
    assert all(not cell.holder for cell in cells(world))
    return Outage(dependency, tasks, heals_at_s)


def ideal_s(callers: int, lasts_s: float) -> float:
    """The ramp, and then as many at a time as there are slots."""
    return lasts_s * math.ceil(math.log2(SLOTS)) + callers * lasts_s / SLOTS


@pytest.mark.parametrize(
    ("timed", "lasts_s", "typical", "most"),
    [(True, 0.05, 18, 42), (True, 1.0, 18, 42), (False, 0.05, 18, 42), (False, 1.0, 32, 50)],
)
@pytest.mark.parametrize("seed", range(6))
def test_after_an_outage_everybody_is_served_in_time_through_the_slots(
    timed: bool,  # noqa: FBT001 - data
    lasts_s: float,
    typical: float,
    most: int,
    seed: int,
) -> None:
    """64 callers: never more than 16 in flight, and done within 1.1 of what is possible.

    A job that has called before knows how long to look away; one that is ill from its first call
    on, where calls are long, guesses until one has succeeded.
    """
    went = outage(64, lasts_s=lasts_s, seed=seed, timed=timed)

    operations = [task.store_operations() for task in went.tasks]
    print(  # noqa: T201 - the figures
        f"S={lasts_s:g} s: lag {went.lag_s:.1f} s, served after {went.served_s:.1f} s, "
        f"drain {went.drain_s / ideal_s(64, lasts_s):.2f} of the ideal; "
        f"{statistics.mean(operations):.1f} store operations per caller, at most {max(operations)}"
    )
    assert went.dependency.most_calls_at_once() == SLOTS
    assert went.dependency.most_probes_at_once() == 1
    assert went.served_s <= 1.1 * (went.lag_s + ideal_s(64, lasts_s))
    assert statistics.mean(operations) <= typical
    assert max(operations) <= most


@pytest.mark.parametrize(("lasts_s", "typical", "longest"), [(0.05, 1.25, 1.5), (1.0, 1.25, 1.25)])
def test_the_drain_alone_takes_a_quarter_more_than_the_ideal(
    lasts_s: float, typical: float, longest: float
) -> None:
    """Counted from the first success; calls as short as 50 store operations may take half more."""
    drains = [
        outage(64, lasts_s=lasts_s, seed=seed).drain_s / ideal_s(64, lasts_s) for seed in range(9)
    ]

    assert statistics.median(drains) <= typical
    assert max(drains) <= longest


@pytest.mark.parametrize("lasts_s", [0.05, 1.0])
def test_the_requests_of_an_outage_do_not_grow_with_the_callers(lasts_s: float) -> None:
    """64 and 256 callers trip after equally many requests: two for each slot."""
    few, many = (
        [outage(callers, lasts_s=lasts_s, seed=seed).requests for seed in range(2)]
        for callers in (64, 256)
    )

    assert max(few + many) <= 2 * SLOTS + 4
    assert abs(max(many) - max(few)) <= 4


@pytest.mark.parametrize("seed", range(4))
def test_a_collective_call_of_a_healthy_dependency_passes_the_slots(seed: int) -> None:
    """At a closed circuit too 64 that come at once are 16 at a time, and served in time."""
    world = World(seed=seed)
    dependency = Dependency(world, lasts_s=0.5)
    tasks = [
        call(world, dependency, mine, name=name)
        for name, mine in enumerate(begun(world, 64, hosts=8))
    ]

    world.run()

    assert [task.error for task in tasks] == [None] * 64
    assert dependency.most_calls_at_once() == SLOTS
    assert world.now_s <= 1.25 * ideal_s(64, 0.5)


# --- who passes ------------------------------------------------------------------------------


def test_a_single_caller_takes_no_slot_while_the_circuit_is_closed() -> None:
    """Its store stays as it is: no cell, no ticket."""
    world = World()
    (mine,) = begun(world, 1)
    before = dict(world.values)

    call(world, Dependency(world), mine, collective=False)
    world.run()

    assert world.values == before


@pytest.mark.parametrize("collective", [True, False])
def test_everybody_takes_a_slot_while_the_circuit_recovers(collective: bool) -> None:  # noqa: FBT001 - data
    """At a limit of one, calls that come together are made one after the other."""
    world = World()
    dependency = Dependency(world, lasts_s=1.0)
    circuits = begun(world, 3)
    put(world, state="recovering", limit=1, epoch=5)
    look_again(world, circuits)

    tasks = [
        call(world, dependency, mine, name=name, collective=collective)
        for name, mine in enumerate(circuits)
    ]
    world.run()

    assert [task.error for task in tasks] == [None] * 3
    assert dependency.calls[1] >= dependency.calls[0] + 1.0
    assert record(world).limit > 1


def test_of_all_who_come_at_once_only_those_whose_turn_it_is_claim() -> None:
    """At a limit of one, 32 callers that a bell has woken send one claim, not 32."""
    world = World()
    circuits = begun(world, 32)
    put(world, state="recovering", limit=1, epoch=5)
    look_again(world, circuits)
    tasks = [
        call(world, Dependency(world, lasts_s=1.0), mine, name=name)
        for name, mine in enumerate(circuits)
    ]
    claims: list[int] = []

    world.at(0.02 + world.now_s, lambda: claims.append(count_claims(tasks)))
    world.run()

    assert claims == [1]
    assert [task.error for task in tasks] == [None] * 32


def test_who_does_not_wait_is_refused_where_a_recovering_circuit_is_full() -> None:
    """The error names the slots, the state and the option, and no call is made."""
    world = World()
    circuits = begun(world, 2, config=ONE_SLOT)
    put(world, state="recovering", limit=1, epoch=5)
    look_again(world, circuits)
    dependency = Dependency(world)
    call(world, dependency, circuits[0], lasts_s=50.0)
    waiting = patience(dependency, when_open="raise")

    task = call(
        world, dependency, circuits[1], name=1, at_s=10.0, waiting=waiting, collective=False
    )
    world.run()

    assert isinstance(task.error, CircuitOpenError)
    for word in ("All 1 slots", "recovering", "epoch 5", "max_concurrent"):
        assert word in str(task.error)
    assert task.ended_at_s == pytest.approx(10.0, abs=0.1)
    assert len(dependency.calls) == 1


def test_who_does_not_wait_for_an_ill_dependency_waits_in_a_queue() -> None:
    """While the circuit is closed, a full house is no outage."""
    world = World()
    first, second = begun(world, 2, config=ONE_SLOT)
    dependency = Dependency(world)
    call(world, dependency, first, lasts_s=50.0)
    waiting = patience(dependency, when_open="raise")

    task = call(world, dependency, second, name=1, at_s=1.0, waiting=waiting)
    world.run()

    assert task.error is None
    assert dependency.calls[1] >= 50.0


def test_the_deadline_ends_the_wait_for_a_slot() -> None:
    """A caller whose deadline passes raises, and leaves nothing behind but its ticket."""
    world = World()
    first, second = begun(world, 2, config=ONE_SLOT)
    dependency = Dependency(world)
    call(world, dependency, first, lasts_s=500.0, policy=RetryPolicy(stall_timeout_s=600.0))
    keys = set(world.values)

    task = call(world, dependency, second, name=1, at_s=1.0, policy=RetryPolicy(deadline_s=60.0))
    world.run()

    assert isinstance(task.error, CircuitOpenError)
    assert task.ended_at_s == pytest.approx(61.0, abs=0.2)
    assert set(world.values) - keys == {KEYS.slot(DEPENDENCY, 0), KEYS.turn(DEPENDENCY)}


@pytest.mark.parametrize("pace_s", [0.1, 40.0])
def test_whoever_waits_for_a_slot_says_so(pace_s: float) -> None:
    """From its first look in vain on, no silence is longer than the voice allows."""
    world = World()
    dependency = Dependency(world)
    first, *others = begun(world, 9, config=ONE_SLOT)
    call(world, dependency, first, lasts_s=pace_s)
    world.run()
    call(world, dependency, first, lasts_s=190.0, policy=RetryPolicy(stall_timeout_s=600.0))
    came_s = world.now_s + 1.0
    waiting = patience(dependency, voice_s=28.0)

    tasks = [
        call(world, dependency, mine, name=name, at_s=came_s, lasts_s=1.0, waiting=waiting)
        for name, mine in enumerate(others, 1)
    ]
    world.run()

    for task in tasks:
        spoken = [at for at, event in task.events if isinstance(event, SlotAwaited)]
        assert spoken[0] == pytest.approx(came_s, abs=0.5)
        assert max(after - before for before, after in pairwise(spoken)) <= 28.1
        assert len(spoken) <= 3 + (world.now_s - came_s) / 14.0


def test_whoever_says_that_it_waits_does_not_look() -> None:
    """What it says it knows, and a read is load on the store."""
    world = World()
    (mine,) = begun(world, 1, config=ONE_SLOT)
    held = SlotRecord(holder="other", turn=1, took_s=40.0, writer="other")
    world.values[KEYS.slot(DEPENDENCY, 0)] = encode(held)
    world.values[KEYS.turn(DEPENDENCY)] = b"20"

    task = world.spawn(
        enter(mine, operation="save", voice_s=10.0, deadline_at_s=world.now_s + 400.0)
    )
    world.run()

    spoken = [event for _, event in task.events if isinstance(event, SlotAwaited)]
    looks = [effect for effect in task.performed if isinstance(effect, fx.MultiGet)]
    assert len(spoken) >= 400.0 / 10.0
    assert len(looks) == 2


# --- when to come ----------------------------------------------------------------------------


def operations(task: Task) -> list[Effect]:
    """What a task asked of the store."""
    return [effect for effect in task.performed if isinstance(effect, STORE_EFFECTS)]


def hold(mine: Circuit, ticket: int, *, store_id: str) -> None:
    """Let a process hold a ticket with which it was not let in."""
    mine.ticket = (store_id, ticket)


def woken(
    world: World, mine: Circuit, *, at_s: float = 12.0, name: int = 0, **options: Any
) -> tuple[Task, Dependency]:
    """A collective call that found the circuit open, and whose bell rings a while later."""
    put(world, state="open", generation=1, limit=0, epoch=7, open_s=1000.0)
    look_again(world, [mine])
    dependency = Dependency(world)
    task = call(world, dependency, mine, name=name, **options)

    def heal() -> None:
        put(world, state="recovering", generation=1, limit=1, epoch=8)
        world._write(KEYS.bell(DEPENDENCY, 1), b"1")

    world.at(at_s, heal)
    return task, dependency


@pytest.mark.parametrize("pace_s", [None, 4.0])
def test_who_is_woken_comes_by_its_ticket_without_a_look(pace_s: float | None) -> None:
    """After the bell it sleeps until its turn, and the first that it asks is what the slots say."""
    world = World()
    (mine,) = begun(world, 1)
    mine.pace_s, mine.turn = pace_s, 0
    hold(mine, 15, store_id=record(world).store_id)
    task, dependency = woken(world, mine)

    world.run()

    bells = [at for at, effect in enumerate(task.performed) if isinstance(effect, fx.WaitFor)]
    after = task.performed[bells[-1] + 1 :]
    looked = next(at for at, effect in enumerate(after) if isinstance(effect, STORE_EFFECTS))
    assert isinstance(after[looked], fx.MultiGet)
    slept_s = sum(each.duration_s for each in after[:looked] if isinstance(each, fx.Sleep))
    # Fourteen are let in before: one, two, four, and seven of the next eight.
    assert slept_s == pytest.approx((pace_s or 0.05) * (3 + 7 / 8 - 0.3), rel=0.05)
    assert dependency.calls[0] >= 12.0 + slept_s


def test_a_ticket_that_was_not_let_in_is_kept() -> None:
    """Whoever comes again, because the circuit has opened meanwhile, does not go to the end."""
    world = World()
    (mine,) = begun(world, 1)
    hold(mine, 9, store_id=record(world).store_id)
    world.values[KEYS.turn(DEPENDENCY)] = b"500"
    task, dependency = woken(world, mine)

    world.run()

    assert dependency.calls == [pytest.approx(12.0, abs=0.5)]
    assert world.values[KEYS.turn(DEPENDENCY)] == b"500"
    assert max(cell.turn for cell in cells(world)) == 9
    assert mine.ticket is None
    assert task.error is None


def test_a_ticket_of_another_store_is_not_used() -> None:
    """It says nothing about this one's line: a new one is drawn."""
    world = World()
    (mine,) = begun(world, 1)
    hold(mine, 900, store_id="a store that was lost")
    world.values[KEYS.turn(DEPENDENCY)] = b"2"
    _, dependency = woken(world, mine)

    world.run()

    assert dependency.calls == [pytest.approx(12.0, abs=0.5)]
    assert world.values[KEYS.turn(DEPENDENCY)] == b"3"
    assert max(cell.turn for cell in cells(world)) == 3


def test_who_was_let_in_and_failed_comes_before_all_who_still_hold_a_ticket() -> None:
    """It has a place among those who wait for the trip, and draws no second ticket."""
    world = World()
    (mine,) = begun(world, 1)
    mine.place = (1, 2)
    world.values[KEYS.turn(DEPENDENCY)] = b"300"
    task, dependency = woken(world, mine, at_s=12.0)

    world.run()

    assert world.values[KEYS.turn(DEPENDENCY)] == b"300"
    assert dependency.calls[0] == pytest.approx(12.0, abs=0.5)
    assert task.error is None


def test_who_stands_far_back_draws_no_place_among_the_waiters() -> None:
    """Its ticket says that it cannot be one of the nearest: it costs the store no counter."""
    for ahead, draws in ((SLOTS // 2, True), (SLOTS // 2 + 1, False)):
        world = World()
        (mine,) = begun(world, 1)
        hold(mine, ahead, store_id=record(world).store_id)
        task, _ = woken(world, mine)

        world.run()

        key = KEYS.waiting(DEPENDENCY, 1)
        drawn = [effect for effect in operations(task) if isinstance(effect, fx.Add)]
        assert [effect.key for effect in drawn] == ([key] if draws else [])


@pytest.mark.parametrize("state", ["closed", "recovering"])
def test_a_collective_call_reads_the_record_with_the_slots(state: str) -> None:
    """One look of all, and a claim: no read of its own for what the slots' look tells anyway."""
    world = World()
    (mine,) = begun(world, 1)
    put(world, state=state, limit=SLOTS if state == "closed" else 1, epoch=5)
    mine.view = None

    task = world.spawn(
        enter(mine, operation="save", voice_s=28.0, deadline_at_s=world.now_s + 60.0)
    )
    world.run()

    assert [type(effect) for effect in operations(task)] == [fx.MultiGet, fx.CompareAndSet]
    assert task.result[0].record.state == state


# --- holders that die, stop, or take long ----------------------------------------------------


def test_a_long_call_keeps_its_slot() -> None:
    """A call of three leases beats all the while: nobody takes its slot away."""
    world = World()
    first, second = begun(world, 2, config=ONE_SLOT)
    dependency = Dependency(world)
    policy = RetryPolicy(stall_timeout_s=600.0)
    call(world, dependency, first, lasts_s=3 * LEASE_S, policy=policy)

    task = call(world, dependency, second, name=1, at_s=1.0)
    world.run()

    assert dependency.calls[1] >= 3 * LEASE_S
    assert task.emitted(SlotForgiven) == []


@pytest.mark.parametrize("died_s", [0.5, 4.9, 5.1, 17.0, 33.0])
@pytest.mark.parametrize("came_s", [0.1, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_dead_holder_is_forgiven_within_one_and_a_half_leases(
    died_s: float, came_s: float, seed: int
) -> None:
    """Whatever its last beat was, one of those who waited takes over, not before a lease."""
    world = World(seed=seed)
    first, *others = begun(world, 4, config=ONE_SLOT)
    dependency = Dependency(world, lasts_s=1.0)
    policy = RetryPolicy(stall_timeout_s=600.0)
    holder = call(world, dependency, first, lasts_s=500.0, policy=policy)
    died_s += came_s
    tasks = [
        call(world, dependency, mine, name=name, at_s=came_s) for name, mine in enumerate(others, 1)
    ]

    world.at(died_s, lambda: die(holder, world))
    world.run()

    # Its last sign of life may have been a beat before.
    assert LEASE_S - 5.0 <= dependency.calls[1] - died_s <= 1.5 * LEASE_S
    assert sum(len(task.emitted(SlotForgiven)) for task in tasks) == 1
    assert dependency.most_calls_at_once() == 1 or len(dependency.calls) == 4
    assert [task.error for task in tasks] == [None] * 3


@pytest.mark.parametrize("seed", range(3))
def test_holders_that_die_on_all_slots_do_not_stop_the_others(seed: int) -> None:
    """A node with a holder in every slot dies: the others get in within one and a half leases."""
    world = World(seed=seed)
    circuits = begun(world, 6, config=TWO_SLOTS)
    dependency = Dependency(world, lasts_s=1.0)
    holders = [
        call(world, dependency, mine, name=name, lasts_s=500.0)
        for name, mine in enumerate(circuits[:2])
    ]
    tasks = [
        call(world, dependency, mine, name=name, at_s=1.0)
        for name, mine in enumerate(circuits[2:], 2)
    ]

    of_the_dead: list[str] = []
    for holder in holders:
        world.at(7.0, partial(die, holder, world))
    world.at(8.0, lambda: of_the_dead.extend(cell.holder for cell in cells(world)))
    world.run()

    assert dependency.calls[2] - 7.0 <= 1.5 * LEASE_S
    assert [task.error for task in tasks] == [None] * 4
    # A slot is forgiven when it is needed, and the four may all have passed the other.
    assert len(set(of_the_dead)) == 2
    left = [cell.holder for cell in cells(world)]
    assert "" in left
    assert set(left) <= {"", *of_the_dead}


@pytest.mark.parametrize("paused", [fx.Call, fx.CompareAndSet])
@pytest.mark.parametrize("seed", range(3))
def test_a_holder_that_was_stopped_changes_nothing_when_it_comes_back(
    paused: type[Effect], seed: int
) -> None:
    """Stopped in its call, or right after its claim, it finds its slot with somebody else."""
    world = World(seed=seed)
    first, second = begun(world, 2, config=ONE_SLOT)
    dependency = Dependency(world, lasts_s=1.0)
    struck = False

    def fault(task: Task, _index: int, effect: Effect) -> Fault | None:
        nonlocal struck
        if task.name == 0 and isinstance(effect, paused) and not struck:
            struck = True
            return Pause(3 * LEASE_S)
        return None

    world.fault = fault
    stopped = call(world, dependency, first)
    other = call(
        world,
        dependency,
        second,
        name=1,
        at_s=0.5,
        lasts_s=200.0,
        policy=RetryPolicy(stall_timeout_s=600.0),
    )
    held: list[str] = []
    for at_s in (60.0, 150.0):
        world.at(at_s, lambda: held.append(cells(world)[0].holder))
    world.run()

    assert len(other.emitted(SlotForgiven)) == 1
    assert stopped.error is None
    assert (stopped.ended_at_s or 0) < 150.0
    assert held[0] == held[1] != ""
    assert other.error is None
    assert cells(world)[0].holder == ""


def test_a_store_that_comes_back_empty_takes_no_slot_with_it() -> None:
    """The holder's cell is gone: another may come in, and the holder leaves no cell behind."""
    world = World()
    first, second = begun(world, 2, config=ONE_SLOT)
    dependency = Dependency(world)
    policy = RetryPolicy(stall_timeout_s=600.0)
    holder = call(world, dependency, first, lasts_s=40.0, policy=policy)
    world.at(12.0, world.values.clear)

    other = call(world, dependency, second, name=1, at_s=13.0, lasts_s=100.0, policy=policy)
    held: list[str] = []
    for at_s in (20.0, 60.0):
        world.at(at_s, lambda: held.append(cells(world)[0].holder))
    world.run()

    assert holder.error is other.error is None
    assert dependency.calls[1] == pytest.approx(13.0, abs=0.5)
    assert held[0] == held[1] != ""


# --- lost answers ----------------------------------------------------------------------------


def lossy(
    seed: int, *, heals_at_s: float, losing: int | None, share: float = 0.0
) -> tuple[World, Dependency, list[Task], bool]:
    """Six callers on two slots; one operation's answer is lost, or a share of all answers."""
    struck = False
    world = World(seed=seed)
    dice = world._random

    def fault(task: Task, index: int, effect: Effect) -> Fault | None:
        nonlocal struck
        if not isinstance(effect, STORE_EFFECTS) or isinstance(effect, fx.WaitFor):
            return None
        mine = task.name == 0 and index >= 0 and task.store_operations() == losing
        if mine or dice.random() < share:
            struck = True
            return Lost()
        return None

    world.fault = fault
    dependency = Dependency(world, heals_at_s=heals_at_s, lasts_s=0.2)
    tasks = [
        call(world, dependency, mine, name=name, store_patience_s=5.0)
        for name, mine in enumerate(begun(world, 6, hosts=2, config=TWO_SLOTS))
    ]
    world.run()
    return world, dependency, tasks, struck


def check_nothing_lost(world: World, dependency: Dependency, tasks: list[Task]) -> None:
    """Everybody served through the slots that there are, and all of those free again."""
    assert [task.error for task in tasks] == [None] * len(tasks)
    assert dependency.most_calls_at_once() <= 2
    assert [cell.holder for cell in cells(world)] == ["", ""]


@pytest.mark.parametrize("heals_at_s", [0.0, 5.0])
def test_no_single_lost_answer_loses_a_slot(heals_at_s: float) -> None:
    """Operation by operation of one caller, in good times and through an outage."""
    index, struck = 0, True
    while struck:
        world, dependency, tasks, struck = lossy(0, heals_at_s=heals_at_s, losing=index)
        check_nothing_lost(world, dependency, tasks)
        assert not any(task.emitted(SlotForgiven) for task in tasks)
        assert world.now_s < heals_at_s + LEASE_S
        index += 1

    assert index >= 4


@pytest.mark.parametrize("heals_at_s", [0.0, 30.0])
@pytest.mark.parametrize("seed", range(8))
def test_one_answer_in_twenty_may_be_lost(heals_at_s: float, seed: int) -> None:
    """Any operation of any caller: no slot is lost, the limit holds, and nobody is stuck."""
    world, dependency, tasks, struck = lossy(seed, heals_at_s=heals_at_s, losing=None, share=0.05)

    check_nothing_lost(world, dependency, tasks)
    assert struck or heals_at_s == 0


@pytest.mark.parametrize(("unanswered", "forgiven"), [(1, 0), (2, 0), (3, 1)])
@pytest.mark.parametrize("kind", [Away, Lost])
def test_a_release_that_was_not_answered_is_sent_again(
    unanswered: int, forgiven: int, kind: type[Away | Lost]
) -> None:
    """Up to three times, and after that the lease does it; the call's result is not lost."""
    world = World()
    first, second = begun(world, 2, config=ONE_SLOT)
    dependency = Dependency(world, lasts_s=1.0)
    left = unanswered

    def fault(task: Task, _index: int, effect: Effect) -> Fault | None:
        nonlocal left
        if task.name or not isinstance(effect, fx.CompareAndSet) or not left:
            return None
        releases = any(isinstance(done, fx.Call) for done in task.performed)
        left -= releases
        return kind() if releases else None

    world.fault = fault
    mine = call(world, dependency, first, store_patience_s=5.0)
    other = call(world, dependency, second, name=1, at_s=0.5)
    world.run()

    assert mine.result.value == "done"
    assert len(mine.emitted(StoreLost)) == forgiven
    # What was executed has freed the slot, whatever was answered.
    assert len(other.emitted(SlotForgiven)) == (forgiven if kind is Away else 0)
    assert dependency.calls[1] <= 1.0 + forgiven * 1.5 * LEASE_S + 2.0


@pytest.mark.parametrize("seed", range(4))
def test_lost_beats_do_not_cost_a_living_holder_its_slot(seed: int) -> None:
    """Half of all answers to beats are lost, and the call of three leases keeps its slot."""
    world = World(seed=seed)
    first, second = begun(world, 2, config=ONE_SLOT)
    beats = 0

    def fault(_task: Task, index: int, _effect: Effect) -> Fault | None:
        nonlocal beats
        beats += index < 0
        return Lost() if index < 0 and beats % 2 else None

    world.fault = fault
    dependency = Dependency(world)
    policy = RetryPolicy(stall_timeout_s=600.0)
    holder = call(world, dependency, first, lasts_s=3 * LEASE_S, policy=policy)
    other = call(world, dependency, second, name=1, at_s=1.0, policy=policy)
    world.run()

    assert beats >= 15
    assert holder.error is other.error is None
    assert other.emitted(SlotForgiven) == []
    assert dependency.calls[1] >= 3 * LEASE_S
    assert cells(world)[0].holder == ""


# --- interruptions ---------------------------------------------------------------------------


def interrupted(
    index: int, *, heals_at_s: float
) -> tuple[World, Task, Task, float | None, BaseException]:
    """Interrupt the effect of this index of the first of two callers on one slot."""
    world = World()
    error = KeyboardInterrupt()
    struck_at_s: list[float] = []

    def fault(task: Task, at: int, _effect: Effect) -> Fault | None:
        if task.name == 0 and at == index:
            struck_at_s.append(world.now_s)
            return Interrupt(error)
        return None

    world.fault = fault
    dependency = Dependency(world, heals_at_s=heals_at_s, lasts_s=0.2)
    first, second = begun(world, 2, config=ONE_SLOT)
    mine = call(world, dependency, first, store_patience_s=5.0)
    other = call(world, dependency, second, name=1, at_s=0.1, store_patience_s=5.0)
    world.run()
    return world, mine, other, struck_at_s[0] if struck_at_s else None, error


def served_after(world: World) -> float:
    """How long a caller takes that comes when all others have ended, in seconds."""
    (late,) = begun(world, 1, config=ONE_SLOT)
    came_s = world.now_s
    task = call(world, Dependency(world, lasts_s=0.2), late, name=2)
    world.run()
    assert task.error is None
    return world.now_s - came_s


@pytest.mark.parametrize("heals_at_s", [0.0, 3.0])
def test_an_interruption_anywhere_passes_and_leaves_the_slot_to_others(heals_at_s: float) -> None:
    """Effect by effect: it is raised as it is, and the other caller is served after a lease."""
    index = at_once = 0
    while True:
        world, mine, other, struck, error = interrupted(index, heals_at_s=heals_at_s)
        if struck is None:
            break
        assert mine.error is error, mine.performed[index]
        assert other.error is None
        held = bool(cells(world)[0].holder)
        # It had its turn after the other: its slot is forgiven when somebody comes.
        assert not held or struck > (other.ended_at_s or math.inf)
        assert served_after(world) <= (1.5 * LEASE_S if held else 1.0)
        assert cells(world)[0].holder == ""
        ended_s = other.ended_at_s or math.inf
        # After an outage there is also the wait for the probe.
        lag_s = 2 * CONFIG.open_for_s if heals_at_s else 0.0
        assert ended_s <= max(struck, heals_at_s) + 1.5 * LEASE_S + lag_s
        at_once += not (held or other.emitted(SlotForgiven))
        if isinstance(mine.performed[index], fx.Call):
            assert not held
            assert not other.emitted(SlotForgiven)
        index += 1

    assert index > 10
    assert at_once > index / 2


def test_who_has_its_result_does_not_wait_for_a_store_that_hangs() -> None:
    """One that takes its timeout to say nothing is asked once; the slot's lease does the rest."""
    world = World()
    (mine,) = begun(world, 1, config=ONE_SLOT)
    dependency = Dependency(world)
    asked: list[Effect] = []

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        if not dependency.calls or not isinstance(effect, STORE_EFFECTS):
            return None
        asked.append(effect)
        world.now_s += 5.0
        return Away()

    world.fault = fault
    task = call(world, dependency, mine, store_patience_s=5.0)
    world.run()

    assert task.result.value == "done"
    assert len(asked) == 1
    assert task.emitted(StoreLost)


def test_an_interrupted_call_does_not_ask_again_and_again_for_its_slot_to_be_freed() -> None:
    """Where the store is away each question takes its time, and whoever pressed Ctrl-C waits."""
    world = World()
    (mine,) = begun(world, 1, config=ONE_SLOT)
    struck: list[int] = []
    asked: list[Effect] = []

    def fault(_task: Task, index: int, effect: Effect) -> Fault | None:
        if isinstance(effect, fx.Call):
            struck.append(index)
            return Interrupt(KeyboardInterrupt())
        if struck and isinstance(effect, STORE_EFFECTS):
            asked.append(effect)
            return Away()
        return None

    world.fault = fault
    task = call(world, Dependency(world), mine, store_patience_s=5.0)
    world.run()

    assert isinstance(task.error, KeyboardInterrupt)
    assert len(asked) == 1


def test_an_interrupted_call_frees_its_slot_at_once() -> None:
    """The slot is free within milliseconds of the interruption, and says nothing new."""
    world = World()
    error = SystemExit(3)
    world.fault = lambda _task, _index, effect: (
        Interrupt(error) if isinstance(effect, fx.Call) else None
    )
    (mine,) = begun(world, 1, config=ONE_SLOT)

    task = call(world, Dependency(world), mine)
    world.run()

    assert task.error is error
    assert world.now_s < 0.1
    assert cells(world) == [SlotRecord(writer=cells(world)[0].writer)]
    assert task.emitted(StoreLost) == []


# --- a line whose owners are no more ---------------------------------------------------------


def abandoned(
    world: World, *, slots: int, waiting: int, held: bool, pace_s: float = 1.0, turn: int = 0
) -> None:
    """The line that a job leaves behind that was killed: holders, and tickets nobody holds."""
    for index in range(slots):
        holder = f"dead {index}" if held else ""
        cell = SlotRecord(turn=turn, holder=holder, took_s=pace_s, last="ok", writer=f"w{index}")
        world.values[KEYS.slot(DEPENDENCY, index)] = encode(cell)
    world.values[KEYS.turn(DEPENDENCY)] = str(turn + waiting).encode()


@pytest.mark.parametrize("waiting", [0, 3, 30, 200])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("state", ["closed", "recovering"])
def test_a_job_that_was_killed_in_line_bars_no_slot_to_the_next(
    waiting: int,
    held: bool,  # noqa: FBT001 - data
    state: str,
) -> None:
    """After a restart all tickets ahead are dead, and the slots may be held by the dead as well."""
    world = World()
    circuits = begun(world, 12, config=TWO_SLOTS)
    put(world, state=state, limit=2 if state == "closed" else 1, epoch=5)
    look_again(world, circuits)
    abandoned(world, slots=2, waiting=waiting, held=held)
    dependency = Dependency(world, lasts_s=1.0)

    tasks = [call(world, dependency, mine, name=name) for name, mine in enumerate(circuits)]
    world.run()

    assert [task.error for task in tasks] == [None] * 12
    # Twice what the line would take, a lease and a half for the dead, and the living's own calls.
    line_s, dead_s = (2 * waiting / 2, 1.5 * LEASE_S) if held else (0.0, 0.0)
    assert world.now_s <= line_s + dead_s + 12.0 / 2 + 25.0
