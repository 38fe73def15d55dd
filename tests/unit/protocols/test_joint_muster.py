# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""No success without every rank: one that does not come is named within a bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.events import RanksLost, WorkAwaited
from lightning_resilience.core.joint import error_of
from lightning_resilience.errors import JointError, JointUnavailableError
from lightning_resilience.protocols import effects as fx
from tests.joint_scenes import finals, one_verdict, saving
from tests.scenes import KEYS, Dependency, member
from tests.scripted_driver import Interrupt, Pause, Task, World


if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_resilience.protocols.effects import Effect
    from tests.scripted_driver import Fault


FOREVER_S = 1e9
TIMEOUT_S, BEAT_S = 40.0, 5.0


def present(
    world: World, ranks: Sequence[int], *, of: int, lasts_s: float = 1.0, **options: Any
) -> list[Task]:
    """Some ranks of a job, which has enlisted all of them, at one joint operation."""
    for rank in range(of):
        world.values[KEYS.joint("arrived", rank)] = b"0"
    dependency = Dependency(world, lasts_s=lasts_s)
    return [
        world.spawn(saving(dependency, member(rank, world_size=of), **options), name=rank)
        for rank in ranks
    ]


def late(world: World, rank: int, *, of: int, at_s: float, **options: Any) -> Task:
    """One more rank of that job, which comes at its own time."""
    dependency = Dependency(world)
    return world.spawn(
        saving(dependency, member(rank, world_size=of), **options), name=rank, at_s=at_s
    )


def looks(task: Task) -> int:
    """How often a rank has looked who has come, beyond what it looks at for the verdict."""
    keys = [effect.keys for effect in task.performed if isinstance(effect, fx.MultiGet)]
    return sum("/final/" in each[0] and len(each) > 2 for each in keys)


@pytest.mark.parametrize(
    ("of", "absent"), [(of, rank) for of in (2, 3, 4) for rank in range(1, of)]
)
def test_a_rank_that_never_comes_is_named_by_all_that_did(of: int, absent: int) -> None:
    """Each rank without work is absent in turn: one timeout later the others raise and name it."""
    world = World(seed=of)
    tasks = present(world, [rank for rank in range(of) if rank != absent], of=of)

    world.run(limit_s=TIMEOUT_S + 2 * BEAT_S)

    final = one_verdict(tasks)
    assert (final.failure, final.first_rank, final.lost_ranks) == ("lost", absent, (absent,))
    text = str(error_of(final, seq=1))
    assert f"rank {absent} has not come to it within {TIMEOUT_S:.1f} s" in text
    assert "is_global_zero" in text
    (lost,) = tasks[0].emitted(RanksLost)
    assert lost.ranks == (absent,)


def test_several_ranks_that_never_come_are_all_named() -> None:
    """Of four ranks the two in the middle are absent: the verdict names both, and no third."""
    world = World()
    tasks = present(world, [0, 3], of=4)

    world.run(limit_s=TIMEOUT_S + 2 * BEAT_S)

    final = one_verdict(tasks)
    assert final.lost_ranks == (1, 2)
    assert "Lost ranks: 1, 2." in str(error_of(final, seq=1))


@pytest.mark.parametrize("delay_s", [0.5, 5.0, 30.0])
def test_a_rank_that_comes_late_is_waited_for(delay_s: float) -> None:
    """Within the bound it costs the others its delay and an eighth of it, and nobody is lost."""
    world = World()
    tasks = present(world, [0, 1], of=3)
    tasks.append(late(world, 2, of=3, at_s=1.0 + delay_s))

    world.run(limit_s=1.0 + 1.125 * delay_s + 1.0)

    assert one_verdict(tasks).failure == ""
    assert not tasks[0].emitted(RanksLost)
    said = [event.workers for event in tasks[0].emitted(WorkAwaited)]
    assert said == ([(2,)] if delay_s > BEAT_S else [])


def test_a_rank_that_comes_after_the_bound_finds_that_it_was_lost() -> None:
    """It takes no success that was never told: it raises what the others have raised."""
    world = World()
    tasks = present(world, [0, 1], of=3)
    tasks.append(late(world, 2, of=3, at_s=2 * TIMEOUT_S))

    world.run(limit_s=2 * TIMEOUT_S + 1.0)

    assert one_verdict(tasks).lost_ranks == (2,)


def test_a_rank_that_has_called_once_too_often_is_alone_and_says_so() -> None:
    """All have come to the first operation, and one to a second: only that one raises, in time."""
    world = World()
    tasks = present(world, [0], of=2, seqs=(1, 2)) + present(world, [1], of=2)

    world.run(limit_s=TIMEOUT_S + 3 * BEAT_S)

    twice, once = finals(tasks)
    assert [final.failure for final in twice] == ["", "lost"]
    assert [final.failure for final in once] == [""]
    assert twice[1].lost_ranks == (1,)


def test_a_rank_without_work_that_has_called_once_too_often_names_the_worker() -> None:
    """It waits for work that nobody does, and names the rank that has not come to do it."""
    world = World()
    tasks = present(world, [0], of=2) + present(world, [1], of=2, seqs=(1, 2))

    world.run(limit_s=2 * TIMEOUT_S)

    final = finals(tasks)[1][1]
    assert (final.failure, final.lost_ranks) == ("lost", (0,))
    assert "rank 0 has not come to it" in final.error


