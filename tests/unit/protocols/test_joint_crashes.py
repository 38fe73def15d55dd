# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Every place at which a rank can die or an answer can be lost, in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lightning_resilience.core.records import FinalRecord, decode
from lightning_resilience.protocols import effects as fx
from tests.joint_scenes import finals, job
from tests.scenes import KEYS, Dependency, assert_legal, record
from tests.scripted_driver import STORE_EFFECTS, Away, Crash, Fault, Interrupt, Lost, Task, World


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import Effect


TIMEOUT_S = 40.0
OUTAGE_S = 30.0
# Open wait, lease, bell's chunk and ramp of a short outage, and twice the silence of a lost rank.
BOUND_S = 400.0


def crash_at(rank: int, index: int) -> World:
    """A world in which one rank dies before its effect of that index."""

    def strike(task: Task, at: int, _effect: Effect) -> Fault | None:
        return Crash() if task.name == rank and at == index else None

    return World(seed=index, fault=strike)


@pytest.mark.parametrize("ill", [False, True], ids=["well", "ill"])
@pytest.mark.parametrize("workers", [(0,), (0, 1)], ids=["one worker", "two workers"])
@pytest.mark.parametrize("rank", [0, 1])
def test_whenever_a_rank_dies_the_other_ends_with_one_verdict(
    *, ill: bool, workers: tuple[int, ...], rank: int
) -> None:
    """Death before any one effect: the survivor's verdict is the store's, in bounded time."""
    index = 0
    while True:
        world = crash_at(rank, index)
        dependency = Dependency(world, heals_at_s=OUTAGE_S if ill else 0.0)
        tasks = job(world, dependency, workers=workers)

        world.run(limit_s=BOUND_S)

        if not tasks[rank].crashed:
            break
        ((final,),) = finals([tasks[1 - rank]])
        key = KEYS.joint("final", 1)
        assert decode(FinalRecord, world.values[key], key=key) == final
        assert final.failure in {"", "lost"}
        assert final.lost_ranks in {(), (rank,)}
        assert_legal(record(world))
        index += 1
    assert index > 10


@pytest.mark.parametrize("ill", [False, True], ids=["well", "ill"])
@pytest.mark.parametrize("workers", [(0,), (0, 1)], ids=["one worker", "two workers"])
@pytest.mark.parametrize("rank", [0, 1])
def test_whenever_a_rank_is_interrupted_it_says_so_and_the_other_ends(
    *, ill: bool, workers: tuple[int, ...], rank: int
) -> None:
    """Ctrl-C at any one effect: it is never swallowed, and the other rank ends with the verdict."""
    index = 0
    while True:
        interruption = KeyboardInterrupt()

        def strike(
            task: Task,
            at: int,
            _effect: Effect,
            index: int = index,
            interruption: KeyboardInterrupt = interruption,
        ) -> Fault | None:
            return Interrupt(interruption) if (task.name, at) == (rank, index) else None

        world = World(seed=index, fault=strike)
        dependency = Dependency(world, heals_at_s=OUTAGE_S if ill else 0.0)
        tasks = job(world, dependency, workers=workers)

        world.run(limit_s=BOUND_S)

        mine, other = tasks[rank], tasks[1 - rank]
        if len(mine.performed) <= index:
            break
        raised = mine.error or mine.result[0].error
        assert raised is interruption
        ((final,),) = finals([other])
        assert final.failure in {"", "cancelled", "lost"}
        # Nobody waits for the silence of one that could still say that it leaves its work undone.
        has_begun = any(isinstance(effect, fx.Sleep) for effect in mine.performed[:index])
        assert final.failure != "lost" or rank not in workers or not has_begun
        assert_legal(record(world))
        index += 1
    assert index > 10


@pytest.mark.parametrize("fault", [Lost(), Away()], ids=["executed", "not executed"])
def test_whichever_answer_is_lost_nobody_is_stuck(fault: Fault) -> None:
    """Trip, probe, recovery and save with each store operation in turn unanswered: one verdict."""
    number = 0
    while True:
        world = World(seed=1)
        operations: list[Effect] = []

        def strike(
            _task: Task,
            _index: int,
            effect: Effect,
            operations: list[Effect] = operations,
            number: int = number,
        ) -> Fault | None:
            if not isinstance(effect, STORE_EFFECTS):
                return None
            operations.append(effect)
            # The first operations belong to the start, which no joint operation protects.
            return fault if len(operations) == number + 8 else None

        world.fault = strike
        dependency = Dependency(world, heals_at_s=OUTAGE_S)
        tasks = job(world, dependency, seqs=(1, 2))

        world.run(limit_s=BOUND_S)

        if len(operations) < number + 8:
            break
        first, second = finals(tasks)
        assert first == second
        assert [final.failure for final in first] == ["", ""]
        assert dependency.most_probes_at_once() == 1
        assert_legal(record(world))
        number += 1
    assert number > 40


@pytest.mark.parametrize("seed", range(30))
def test_with_many_lost_answers_verdicts_are_still_one(seed: int) -> None:
    """One answer in ten is lost, or never asked for: ranks agree, operation by operation."""
    world = World(seed=seed)
    world_of_chance = World(seed=1000 + seed)._random

    def strike(_task: Task, index: int, effect: Effect) -> Fault | None:
        if not isinstance(effect, STORE_EFFECTS) or index < 12:
            return None
        draw = world_of_chance.random()
        return Lost() if draw < 0.05 else Away() if draw < 0.1 else None

    world.fault = strike
    dependency = Dependency(world, heals_at_s=OUTAGE_S)
    tasks = job(world, dependency, ranks=3, workers=(0, 2), seqs=range(1, 6))

    world.run(limit_s=2000)

    first, *others = finals(tasks)
    assert all(each == first for each in others)
    assert [final.failure for final in first] == [""] * 5
    assert dependency.most_probes_at_once() == 1
