# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A retry is charged to the job before its backoff; denied, it waits."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.breaker import BreakerConfig
from lightning_resilience.core.budget import BudgetConfig
from lightning_resilience.core.events import RetryDenied, RetryScheduled
from lightning_resilience.core.records import BudgetRecord, decode
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.errors import (
    BudgetExhaustedError,
    RetriesExhaustedError,
    StoreUnavailableError,
)
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.circuit import begin
from lightning_resilience.protocols.circuit_memory import Circuit, Limits
from tests.scenes import DEPENDENCY, KEYS, Dependency, guarded, patience, put
from tests.scripted_driver import STORE_EFFECTS, Away, Fault, Lost, Task, World


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.effects import Effect, Protocol


KEY = KEYS.budget(DEPENDENCY)
TWO = BudgetConfig(retry_ratio=0.0, retry_floor=2)
PATIENT = RetryPolicy(max_attempts=50, max_delay_s=5.0)


def member(name: str = "host", *, budget: BudgetConfig = TWO, hosts: int = 100) -> Circuit:
    """A process; with so many hosts its failures do not trip the circuit."""
    return Circuit(
        DEPENDENCY,
        config=BreakerConfig(),
        keys=KEYS,
        host=name,
        hosts=hosts,
        limits=Limits(budget=budget),
    )


def budget(world: World) -> BudgetRecord:
    """The budget's record as it is in the store now."""
    return decode(BudgetRecord, world.values[KEY], key=KEY)


def failing(dependency: Dependency, times: int) -> Callable[[CancelToken], str]:
    """Work that fails so many times and then succeeds."""
    left = times

    def work(token: CancelToken) -> str:
        nonlocal left
        dependency.call(token)
        if left:
            left -= 1
            raise ConnectionResetError("reset by peer")
        return "value"

    return work


def attempt(
    times: int,
    *,
    world: World | None = None,
    mine: Circuit | None = None,
    name: int = 0,
    at_s: float | None = None,
    **options: Any,
) -> tuple[World, Task]:
    """Start a call that fails so many times before it succeeds."""
    world = world or World()
    dependency = Dependency(world)
    options = {"policy": PATIENT, "work": failing(dependency, times), **options}
    if "when_open" in options or "voice_s" in options:
        chosen = {key: options.pop(key) for key in ("when_open", "voice_s") if key in options}
        options["waiting"] = patience(dependency, **chosen)
    task = world.spawn(guarded(mine or member(), dependency, **options), name=name, at_s=at_s)
    return world, task


def exhaust(world: World, *, retries: int = 2) -> float:
    """Let another process use the whole budget; return when its last retry was charged."""
    _, task = attempt(retries, world=world, mine=member("greedy"), name=99)
    world.run()
    assert task.error is None
    assert sum(budget(world).retries) == retries
    return max(at for at, event in task.events if isinstance(event, RetryScheduled))


def test_a_call_without_a_retry_leaves_the_budget_alone() -> None:
    """It is counted where it was made, and nobody is told."""
    mine = member()

    world, _ = attempt(0, mine=mine)
    world.run()

    assert KEY not in world.values
    assert mine.ledger.calls == 1


def test_a_retry_is_charged_before_its_backoff() -> None:
    """While it waits in the backoff it counts already."""
    world, task = attempt(1, policy=RetryPolicy(base_delay_s=10.0))
    seen: list[int] = []

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        if isinstance(effect, fx.Sleep) and task.emitted(RetryScheduled):
            seen.append(sum(budget(world).retries))
        return None

    world.fault = fault
    world.run()

    assert seen == [1]
    assert task.result.attempts == 2


