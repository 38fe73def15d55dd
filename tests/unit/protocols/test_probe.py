# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""An ill dependency is waited for together, with one probe for the whole job."""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException

from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.events import DependencyAwaited, ProbeEnded, ProbeStarted
from lightning_resilience.errors import CircuitOpenError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.circuit import begin
from lightning_resilience.protocols.probe import Patience, await_passage
from tests.scenes import (
    CONFIG,
    DEPENDENCY,
    KEYS,
    Dependency,
    assert_legal,
    circuit,
    patience,
    put,
    record,
    states,
)
from tests.scripted_driver import (
    STORE_EFFECTS,
    Away,
    Crash,
    Fault,
    Interrupt,
    Lost,
    Pause,
    Task,
    World,
)


if TYPE_CHECKING:
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Effect, Protocol


FOREVER_S = 1e9
INTERRUPTION = KeyboardInterrupt()
TOLD_TO_STOP = SignalException("told to stop", signal.SIGTERM)


def waiter(mine: Circuit, waiting: Patience, *, deadline_at_s: float = FOREVER_S) -> Protocol[Any]:
    """A process that needs the dependency."""
    yield from begin(mine, new_incarnation=False)
    return (yield from await_passage(mine, waiting, operation="save", deadline_at_s=deadline_at_s))


def outage(*, ranks: int, heals_at_s: float, seed: int = 0, lasts_s: float = 0.01) -> Any:
    """A world whose circuit is open, its dependency, and ranks that wait."""
    world = World(seed=seed)
    world.spawn(begin(circuit(), new_incarnation=True))
    world.run()
    put(world, state="open", epoch=2, generation=1, limit=0)
    dependency = Dependency(world, heals_at_s=heals_at_s, lasts_s=lasts_s)
    tasks = [
        world.spawn(waiter(circuit(), patience(dependency)), name=name) for name in range(ranks)
    ]
    return world, dependency, tasks


def is_probe(effect: Effect) -> bool:
    """True for the call that is the probe."""
    return isinstance(effect, fx.Call)


def test_a_closed_circuit_is_passed_at_once() -> None:
    """Nobody waits, draws a ticket or probes while the circuit is closed."""
    world = World()
    dependency = Dependency(world)
    task = world.spawn(waiter(circuit(), patience(dependency)))

    world.run(limit_s=1)

    assert task.result.record.state == "closed"
    assert dependency.probes == []


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_healed_dependency_lets_everybody_through(ranks: int) -> None:
    """One probe is answered; all waiters are woken by the bell and pass."""
    world, dependency, tasks = outage(ranks=ranks, heals_at_s=0.0)

    world.run(limit_s=CONFIG.open_for_s + 2)

    assert all(task.error is None for task in tasks)
    assert len(dependency.probes) == 1
    assert states(world) == ["open", "half_open", "recovering"]


@pytest.mark.parametrize("seed", range(10))
def test_one_probe_at_a_time_and_one_per_claim_epoch(seed: int) -> None:
    """Through a long outage of eight ranks no two probes overlap, and each has its own epoch."""
    world, dependency, tasks = outage(ranks=8, heals_at_s=300.0, seed=seed, lasts_s=3.0)

    world.run(limit_s=600)

    epochs = [event.epoch for task in tasks for event in task.emitted(ProbeStarted)]
    assert dependency.most_probes_at_once() == 1
    assert len(set(epochs)) == len(epochs) == len(dependency.probes)
    assert_legal(record(world))


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_probes_do_not_grow_with_the_number_of_ranks(ranks: int) -> None:
    """What reaches an ill dependency is a constant: one probe per open wait."""
    world, dependency, _ = outage(ranks=ranks, heals_at_s=300.0)

    world.run(limit_s=600)

    assert 5 <= len(dependency.probes) <= 10


