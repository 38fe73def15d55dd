# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One rank reads what all ranks have told, between two joint operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.errors import JointUnavailableError
from lightning_resilience.protocols.effects import MultiGet
from lightning_resilience.protocols.joint import perform
from lightning_resilience.protocols.joint_told import read_reports
from tests.scenes import KEYS, Dependency, joint, member, part, patience
from tests.scripted_driver import Away, World


if TYPE_CHECKING:
    from lightning_resilience.core.records import OutcomeRecord
    from lightning_resilience.protocols.effects import Effect, Protocol
    from tests.scripted_driver import Task


def telling(rank: int, *, world: World, ranks: int) -> Protocol[tuple[OutcomeRecord, ...]]:
    """One rank: a joint operation in which all work, and then, on rank 0, what all have told."""
    who = member(rank, world_size=ranks)
    waiting = patience(Dependency(world))
    operation = joint(None, waiting, workers=tuple(range(ranks)))

    def work() -> Protocol[Any]:
        yield from ()
        return f"said by {rank}"

    yield from perform(who, operation, part(work, rank=rank))
    if rank != 0:
        return ()
    return (yield from read_reports(who, "save", seq=operation.seq))


def told(world: World, *, ranks: int) -> list[str]:
    """Run all ranks; return what rank 0 has read."""
    tasks = [
        world.spawn(telling(rank, world=world, ranks=ranks), name=rank) for rank in range(ranks)
    ]
    world.run()
    if tasks[0].error is not None:
        raise tasks[0].error
    return [report.detail for report in tasks[0].result]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_one_rank_reads_what_every_rank_has_told(ranks: int) -> None:
    """In the order of ranks, also where there is only one, which tells nobody but itself."""
    assert told(World(), ranks=ranks) == [f"said by {rank}" for rank in range(ranks)]


def test_a_report_that_was_lost_with_the_store_is_not_made_up() -> None:
    """Whoever needs all of them sees that one is missing."""

    def forget(task: Task, _index: int, effect: Effect) -> None:
        if task.name == 0 and isinstance(effect, MultiGet) and LOST in effect.keys:
            world.values.pop(LOST, None)

    world = World(fault=forget)

    assert told(world, ranks=3) == ["said by 0", "said by 2"]


LOST = KEYS.joint("out", 1, 1)


@pytest.mark.parametrize("away_s", [5.0, 500.0])
def test_the_store_may_be_away_for_as_long_as_in_the_operation_itself(away_s: float) -> None:
    """A shorter absence is waited for, a longer one is this rank's own error."""
    ended_at_s: list[float] = []

    def fault(task: Task, _index: int, effect: Effect) -> Away | None:
        if task.name != 0 or not isinstance(effect, MultiGet) or effect.keys != REPORTS:
            return None
        if KEYS.joint("final", 1) not in world.values:
            return None
        ended_at_s.append(world.now_s)
        return Away() if world.now_s < ended_at_s[0] + away_s else None

    world = World(fault=fault)

    if away_s < member(0).store_patience_s:
        assert told(world, ranks=2) == ["said by 0", "said by 1"]
    else:
        with pytest.raises(JointUnavailableError):
            told(world, ranks=2)


REPORTS = (KEYS.joint("out", 1, 0), KEYS.joint("out", 1, 1))