def test_those_who_fail_together_charge_over_a_quarter_of_a_second() -> None:
    """The first who fail may open the circuit, and then the others need not be charged at all."""
    world = World()
    tasks = [
        attempt(1, world=world, mine=member(str(name)), name=name, collective=True)[1]
        for name in range(40)
    ]
    world.run()

    asked = [
        next(
            effect.duration_s
            for effect in reversed(task.performed[: task.performed.index(charge_of(task))])
            if isinstance(effect, fx.Sleep)
        )
        for task in tasks
        if any(is_charge(effect) for effect in task.performed)
    ]
    assert len(asked) >= 20
    assert 0 <= min(asked) < 0.05
    assert 0.2 < max(asked) <= 0.25


def is_charge(effect: Effect) -> bool:
    """Tell whether it is the look at record and budget with which a task asks for a retry."""
    return isinstance(effect, fx.MultiGet) and effect.keys[-1] == KEY


def charge_of(task: Task) -> Effect:
    """The look with which a task asks for its first retry."""
    return next(effect for effect in task.performed if is_charge(effect))


def test_a_call_of_one_rank_is_charged_at_once() -> None:
    """Nobody else asks at the same time, and a short deadline is not spent on waiting for them."""
    world, task = attempt(1)
    world.run()

    before = task.performed[: task.performed.index(charge_of(task))]
    assert not any(isinstance(effect, fx.Sleep) for effect in before)


def test_the_record_that_is_read_with_the_budget_is_not_read_again() -> None:
    """A retry that comes soon after its charge goes ahead on what the charge has seen."""
    world, task = attempt(1)
    world.run()

    charged = task.performed.index(charge_of(task))
    after = [type(each) for each in task.performed[charged:] if isinstance(each, STORE_EFFECTS)]
    assert fx.Get not in after


def test_a_retry_is_never_given_back() -> None:
    """One that succeeded was load all the same."""
    world, task = attempt(2)

    world.run()

    assert task.result.value == "value"
    assert budget(world).retries == (2, 0, 0, 0, 0)


def test_the_calls_since_the_last_charge_are_told_with_it() -> None:
    """Thirty calls that went well and the one that did not: three retries more may be made."""
    world = World()
    mine = member(budget=BudgetConfig(retry_ratio=0.1, retry_floor=2))
    for _ in range(30):
        attempt(0, world=world, mine=mine)
        world.run()

    attempt(1, world=world, mine=mine)
    world.run()

    assert budget(world).calls == (31, 0, 0, 0, 0)
    assert mine.ledger.calls == 0


def test_threads_that_charge_at_once_tell_each_call_once() -> None:
    """Told by each of them, a thousand calls of one process would be a quota for thousands."""
    world = World()
    mine = member(budget=BudgetConfig(retry_floor=20))
    for _ in range(30):
        attempt(0, world=world, mine=mine)
        world.run()

    for _ in range(8):
        attempt(1, world=world, mine=mine)
    world.run()

    assert sum(budget(world).retries) == 8
    assert sum(budget(world).calls) + mine.ledger.calls == 38


def test_calls_that_nobody_was_told_of_are_told_with_the_next_charge() -> None:
    """A denial tells nobody; of what was not told the last window's share is told later."""
    world = World()
    exhaust(world)
    mine = member()
    for _ in range(20):
        attempt(0, world=world, mine=mine)
        world.run()

    _, task = attempt(1, world=world, mine=mine)
    world.run()

    assert task.emitted(RetryDenied)
    assert 10 <= sum(budget(world).calls) < 21
    assert mine.ledger.calls == 0


def test_a_denied_retry_waits_and_is_made() -> None:
    """No window of 60 s holds a third retry; then it is made, and the call succeeds."""
    world = World()
    last_s = exhaust(world)

    _, task = attempt(1, world=world)
    world.run()

    assert task.result.value == "value"
    (scheduled,) = (at for at, event in task.events if isinstance(event, RetryScheduled))
    assert scheduled - last_s >= 60.0
    denied = task.emitted(RetryDenied)
    assert denied
    assert {(event.used, event.quota, event.window_s) for event in denied} == {(2, 2, 60.0)}
    assert all(event.next_try_in_s > 0 for event in denied)


