# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Saves are left without a verdict where the shared store is gone, and settled in the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.events import DeferralsSettled, OperationDeferred
from lightning_resilience.core.records import FinalRecord
from lightning_resilience.core.store_loss import is_deferred
from lightning_resilience.errors import JointError, JointUnavailableError
from lightning_resilience.protocols import effects as fx
from tests.joint_scenes import finals, saving
from tests.scenes import Dependency, member
from tests.scripted_driver import STORE_EFFECTS, Away, Interrupt, Task, World


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.protocols.effects import Effect, Protocol
    from tests.scripted_driver import Fault


AFTER_S, TIMEOUT_S = 10.0, 40.0
FOREVER_S = 1e9
# A look that is refused at the end of the wait, and the pause before it.
LOOK_S = 6.0


def staged(_why: str) -> Protocol[str]:
    """What is done instead: nothing that needs a store."""
    yield fx.Sleep(0.5)
    return "staged"


def gone(
    world: World,
    since_s: float,
    until_s: float = FOREVER_S,
    *,
    is_refused: bool = True,
    ranks: tuple[int, ...] = (0, 1, 2, 3),
) -> None:
    """Let the store's server be gone for some ranks; it comes back with nothing."""

    def fault(task: Task, _index: int, effect: Effect) -> Fault | None:
        is_away = since_s <= world.now_s < until_s and task.name in ranks
        return Away(is_refused) if is_away and isinstance(effect, STORE_EFFECTS) else None

    world.fault = fault
    if until_s < FOREVER_S:
        world.at(until_s, world.values.clear)


