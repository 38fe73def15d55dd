# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What several workers have reported counts, also where the shared store has lost it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.circuit import begin
from lightning_resilience.protocols.joint import perform
from lightning_resilience.protocols.joint_fence import enlist
from tests.joint_scenes import one_verdict
from tests.scenes import Dependency, circuit, joint, member, part, patience
from tests.scripted_driver import World


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.protocols.effects import Effect, Protocol
    from tests.scripted_driver import Fault, Task


WORKERS = (0, 1, 2)
FAILING = 0
SOON_S, LATER_S = 1.0, 20.0


def loading(world: World, rank: int, *, lasts_s: float, fails: bool) -> Protocol[Any]:
    """A rank of three that all load: each works for a while, and then maybe may not read."""
    me = yield from enlist(member(rank, world_size=len(WORKERS)))
    mine = circuit("host")
    yield from begin(mine, new_incarnation=False)

    def work() -> Protocol[str]:
        yield fx.Sleep(lasts_s)
        if fails:
            raise OSError(errno.EACCES, "not yours")
        return "done"

    operation = joint(mine, patience(Dependency(world)), op="load", workers=WORKERS)
    return [(yield from perform(me, operation, part(work, rank=rank)))]


def play(
    lasts_s: tuple[float, float, float],
    *,
    failing: int | None = None,
    lost_at_s: float | None = None,
    fault: Callable[[Task, int, Effect], Fault | None] = lambda _task, _index, _effect: None,
) -> tuple[World, list[Task]]:
    """Let three ranks load, and let the store lose everything at an instant."""
    world = World(seed=3, fault=fault)
    tasks = [
        world.spawn(loading(world, rank, lasts_s=lasts_s[rank], fails=rank == failing), name=rank)
        for rank in WORKERS
    ]
    if lost_at_s is not None:
        world.at(lost_at_s, world.values.clear)
    return world, tasks


@pytest.mark.parametrize("early", [(0,), (0, 2)])
def test_reports_that_the_store_has_lost_are_put_back(early: tuple[int, ...]) -> None:
    """Whoever has reported waits for the others, and is not taken for lost by anybody."""
    first, second, third = (SOON_S if rank in early else LATER_S for rank in WORKERS)
    world, tasks = play((first, second, third), lost_at_s=SOON_S + 0.5)

    world.run(limit_s=2000)

    final = one_verdict(tasks)
    assert (final.failure, final.lost_ranks) == ("", ())
    assert max(task.ended_at_s or 0.0 for task in tasks) < LATER_S + member(0).timeout_s


def test_a_failure_that_the_store_has_lost_is_no_success() -> None:
    """The one who failed finds the success of another in the new store, and adds its own report."""
    world, tasks = play((SOON_S, SOON_S + 2.0, LATER_S), failing=FAILING, lost_at_s=SOON_S + 1.0)

    world.run(limit_s=2000)

    final = one_verdict(tasks)
    assert (final.failure, final.first_rank) == ("permanent", FAILING)


def test_a_count_without_its_report_makes_no_success() -> None:
    """The store is lost between report and count: it counts all, and the report is missing."""
    lost: list[Effect] = []

    def fault(task: Task, _index: int, effect: Effect) -> Fault | None:
        if task.name == FAILING and isinstance(effect, fx.Add) and "/count/" in effect.key:
            lost.append(effect)
            world.values.clear()
        return None

    world, tasks = play((SOON_S, SOON_S + 1.0, SOON_S + 2.0), failing=FAILING, fault=fault)

    world.run(limit_s=2000)

    final = one_verdict(tasks)
    assert len(lost) == 1
    assert (final.failure, final.first_rank) == ("permanent", FAILING)