def test_the_open_wait_doubles_up_to_its_cap() -> None:
    """Probes of a long outage come after 10, 20, 40, 60, 60 … seconds."""
    world, dependency, _ = outage(ranks=2, heals_at_s=250.0)

    world.run(limit_s=600)

    starts = [start for start, _ in dependency.probes]
    gaps = [after - before for before, after in zip([0.0, *starts], starts, strict=False)]
    assert gaps == pytest.approx([10, 20, 40, 60, 60, 60, 60][: len(gaps)], abs=0.5)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_a_dead_prober_is_replaced_within_one_and_a_half_leases(ranks: int, seed: int) -> None:
    """The prober dies with the permit in its hand; another takes over, in a new epoch."""
    world, dependency, tasks = outage(ranks=ranks, heals_at_s=0.0, seed=seed)
    died_at_s: list[float] = []

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        if is_probe(effect) and not died_at_s:
            died_at_s.append(world.now_s)
            return Crash()
        return None

    world.fault = fault

    world.run(limit_s=100)

    survivors = [task for task in tasks if not task.crashed]
    (first_probe, _), *_ = dependency.probes
    assert first_probe - died_at_s[0] <= 1.5 * CONFIG.probe_lease_s
    assert len(survivors) == ranks - 1
    assert all(task.error is None for task in survivors)
    (started,) = [event for task in survivors for event in task.emitted(ProbeStarted)]
    assert started.taken_over
    assert_legal(record(world))


def test_dead_nearest_waiters_are_replaced_at_the_next_chunk() -> None:
    """Should both nearest waiters die, the others claim what is overdue at the end of a chunk."""
    world, dependency, tasks = outage(ranks=5, heals_at_s=0.0)
    world.fault = lambda _task, _index, effect: (
        Crash() if is_probe(effect) and len(dead(tasks)) < 2 else None
    )

    world.run(limit_s=400)

    assert len(dead(tasks)) == 2
    assert all(task.error is None for task in tasks if not task.crashed)
    assert len(dependency.probes) == 1


def dead(tasks: list[Task]) -> list[Task]:
    """Those that have crashed."""
    return [task for task in tasks if task.crashed]


def count(task: Task, kind: type[Effect]) -> int:
    """How many effects of a kind a task has had performed."""
    return sum(isinstance(effect, kind) for effect in task.performed)


def test_the_late_result_of_a_paused_prober_changes_nothing() -> None:
    """A prober that was frozen past its lease comes back to an epoch that is over."""
    world, dependency, tasks = outage(ranks=3, heals_at_s=300.0)
    paused: list[Task] = []

    def fault(task: Task, _index: int, effect: Effect) -> Fault | None:
        if is_probe(effect) and not paused:
            paused.append(task)
            return Pause(2.5 * CONFIG.probe_lease_s)
        return None

    world.fault = fault
    world.run(limit_s=600)

    assert_legal(record(world))
    reasons = [entry.reason for entry in record(world).history]
    assert "the prober was silent; another took over" in reasons
    first_end = paused[0].emitted(ProbeEnded)[0]
    assert not any(
        entry.epoch == first_end.epoch + 1 and entry.reason.startswith("the probe failed")
        for entry in record(world).history
    )
    assert dependency.most_probes_at_once() == 1
    assert all(task.error is None for task in tasks)


def test_a_prober_paused_before_it_sends_does_not_send() -> None:
    """Frozen between claim and probe, it looks at its clock and gives the permit back."""
    world, dependency, tasks = outage(ranks=1, heals_at_s=0.0)
    key = KEYS.breaker(DEPENDENCY)
    paused: list[float] = []

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        if isinstance(effect, fx.CompareAndSet) and effect.key == key and not paused:
            paused.append(world.now_s)
            return Pause(CONFIG.probe_lease_s)
        return None

    world.fault = fault
    world.run(limit_s=100)

    assert tasks[0].error is None
    assert states(world) == ["open", "half_open", "open", "half_open", "recovering"]
    assert dependency.probes[0][0] >= paused[0] + CONFIG.probe_lease_s


@pytest.mark.parametrize("interruption", [INTERRUPTION, TOLD_TO_STOP], ids=["ctrl-c", "launcher"])
def test_an_interrupted_prober_gives_the_permit_back(interruption: BaseException) -> None:
    """An interruption of the probe passes, and leaves an open circuit without a holder."""
    world, _, tasks = outage(ranks=1, heals_at_s=0.0)
    world.fault = lambda _task, _index, effect: (
        Interrupt(interruption) if is_probe(effect) else None
    )

    world.run(limit_s=100)

    assert tasks[0].error is interruption
    assert (record(world).state, record(world).holder) == ("open", "")


def test_an_interruption_stays_what_it_is_while_the_store_is_away() -> None:
    """A permit that cannot be given back does not replace the Ctrl-C by a store's error."""
    world, _, tasks = outage(ranks=1, heals_at_s=0.0)
    interrupted: list[Effect] = []

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        if is_probe(effect):
            interrupted.append(effect)
            return Interrupt(INTERRUPTION)
        return Away() if interrupted else None

    world.fault = fault
    world.run(limit_s=100)

    assert tasks[0].error is INTERRUPTION


