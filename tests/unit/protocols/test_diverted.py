# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A guarded call with another way: storage is not waited for, as long as there is one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.events import DiversionFailed, ProbeStarted
from lightning_resilience.errors import CheckpointError, RetriesExhaustedError
from lightning_resilience.protocols.circuit import begin
from lightning_resilience.protocols.diverted import OtherWay, guard_or_divert
from lightning_resilience.protocols.guard import GuardedCall
from tests.scenes import POLICY, Dependency, circuit, patience
from tests.scripted_driver import Interrupt, Task, Token, World


if TYPE_CHECKING:
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Effect, Protocol


FOREVER_S = 1e9


@dataclass
class Other:
    """What is done on the node.

    Args:
        world: Whose clock counts.
        errors: What it raises, one after the other.
        lasts_s: How long it takes.
    """

    world: World
    errors: list[BaseException] = field(default_factory=list)
    lasts_s: float = 0.5
    whys: list[str] = field(default_factory=list)

    def keep(self, why: str, token: CancelToken) -> str:
        """Keep it there."""
        assert isinstance(token, Token)
        token.spend(self.lasts_s)
        self.whys.append(why)
        if self.errors:
            raise self.errors.pop(0)
        return "kept"


def diverted(
    mine: Circuit, dependency: Dependency, other: Other, *, at_once: str = ""
) -> Protocol[Any]:
    """Begin, then one call."""
    call = GuardedCall(
        work=dependency.call,
        operation="save",
        target="a.ckpt",
        policy=POLICY,
        patience=patience(dependency),
    )
    if mine.view is None:
        yield from begin(mine, new_incarnation=True)
    way = OtherWay(work=other.keep, timeout_s=60.0, at_once=at_once)
    return (yield from guard_or_divert(mine, call, way))


def run(
    *, heals_at_s: float = 0.0, errors: tuple[BaseException, ...] = (), error: Any = None
) -> tuple[Task, Dependency, Other]:
    """One call of one process."""
    world = World()
    dependency = Dependency(world, heals_at_s=heals_at_s)
    if error is not None:
        dependency.error = error
    other = Other(world, list(errors))
    task = world.spawn(diverted(circuit(), dependency, other))
    world.run()
    return task, dependency, other


def test_where_storage_is_well_there_is_no_other_way() -> None:
    """One call, and nothing on the node."""
    task, dependency, other = run()

    assert (task.result.value, len(dependency.calls), other.whys) == ("done", 1, [])


def test_an_outage_is_not_waited_for() -> None:
    """Three failures trip the circuit; then the other way is taken at once."""
    task, dependency, other = run(heals_at_s=FOREVER_S)

    assert task.result.value == "kept"
    assert task.result.attempts == len(dependency.calls) == 3
    assert "reset by peer" in other.whys[0]
    # Two backoffs of at most 2 and 4 s, and no open wait of 10 s.
    assert (task.ended_at_s or 0.0) < 8.0


def test_under_an_open_circuit_storage_is_asked_nothing() -> None:
    """The second save of an outage makes no request at all."""
    world = World()
    dependency = Dependency(world, heals_at_s=FOREVER_S)
    other, mine = Other(world), circuit()
    world.spawn(diverted(mine, dependency, other))
    world.run()
    made = len(dependency.calls)

    task = world.spawn(diverted(mine, dependency, other))
    world.run()

    assert task.result.value == "kept"
    assert len(dependency.calls) == made
    assert task.emitted(ProbeStarted) == []


def test_a_probe_that_is_due_is_sent_all_the_same() -> None:
    """So storage that is well again is noticed, though nobody waits for it."""
    world = World()
    dependency = Dependency(world, heals_at_s=20.0)
    other, mine = Other(world), circuit()
    world.spawn(diverted(mine, dependency, other))
    world.run()
    world.now_s = 40.0

    task = world.spawn(diverted(mine, dependency, other))
    world.run()

    assert task.result.value == "done"
    assert len(task.emitted(ProbeStarted)) == 1


def test_without_room_on_the_node_storage_is_waited_for() -> None:
    """The reason is told, and the call is made once storage is well."""
    full = CheckpointError("4 checkpoints wait already")

    task, _, other = run(heals_at_s=30.0, errors=(full,))

    assert task.result.value == "done"
    assert len(other.whys) == 1
    (failed,) = task.emitted(DiversionFailed)
    assert "4 checkpoints wait already" in failed.error
    assert (task.ended_at_s or 0.0) >= 30.0


def test_the_other_way_may_come_first() -> None:
    """Where storage is well, and is to be left alone: it is asked nothing."""
    world = World()
    dependency, other, mine = Dependency(world), Other(world), circuit()

    task = world.spawn(diverted(mine, dependency, other, at_once="it was written just now"))
    world.run()

    assert (task.result.value, dependency.calls) == ("kept", [])
    assert other.whys == ["it was written just now"]


def test_where_the_first_way_is_shut_storage_is_asked() -> None:
    """A full node is no reason to fail."""
    world = World()
    dependency, mine = Dependency(world), circuit()
    other = Other(world, [CheckpointError("full")])

    task = world.spawn(diverted(mine, dependency, other, at_once="it was written just now"))
    world.run()

    assert (task.result.value, len(dependency.calls)) == ("done", 1)


def test_what_is_no_outage_is_raised() -> None:
    """A denial is not kept on the node."""

    def denied() -> BaseException:
        return PermissionError("Access Denied")

    task, dependency, other = run(heals_at_s=FOREVER_S, error=denied)

    assert isinstance(task.error, RetriesExhaustedError)
    assert task.error.failure == "permanent"
    assert (len(dependency.calls), other.whys) == (1, [])


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_on_the_other_way_is_raised(
    interruption: type[BaseException],
) -> None:
    """Nobody waits for storage after it."""
    task, dependency, _ = run(heals_at_s=FOREVER_S, errors=(interruption(),))

    assert isinstance(task.error, interruption)
    assert len(dependency.calls) == 3


def test_an_interruption_before_it_takes_no_other_way() -> None:
    """Ctrl-C in a backoff ends the call."""
    world = World()
    dependency = Dependency(world, heals_at_s=FOREVER_S)
    other = Other(world)

    def interrupt(_task: Task, _index: int, _effect: Effect) -> Any:
        return Interrupt(KeyboardInterrupt()) if len(dependency.calls) == 1 else None

    world.fault = interrupt
    task = world.spawn(diverted(circuit(), dependency, other))
    world.run()

    assert task.error is not None
    assert not isinstance(task.error, Exception)
    assert other.whys == []