def test_one_that_is_alone_waits_hardly_longer_than_it_must() -> None:
    """What it has written itself it has seen: its buckets do not begin a look late."""
    lasted_s = []

    for seed in range(9):
        world, task = attempt(3, world=World(seed=seed))
        world.run()
        assert task.result.attempts == 4
        lasted_s.append(world.now_s)

    assert min(lasted_s) >= 60.0
    # Five buckets, and half of one for the jitter of each look in between.
    assert statistics.median(lasted_s) <= 5 * 15.0 + 4 * 7.5


def test_asking_again_writes_nothing_while_no_bucket_ends() -> None:
    """Denied ten times within a bucket, the budget's bytes are what they were."""
    world = World()
    exhaust(world)
    before = world.values[KEY]

    for name in range(10):
        attempt(1, world=world, name=name, when_open="raise", mine=member(f"host {name}"))
    world.run()

    assert world.values[KEY] == before


def test_a_denied_wait_is_no_silence() -> None:
    """It says what it waits for at least as often as the voice allows."""
    world = World()
    exhaust(world)

    _, task = attempt(1, world=world, voice_s=4.0)
    world.run()

    spoken = [at for at, event in task.events if isinstance(event, RetryDenied)]
    assert len(spoken) > 10
    assert max(after - before for before, after in pairwise(spoken)) <= 4.1


@pytest.mark.parametrize(("deadline_s", "waits"), [(0.5, False), (40.0, True)])
def test_the_deadline_ends_the_wait_for_the_budget(deadline_s: float, waits: bool) -> None:  # noqa: FBT001 - data
    """Where it would pass before there can be room, the call is given up before it, and says so."""
    world = World()
    exhaust(world)
    came_s = world.now_s

    _, task = attempt(1, world=world, policy=RetryPolicy(deadline_s=deadline_s, base_delay_s=0.01))
    world.run()

    assert isinstance(task.error, RetriesExhaustedError)
    reason = f"deadline_s={deadline_s:g} would pass before the job's retry budget has room"
    assert task.error.reason == reason
    assert reason in str(task.error)
    assert task.error.attempts == 1
    assert isinstance(task.error.__cause__, ConnectionResetError)
    assert bool(task.emitted(RetryDenied)) is waits
    assert world.now_s - came_s < deadline_s


def test_who_is_not_to_wait_is_told_that_the_budget_is_exhausted() -> None:
    """The error has the numbers, the attempts, the failure as its cause, and what to do."""
    world = World()
    exhaust(world)

    _, task = attempt(1, world=world, when_open="raise")
    world.run()

    error = task.error
    assert isinstance(error, BudgetExhaustedError)
    assert (error.dependency, error.used, error.quota, error.window_s) == (DEPENDENCY, 2, 2, 60.0)
    assert error.attempts == 1
    assert "ConnectionResetError: reset by peer" in error.last_error
    assert isinstance(error.__cause__, ConnectionResetError)
    for word in (DEPENDENCY, "2 of 2", "60 s", "retry_floor", "retry_ratio"):
        assert word in str(error)


def test_what_follows_an_open_circuit_is_not_charged() -> None:
    """The third failure trips the circuit: two retries were charged, and the third is not."""
    world = World()
    dependency = Dependency(world, heals_at_s=100.0)

    task = world.spawn(guarded(member(budget=BudgetConfig(), hosts=1), dependency, policy=PATIENT))
    world.run()

    assert task.error is None
    assert sum(at < 100.0 for at in dependency.calls) == 3
    # Nor is the store asked.
    reads = [effect for effect in task.performed if isinstance(effect, fx.MultiGet)]
    assert sum(KEY in effect.keys for effect in reads) == 2
    assert budget(world).retries == (2, 0, 0, 0, 0)


