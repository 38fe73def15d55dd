# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A store that was lost and comes back empty never makes two ranks return different verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from lightning_resilience.core.records import FinalRecord, decode, encode
from lightning_resilience.errors import JointUnavailableError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.joint import perform
from lightning_resilience.protocols.joint_fence import enlist
from tests.scenes import (
    DEPENDENCY,
    KEYS,
    Dependency,
    circuit,
    guarded,
    joint,
    member,
    part,
    patience,
    record,
)
from tests.scripted_driver import Away, Crash, Lost, Pause, World


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.protocols.effects import Effect, Protocol
    from lightning_resilience.protocols.joint import JointResult, Member
    from tests.scripted_driver import Fault, Task


WORKER, WAITER, OTHER = 0, 1, 2


def saves(
    rank: int, world: World, *, lasts_s: float, count: int = 1, on_outage: str = "wait"
) -> Protocol[list[str]]:
    """A rank of three that enlists, and then saves some times; rank 0 has the work."""
    me = yield from enlist(member(rank, world_size=3, on_outage=on_outage))
    dependency = Dependency(world, lasts_s=lasts_s)
    verdicts = []
    for seq in range(1, count + 1):
        mine = circuit()
        work = None
        if rank == WORKER:
            work = part(lambda mine=mine: guarded(mine, dependency))  # type: ignore[misc]
        result: JointResult = yield from perform(
            me, joint(mine, patience(dependency), seq=seq), work
        )
        verdicts.append(result.final.failure or "ok")
    return verdicts


def play(
    fault: Callable[[Task, int, Effect], Fault | None],
    *,
    lost_at_s: float,
    lasts_s: float = 1.0,
    count: int = 1,
) -> list[Task]:
    """Let three ranks save, and let the store lose everything at an instant."""
    world = World(seed=3, fault=fault)
    tasks = [
        world.spawn(saves(rank, world, lasts_s=lasts_s, count=count), name=rank)
        for rank in range(3)
    ]
    world.at(lost_at_s, world.values.clear)
    world.run(limit_s=2000.0)
    return tasks


def once(strike: Fault, when: Callable[[Task, Effect], bool]) -> Callable[..., Fault | None]:
    """Strike the first effect that fits."""
    struck: list[Effect] = []

    def fault(task: Task, _index: int, effect: Effect) -> Fault | None:
        if struck or not when(task, effect):
            return None
        struck.append(effect)
        return strike

    return fault


def is_arrival(effect: Effect, rank: int) -> bool:
    """Tell whether a rank is about to arrive."""
    return isinstance(effect, fx.CompareAndSet) and effect.key == KEYS.joint("arrived", rank)


def verdicts_of(tasks: list[Task]) -> set[tuple[str, ...]]:
    """What the ranks have returned, those left out that raised."""
    assert all(
        task.error is None or isinstance(task.error, JointUnavailableError) for task in tasks
    ), [task.error for task in tasks]
    return {tuple(task.result) for task in tasks if task.error is None and not task.crashed}


@pytest.mark.parametrize("count", [1, 3])
def test_who_was_stopped_while_it_waited_makes_no_verdict_up(count: int) -> None:
    """The others have returned, and the store has lost that: the late one raises, and says why."""

    def waits(task: Task, effect: Effect) -> bool:
        return task.name == WAITER and isinstance(effect, fx.WaitFor)

    tasks = play(once(Pause(20.0), waits), lost_at_s=10.0, count=count)

    late = tasks[WAITER].error
    assert isinstance(late, JointUnavailableError)
    for word in ("Rank 1", "joint operation 1", "has lost what it held", "rank", "Restart"):
        assert word in str(late)
    if count == 1:
        assert verdicts_of(tasks) == {("ok",)}


def test_who_was_stopped_before_it_arrived_makes_no_verdict_up() -> None:
    """It comes to a store in which nobody has ever been, and does not take them for lost."""

    def arrives(task: Task, effect: Effect) -> bool:
        return task.name == WAITER and is_arrival(effect, WAITER)

    tasks = play(once(Pause(20.0), arrives), lost_at_s=10.0)

    assert isinstance(tasks[WAITER].error, JointUnavailableError)
    assert verdicts_of(tasks) == {("ok",)}


