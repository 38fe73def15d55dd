# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Every rank does what its scenario says, at the price that the protocols have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.records import BreakerRecord, decode
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.drill.observer import Observer
from lightning_resilience.drill.scenario import (
    Outage,
    Refusal,
    Scenario,
    Storage,
    Store,
    StoreGone,
    Workload,
)
from lightning_resilience.drill.world import World
from lightning_resilience.errors import CircuitOpenError, JointError, RetriesExhaustedError
from tests.drill_scenes import Seen


if TYPE_CHECKING:
    from lightning_resilience.drill.process import Operation


class Operations(Observer):
    """Keeps every operation that has begun, and counts those that have ended."""

    def __init__(self) -> None:
        self.started: list[Operation] = []
        self.finished: list[Operation] = []

    def operation_began(self, now_s: float, operation: Operation) -> None:
        """Keep it."""
        assert operation.began_at_s == now_s
        self.started.append(operation)

    def operation_ended(self, now_s: float, operation: Operation) -> None:
        """Keep it."""
        assert operation.ended_at_s == now_s
        self.finished.append(operation)


def played(
    *, seed: int = 1, until_s: float = 5000.0, **fields: Any
) -> tuple[World, Seen, Operations]:
    """A run that is over."""
    seen, operations = Seen(), Operations()
    world = World(
        Scenario(**{"ranks": 4, **fields}), seed, make_observers=lambda _world: [seen, operations]
    )
    assert world.run(until_s=until_s)
    return world, seen, operations


@pytest.mark.parametrize("kind", ["single", "collective"])
def test_in_a_healthy_world_each_rank_makes_one_request_for_each_call(kind: Any) -> None:
    """One attempt, no probe, and every operation is a success."""
    world, seen, operations = played(workload=Workload(kinds=(kind,), rounds=3))

    assert len(seen.requests) == len(operations.finished) == 4 * 3
    assert {request.kind for request in seen.requests} == {"call"}
    assert {operation.attempts for operation in operations.finished} == {1}
    assert {operation.error for operation in operations.finished} == {None}
    of_first = [each.number for each in operations.finished if each.process.rank == 0]
    assert of_first == [1, 2, 3]
    assert {process.state for process in world.processes} == {"ended"}


def test_in_a_healthy_world_a_call_of_its_own_costs_few_store_operations() -> None:
    """The first one begins the breaker; each later one looks once and reports."""
    _, _, operations = played(workload=Workload(kinds=("single",), rounds=3))

    of_later = [each.store_operations for each in operations.finished if each.number > 1]
    assert max(of_later) <= 3
    assert max(each.store_operations for each in operations.finished) <= 12


def test_store_operations_of_an_operation_are_those_that_its_process_sent_for_it() -> None:
    """They add up to what the server has performed."""
    world, _, operations = played(workload=Workload(kinds=("single", "collective"), rounds=2))

    sent = sum(process.store_operations for process in world.processes)
    assert sum(each.store_operations for each in operations.finished) == sent
    assert world.store.operations == sent


def test_collective_calls_of_all_ranks_are_in_flight_up_to_the_limit() -> None:
    """They come together, and pass the slots of the breaker."""
    world, seen, _ = played(
        ranks=32,
        storage=Storage(slots=64, service_s=1.0),
        workload=Workload(spread_s=0.0),
    )

    limit = world.scenario.breaker.max_concurrent
    assert seen.most_in_flight == limit < 32


def test_only_the_worker_of_a_joint_save_comes_to_storage() -> None:
    """All ranks share its verdict, and learn it soon after."""
    world, seen, operations = played(workload=Workload(kinds=("joint",), rounds=2))

    assert [(request.process.rank, request.kind) for request in seen.requests] == [(0, "call")] * 2
    assert len(operations.finished) == 4 * 2
    assert {operation.error for operation in operations.finished} == {None}
    assert {process.state for process in world.processes} == {"ended"}
    details = {operation.result.final.detail for operation in operations.finished}
    assert details == {"done"}


def test_every_rank_of_a_joint_load_comes_to_storage() -> None:
    """Each by a slot and with its own call; and one verdict of all is what all return."""
    _, seen, operations = played(workload=Workload(kinds=("load",), rounds=2))

    assert len(seen.requests) == 4 * 2
    assert {(request.process.rank, request.kind) for request in seen.requests} == {
        (rank, "call") for rank in range(4)
    }
    finals = [operation.result.final for operation in operations.finished]
    assert [(final.op, final.failure, final.workers) for final in finals] == [
        ("load", "", (0, 1, 2, 3))
    ] * 8
    assert len({final.writer for final in finals}) == 2


def test_a_joint_load_is_in_flight_up_to_the_limit() -> None:
    """All ranks come at the same time, and so by slots."""
    world, seen, _ = played(
        ranks=32,
        storage=Storage(slots=64, service_s=1.0),
        workload=Workload(kinds=("load",), spread_s=0.0),
    )

    assert seen.most_in_flight == world.scenario.breaker.max_concurrent < 32