@pytest.mark.parametrize("state", ["open", "half_open", "recovering", "forced_open"])
def test_a_circuit_that_others_have_opened_meanwhile_is_not_charged(state: str) -> None:
    """The record is read with the budget: an open circuit makes the question void."""
    world = World()
    world, task = attempt(1, policy=RetryPolicy(deadline_s=200.0))

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        if isinstance(effect, fx.MultiGet) and KEY in effect.keys:
            put(world, state=state, limit=16 if state == "recovering" else 0, epoch=9)
        return None

    world.fault = fault
    world.run()

    assert KEY not in world.values
    assert task.ended


# --- several processes -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_eight_processes_that_charge_at_once_are_all_counted(seed: int) -> None:
    """Whoever loses a compare-and-set decides anew: eight retries are eight, and not one less."""
    world = World(seed=seed)
    tasks = [
        attempt(1, world=world, name=name, mine=member(f"host {name}", budget=BudgetConfig()))[1]
        for name in range(8)
    ]

    world.run()

    assert [task.error for task in tasks] == [None] * 8
    assert sum(budget(world).retries) == 8
    # No conflict was taken for a denial.
    assert not any(task.emitted(RetryDenied) for task in tasks)


def test_two_that_see_a_bucket_end_together_end_one() -> None:
    """Whoever was slower finds a bucket that has just begun, and does not end that as well."""
    world = World()
    circuits = [member(f"host {name}", budget=BudgetConfig()) for name in range(2)]
    for at_s in (0.0, 20.0):
        for name, mine in enumerate(circuits):
            attempt(1, world=world, mine=mine, name=name, at_s=at_s)
        world.run()

    assert budget(world).bucket == 1
    # How old the first two are taken to be depends on who of the two comes first.
    assert budget(world).retries in {(2, 2, 0, 0, 0), (2, 0, 2, 0, 0)}


def test_who_saw_a_bucket_begin_does_not_forget_what_others_have_just_charged() -> None:
    """After five buckets of not looking it finds retries of the last second, and is denied."""
    world = World()
    early, late = member("early"), member("late")
    attempt(1, world=world, mine=early, at_s=0.0)
    attempt(1, world=world, mine=late, name=1, at_s=86.0)
    world.run()

    _, task = attempt(1, world=world, mine=early, at_s=90.0)
    world.run()

    assert task.emitted(RetryDenied)
    assert task.result.value == "value"


def test_those_who_are_denied_together_ask_again_apart() -> None:
    """Eight that wait for the same bucket's end come over the length of a bucket."""
    world = World()
    exhaust(world)
    tasks = [
        attempt(1, world=world, name=name, mine=member(f"host {name}"))[1] for name in range(8)
    ]
    asked: dict[int, list[float]] = {}

    def fault(task: Task, _index: int, effect: Effect) -> Fault | None:
        if isinstance(effect, fx.MultiGet):
            asked.setdefault(task.name, []).append(world.now_s)
        return None

    world.fault = fault
    world.run()

    seconds = sorted(instants[1] for instants in asked.values())
    assert len(tasks) == len(seconds) == 8
    assert seconds[-1] - seconds[0] > 5.0


def saves(mine: Circuit, dependency: Dependency, *, count: int) -> Protocol[None]:
    """Calls one after the other, each of which fails now and then."""
    for turn in range(count):
        yield from guarded(
            mine,
            dependency,
            policy=PATIENT,
            work=failing(dependency, 1 + turn % 3),
            store_patience_s=5.0,
        )
        yield fx.Sleep(3.0 + turn % 4 * 11.0)