def test_a_permanent_answer_means_that_the_dependency_is_up() -> None:
    """A probe that is refused was answered: the circuit lets calls through again."""
    world, dependency, tasks = outage(ranks=2, heals_at_s=FOREVER_S)
    dependency.error = lambda: PermissionError(13, "Permission denied")

    world.run(limit_s=30)

    assert all(task.error is None for task in tasks)
    assert record(world).state == "recovering"


def test_a_probe_that_hangs_is_a_failed_one() -> None:
    """A probe without an answer is abandoned at its timeout, and the circuit stays open."""
    world, dependency, _ = outage(ranks=2, heals_at_s=0.0, lasts_s=60.0)
    world.at(25.0, lambda: setattr(dependency, "lasts_s", 0.01))

    world.run(limit_s=100)

    assert states(world) == ["open", "half_open", "open", "half_open", "recovering"]


def test_a_bell_that_stays_rung_makes_no_busy_loop() -> None:
    """A bell left over from another life of the store wakes in vain, and rarer and rarer."""
    world, _, tasks = outage(ranks=2, heals_at_s=0.0)
    put(world, state="forced_open", epoch=3)
    world.values[KEYS.bell(DEPENDENCY, 1)] = b"1"
    world.at(600.0, lambda: put(world, state="closed", epoch=4))

    world.run(limit_s=700)

    assert all(task.store_operations() < 2000 for task in tasks)
    assert all(task.error is None for task in tasks)


def test_waiting_costs_few_store_operations() -> None:
    """Waiting is pushed: a waiter far back in line reads a few times in ten minutes."""
    world, _, tasks = outage(ranks=8, heals_at_s=600.0)

    world.run(limit_s=900)

    assert min(task.store_operations() for task in tasks) <= 25
    assert sum(task.store_operations() for task in tasks) <= 8 * 40


def test_the_wait_ends_at_the_deadline() -> None:
    """A waiter gives up at its deadline with an error that says since when and why."""
    world, dependency, _ = outage(ranks=0, heals_at_s=FOREVER_S)
    task = world.spawn(waiter(circuit(), patience(dependency), deadline_at_s=100.0))

    world.run(limit_s=110)

    assert isinstance(task.error, CircuitOpenError)
    assert task.error.dependency == DEPENDENCY
    assert task.error.epoch == record(world).epoch
    assert "after 100.0 s of waiting" in str(task.error)


def test_a_far_waiter_leaves_at_its_deadline_too() -> None:
    """A waiter who sleeps in long chunks does not oversleep its deadline."""
    world, dependency, _ = outage(ranks=4, heals_at_s=200.0)
    task = world.spawn(waiter(circuit(), patience(dependency), deadline_at_s=9000.0 + 100), name=9)

    world.run(limit_s=400)

    assert isinstance(task.error, CircuitOpenError)
    assert task.ended_at_s == pytest.approx(100.0, abs=6.0)


def test_who_may_not_wait_is_refused_at_once() -> None:
    """when_open="raise" ends at once, and says when the next probe is due."""
    world, dependency, _ = outage(ranks=0, heals_at_s=0.0)
    task = world.spawn(waiter(circuit(), patience(dependency, when_open="raise")))

    world.run(limit_s=1)

    assert isinstance(task.error, CircuitOpenError)
    assert task.error.retry_after_s == pytest.approx(CONFIG.open_for_s, abs=0.1)
    assert dependency.probes == []


def test_who_may_not_wait_still_probes_when_the_probe_is_due() -> None:
    """If every caller were refused, nobody would ever notice that the dependency is well."""
    world, dependency, _ = outage(ranks=0, heals_at_s=0.0)
    mine, waiting = circuit(), patience(dependency, when_open="raise")
    refused = world.spawn(waiter(mine, waiting))
    world.run()
    later = world.spawn(
        await_passage(mine, waiting, operation="save", deadline_at_s=FOREVER_S),
        at_s=CONFIG.open_for_s + 1,
    )

    world.run(limit_s=30)

    assert isinstance(refused.error, CircuitOpenError)
    assert later.error is None
    assert later.result.record.state == "recovering"