def job(
    world: World,
    *,
    ranks: int = 2,
    trains_s: Callable[[int], float] = lambda _rank: 1.0,
    instead: Callable[[str], Protocol[Any]] | None = staged,
    **options: Any,
) -> list[Task]:
    """All ranks of a job whose saves may be deferred."""
    how: dict[str, Any] = {"may_be_deferred": True, "instead": instead, **options}
    return [
        world.spawn(
            saving(
                Dependency(world, lasts_s=how.pop("lasts_s", 1.0) if rank == 0 else 1.0),
                member(rank, world_size=ranks, defer_after_s=AFTER_S),
                trains_s=trains_s(rank),
                **{name: value for name, value in how.items() if name != "lasts_s"},
            ),
            name=rank,
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_go_on_without_a_verdict(ranks: int) -> None:
    """Each by itself, after the same time; rank 0's checkpoint is staged, and no other is told."""
    world = World()
    gone(world, 0.5)
    tasks = job(world, ranks=ranks)

    world.run()

    assert all(is_deferred(each[0]) for each in finals(tasks))
    assert [task.result[0].value for task in tasks] == ["staged"] + [None] * (ranks - 1)
    for task in tasks:
        assert len(task.emitted(OperationDeferred)) == 1
        assert task.ended_at_s is not None
        assert 1.0 + AFTER_S <= task.ended_at_s <= 1.0 + AFTER_S + LOOK_S


def test_it_is_borne_once_and_not_at_every_operation() -> None:
    """A server that is gone still is gone at the next save: nobody waits for that again."""
    world = World()
    gone(world, 0.5)
    tasks = job(world, seqs=(1, 2, 3, 4))

    world.run()

    assert all(is_deferred(final) for each in finals(tasks) for final in each)
    for task in tasks:
        assert task.ended_at_s is not None
        assert task.ended_at_s <= 1.0 + AFTER_S + LOOK_S + 4 * 0.5


def test_a_store_that_does_not_answer_is_no_store_that_is_gone() -> None:
    """Silence says something of this rank's way only, so it is borne for all the patience."""
    world = World()
    gone(world, 0.5, is_refused=False)
    tasks = job(world)

    world.run()

    for task in tasks:
        assert isinstance(task.error, JointUnavailableError)
        assert task.emitted(OperationDeferred) == []
        assert task.ended_at_s is not None
        assert task.ended_at_s >= 1.0 + TIMEOUT_S


def test_a_rank_that_is_cut_off_by_itself_defers_nothing() -> None:
    """It raises, and the others name it: nobody has gone on without it."""
    world = World()
    gone(world, 0.5, is_refused=False, ranks=(1,))
    tasks = job(world, ranks=3)

    world.run()

    assert isinstance(tasks[1].error, JointUnavailableError)
    for task in (tasks[0], tasks[2]):
        assert task.error is None
        assert task.result[0].final.lost_ranks == (1,)


def test_what_has_no_other_way_waits_for_the_store() -> None:
    """A load is the same on all ranks or not at all."""
    world = World()
    gone(world, 0.5)
    tasks = job(world, may_be_deferred=False, op="load")

    world.run()

    assert all(isinstance(task.error, JointUnavailableError) for task in tasks)


def test_work_that_was_done_is_not_done_again() -> None:
    """The checkpoint is in storage when the store is lost: that is what rank 0 knows of it."""
    world = World()
    gone(world, 3.0)
    tasks = job(world, lasts_s=5.0)

    world.run()

    assert all(is_deferred(each[0]) for each in finals(tasks))
    assert tasks[0].result[0].value not in {None, "staged"}


def test_work_that_cannot_be_staged_is_an_error_at_once() -> None:
    """The rank raises and says why, instead of waiting for a store that is gone."""

    def full(_why: str) -> Protocol[str]:
        yield fx.Sleep(0.1)
        message = "no space left"
        raise OSError(message)

    world = World()
    gone(world, 0.5)
    tasks = job(world, instead=full)

    world.run()

    assert isinstance(tasks[0].error, JointUnavailableError)
    assert "no space left" in str(tasks[0].error)
    assert isinstance(tasks[0].error.__cause__, OSError)
    assert tasks[0].ended_at_s is not None
    assert tasks[0].ended_at_s <= 1.0 + AFTER_S + LOOK_S
    assert is_deferred(tasks[1].result[0].final)


def test_an_interruption_while_it_is_staged_stays_one() -> None:
    """Whoever presses Ctrl-C is not told of anything else."""

    def interrupted(_why: str) -> Protocol[str]:
        yield fx.Sleep(0.1)
        raise KeyboardInterrupt

    world = World()
    gone(world, 0.5)
    tasks = job(world, instead=interrupted)

    world.run()

    assert isinstance(tasks[0].error, KeyboardInterrupt)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_rank_that_meets_the_next_store_does_not_wait_for_those_that_have_gone_on(
    late: int,
) -> None:
    """It comes when the others have deferred, finds nobody, and defers as well, in bounded time."""
    world = World()
    back_at_s, comes_at_s = 1.0 + AFTER_S + LOOK_S, 30.0
    gone(world, 0.5, back_at_s)
    tasks = job(world, ranks=3, trains_s=lambda rank: comes_at_s if rank == late else 1.0)

    world.run()

    assert all(is_deferred(each[0]) for each in finals(tasks))
    ended_at_s = tasks[late].ended_at_s
    assert ended_at_s is not None
    assert ended_at_s <= comes_at_s + 2 * AFTER_S + LOOK_S


def two_saves(world: World, number: int, *, between_s: float) -> Protocol[Any]:
    """One rank that saves, trains, and saves once more, as one member."""
    who = member(number, defer_after_s=AFTER_S)
    options: dict[str, Any] = {"may_be_deferred": True, "instead": staged}
    return saving(Dependency(world), who, seqs=(1, 2), trains_s=1.0, between_s=between_s, **options)


def test_what_was_deferred_is_settled_with_the_next_verdict() -> None:
    """In the next store the ranks agree again, and each knows how its save before has ended."""
    world = World()
    gone(world, 0.5, 20.0)
    tasks = [
        world.spawn(two_saves(world, number, between_s=20.0), name=number) for number in (0, 1)
    ]

    world.run()

    for first, second in finals(tasks):
        assert is_deferred(first)
        assert not is_deferred(second)
        assert not second.failure
    for task in tasks:
        (settled,) = task.emitted(DeferralsSettled)
        assert settled.number == 1


def test_a_failure_that_others_have_returned_is_raised_with_the_next_verdict() -> None:
    """A rank that had missed it has other books than they, and says whose save has failed."""
    world = World()
    failed = FinalRecord(
        op="save", subject="a.ckpt", failure="permanent", first_rank=0, error="x", writer="w"
    )

    def rank(number: int) -> Protocol[Any]:
        who = member(number, defer_after_s=AFTER_S)
        who.unsettled = (
            who.unsettled.with_deferred(7) if number else who.unsettled.with_verdict(7, failed)
        )
        options: dict[str, Any] = {"may_be_deferred": True, "instead": staged, "seqs": (8,)}
        return saving(Dependency(world), who, enlists=False, **options)

    tasks = [world.spawn(rank(number), name=number) for number in (0, 1)]
    world.run()

    assert tasks[0].error is None
    assert isinstance(tasks[1].error, JointError)
    assert "joint operation 7" in str(tasks[1].error)
    assert not tasks[1].error.in_step


def test_an_interrupted_rank_does_not_defer() -> None:
    """Its patience is over at once, and what it raises is the interruption."""
    world = World()

    def fault(task: Task, _index: int, effect: Effect) -> Fault | None:
        if task.name == 1 and isinstance(effect, fx.Sleep) and world.now_s > 1.5:
            return Interrupt(KeyboardInterrupt())
        is_gone = world.now_s >= 0.5 and isinstance(effect, STORE_EFFECTS)
        return Away(is_refused=True) if is_gone else None

    world.fault = fault
    tasks = job(world)
    world.run()

    assert isinstance(tasks[1].error, KeyboardInterrupt)
    assert tasks[1].emitted(OperationDeferred) == []