@pytest.mark.parametrize("share", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(3))
def test_eight_processes_make_no_more_retries_than_the_quota_in_any_window(
    seed: int, share: float
) -> None:
    """Whatever they ask and when, and with answers lost, at most the floor within 60 s."""
    world = World(seed=seed)
    dice = world._random

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        store = isinstance(effect, STORE_EFFECTS) and share > 0
        return (
            Lost()
            if store and effect.__class__ is not fx.MultiGet and dice.random() < share
            else None
        )

    config = BudgetConfig(retry_ratio=0.0, retry_floor=6)
    circuits = [member(f"host {name}", budget=config) for name in range(8)]
    for name, mine in enumerate(circuits):
        world.spawn(begin(mine, new_incarnation=True), name=name)
    world.run()
    world.tasks.clear()
    world.fault = fault
    dependency = Dependency(world)
    tasks = [
        world.spawn(saves(mine, dependency, count=4), name=name)
        for name, mine in enumerate(circuits)
    ]
    world.run()

    assert [task.error for task in tasks] == [None] * 8
    granted = sorted(
        at for task in tasks for at, event in task.events if isinstance(event, RetryScheduled)
    )
    assert len(granted) >= 8 * (1 + 2 + 3 + 1)
    in_a_window = [sum(0 <= at - start < 60.0 for at in granted) for start in granted]
    assert max(in_a_window) <= 6
    # And the budget is used, not only kept.
    assert max(in_a_window) == 6


# --- the store -------------------------------------------------------------------------------


def charged_with(fault: Fault, *, at: int) -> tuple[World, Task, bool]:
    """A call with one retry; the operation of this number on the budget has a fault."""
    world, task = attempt(1, store_patience_s=5.0)
    seen = 0

    def strike(_task: Task, _index: int, effect: Effect) -> Fault | None:
        nonlocal seen
        keys = effect.keys if isinstance(effect, fx.MultiGet) else (getattr(effect, "key", ""),)
        seen += KEY in keys
        return fault if KEY in keys and seen == at else None

    world.fault = strike
    world.run()
    return world, task, seen >= at


@pytest.mark.parametrize("fault", [Lost(), Away()])
def test_a_charge_whose_answer_is_lost_is_counted_once(fault: Fault) -> None:
    """Operation by operation of the charge: one retry in the record, whatever was lost."""
    at, struck = 1, True
    while struck:
        world, task, struck = charged_with(fault, at=at)
        assert task.result.value == "value"
        assert budget(world).retries == (1, 0, 0, 0, 0)
        at += struck

    # The read, the record's creation and the charge.
    assert at == 4


def test_a_budget_that_was_lost_begins_anew() -> None:
    """The store came back empty: the record is made again, and told apart from the one before."""
    world = World()
    exhaust(world)
    before = budget(world)
    world.values.clear()

    _, task = attempt(1, world=world)
    world.run()

    assert task.emitted(RetryDenied) == []
    assert budget(world).origin != before.origin
    assert budget(world).retries == (1, 0, 0, 0, 0)


@pytest.mark.parametrize("when_open", ["wait", "raise"])
def test_a_budget_that_vanishes_under_the_charge_is_no_denial(when_open: str) -> None:
    """Emptied between read and write, it is asked again; nobody is told that it is exhausted."""
    world, task = attempt(1, when_open=when_open)
    emptied = 0

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        nonlocal emptied
        if isinstance(effect, fx.CompareAndSet) and effect.key == KEY and effect.expected:
            emptied += 1
            if emptied == 1:
                world.values.clear()
        return None

    world.fault = fault
    world.run()

    assert emptied == 2
    assert task.error is None
    assert task.result.attempts == 2
    assert budget(world).retries == (1, 0, 0, 0, 0)


def test_without_patience_the_stores_failure_is_the_callers() -> None:
    """In a joint operation the failure is raised as it is, with the attempt's as its cause."""
    world, task = attempt(1)
    world.fault = lambda _task, _index, effect: (
        Away() if isinstance(effect, fx.MultiGet) and KEY in effect.keys else None
    )

    world.run()

    assert isinstance(task.error, StoreUnavailableError)
    assert isinstance(task.error.__cause__, ConnectionResetError)