def test_a_failed_probe_refuses_who_may_not_wait() -> None:
    """A caller that probes and fails is refused all the same, and does not wait."""
    world, dependency, _ = outage(ranks=0, heals_at_s=FOREVER_S)
    mine, waiting = circuit(), patience(dependency, when_open="raise")
    world.spawn(waiter(mine, waiting))
    world.run()
    later = world.spawn(
        await_passage(mine, waiting, operation="save", deadline_at_s=FOREVER_S), at_s=20.0
    )

    world.run(limit_s=21)

    assert isinstance(later.error, CircuitOpenError)
    assert len(dependency.probes) == 1


def test_a_waiter_says_what_it_waits_for() -> None:
    """While it waits, an event at least every voice_s seconds names the dependency and the wait."""
    world, dependency, _ = outage(ranks=0, heals_at_s=200.0)
    task = world.spawn(waiter(circuit(), patience(dependency, voice_s=30.0)))

    world.run(limit_s=400)

    instants = [at for at, event in task.events if isinstance(event, DependencyAwaited)]
    gaps = [after - before for before, after in pairwise(instants)]
    assert max(gaps) <= 36.0
    assert task.emitted(DependencyAwaited)[0].dependency == DEPENDENCY


def test_waiters_come_back_over_a_time_not_at_once() -> None:
    """After the bell the waiters return over spread_s seconds."""
    world, dependency, _ = outage(ranks=0, heals_at_s=0.0)
    waiting = patience(dependency, spread_s=8.0)
    tasks = [world.spawn(waiter(circuit(), waiting), name=name) for name in range(8)]

    world.run(limit_s=30)

    ends = sorted(task.ended_at_s or 0.0 for task in tasks)
    assert ends[-1] - ends[0] > 2.0


def test_only_an_operator_ends_a_forced_open_circuit() -> None:
    """Nobody probes a circuit that is held open; released, it is probed."""
    world, dependency, tasks = outage(ranks=2, heals_at_s=0.0)
    put(world, state="forced_open", epoch=3)
    world.at(400.0, lambda: put(world, state="open", epoch=4))

    world.run(limit_s=700)

    assert all(task.error is None for task in tasks)
    assert dependency.probes[0][0] > 400.0


@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_a_bell_that_was_lost_is_rung_by_whoever_finds_out(deaths: int) -> None:
    """The prober dies between the record and the bell, and so do the first who ring for it.

    The first of the others that re-reads at the end of its chunk rings, and wakes all at once.
    """
    world, dependency, _ = outage(ranks=0, heals_at_s=0.0)
    waiting = patience(dependency, chunk_s=20.0, spread_s=0.0)
    tasks = [world.spawn(waiter(circuit(), waiting), name=name) for name in range(8)]
    bell = KEYS.bell(DEPENDENCY, 1)
    rings: list[float] = []

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        if not (isinstance(effect, fx.Set) and effect.key == bell):
            return None
        rings.append(world.now_s)
        return Crash() if len(rings) <= deaths else None

    world.fault = fault
    world.run(limit_s=60)

    assert len(dead(tasks)) == deaths
    woken = [task.ended_at_s or 0.0 for task in tasks if not task.crashed]
    assert [task.error for task in tasks if not task.crashed] == [None] * (8 - deaths)
    # Two chunks at most, though some of them look half as often: one has found out for all.
    assert rings[deaths] <= rings[0] + 20.0 + 1.0
    assert max(woken) - rings[deaths] < 1.0


def test_who_finds_a_circuit_passing_before_the_bell_rings_does_not_ring_for_another_trip() -> None:
    """What it finds is of a later trip: its waiters' bell is not touched."""
    world, dependency, _ = outage(ranks=0, heals_at_s=FOREVER_S)
    waiting = patience(dependency, chunk_s=20.0)
    task = world.spawn(waiter(circuit(), waiting))
    world.at(5.0, lambda: put(world, state="recovering", generation=2, limit=1, epoch=50))

    world.run(limit_s=60)

    assert task.error is None
    assert not any(isinstance(effect, fx.Set) for effect in task.performed)