def test_one_rank_that_is_refused_fails_the_load_of_all() -> None:
    """Within a beat, with its failure and its rank."""
    world, _, operations = played(
        workload=Workload(kinds=("load",), rounds=2),
        faults=(Refusal(at_s=0, for_s=10, ranks=(2,)),),
    )

    errors = [operation.error for operation in operations.finished]
    assert len(errors) == 4
    assert {type(error) for error in errors} == {JointError}
    assert {operation.result.final.failure for operation in operations.finished} == {"permanent"}
    assert {operation.result.final.first_rank for operation in operations.finished} == {2}
    assert max(operation.ended_at_s or 0.0 for operation in operations.finished) < 10.0
    assert {process.state for process in world.processes} == {"ended"}


def test_kinds_take_turns_within_a_round() -> None:
    """In the order of the scenario, with the time between rounds on each rank's own clock."""
    _, _, operations = played(
        ranks=1, workload=Workload(kinds=("single", "joint", "collective"), rounds=2, every_s=100.0)
    )

    assert [operation.kind for operation in operations.started] == [
        "single", "joint", "collective", "single", "joint", "collective",
    ]  # fmt: skip
    assert operations.started[2].began_at_s < 10.0
    assert 100.0 <= operations.started[3].began_at_s < 110.0


def test_ranks_begin_within_the_spread() -> None:
    """Each a little later by chance, and never by more than the scenario says."""
    _, _, operations = played(ranks=64, workload=Workload(kinds=("single",), spread_s=2.0))

    starts = [operation.began_at_s for operation in operations.started]
    assert 0.0 <= min(starts) < 0.5
    assert 1.5 < max(starts) <= 2.0
    assert len(set(starts)) == 64


def test_a_call_that_fails_is_caught_and_its_rank_goes_on() -> None:
    """As a careful user does; nothing keeps the frames of the error."""
    world, _, operations = played(
        ranks=1,
        workload=Workload(kinds=("single",), rounds=2, every_s=10.0),
        retry=RetryPolicy(max_attempts=1, unknown_max_attempts=1),
        faults=(Outage(at_s=0, for_s=5, error="unknown"),),
    )

    first, second = operations.finished
    assert isinstance(first.error, RetriesExhaustedError)
    assert first.error.__traceback__ is None
    assert first.error.__cause__ is not None
    assert first.error.__cause__.__traceback__ is None
    assert second.error is None
    assert world.processes[0].state == "ended"


def test_a_call_that_is_not_to_wait_is_refused_while_the_circuit_is_open() -> None:
    """The scenario's ``when_open`` reaches the guard."""
    _, _, operations = played(
        ranks=8,
        workload=Workload(kinds=("single",), rounds=5, every_s=10.0, when_open="raise"),
        faults=(Outage(at_s=0, for_s=100),),
    )

    assert any(isinstance(each.error, CircuitOpenError) for each in operations.finished)


def test_a_joint_save_that_fails_ends_its_ranks() -> None:
    """As an exception does that nobody catches: no second save begins."""
    world, _, operations = played(
        workload=Workload(kinds=("joint",), rounds=2, on_outage="fail"),
        faults=(Outage(at_s=0, for_s=500),),
    )

    assert len(operations.finished) == 4
    assert all(isinstance(each.error, JointError) for each in operations.finished)
    assert {process.state for process in world.processes} == {"ended"}


def test_a_joint_save_waits_for_an_ill_storage() -> None:
    """And all ranks succeed once it is well."""
    _, _, operations = played(
        workload=Workload(kinds=("joint",)), faults=(Outage(at_s=0, for_s=200),)
    )

    assert {operation.error for operation in operations.finished} == {None}
    assert all(200 < (operation.ended_at_s or 0) < 300 for operation in operations.finished)


def test_a_rank_that_cannot_begin_makes_nothing() -> None:
    """Nobody is let through before the record was read, and nobody waits for it for ever."""
    world, seen, operations = played(
        workload=Workload(kinds=("joint",), joint_timeout_s=40.0),
        faults=(StoreGone(at_s=0, for_s=600),),
    )

    assert {process.state for process in world.processes} == {"ended"}
    assert operations.started == []
    assert all(40.0 <= at_s < 60.0 for at_s, _, what in seen.changes if what == "ended")


def test_the_record_is_that_of_the_first_start() -> None:
    """Rank 0 begins, and everybody finds its record under the job's name."""
    world, _, _ = played(workload=Workload(kinds=("joint",)))

    [key] = [key for key in world.store.cells.values if "/breaker/" in key]
    record = decode(BreakerRecord, world.store.cells.values[key], key=key)
    assert record.state == "closed"


def test_one_answer_in_twenty_may_be_lost() -> None:
    """Every operation ends well all the same."""
    _, _, operations = played(
        ranks=8,
        workload=Workload(kinds=("single", "collective", "joint"), rounds=2),
        store=Store(lost_answers=0.05),
    )

    assert len(operations.finished) == 8 * 6
    assert {operation.error for operation in operations.finished} == {None}
