# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A world has the hosts, ranks and faults that its scenario says, when it says."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.drill.scenario import (
    Brownout,
    Clocks,
    Crash,
    GroupRestart,
    Interrupt,
    Outage,
    Pause,
    Scenario,
    Storage,
    StoragePartition,
    StoreGone,
    StorePartition,
    Workload,
)
from lightning_resilience.drill.world import World
from tests.drill_scenes import Seen


if TYPE_CHECKING:
    from lightning_resilience.drill.process import Process


def world_of(*, seed: int = 1, **fields: Any) -> tuple[World, Seen]:
    """A world before anything has happened in it."""
    seen = Seen()
    scenario = Scenario(**{"ranks": 4, "workload": Workload(kinds=("single",)), **fields})
    return World(scenario, seed, make_observers=lambda _world: [seen]), seen


def advance(world: World, until_s: float) -> None:
    """Let everything happen until an instant."""
    while (next_at_s := world.agenda.next_at_s()) is not None and next_at_s <= until_s:
        world.agenda.step()


# --- hosts and clocks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "hosts", "seats"),
    [(8, 2, [4, 4]), (7, 3, [3, 2, 2]), (5, 5, [1] * 5), (1, 1, [1]), (9, 4, [3, 2, 2, 2])],
)
def test_ranks_sit_side_by_side_on_as_many_hosts_as_there_are(
    ranks: int, hosts: int, seats: list[int]
) -> None:
    """No host is empty, none has two more than another, and neighbours share one."""
    world, _ = world_of(ranks=ranks, hosts=hosts)
    advance(world, 0.0)

    numbers = [process.host.number for process in world.processes]
    assert numbers == sorted(numbers)
    assert list(Counter(numbers).values()) == seats
    assert [process.rank for process in world.processes] == list(range(ranks))


def test_clocks_differ_within_what_the_scenario_says() -> None:
    """To either side, each host its own; and two hosts by no more than the square of the rate."""
    clocks = Clocks(offset_s=500.0, rate=1.2)
    world, _ = world_of(ranks=400, hosts=400, clocks=clocks)

    offsets = [host.clock.offset_s for host in world.hosts]
    rates = [host.clock.rate for host in world.hosts]
    assert -500 <= min(offsets) < -400
    assert 400 < max(offsets) <= 500
    assert 1 / 1.2 <= min(rates) < 0.87
    assert 1.15 < max(rates) <= 1.2
    assert sum(rate < 1 for rate in rates) == pytest.approx(200, abs=40)
    assert max(rates) / min(rates) <= 1.2**2


def test_clocks_are_drawn_from_the_seed() -> None:
    """The same for the same seed, others for another one."""
    first, again, other = (
        [host.clock for host in world_of(seed=seed, ranks=8, hosts=8)[0].hosts]
        for seed in (1, 1, 2)
    )

    assert first == again
    assert first != other


# --- when a run is over -------------------------------------------------------------------------


def test_a_run_is_over_when_all_have_ended() -> None:
    """And not before the last fault is."""
    world, seen = world_of(faults=(Outage(at_s=100, for_s=50),))

    assert world.run(until_s=1000.0)

    assert world.healed_at_s == 150.0
    assert world.agenda.now_s == 150.0
    assert seen.world == [(100.0, "outage begins"), (150.0, "outage ends")]
    assert {process.state for process in world.processes} == {"ended"}


def test_a_run_that_is_cut_short_says_so_and_can_go_on() -> None:
    """Nothing after the instant has happened; the rest happens later as it would have."""
    fields: dict[str, Any] = {"faults": (Outage(at_s=0, for_s=50),)}
    whole, _ = world_of(**fields)
    assert whole.run(until_s=1000.0)
    world, _ = world_of(**fields)

    assert not world.run(until_s=20.0)
    assert world.agenda.now_s <= 20.0
    assert world.run(until_s=1000.0)

    assert world.trace.digest == whole.trace.digest


def test_ranks_that_stand_still_for_ever_have_not_ended() -> None:
    """They are alive, and whoever waits for them is told no."""
    world, _ = world_of(faults=(Pause(at_s=0, ranks=(1,), for_s=1e6),))

    assert not world.run(until_s=1000.0)
    assert [process.is_alive for process in world.processes] == [False, True, False, False]


def test_a_fault_that_strikes_late_is_over_late() -> None:
    """A pause that begins after some effects is counted from when it began."""
    fault = Pause(at_s=0, ranks=(0,), effects=8, for_s=70.0)
    world, seen = world_of(workload=Workload(kinds=("single",), spread_s=30.0), faults=(fault,))

    assert world.healed_at_s == 70.0
    assert world.run(until_s=1000.0)

    [began_at_s] = [at_s for at_s, _, what in seen.changes if what.startswith("paused")]
    assert began_at_s > 0.0
    assert world.healed_at_s == began_at_s + 70.0


# --- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Outage(at_s=5, for_s=3), Brownout(at_s=5, for_s=3)])
def test_storage_is_ill_for_as_long_as_the_fault_says(fault: Outage | Brownout) -> None:
    """From its beginning to its end."""
    world, _ = world_of(faults=(fault,))

    ill = []
    for at_s in (4.9, 5.0, 7.9, 8.0):
        advance(world, at_s)
        ill.append(world.storage.is_ill)

    assert ill == [False, True, True, False]


