# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A joint operation: every rank enters, some work, all leave with one verdict."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.events import GateDecided, RanksLost, VerdictReached, WorkAwaited
from lightning_resilience.core.joint import error_of
from lightning_resilience.core.records import FinalRecord, decode
from lightning_resilience.errors import JointError, JointUnavailableError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.circuit import begin, refresh
from lightning_resilience.protocols.joint import perform
from tests.joint_scenes import finals, job, one_verdict, saving
from tests.scenes import (
    Dependency,
    circuit,
    guarded,
    joint,
    member,
    part,
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
    from lightning_resilience.protocols.effects import Effect, Protocol
    from tests.scripted_driver import Striking


FOREVER_S = 1e9
BEAT_S = 5.0
TIMEOUT_S = 40.0
INTERRUPTION = KeyboardInterrupt()


def key_of(effect: Effect) -> str:
    """The key that an effect is about, or nothing."""
    return getattr(effect, "key", "")


def once(where: Any, fault: Fault) -> Striking:
    """Let a fault strike the first effect for which ``where(task, effect)`` holds."""
    struck: list[Effect] = []

    def strike(task: Task, _index: int, effect: Effect) -> Fault | None:
        if struck or not where(task, effect):
            return None
        struck.append(effect)
        return fault

    return strike


def away_for(world: World, rank: int, *, from_s: float, until_s: float = FOREVER_S) -> Striking:
    """Cut one rank off from the store for a while."""

    def strike(task: Task, _index: int, effect: Effect) -> Fault | None:
        cut = task.name == rank and from_s <= world.now_s < until_s
        return Away() if cut and isinstance(effect, STORE_EFFECTS) else None

    return strike


def ends(tasks: list[Task]) -> list[float]:
    """When each of these ended."""
    return [task.ended_at_s if task.ended_at_s is not None else FOREVER_S for task in tasks]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("everybody", [False, True])
def test_all_ranks_leave_with_the_same_success(ranks: int, everybody: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """Whether one rank works or all do, the verdict is one and it is written once."""
    world = World(seed=ranks)
    dependency = Dependency(world)
    workers = tuple(range(ranks)) if everybody else (0,)

    tasks = job(world, dependency, ranks=ranks, workers=workers)
    world.run(limit_s=5)

    final = one_verdict(tasks)
    assert (final.failure, final.detail, final.workers) == ("", "done", workers)
    assert len(dependency.calls) == len(workers)


def test_a_worker_gets_its_value_and_the_others_none() -> None:
    """The result holds the verdict for all, and the work's own value where it was done."""
    world = World()

    tasks = job(world, Dependency(world))
    world.run()

    assert [task.result[0].value for task in tasks] == ["done", None]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_failure_of_any_worker_is_everybodys(rank: int) -> None:
    """One rank is refused: all ranks raise the same text, naming that rank and its failure."""
    world = World()
    well, ill = Dependency(world), Dependency(world, heals_at_s=FOREVER_S)
    ill.error = lambda: PermissionError(13, "Permission denied")
    tasks = [
        world.spawn(
            saving(ill if name == rank else well, member(name, world_size=3), workers=(0, 1, 2)),
            name=name,
        )
        for name in range(3)
    ]

    world.run(limit_s=10)

    final = one_verdict(tasks)
    assert (final.failure, final.first_rank) == ("permanent", rank)
    errors = {str(error_of(each[0], seq=1)) for each in finals(tasks)}
    assert len(errors) == 1
    assert f"on rank {rank}" in errors.pop()
    assert len(ill.calls) == 1
    assert [task.result[0].error is not None for task in tasks] == [
        name == rank for name in range(3)
    ]


def test_the_most_severe_failure_wins_and_ties_go_to_the_lowest_rank() -> None:
    """Of transient, permanent and permanent, the lower rank's permanent failure is the verdict."""
    world = World()
    errors: list[BaseException] = [
        TimeoutError("slow"),
        PermissionError(13, "first"),
        PermissionError(13, "second"),
    ]

    def failing(rank: int) -> Any:
        def run() -> Protocol[None]:
            yield fx.Sleep(float(3 - rank))
            raise errors[rank]

        return run

    tasks = [
        world.spawn(
            saving(
                Dependency(world),
                member(rank, world_size=3),
                workers=(0, 1, 2),
                run=failing(rank),
            ),
            name=rank,
        )
        for rank in range(3)
    ]

    world.run(limit_s=10)

    final = one_verdict(tasks)
    assert (final.failure, final.first_rank) == ("permanent", 1)
    assert "first" in final.error


def test_an_outage_is_survived_by_all_ranks_together() -> None:
    """Under "wait" every rank waits on the store, and the save succeeds after ten minutes."""
    world = World()
    dependency = Dependency(world, heals_at_s=600.0)

    tasks = job(world, dependency, ranks=3, seqs=range(1, 4))
    world.run(limit_s=800)

    assert all(final.failure == "" for each in finals(tasks) for final in each)
    assert dependency.most_probes_at_once() == 1
    assert max(ends(tasks)) - min(ends(tasks)) < 5


def test_ranks_that_meet_an_open_circuit_wait_at_the_gate_together() -> None:
    """The gate says WAIT for all; the round after it, written once, says PROCEED."""
    world = World()
    dependency = Dependency(world, heals_at_s=100.0)
    world.spawn(guarded(circuit(), dependency), name=9)
    tasks = [
        world.spawn(saving(dependency, member(rank, world_size=3)), name=rank, at_s=20.0)
        for rank in range(3)
    ]

    world.run(limit_s=300)

    assert one_verdict(tasks).failure == ""
    decided = [event for task in tasks for event in task.emitted(GateDecided)]
    assert sorted((event.round_number, event.verdict) for event in decided) == [
        (0, "wait"),
        (1, "proceed"),
    ]


def test_an_open_circuit_fails_all_ranks_at_once_under_fail() -> None:
    """Under "fail" all leave with the same error within a second, without a call or a probe."""
    world = World()
    dependency = Dependency(world, heals_at_s=FOREVER_S)
    world.spawn(guarded(circuit(), dependency), name=9, at_s=0.0)
    tasks = [
        world.spawn(
            saving(dependency, member(rank, world_size=3, on_outage="fail"), trains_s=9.0),
            name=rank,
        )
        for rank in range(3)
    ]
    calls_before = 3

    world.run(limit_s=2000)

    final = one_verdict(tasks)
    assert final.failure == "transient"
    assert "circuit is open" in final.error
    assert max(ends(tasks)) < 10.0
    assert len(dependency.calls) == calls_before
    assert len({str(error_of(each[0], seq=1)) for each in finals(tasks)}) == 1


@pytest.mark.parametrize(("heals_at_s", "failure"), [(9.0, ""), (FOREVER_S, "transient")])
def test_a_restarted_job_waits_for_one_probe_under_fail(heals_at_s: float, failure: str) -> None:
    """A circuit left open by an earlier start decides nothing by itself: one probe does."""
    world = World()
    dependency = Dependency(world, heals_at_s=heals_at_s)
    hasty = patience(dependency, when_open="raise")
    world.spawn(guarded(circuit(), dependency, waiting=hasty), name=9)
    tasks = [
        world.spawn(
            saving(dependency, member(rank, world_size=2, on_outage="fail")), name=rank, at_s=9.0
        )
        for rank in range(2)
    ]

    world.run(limit_s=2000)

    assert one_verdict(tasks).failure == failure
    assert len(dependency.probes) == 1
    assert max(ends(tasks)) < 9.0 + 30.0


def test_a_verdict_that_stops_rests_on_a_read_made_after_arrival() -> None:
    """A rank that last saw the circuit open does not fail all others once it is closed."""
    world = World()
    dependency = Dependency(world)
    world.spawn(begin(circuit(), new_incarnation=True))
    world.run()
    mine = circuit()

    def rank() -> Protocol[Any]:
        yield from begin(mine, new_incarnation=False)
        put(world, state="open", epoch=2)
        yield from refresh(mine)
        put(world, state="closed", epoch=5)
        operation = joint(mine, patience(dependency))
        mine_to_do = part(lambda: guarded(mine, dependency))
        me = member(0, world_size=1, on_outage="fail")
        return [(yield from perform(me, operation, mine_to_do))]

    task = world.spawn(rank())
    world.run(limit_s=10)

    assert one_verdict([task]).failure == ""


def test_the_gates_deadline_fails_all_ranks_alike() -> None:
    """A dependency that stays ill past the deadline ends the operation with one verdict for all."""
    world = World()
    dependency = Dependency(world, heals_at_s=FOREVER_S)
    world.spawn(guarded(circuit(), dependency), name=9)
    tasks = [
        world.spawn(saving(dependency, member(rank), deadline_s=100.0), name=rank, at_s=20.0)
        for rank in range(2)
    ]

    world.run(limit_s=2000)

    assert one_verdict(tasks).failure == "transient"
    assert max(ends(tasks)) < 130.0


def test_a_late_rank_learns_at_once_that_the_gate_has_failed() -> None:
    """Who arrives after the others gave up does not wait for a deadline of its own."""
    world = World()
    dependency = Dependency(world, heals_at_s=FOREVER_S)
    world.spawn(guarded(circuit(), dependency), name=9)
    tasks = [
        world.spawn(saving(dependency, member(rank), deadline_s=100.0), name=rank, at_s=at_s)
        for rank, at_s in ((0, 20.0), (1, 130.0))
    ]

    world.run(limit_s=2000)

    assert one_verdict(tasks).failure == "transient"
    assert (tasks[1].ended_at_s or FOREVER_S) < 135.0


def test_a_first_arriver_that_dies_leaves_its_verdict_valid() -> None:
    """The gate's writer dies right after it; the others go by what it wrote."""
    world = World()
    dependency = Dependency(world)
    tasks = [
        world.spawn(saving(dependency, member(rank, world_size=3)), name=rank, at_s=at_s)
        for rank, at_s in ((0, 1.0), (1, 0.0), (2, 1.0))
    ]
    world.fault = once(
        lambda task, effect: task.name == 1 and isinstance(effect, fx.WaitFor), Crash()
    )

    world.run(limit_s=10)

    assert tasks[1].crashed
    assert one_verdict([tasks[0], tasks[2]]).failure == ""
    assert [event.verdict for event in tasks[1].emitted(GateDecided)] == ["proceed"]


def test_when_the_last_worker_dies_before_the_verdict_others_write_it() -> None:
    """All outcomes are there, but who should merge them is dead: a waiting rank does it."""
    world = World()
    dependency = Dependency(world)
    tasks = job(world, dependency, ranks=3, workers=(0, 1))
    world.fault = once(
        lambda _task, effect: (
            isinstance(effect, fx.CompareAndSet)
            and "/final/" in effect.key
            and not decode(FinalRecord, effect.desired, key=effect.key).is_open
        ),
        Crash(),
    )

    world.run(limit_s=2 * TIMEOUT_S)

    survivors = [task for task in tasks if not task.crashed]
    assert len(survivors) == 2
    assert one_verdict(survivors).failure == ""


def test_when_the_verdict_is_there_but_its_bell_is_not_everybody_finds_it() -> None:
    """The writer dies between verdict and bell: the others read it at the end of a chunk."""
    world = World()
    tasks = job(world, Dependency(world), ranks=3)
    world.fault = once(
        lambda _task, effect: isinstance(effect, fx.Set) and "/done/" in effect.key, Crash()
    )

    world.run(limit_s=TIMEOUT_S)

    assert one_verdict([task for task in tasks if not task.crashed]).failure == ""


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_worker_that_dies_is_lost_and_named(silent: int) -> None:
    """A worker that is killed in its work is the verdict's lost rank, within two timeouts."""
    world = World()
    tasks = job(world, Dependency(world), ranks=3, workers=(0, 1, 2))
    world.fault = once(
        lambda task, effect: task.name == silent and isinstance(effect, fx.Call), Crash()
    )

    world.run(limit_s=2 * TIMEOUT_S + 1)

    survivors = [task for task in tasks if not task.crashed]
    final = one_verdict(survivors)
    assert (final.failure, final.first_rank, final.lost_ranks) == ("lost", silent, (silent,))
    assert f"rank {silent}" in str(error_of(final, seq=1))
    assert any(task.emitted(RanksLost) for task in survivors)


def test_all_lost_workers_are_named() -> None:
    """Of three workers two never arrive: after one timeout both are in the verdict's text."""
    world = World()
    dependency = Dependency(world)
    task = world.spawn(saving(dependency, member(0, world_size=3), workers=(0, 1, 2)))

    world.run(limit_s=1.1 * TIMEOUT_S)

    final = one_verdict([task])
    assert (final.failure, final.first_rank, final.lost_ranks) == ("lost", 1, (1, 2))
    assert "Lost ranks: 1, 2" in str(error_of(final, seq=1))


def test_a_slow_worker_that_beats_is_never_lost() -> None:
    """Silence counts, not duration: a save of ten timeouts is waited for."""
    world = World()
    dependency = Dependency(world, lasts_s=50.0)

    def parts() -> Protocol[str]:
        for _ in range(8):
            yield fx.Call(dependency.call, timeout_s=60.0)
        yield fx.Sleep(100.0)
        return "long"

    tasks = job(world, dependency, run=parts)
    world.run(limit_s=600)

    assert one_verdict(tasks).detail == "long"


@pytest.mark.parametrize("look", range(1, 13))
def test_an_observer_that_was_stopped_takes_nobody_for_lost(look: int) -> None:
    """A rank that freezes between a look and its conclusion has not watched the other's silence."""
    world = World()
    dependency = Dependency(world, lasts_s=20 * TIMEOUT_S)
    looks = 0

    def freeze(task: Task, _index: int, effect: Effect) -> Pause | None:
        nonlocal looks
        if task.name == 0 or not isinstance(effect, fx.MultiGet):
            return None
        looks += 1
        return Pause(3 * TIMEOUT_S) if looks == look else None

    def parts() -> Protocol[str]:
        yield fx.Call(dependency.call, timeout_s=30 * TIMEOUT_S)
        return "long"

    # A beat between every other look, so that some looks show what the one before has shown.
    tasks = job(world, dependency, run=parts, members={"beat_s": 0.9 * TIMEOUT_S})
    world.fault = freeze
    world.run(limit_s=30 * TIMEOUT_S)

    assert looks >= look
    assert one_verdict(tasks).detail == "long"


def test_a_worker_that_waits_for_the_dependency_is_never_lost() -> None:
    """The circuit opens under the worker: hours on the bell are no silence."""
    world = World()
    dependency = Dependency(world, heals_at_s=1000.0)

    tasks = job(world, dependency)
    world.run(limit_s=1200)

    assert one_verdict(tasks).failure == ""


def test_a_late_worker_that_has_arrived_nowhere_yet_gets_its_time() -> None:
    """Ranks are seconds apart: one that comes within the timeout is not lost."""
    world = World()
    dependency = Dependency(world)
    first = world.spawn(saving(dependency, member(1)), name=1)
    late = world.spawn(saving(dependency, member(0)), name=0, at_s=0.9 * TIMEOUT_S)

    world.run(limit_s=2 * TIMEOUT_S)

    assert one_verdict([first, late]).failure == ""


def test_a_rank_that_was_taken_for_lost_hears_the_verdict_of_the_others() -> None:
    """It comes back with its work done: the verdict stands, and it is told so as well."""
    world = World()
    dependency = Dependency(world)
    early = world.spawn(saving(dependency, member(1)), name=1)
    late = world.spawn(saving(dependency, member(0)), name=0, at_s=3 * TIMEOUT_S)

    world.run(limit_s=5 * TIMEOUT_S)

    assert one_verdict([early, late]).failure == "lost"


@pytest.mark.parametrize("second", [{"op": "remove"}, {"digest": "another"}])
def test_different_operations_at_one_number_are_an_error_that_names_both(
    second: dict[str, Any],
) -> None:
    """The ranks are not in lock-step: a permanent error says who does what."""
    world = World()
    dependency = Dependency(world)
    first = world.spawn(saving(dependency, member(0)), name=0)
    other = world.spawn(saving(dependency, member(1), **second), name=1, at_s=0.5)

    world.run(limit_s=3 * TIMEOUT_S)

    assert isinstance(other.error, JointError)
    assert other.error.outcome == "permanent"
    assert "rank 0" in str(other.error) or "ranks 0 and 1" in str(other.error)
    assert all(word in str(other.error) for word in ("'save'", *second.values())[: len(second)])
    assert first.ended


def test_who_waits_for_an_operation_that_others_do_not_do_hears_of_it() -> None:
    """The rank that came first is told within seconds as well, not after a timeout."""
    world = World()
    dependency = Dependency(world)
    first = world.spawn(saving(dependency, member(1)), name=1)
    other = world.spawn(saving(dependency, member(0), op="remove"), name=0, at_s=0.5)

    world.run(limit_s=5)

    assert isinstance(other.error, JointError)
    assert one_verdict([first]).failure == "permanent"
    assert "remove" in one_verdict([first]).error


def test_a_rank_cut_off_from_the_store_raises_and_is_named() -> None:
    """The worker that cannot reach the store says so in bounded time; the others name it."""
    world = World()
    dependency = Dependency(world, lasts_s=10.0)
    tasks = job(world, dependency, ranks=3, members={"store_patience_s": 30.0})
    world.fault = away_for(world, 0, from_s=5.0)

    world.run(limit_s=200)

    assert isinstance(tasks[0].error, JointUnavailableError)
    assert tasks[0].error.lost_ranks == (0,)
    assert (tasks[0].ended_at_s or FOREVER_S) <= 10.0 + 30.0 + 6.0
    assert one_verdict(tasks[1:]).lost_ranks == (0,)


def test_a_waiting_rank_cut_off_from_the_store_makes_up_no_verdict() -> None:
    """A rank without work that cannot read the verdict raises; the others succeed."""
    world = World()
    dependency = Dependency(world, lasts_s=10.0)
    tasks = job(world, dependency, ranks=3, members={"store_patience_s": 30.0})
    world.fault = away_for(world, 2, from_s=5.0)

    world.run(limit_s=200)

    assert isinstance(tasks[2].error, JointUnavailableError)
    assert one_verdict(tasks[:2]).failure == ""


def test_a_short_absence_of_the_store_goes_unnoticed() -> None:
    """Twenty seconds without the store, for everybody: the operation succeeds."""
    world = World()
    dependency = Dependency(world, lasts_s=10.0)
    tasks = job(world, dependency, ranks=3, seqs=(1, 2))
    world.fault = lambda _task, _index, effect: (
        Away() if isinstance(effect, STORE_EFFECTS) and 5.0 <= world.now_s < 25.0 else None
    )

    world.run(limit_s=100)

    assert all(final.failure == "" for each in finals(tasks) for final in each)


def test_a_lost_store_raises_at_once_where_that_was_asked_for() -> None:
    """With no patience (on_store_loss "raise") nobody tries again."""
    world = World()
    tasks = job(world, Dependency(world, lasts_s=10.0), members={"store_patience_s": 0.0})
    world.fault = lambda _task, _index, effect: (
        Away() if isinstance(effect, STORE_EFFECTS) and world.now_s >= 5.0 else None
    )

    world.run(limit_s=TIMEOUT_S)

    assert all(isinstance(task.error, JointUnavailableError) for task in tasks)


def test_a_store_that_is_lost_after_the_verdict_changes_nothing() -> None:
    """Clean-up is housekeeping: a verdict that is known is returned all the same."""
    world = World()
    tasks = job(world, Dependency(world), seqs=range(1, 17))

    def strike(task: Task, _index: int, _effect: Effect) -> Fault | None:
        over = len(task.emitted(VerdictReached)) == 16
        return Away() if over and task.name == 0 else None

    world.fault = strike
    world.run(limit_s=10)

    assert [len(each) for each in finals(tasks)] == [16, 16]


def test_an_interrupted_worker_publishes_that_before_it_leaves() -> None:
    """Ctrl-C on the worker: the others leave within seconds, with the verdict "cancelled"."""
    world = World()
    tasks = job(world, Dependency(world), ranks=3)
    world.fault = once(lambda _task, effect: isinstance(effect, fx.Call), Interrupt(INTERRUPTION))

    world.run(limit_s=5)

    final = one_verdict(tasks)
    assert (final.failure, final.first_rank) == ("cancelled", 0)
    assert tasks[0].result[0].error is INTERRUPTION


def test_one_of_several_workers_is_interrupted_and_does_not_wait() -> None:
    """The interrupted worker leaves at once; the verdict of the others is "cancelled" too."""
    world = World()
    dependency = Dependency(world, lasts_s=30.0)
    tasks = job(world, dependency, ranks=3, workers=(0, 1, 2))
    world.fault = once(
        lambda task, effect: task.name == 1 and isinstance(effect, fx.Call),
        Interrupt(INTERRUPTION),
    )

    world.run(limit_s=60)

    assert (tasks[1].ended_at_s or FOREVER_S) < 1.0
    assert {task.result[0].final.failure for task in tasks} == {"cancelled"}
    assert {task.result[0].final.first_rank for task in tasks} == {1}


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_for_good_ends_the_wait_of_the_others(failing: int) -> None:
    """One rank may not read: those who wait out an outage meanwhile leave within seconds."""
    world = World()
    dependency = Dependency(world, heals_at_s=1000.0)

    def forbidden() -> Protocol[str]:
        yield fx.Sleep(0.001)
        message = "not yours"
        raise PermissionError(message)

    def load(rank: int) -> Protocol[Any]:
        mine = circuit(f"host{rank}", hosts=3)
        waiting = patience(dependency)
        yield from begin(mine, new_incarnation=False)

        def work() -> Protocol[Any]:
            return (yield from guarded(mine, dependency)).value

        operation = joint(mine, waiting, op="load", workers=(0, 1, 2))
        run_part = part(forbidden if rank == failing else work, rank=rank)
        return [(yield from perform(member(rank, world_size=3), operation, run_part))]

    tasks = [world.spawn(load(rank), name=rank) for rank in range(3)]
    world.run(limit_s=200)

    final = one_verdict(tasks)
    assert (final.failure, final.first_rank) == ("permanent", failing)
    assert max(task.ended_at_s or FOREVER_S for task in tasks) < 4 * BEAT_S


def test_the_most_severe_of_failures_at_the_same_time_wins() -> None:
    """Two ranks fail within a beat: the verdict is the same whoever of them writes it."""
    world = World()

    def fail(rank: int) -> Protocol[str]:
        yield fx.Sleep(0.5 * rank)
        raise OSError((errno.ENOSPC, errno.EACCES)[rank], "no")

    def save(rank: int) -> Protocol[Any]:
        mine = circuit("host")
        yield from begin(mine, new_incarnation=False)
        operation = joint(mine, patience(Dependency(world)), workers=(0, 1))
        run_part = part(lambda: fail(rank), rank=rank)
        return [(yield from perform(member(rank), operation, run_part))]

    tasks = [world.spawn(save(rank), name=rank) for rank in range(2)]
    world.run(limit_s=100)

    final = one_verdict(tasks)
    assert (final.failure, final.first_rank) == ("permanent", 1)


def test_a_rank_that_was_taken_for_lost_stops_waiting() -> None:
    """A worker that was frozen and is back in its wait finds the verdict instead of the outage."""
    world = World()
    dependency = Dependency(world, heals_at_s=5000.0)
    tasks = job(world, dependency)
    world.fault = once(
        lambda task, effect: task.name == 0 and isinstance(effect, fx.WaitFor),
        Pause(3 * TIMEOUT_S),
    )

    world.run(limit_s=1000)

    assert one_verdict(tasks).lost_ranks == (0,)
    assert (tasks[0].ended_at_s or FOREVER_S) < 4 * TIMEOUT_S


def test_a_worker_interrupted_at_the_gate_is_not_waited_for() -> None:
    """Ctrl-C while all wait for the dependency: the worker's outcome is there when they proceed."""
    world = World()
    dependency = Dependency(world, heals_at_s=100.0)
    world.spawn(guarded(circuit(), dependency), name=9)
    tasks = [
        world.spawn(saving(dependency, member(rank, world_size=3)), name=rank, at_s=20.0)
        for rank in range(3)
    ]
    world.fault = once(
        lambda task, effect: task.name == 0 and isinstance(effect, fx.WaitFor),
        Interrupt(INTERRUPTION),
    )

    world.run(limit_s=100 + 60 + 10)

    assert tasks[0].error is INTERRUPTION
    assert (tasks[0].ended_at_s or FOREVER_S) < 21.0
    assert one_verdict(tasks[1:]).failure == "cancelled"


def test_an_interruption_is_not_held_up_by_a_store_that_is_away() -> None:
    """Ctrl-C while the store does not answer: the worker leaves in under a second."""
    world = World()
    tasks = job(world, Dependency(world), members={"store_patience_s": 3600.0})
    interrupted: list[Effect] = []

    def strike(task: Task, _index: int, effect: Effect) -> Fault | None:
        if task.name != 0:
            return None
        if isinstance(effect, fx.Call):
            interrupted.append(effect)
            return Interrupt(INTERRUPTION)
        return Away() if interrupted else None

    world.fault = strike
    world.run(limit_s=3 * TIMEOUT_S)

    assert tasks[0].error is INTERRUPTION
    assert (tasks[0].ended_at_s or FOREVER_S) < 1.0


def test_a_beat_that_cannot_be_written_does_not_hold_up_the_work() -> None:
    """The store is away for longer than its patience while the work sleeps: it is done in time."""
    world = World()

    def run() -> Protocol[str]:
        yield fx.Sleep(60.0)
        return "slept"

    tasks = job(world, Dependency(world), ranks=1, run=run, members={"store_patience_s": 20.0})
    world.fault = away_for(world, 0, from_s=1.0, until_s=50.0)

    world.run(limit_s=100)

    assert one_verdict(tasks).detail == "slept"
    assert tasks[0].ended_at_s == pytest.approx(60.0, abs=1.0)


def test_a_result_that_cannot_be_described_is_a_failure_like_others() -> None:
    """A bug after the work is published as well, so that nobody waits for the timeout."""

    class Odd:
        def __str__(self) -> str:
            raise TypeError("no text")

    def run() -> Protocol[Odd]:
        yield fx.Sleep(0.1)
        return Odd()

    world = World()
    tasks = job(world, Dependency(world), run=run)

    world.run(limit_s=5)

    assert one_verdict(tasks).failure == "permanent"


def test_a_count_whose_answer_was_lost_costs_a_chunk_at_most() -> None:
    """The counter of outcomes is a hint: without it a waiting rank reads the outcomes."""
    world = World()
    tasks = job(world, Dependency(world), ranks=3, workers=(0, 1, 2))
    world.fault = lambda _task, _index, effect: (
        Lost() if isinstance(effect, fx.Add) and "/count/" in effect.key else None
    )

    world.run(limit_s=TIMEOUT_S)

    assert one_verdict(tasks).failure == ""


def test_the_number_of_keys_is_bounded_over_any_number_of_operations() -> None:
    """After 500 operations, some of them through outages, there are no more keys than after 50."""
    world = World()
    dependency = Dependency(world)
    tasks = job(world, dependency, ranks=2, workers=(0, 1), seqs=range(1, 501))
    counts: list[int] = []

    def look() -> None:
        counts.append(len(world.values))
        dependency.heals_at_s = world.now_s + 5.0
        if not tasks[0].ended:
            world.at(world.now_s + 30.0, look)

    world.at(0.5, look)
    world.run(limit_s=30_000, most_effects=500_000)

    assert all(final.failure == "" for each in finals(tasks) for final in each)
    assert states(world).count("open") > 0
    assert world.most_keys < 200
    assert len(world.values) < 200


def test_keys_that_somebody_may_still_read_are_kept() -> None:
    """A failure waits for nobody: a rank that is far behind still finds the others' verdicts."""
    world = World()
    dependency = Dependency(world, heals_at_s=FOREVER_S)
    dependency.error = lambda: PermissionError(13, "Permission denied")
    fast = world.spawn(saving(dependency, member(0), seqs=range(1, 33)), name=0)
    slow = world.spawn(saving(dependency, member(1), seqs=range(1, 33)), name=1, at_s=30.0)

    world.run(limit_s=100)

    assert (fast.ended_at_s or 0.0) < 30.0
    assert finals([fast]) == finals([slow])


def test_waiting_ranks_say_what_they_wait_for() -> None:
    """A rank without work reports the wait, and all report the verdict with its duration."""
    world = World()
    tasks = job(world, Dependency(world, lasts_s=50.0))

    world.run(limit_s=100)

    assert tasks[1].emitted(WorkAwaited)[0].workers == (0,)
    (reached,) = tasks[1].emitted(VerdictReached)
    assert reached.outcome == "ok"
    assert reached.elapsed_s == pytest.approx(50.0, abs=1.0)


def test_an_operation_without_a_dependency_needs_no_circuit() -> None:
    """A joint operation that shares nothing but the decision proceeds and ends as others do."""
    world = World()

    def run() -> Protocol[str]:
        yield fx.Sleep(1.0)
        return "agreed"

    tasks = job(world, Dependency(world), circuit=None, run=run)
    world.run(limit_s=10)

    assert one_verdict(tasks).detail == "agreed"


def test_a_joint_operation_costs_each_rank_few_store_operations() -> None:
    """On the closed path a rank without work spends about three store operations and no more."""
    world = World()
    tasks = job(world, Dependency(world), ranks=4, seqs=range(1, 11))

    world.run(limit_s=10)

    waiting = [task.store_operations() / 10 for task in tasks[1:]]
    assert max(waiting) <= 5
    assert record(world).state == "closed"