def test_a_worker_that_was_taken_for_lost_makes_no_verdict_up() -> None:
    """The others have returned that it is lost; then the store loses that, and the worker wakes."""

    def works(task: Task, effect: Effect) -> bool:
        return task.name == WORKER and isinstance(effect, fx.Call)

    tasks = play(once(Pause(200.0), works), lost_at_s=150.0, lasts_s=5.0)

    assert isinstance(tasks[WORKER].error, JointUnavailableError)
    assert verdicts_of(tasks) == {("lost",)}


def test_a_worker_that_was_stopped_as_it_arrived_makes_no_verdict_up() -> None:
    """It finds no gate and no ballot, makes both, does its work, and still returns none."""

    def arrives(task: Task, effect: Effect) -> bool:
        return task.name == WORKER and is_arrival(effect, WORKER)

    tasks = play(once(Pause(200.0), arrives), lost_at_s=150.0)

    assert isinstance(tasks[WORKER].error, JointUnavailableError)
    assert verdicts_of(tasks) == {("lost",)}


@pytest.mark.parametrize("late", [WORKER, WAITER])
def test_a_gate_that_refuses_in_a_store_that_was_lost_is_no_verdict(late: int) -> None:
    """The others have saved; the late one finds the circuit open, and the policy is not to wait."""

    def fault(task: Task, _index: int, effect: Effect) -> Fault | None:
        if task.name == late and is_arrival(effect, late) and not struck:
            struck.append(effect)
            return Pause(200.0)
        return None

    struck: list[Effect] = []
    world = World(seed=3, fault=fault)
    tasks = [
        world.spawn(saves(rank, world, lasts_s=1.0, on_outage="fail"), name=rank)
        for rank in range(3)
    ]

    def lose() -> None:
        before = record(world)
        world.values.clear()
        key = KEYS.breaker(DEPENDENCY)
        world.values[key] = encode(msgspec.structs.replace(before, state="forced_open", epoch=9))

    world.at(150.0, lose)
    world.run(limit_s=2000.0)

    assert isinstance(tasks[late].error, JointUnavailableError)
    assert len(verdicts_of(tasks)) == 1


def test_a_store_that_is_lost_while_all_are_there_costs_no_save() -> None:
    """Nobody has returned: all say so in the new store, and the verdict is made there."""
    tasks = play(lambda _task, _index, _effect: None, lost_at_s=30.0, lasts_s=50.0)

    assert [task.error for task in tasks] == [None] * 3
    assert verdicts_of(tasks) == {("ok",)}


def test_a_store_that_is_lost_between_two_saves_costs_none() -> None:
    """The next operation begins in the new store as in any other."""
    world = World(seed=3)
    tasks = [world.spawn(saves(rank, world, lasts_s=1.0), name=rank) for rank in range(3)]
    world.run()
    world.values.clear()
    again = [
        world.spawn(
            perform(
                member(rank, world_size=3),
                joint(mine := circuit(), patience(Dependency(world)), seq=2),
                part(lambda mine=mine: guarded(mine, Dependency(world)))  # type: ignore[misc]
                if rank == WORKER
                else None,
            ),
            name=rank,
        )
        for rank in range(3)
    ]
    world.run(limit_s=2000.0)

    assert [task.error for task in (*tasks, *again)] == [None] * 6
    assert [task.result.final.failure for task in again] == [""] * 3


@pytest.mark.parametrize("at", range(6))
def test_a_rank_that_dies_after_the_first_gate_costs_no_verdict(at: int) -> None:
    """Also where it has decided the gate and not laid out the ballot, the others come to one."""

    def dies(task: Task, effect: Effect) -> bool:
        return (
            task.name == OTHER
            and task.performed[-1:] != []
            and sum(isinstance(done, fx.CompareAndSet) for done in task.performed) >= at
            and isinstance(effect, fx.CompareAndSet)
        )

    tasks = play(once(Crash(), dies), lost_at_s=1e6)

    # Who dies before it has come is named.
    assert verdicts_of(tasks) == {("ok",) if at else ("lost",)}