@pytest.mark.parametrize("empty", [True, False])
def test_the_store_is_gone_for_as_long_as_the_fault_says(*, empty: bool) -> None:
    """And comes back with what it had, or with nothing."""
    world, seen = world_of(faults=(StoreGone(at_s=5, for_s=3, comes_back_empty=empty),))

    gone = []
    for at_s in (4.9, 5.0, 7.9, 8.0):
        advance(world, at_s)
        gone.append(world.store.is_gone)

    assert gone == [False, True, True, False]
    assert seen.emptied_at_s == ([8.0] if empty else [])
    assert bool(world.store.cells.values) == (not empty)


@pytest.mark.parametrize("kind", [StorePartition, StoragePartition])
def test_hosts_are_cut_off_for_as_long_as_the_fault_says(kind: Any) -> None:
    """The others are not, and two faults on one host last until the later end."""
    faults = (kind(at_s=5, for_s=3, hosts=(1,)), kind(at_s=6, for_s=1, hosts=(1, 0)))
    world, _ = world_of(hosts=3, faults=faults)

    cut = []
    for at_s in (4.9, 5.0, 6.0, 7.9, 8.0):
        advance(world, at_s)
        now_s = max(at_s, world.agenda.now_s)
        ways = "is_cut_off" if kind is StorePartition else "is_cut_off_from_storage"
        cut.append([getattr(host, ways)(now_s) for host in world.hosts])

    none, one, two = [False] * 3, [False, True, False], [True, True, False]
    assert cut == [none, one, two, one, none]


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        (Crash(at_s=0.5, ranks=(1, 2)), "crashed"),
        (Crash(at_s=0.5, ranks=(1, 2), effects=1), "crashed"),
        (Interrupt(at_s=0.5, ranks=(1, 2)), "interrupted"),
        (Interrupt(at_s=0.5, ranks=(1, 2), effects=1), "interrupted"),
    ],
)
def test_those_are_struck_whom_the_fault_names(fault: Crash | Interrupt, state: str) -> None:
    """At its instant, or so many effects later."""
    world, seen = world_of(
        storage=Storage(service_s=5.0), workload=Workload(kinds=("single",), rounds=2),
        faults=(fault,),
    )  # fmt: skip

    assert world.run(until_s=1000.0)

    assert [process.state for process in world.processes] == ["ended", state, state, "ended"]
    struck = [at_s for at_s, _, what in seen.changes if what == state]
    assert all((at_s == 0.5) == (fault.effects == 0) for at_s in struck)


def test_a_pause_strikes_whom_it_names() -> None:
    """They stand still, and wake when it is over."""
    world, seen = world_of(
        storage=Storage(service_s=5.0), faults=(Pause(at_s=0.5, ranks=(3,), for_s=7.0),)
    )

    assert world.run(until_s=1000.0)

    assert [(at_s, who) for at_s, who, what in seen.changes if what == "woke"] == [(7.5, "rank 3")]


def test_a_group_restart_replaces_every_rank() -> None:
    """The old ones are killed, also those that stand still; the new ones sit in the same seats."""
    world, seen = world_of(
        hosts=2,
        storage=Storage(service_s=5.0),
        faults=(Pause(at_s=0.25, ranks=(0,), for_s=50.0), GroupRestart(at_s=1.0)),
    )

    assert world.run(until_s=1000.0)

    old, new = world.processes[:4], world.processes[4:]
    assert {process.state for process in old} == {"crashed"}
    assert {process.state for process in new} == {"ended"}
    assert [process.incarnation for process in new] == [2] * 4
    assert [process.host for process in new] == [process.host for process in old]
    assert [at_s for at_s, _, what in seen.changes if what == "crashed"] == [1.0] * 4
    assert new[0].name == "rank 0'2"
    assert not {name_of(process) for process in old} & {name_of(process) for process in new}


def name_of(process: Process) -> str:
    """Whose nonces are whose."""
    return process.dice.name


def test_a_new_incarnation_has_keys_of_its_own_and_the_old_breaker() -> None:
    """Nobody believes what an earlier attempt said; the circuit's state outlives it."""
    world, _ = world_of(
        workload=Workload(kinds=("joint",)),
        storage=Storage(service_s=5.0),
        faults=(GroupRestart(at_s=1.0),),
    )

    assert world.run(until_s=1000.0)

    keys = list(world.store.cells.values)
    assert any("/i1/" in key for key in keys)
    assert any("/i2/" in key for key in keys)
    assert len([key for key in keys if "/breaker/" in key]) == 1


def test_all_may_end_before_a_restart_that_is_still_to_come() -> None:
    """The run goes on until the new ones have ended as well."""
    world, _ = world_of(faults=(GroupRestart(at_s=500.0),))

    assert world.run(until_s=1000.0)

    assert [process.incarnation for process in world.processes] == [1] * 4 + [2] * 4
    assert world.agenda.now_s > 500.0


def test_a_strike_after_a_restart_strikes_the_new_ranks() -> None:
    """It is whoever has the rank now."""
    world, _ = world_of(
        storage=Storage(service_s=5.0),
        faults=(GroupRestart(at_s=1.0), Crash(at_s=2.0, ranks=(1,))),
    )

    assert world.run(until_s=1000.0)

    assert [process.state for process in world.processes[4:]] == [
        "ended", "crashed", "ended", "ended",
    ]  # fmt: skip
