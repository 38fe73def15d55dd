# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that save together, for the tests of joint operations."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.circuit import begin
from lightning_resilience.protocols.effects import Sleep
from lightning_resilience.protocols.joint import JointResult, Member, perform
from lightning_resilience.protocols.joint_fence import enlist
from tests.scenes import Dependency, circuit, guarded, joint, member, part, patience


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lightning_resilience.core.records import FinalRecord
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.joint import Part
    from tests.scripted_driver import Task, World


def saving(
    dependency: Dependency,
    who: Member,
    *,
    seqs: Sequence[int] = (1,),
    run: Callable[[], Protocol[Any]] | None = None,
    instead: Callable[[str], Protocol[Any]] | None = None,
    trains_s: float = 0.0,
    between_s: float = 0.0,
    enlists: bool = True,
    **options: Any,
) -> Protocol[list[JointResult]]:
    """One rank: begin, train for a while, then one joint operation for each number."""
    mine = circuit("host")
    waiting = patience(dependency)
    yield from begin(mine, new_incarnation=True)
    with suppress(StoreUnavailableError):
        who = (yield from enlist(who)) if enlists else who
    yield Sleep(trains_s)

    def work() -> Protocol[Any]:
        return (yield from guarded(mine, dependency)).value

    results = []
    for seq in seqs:
        operation = joint(mine, waiting, **{"seq": seq, **options})
        mine_to_do: Part | None = None
        if who.rank in operation.workers:
            mine_to_do = replace(part(run or work, rank=who.rank), instead=instead)
        results.append((yield from perform(who, operation, mine_to_do)))
        if between_s:
            yield Sleep(between_s)
    return results


def job(
    world: World,
    dependency: Dependency,
    *,
    ranks: int = 2,
    members: dict[str, Any] | None = None,
    **options: Any,
) -> list[Task]:
    """All ranks of a job at the same joint operations."""
    return [
        world.spawn(
            saving(dependency, member(rank, world_size=ranks, **(members or {})), **options),
            name=rank,
        )
        for rank in range(ranks)
    ]


def finals(tasks: Sequence[Task]) -> list[list[FinalRecord]]:
    """The verdicts of each rank, in order."""
    for task in tasks:
        assert task.error is None, f"rank {task.name} raised {task.error!r}"
    return [[result.final for result in task.result] for task in tasks]


def one_verdict(tasks: Sequence[Task]) -> FinalRecord:
    """The one verdict that all of these ranks reached at their one operation."""
    verdicts = {final for each in finals(tasks) for final in each}
    assert len(verdicts) == 1, verdicts
    return verdicts.pop()