def place_of(task: Task, effect: Effect, struck: set[str]) -> str:
    """Where a rank is that can carry something from one store into another.

    ``gate`` and ``ballot``, when the third rank has created them; ``repeat``, before it asks again,
    and ``again``, after; ``work``, when the worker has begun; ``look``, when it has read its own
    number after that.
    """
    key = getattr(effect, "key", "")
    if task.name == OTHER and isinstance(effect, fx.CompareAndSet) and not effect.expected:
        if "/gate/" in key:
            return "gate"
        return "again" if "repeat" in struck else "ballot"
    if task.name == OTHER and isinstance(effect, fx.Sleep):
        return "repeat" if "ballot" in struck else ""
    if task.name != WORKER:
        return ""
    if isinstance(effect, fx.Call):
        return "work"
    is_look = KEYS.joint("arrived", WORKER) in getattr(effect, "keys", (key,))
    return "look" if is_look and "work" in struck else ""


def at_places(strikes: dict[str, Fault]) -> Callable[[Task, int, Effect], Fault | None]:
    """Strike once at each of some places; the third rank is the first at the gate."""
    struck: set[str] = set()

    def fault(task: Task, _index: int, effect: Effect) -> Fault | None:
        if is_arrival(effect, task.name):
            return Pause(1.0) if task.name != OTHER else None
        place = place_of(task, effect, struck)
        if place not in strikes or place in struck:
            return None
        struck.add(place)
        return strikes[place]

    return fault


def test_a_ballot_that_comes_late_into_another_store_takes_no_verdict() -> None:
    """Who decided the gate lays it out after the loss, and the worker has looked before it."""
    stops: dict[str, Fault] = {"gate": Pause(348.0), "work": Pause(200.0), "look": Pause(150.0)}

    tasks = play(at_places(stops), lost_at_s=250.0)

    assert tasks[WAITER].result == ["lost"]
    assert verdicts_of(tasks) == {("lost",)}


@pytest.mark.parametrize("again_s", [0.0, 20.0])
def test_a_ballot_that_is_created_in_two_stores_takes_no_verdict(again_s: float) -> None:
    """Its first answer was lost; asked for again after the loss, it is created there as well."""
    strikes: dict[str, Fault] = {
        "ballot": Lost(),
        "repeat": Pause(348.0),
        "again": Pause(again_s),
        "work": Pause(30.0),
        "look": Pause(325.0),
    }

    tasks = play(at_places(strikes), lost_at_s=250.0)

    assert tasks[WAITER].result == ["lost"]
    assert verdicts_of(tasks) == {("lost",)}


def waits_alone(world: World, me: Member, *, seqs: tuple[int, ...]) -> list[str]:
    """A rank of two in operations of which the worker shows nothing; how each of them ends."""
    dependency = Dependency(world)

    def waits(seq: int) -> Protocol[str]:
        operation = joint(circuit(), patience(dependency), seq=seq)
        try:
            return (yield from perform(me, operation, None)).final.failure
        except JointUnavailableError as error:
            return f"unavailable {error.seq}"

    def waits_for_all() -> Protocol[dict[int, str]]:
        ended = {}
        for seq in seqs:
            ended[seq] = yield from waits(seq)
        return ended

    task = world.spawn(waits_for_all(), name=WAITER)
    world.run(limit_s=2000.0)
    return list(task.result.values())


def test_who_has_left_an_operation_without_its_verdict_makes_none_of_the_next_one_up() -> None:
    """Its number is in the new store, but says nothing: the worker may have gone on for long."""
    world = World(seed=3)
    world.values[KEYS.joint("arrived", WAITER)] = b"0"
    world.values[KEYS.joint("arrived", WORKER)] = b"1"
    world.at(5.0, world.values.clear)

    ended = waits_alone(world, member(WAITER, last_seq=0), seqs=(1, 2))

    assert ended == ["unavailable 1", "unavailable 2"]