def test_a_call_of_another_step_is_no_part_of_the_same_operation() -> None:
    """Both save under one number, at different steps: the second to come says where each is."""
    world = World()
    tasks = present(world, [0], of=2, digest="step 3, call 1")
    tasks += present(world, [1], of=2, digest="step 4, call 1")

    world.run(limit_s=TIMEOUT_S)

    raised = [str(task.error) for task in tasks if task.error is not None]
    failed = [error_of(task.result[0].final, seq=1) for task in tasks if task.result]
    texts = raised + [str(error) for error in failed if error is not None]
    assert any("step 3, call 1" in text and "step 4, call 1" in text for text in texts)


def test_a_call_of_another_step_is_none_although_the_store_has_lost_the_gate() -> None:
    """The verdict says at which step its writer is: a success of that is no other rank's."""
    world = World()
    tasks = present(world, [0], of=2, lasts_s=30.0, workers=(0, 1), digest="step 3, call 1")
    world.at(10.0, world.values.clear)
    tasks.append(late(world, 1, of=2, at_s=11.0, workers=(0, 1), digest="step 4, call 1"))

    world.run(limit_s=3 * TIMEOUT_S)

    (error,) = (task.error for task in tasks if task.error is not None)
    assert isinstance(error, JointError)
    assert "another rank does 'save' at step" in str(error)


def test_while_all_is_well_the_deciding_rank_looks_once_and_the_others_never() -> None:
    """One store operation of rank 0 more, whatever the number of ranks, and none of theirs."""
    world = World()
    tasks = present(world, range(4), of=4)

    world.run(limit_s=10.0)

    assert [looks(task) for task in tasks] == [1, 0, 0, 0]


def test_nobody_is_looked_for_where_all_have_reported() -> None:
    """Whoever has reported has come."""
    world = World()
    tasks = present(world, [0, 1], of=2, workers=(0, 1))

    world.run(limit_s=10.0)

    assert one_verdict(tasks).failure == ""
    assert [looks(task) for task in tasks] == [0, 0]


def test_a_failure_waits_for_nobody() -> None:
    """Rank 0 is refused while rank 1 is still on its way: it raises at once, and so will rank 1."""
    world = World()
    dependency = Dependency(world, heals_at_s=FOREVER_S)
    dependency.error = lambda: PermissionError(13, "Permission denied")
    world.values[KEYS.joint("arrived", 1)] = b"0"
    first = world.spawn(saving(dependency, member(0)), name=0)
    second = world.spawn(saving(dependency, member(1)), name=1, at_s=30.0)

    world.run(limit_s=35.0)

    assert (first.ended_at_s or FOREVER_S) < 5.0
    assert one_verdict([first, second]).failure == "permanent"


def strike_once(strike: Fault, rank: int, kind: type[Effect], *, at: int = 1) -> Any:
    """Strike a rank's effect of a kind, the first or a later one."""
    seen: list[Effect] = []

    def fault(task: Task, _index: int, effect: Effect) -> Fault | None:
        if task.name != rank or not isinstance(effect, kind) or len(seen) >= at:
            return None
        seen.append(effect)
        return strike if len(seen) == at else None

    return fault


def test_the_time_for_which_the_deciding_rank_was_stopped_does_not_count() -> None:
    """It stands still for five timeouts while it waits: a rank that comes then is not lost."""
    world = World(fault=strike_once(Pause(5 * TIMEOUT_S), 0, fx.WaitFor))
    tasks = present(world, [0], of=2)
    tasks.append(late(world, 1, of=2, at_s=5 * TIMEOUT_S + 10.0))

    world.run(limit_s=6 * TIMEOUT_S)

    # Rank 1 finds nobody who works, but not for long enough either.
    assert one_verdict(tasks).failure == ""


def test_a_rank_that_is_interrupted_while_it_waits_for_another_tells_the_rest() -> None:
    """Its work is done, and nobody knows: it says that it leaves, and they leave with it."""
    interruption = KeyboardInterrupt()
    world = World(fault=strike_once(Interrupt(interruption), 0, fx.WaitFor, at=3))
    tasks = present(world, [0, 1], of=3)

    world.run(limit_s=BEAT_S)

    assert tasks[0].error is interruption
    assert one_verdict(tasks[1:]).failure == "cancelled"


def test_a_store_that_is_lost_while_one_waits_takes_nobody_for_absent() -> None:
    """The numbers of all are gone: they say once more where they are, and all succeed."""
    world = World()
    tasks = present(world, [0, 1], of=3)
    tasks.append(late(world, 2, of=3, at_s=20.0))
    world.at(10.0, world.values.clear)

    world.run(limit_s=3 * TIMEOUT_S)

    assert one_verdict(tasks).failure == ""


def test_a_store_that_is_lost_costs_whoever_waits_no_second_timeout() -> None:
    """A rank that does not come to the new store either is waited for as long as any other."""
    world = World()
    tasks = present(world, [0, 1], of=3)
    world.at(10.0, world.values.clear)

    world.run(limit_s=10.0 + TIMEOUT_S + 3 * BEAT_S)

    assert [type(task.error) for task in tasks] == [JointUnavailableError] * 2