def test_a_waiter_that_speaks_does_not_look() -> None:
    """Of ten sentences in a wait none costs the store a read; the chunk's end alone does."""
    world, dependency, _ = outage(ranks=0, heals_at_s=FOREVER_S)
    others = patience(dependency, chunk_s=1e4)
    for name in (1, 2):
        world.spawn(waiter(circuit(), others), name=name)
    task = world.spawn(
        waiter(circuit(), patience(dependency, chunk_s=150.0, voice_s=28.0)), name=3, at_s=0.5
    )
    reads: list[int] = []
    words: list[int] = []
    for at_s in (1.0, 150.0):
        world.at(at_s, lambda: reads.append(count(task, fx.Get)))
        world.at(at_s, lambda: words.append(len(task.emitted(DependencyAwaited))))

    with pytest.raises(AssertionError, match="not over"):
        world.run(limit_s=151.0)

    assert reads[1] == reads[0]
    assert words[1] - words[0] == 5


def test_an_overdue_probe_is_claimed_without_another_read() -> None:
    """The bytes that were read last are what the claim expects: if they are no more, it fails."""
    world, _, tasks = outage(ranks=1, heals_at_s=0.0)

    world.run(limit_s=60)

    performed = [effect for effect in tasks[0].performed if isinstance(effect, STORE_EFFECTS)]
    slept = next(at for at, effect in enumerate(performed) if isinstance(effect, fx.WaitFor))
    assert isinstance(performed[slept + 1], fx.CompareAndSet)


@pytest.mark.parametrize("looks", [True, False])
def test_who_reads_the_slots_next_does_not_read_the_record_when_the_bell_rings(
    looks: bool,  # noqa: FBT001 - data
) -> None:
    """All who wait are woken at once: those who come by their ticket look when it is their turn."""
    world, dependency, _ = outage(ranks=2, heals_at_s=0.0)
    task = world.spawn(
        await_passage(
            circuit(), patience(dependency), operation="save", deadline_at_s=FOREVER_S, looks=looks
        ),
        name=9,
        at_s=1.0,
    )

    world.run(limit_s=200)

    last = [effect for effect in task.performed if isinstance(effect, STORE_EFFECTS)][-1]
    assert isinstance(last, fx.Get if looks else fx.WaitFor)
    assert task.result.record.state == ("recovering" if looks else "open")


def test_a_ticket_whose_answer_was_lost_costs_a_place_in_line_only() -> None:
    """The counter is a hint: a lone waiter without a ticket probes after two chunks, and passes."""
    world, dependency, tasks = outage(ranks=1, heals_at_s=0.0)
    world.fault = lambda _task, _index, effect: Lost() if isinstance(effect, fx.Add) else None

    world.run(limit_s=310)

    assert tasks[0].error is None
    assert len(dependency.probes) == 1


def test_a_process_keeps_its_place_in_line() -> None:
    """Whoever waits again during one trip draws no other ticket, which would be further back."""
    world, dependency, _ = outage(ranks=0, heals_at_s=FOREVER_S)
    mine = circuit()

    for _ in range(4):
        world.spawn(waiter(mine, patience(dependency), deadline_at_s=world.now_s + 3.0))
        world.run(limit_s=400)

    assert world.values[mine.keys.waiting(mine.dependency, 1)] == b"1"


@pytest.mark.parametrize("seed", range(5))
def test_everybody_may_die_but_one(seed: int) -> None:
    """Each prober dies with its permit, until one is left: that one still gets through."""
    world, _, tasks = outage(ranks=4, heals_at_s=0.0, seed=seed)
    world.fault = lambda _task, _index, effect: (
        Crash() if is_probe(effect) and len(dead(tasks)) < 3 else None
    )

    world.run(limit_s=1000)

    (survivor,) = [task for task in tasks if not task.crashed]
    assert survivor.error is None
    assert_legal(record(world))


def test_a_store_that_comes_back_empty_does_not_strand_waiters() -> None:
    """The record vanishes in the middle of the outage: it is rebuilt, and the wait goes on."""
    world, _, tasks = outage(ranks=3, heals_at_s=100.0)
    world.at(42.0, world.values.clear)

    world.run(limit_s=600)

    assert all(task.error is None for task in tasks)
    assert_legal(record(world))


def test_ramp_at_the_limit_closes_at_once() -> None:
    """With nothing to ramp, the probe's success closes the circuit and rings all the same."""
    world, dependency, _ = outage(ranks=0, heals_at_s=0.0)
    config = replace(BreakerConfig(), ramp_start=16)
    tasks = [
        world.spawn(waiter(circuit(config=config), patience(dependency)), name=name)
        for name in range(3)
    ]

    world.run(limit_s=15)

    assert record(world).state == "closed"
    assert all(task.error is None for task in tasks)