@pytest.mark.parametrize(("last_seq", "ends"), [(None, "unavailable 1"), (0, "lost")])
def test_who_could_not_enlist_makes_no_verdict_up(last_seq: int | None, ends: str) -> None:
    """It cannot tell a store in which nobody has come yet from one that was lost."""
    world = World(seed=3)
    world.values[KEYS.joint("arrived", WAITER)] = b"0"

    ended = waits_alone(world, member(WAITER, last_seq=last_seq), seqs=(1,))

    assert ended == [ends]


def test_ranks_that_could_not_enlist_save_all_the_same() -> None:
    """The store was away in their setup; once all have come, the first verdict is made."""
    world = World(seed=3)
    dependency = Dependency(world)
    mine = circuit()
    work = part(lambda: guarded(mine, dependency))
    tasks = [
        world.spawn(
            perform(member(rank), joint(mine, patience(dependency)), work if rank == 0 else None),
            name=rank,
        )
        for rank in range(2)
    ]

    world.run(limit_s=30.0)

    assert [task.error for task in tasks] == [None, None]
    assert [task.result.final.failure for task in tasks] == ["", ""]


def test_a_draft_whose_writer_has_died_costs_no_verdict() -> None:
    """Whoever makes the verdict lays out a ballot in its place."""

    def lies_there(task: Task, effect: Effect) -> bool:
        is_ballot = isinstance(effect, fx.CompareAndSet) and "/final/" in effect.key
        return task.name == OTHER and is_ballot and bool(getattr(effect, "expected", b""))

    struck = once(Crash(), lies_there)

    def fault(task: Task, index: int, effect: Effect) -> Fault | None:
        if task.name != OTHER and is_arrival(effect, task.name):
            return Pause(1.0)
        return struck(task, index, effect)

    tasks = play(fault, lost_at_s=1e6)

    assert tasks[OTHER].crashed
    assert verdicts_of(tasks) == {("ok",)}


def test_a_roll_call_bears_a_beat_that_is_not_heard() -> None:
    """It is a sign of life, and the next one is as good."""

    def beats(task: Task, effect: Effect) -> bool:
        is_beat = isinstance(effect, fx.Set) and effect.key == KEYS.joint("beat", WORKER)
        return task.name == WORKER and is_beat and bool(lost)

    lost: list[float] = []
    world = World(seed=3, fault=once(Away(), beats))
    tasks = [world.spawn(saves(rank, world, lasts_s=4.0), name=rank) for rank in range(3)]

    def lose() -> None:
        lost.append(world.now_s)
        world.values.clear()

    world.at(3.5, lose)
    world.run(limit_s=2000.0)

    assert verdicts_of(tasks) == {("ok",)}


def test_a_bell_that_rings_without_a_verdict_is_no_busy_loop() -> None:
    """A late bell reaches a store that has lost its verdict: the others wait, and pause."""
    world = World(seed=3)
    tasks = [world.spawn(saves(rank, world, lasts_s=20.0), name=rank) for rank in range(3)]
    world.at(5.0, lambda: world.values.update({KEYS.joint("done", 1): b"1"}))

    world.run()

    assert verdicts_of(tasks) == {("ok",)}
    assert max(task.store_operations() for task in tasks) < 60


def test_the_ballot_is_no_verdict() -> None:
    """While the work goes on, an open ballot lies where the verdict will be, and all wait."""
    world = World(seed=3)
    tasks = [world.spawn(saves(rank, world, lasts_s=50.0), name=rank) for rank in range(3)]
    key = KEYS.joint("final", 1)
    seen: list[FinalRecord] = []

    world.at(25.0, lambda: seen.append(decode(FinalRecord, world.values[key], key=key)))
    world.run()

    assert [record.is_open for record in seen] == [True]
    assert verdicts_of(tasks) == {("ok",)}
    assert not decode(FinalRecord, world.values[key], key=key).is_open
