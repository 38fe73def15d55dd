# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A guarded call: gate, attempt, report, and what follows."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from lightning_resilience.core.events import (
    AttemptFailed,
    CallAbandoned,
    RetriesExhausted,
    RetryScheduled,
)
from lightning_resilience.core.outcome import with_user_classifier
from lightning_resilience.core.records import SlotRecord, decode
from lightning_resilience.core.retry import RetryPolicy
from lightning_resilience.errors import (
    CallTimeoutError,
    CircuitOpenError,
    CorruptRecordError,
    RetriesExhaustedError,
    StoreUnavailableError,
)
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.circuit import begin
from lightning_resilience.protocols.probe import Patience
from tests.scenes import (
    CONFIG,
    DEPENDENCY,
    KEYS,
    POLICY,
    Dependency,
    circuit,
    guarded,
    patience,
    put,
    record,
    states,
)
from tests.scripted_driver import Away, Fault, Interrupt, Task, World


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Effect


FOREVER_S = 1e9


@dataclass
class RefusedError(Exception):
    """A failure with the code that a storage library would put in it."""

    code: str

    @property
    def response(self) -> dict[str, dict[str, str]]:
        """Where botocore puts the code."""
        return {"Error": {"Code": self.code}}


def attempt(
    *errors: BaseException,
    world: World | None = None,
    hosts: int = 100,
    mine: Circuit | None = None,
    policy: RetryPolicy = POLICY,
    **options: Any,
) -> tuple[Task, Dependency]:
    """Run a guarded call whose first attempts fail with ``errors``; the next one succeeds.

    With so many hosts one host's failures do not trip the circuit.
    """
    world = world or World()
    dependency = Dependency(world)
    left = list(errors)

    def work(token: Any) -> str:
        dependency.call(token)
        if left:
            raise left.pop(0)
        return "value"

    task = world.spawn(
        guarded(mine or circuit(hosts=hosts), dependency, policy=policy, work=work, **options)
    )
    world.run()
    return task, dependency


def exhausted(task: Task) -> RetriesExhaustedError:
    """The error with which the policy ended."""
    assert isinstance(task.error, RetriesExhaustedError)
    return task.error


def test_a_call_that_succeeds_is_made_once() -> None:
    """The value comes back, with one attempt and no event."""
    task, dependency = attempt()

    assert (task.result.value, task.result.attempts) == ("value", 1)
    assert len(dependency.calls) == 1
    assert task.events == []


def test_a_closed_circuit_costs_a_call_no_store_operation() -> None:
    """Under a fresh closed view neither the gate nor the report reaches for the store."""
    world = World()
    mine = circuit()
    world.spawn(begin(mine, new_incarnation=True))
    world.run()
    task = world.spawn(guarded(mine, Dependency(world)))

    world.run()

    assert task.store_operations() == 0


def test_a_transient_failure_is_retried() -> None:
    """The third attempt succeeds; both failures and both delays were reported."""
    task, _ = attempt(ConnectionResetError("1"), ConnectionResetError("2"))

    assert task.result.attempts == 3
    assert [event.attempt for event in task.emitted(AttemptFailed)] == [1, 2]
    assert [event.attempt for event in task.emitted(RetryScheduled)] == [2, 3]


def test_max_attempts_is_the_number_of_calls() -> None:
    """Five attempts are five calls, the first included, and no sixth."""
    errors = [ConnectionResetError(str(number)) for number in range(9)]

    task, dependency = attempt(*errors)

    error = exhausted(task)
    assert len(dependency.calls) == error.attempts == POLICY.max_attempts
    assert "max_attempts=5" in str(error)
    assert error.__cause__ is errors[4]
    (given_up,) = task.emitted(RetriesExhausted)
    assert given_up.attempts == 5


def test_a_permanent_failure_takes_exactly_one_attempt() -> None:
    """Refused is refused: one call, the user's exception is the cause, and nothing is tripped."""
    error = RefusedError("AccessDenied")

    task, dependency = attempt(error)

    assert len(dependency.calls) == 1
    assert exhausted(task).__cause__ is error
    assert exhausted(task).failure == "permanent"
    assert task.emitted(RetryScheduled) == []


def test_a_full_disk_is_not_hammered() -> None:
    """No space left takes one attempt."""
    task, dependency = attempt(OSError(errno.ENOSPC, "No space left on device"))

    assert len(dependency.calls) == 1
    assert exhausted(task).failure == "capacity"


def test_unknown_failures_have_a_small_limit_of_their_own() -> None:
    """What nobody knows may be a bug: two attempts, not five."""
    task, dependency = attempt(*[ValueError("?") for _ in range(9)])

    assert len(dependency.calls) == POLICY.unknown_max_attempts
    assert exhausted(task).failure == "unknown"


def test_unknown_failures_between_others_are_counted_together() -> None:
    """The limit of unknown failures does not start anew after a transient one."""
    task, dependency = attempt(ValueError("?"), ConnectionResetError("x"), ValueError("?"))

    assert exhausted(task).failure == "unknown"
    assert len(dependency.calls) == 3


def test_expired_credentials_rebuild_the_client_once() -> None:
    """The first refusal rebuilds the client, at once; the call then succeeds."""
    rebuilt: list[int] = []

    task, _ = attempt(RefusedError("ExpiredToken"), rebuild=lambda: rebuilt.append(1))

    assert rebuilt == [1]
    assert task.result.attempts == 2
    assert task.emitted(RetryScheduled) == []


def test_credentials_refused_twice_are_permanent() -> None:
    """A fresh client that is refused as well ends the call."""
    rebuilt: list[int] = []

    task, dependency = attempt(
        *[RefusedError("ExpiredToken") for _ in range(5)], rebuild=lambda: rebuilt.append(1)
    )

    assert (rebuilt, len(dependency.calls)) == ([1], 2)
    assert exhausted(task).failure == "auth"


def test_a_stale_cache_is_dropped_and_the_call_repeated_at_once() -> None:
    """What was cached is out of date: drop it, no delay."""
    dropped: list[int] = []
    stale = type("FileExpired", (OSError,), {})

    task, _ = attempt(stale("changed"), drop_caches=lambda: dropped.append(1))

    assert dropped == [1]
    assert task.result.attempts == 2
    slept = [effect.duration_s for effect in task.performed if isinstance(effect, fx.Sleep)]
    assert slept == []
    assert task.result.elapsed_s < 0.1


def test_stale_answers_for_ever_end() -> None:
    """Stale counts as an attempt, so an endless one is bounded."""
    stale = type("FileExpired", (OSError,), {})

    task, dependency = attempt(*[stale("changed") for _ in range(99)])

    assert len(dependency.calls) == POLICY.max_attempts
    assert exhausted(task).failure == "stale"


def test_a_call_that_never_returns_is_abandoned() -> None:
    """At the stall timeout the attempt is transient, its token is set, and the next one follows."""
    world = World()
    tokens = []

    def work(token: Any) -> str:
        tokens.append(token)
        token.progress(sent=7)
        token.spend(FOREVER_S if len(tokens) == 1 else 0.1)
        return "value"

    task = world.spawn(guarded(circuit(), Dependency(world), work=work))
    world.run(limit_s=200)

    assert task.result.attempts == 2
    assert [token.cancelled for token in tokens] == [True, False]
    (failed,) = task.emitted(AttemptFailed)
    (abandoned,) = task.emitted(CallAbandoned)
    assert (failed.failure, abandoned.timeout_s) == ("transient", POLICY.stall_timeout_s)
    assert abandoned.moved == "7 bytes sent"


def test_hangs_trip_the_circuit() -> None:
    """Calls that hang count against the dependency like calls that fail."""
    world = World()
    dependency = Dependency(world, lasts_s=FOREVER_S)
    world.spawn(guarded(circuit(), dependency))
    world.at(280.0, lambda: setattr(dependency, "lasts_s", 0.1))

    world.run(limit_s=2000)

    assert "open" in states(world)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interruption_is_never_retried(error: BaseException) -> None:
    """Ctrl-C inside the work passes through at once, as it is, and is no attempt that failed."""
    task, dependency = attempt(error)

    assert task.error is error
    assert len(dependency.calls) == 1
    assert task.emitted(AttemptFailed) == []


@pytest.mark.parametrize("kind", [fx.Call, fx.Sleep, fx.WaitFor])
def test_an_interruption_of_any_wait_passes(kind: type) -> None:
    """Interrupted in a call, in a delay or on the bell: what was thrown in comes out."""
    interruption = KeyboardInterrupt()

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        return Interrupt(interruption) if isinstance(effect, kind) else None

    world = World(fault=fault)
    dependency = Dependency(world, heals_at_s=FOREVER_S)
    task = world.spawn(guarded(circuit(), dependency))

    world.run(limit_s=200)

    assert task.error is interruption


def test_an_outage_longer_than_all_attempts_is_survived() -> None:
    """Attempts while the circuit is not closed do not count: ten minutes of outage fail no call."""
    world = World()
    dependency = Dependency(world, heals_at_s=600.0)
    task = world.spawn(guarded(circuit(), dependency))

    world.run(limit_s=1000)

    assert task.error is None
    assert len(dependency.calls) <= POLICY.max_attempts
    assert task.ended_at_s == pytest.approx(600.0, abs=CONFIG.max_open_for_s + 10)


def test_failures_while_recovering_do_not_count() -> None:
    """Probes are answered but calls fail: each failed ramp opens again, and no limit is reached."""
    world = World()
    dependency = Dependency(world)
    calls: list[float] = []

    def work(token: Any) -> str:
        calls.append(world.now_s)
        token.spend(0.1)
        if len(calls) < 12:
            raise ConnectionResetError("x")
        return "value"

    task = world.spawn(guarded(circuit(), dependency, work=work))
    world.run(limit_s=2000)

    assert task.result.attempts == 12


def test_an_attempt_that_ends_after_others_tripped_does_not_count() -> None:
    """It began under a closed circuit and ended under an open one: the outage's business."""
    world = World()
    dependency = Dependency(world)
    policy = RetryPolicy(max_attempts=1, unknown_max_attempts=1)
    left = [1]

    def work(token: Any) -> str:
        token.spend(20.0)
        if left:
            left.pop()
            raise ConnectionResetError("x")
        return "value"

    task = world.spawn(guarded(circuit(hosts=100), dependency, policy=policy, work=work))
    world.at(10.0, lambda: put(world, state="open", epoch=2, generation=1))
    world.run(limit_s=200)

    assert task.error is None
    assert task.result.attempts == 2


@pytest.mark.parametrize("state", ["recovering", "open"])
def test_a_failure_from_before_an_outage_says_nothing_about_its_end(state: str) -> None:
    """An attempt that an old view let through is a result of that epoch, however late it ends."""
    world = World()
    mine = circuit()
    world.spawn(begin(mine, new_incarnation=True))
    world.run()
    before = mine.view
    put(world, state=state, epoch=9, generation=1, limit=4 if state == "recovering" else 0)

    task, dependency = attempt(
        ConnectionResetError("old"), world=world, mine=mine, let_through=before
    )

    assert task.result.attempts == 2
    assert len(dependency.calls) == 2
    assert "a call failed" not in " ".join(entry.reason for entry in record(world).history)
    assert states(world)[-1] != "open"


@pytest.mark.parametrize("strikes", [fx.Get, fx.MultiGet])
@pytest.mark.parametrize("patience_s", [None, 0.0])
def test_a_store_that_goes_away_leaves_the_users_failure_as_the_cause(
    patience_s: float | None, strikes: type[Effect]
) -> None:
    """While a failure is reported, or while its retry asks to be let in again."""
    world = World()

    def fault(_task: Task, _index: int, effect: Effect) -> Fault | None:
        return Away() if dependency.calls and isinstance(effect, strikes) else None

    mine = circuit(hosts=100)
    dependency = Dependency(world, heals_at_s=FOREVER_S)
    world.fault = fault
    world.spawn(begin(mine, new_incarnation=True))
    # So long that the view of before has grown too old when the retry comes.
    policy = RetryPolicy(base_delay_s=30.0)
    task = world.spawn(
        guarded(mine, dependency, policy=policy, store_patience_s=patience_s), at_s=1.0
    )
    world.run()

    assert isinstance(task.error, StoreUnavailableError)
    assert isinstance(task.error.__cause__, ConnectionResetError)


@pytest.mark.parametrize("fails", [False, True])
def test_a_record_that_does_not_decode_costs_no_result(fails: bool) -> None:  # noqa: FBT001 - data
    """A call that succeeded returns; one that failed says so below what is wrong with the store."""
    world = World()
    mine = circuit()
    world.spawn(begin(mine, new_incarnation=True))
    world.run()
    put(world, state="recovering", epoch=9, generation=1, limit=4)

    def work(_token: CancelToken) -> str:
        world.values[KEYS.breaker(DEPENDENCY)] = b"not a record"
        if fails:
            raise ConnectionResetError("reset by peer")
        return "value"

    task = world.spawn(guarded(mine, Dependency(world), work=work), at_s=10.0)
    world.run()

    keys = [KEYS.slot(DEPENDENCY, index) for index in range(CONFIG.max_concurrent)]
    (raw,) = [world.values[key] for key in keys if key in world.values]
    assert decode(SlotRecord, raw, key="slot").holder == ""
    if fails:
        assert isinstance(task.error, CorruptRecordError)
        assert isinstance(task.error.__cause__, ConnectionResetError)
    else:
        assert task.result.value == "value"


def test_the_deadline_bounds_everything() -> None:
    """A dependency that never heals ends the call at deadline_s, with the failure as the cause."""
    world = World()
    dependency = Dependency(world, heals_at_s=FOREVER_S)
    task = world.spawn(guarded(circuit(), dependency))

    world.run(limit_s=POLICY.deadline_s + 10)

    assert isinstance(task.error, CircuitOpenError)
    assert isinstance(task.error.__cause__, ConnectionResetError)
    assert task.error.attempts == CONFIG.trip_failures
    assert "reset by peer" in task.error.last_error


def test_a_delay_past_the_deadline_is_not_begun() -> None:
    """Where the next attempt would come too late, the call is given up now."""
    policy = RetryPolicy(deadline_s=1.0, base_delay_s=30.0, max_delay_s=30.0)

    task, dependency = attempt(*[ConnectionResetError("x") for _ in range(9)], policy=policy)

    assert "deadline_s=1" in str(exhausted(task))
    assert task.ended_at_s is not None
    assert task.ended_at_s < 1.0 + 0.1
    assert len(dependency.calls) < POLICY.max_attempts


def test_retry_after_is_a_floor() -> None:
    """Storage that asks to stay away for 20 s is left alone for 20 s, and then jitter is added."""
    error = RefusedError("SlowDown")
    error.retry_after_s = 20.0  # type: ignore[attr-defined]

    task, dependency = attempt(error)

    first, second = dependency.calls
    assert 20.0 <= second - first <= 20.0 + POLICY.throttle_base_delay_s + 0.1
    (scheduled,) = task.emitted(RetryScheduled)
    assert scheduled.failure == "throttle"


def test_delays_of_ranks_differ() -> None:
    """Eight ranks that fail together come back at eight different times."""
    world = World(seed=5)
    dependency = Dependency(world, heals_at_s=0.5)
    for name in range(8):
        world.spawn(guarded(circuit(hosts=100), dependency), name=name)

    world.run(limit_s=200)

    retries = sorted(dependency.calls[8:])
    assert len({round(instant, 3) for instant in retries}) == len(retries)


def test_the_circuit_decides_when_to_come_back_not_the_backoff() -> None:
    """An attempt that tripped the circuit is followed by the gate, without a delay before it."""
    world = World()
    dependency = Dependency(world, heals_at_s=5.0)
    task = world.spawn(guarded(circuit(), dependency))

    world.run(limit_s=100)

    assert len(task.emitted(RetryScheduled)) == CONFIG.trip_failures - 1
    assert task.error is None


def test_who_may_not_wait_gets_the_failure_as_the_cause() -> None:
    """With when_open="raise" the attempt that tripped the circuit is the cause of the refusal."""
    world = World()
    dependency = Dependency(world, heals_at_s=FOREVER_S)
    waiting = patience(dependency, when_open="raise")
    task = world.spawn(guarded(circuit(), dependency, waiting=waiting))

    world.run(limit_s=100)

    assert isinstance(task.error, CircuitOpenError)
    assert task.error.attempts == CONFIG.trip_failures
    assert isinstance(task.error.__cause__, ConnectionResetError)
    assert len(dependency.calls) == CONFIG.trip_failures


def test_the_error_says_what_happened_with_the_numbers() -> None:
    """The text names operation, target, dependency, attempts, class and the last failure."""
    task, _ = attempt(*[ConnectionResetError("reset by peer") for _ in range(9)])

    text = str(exhausted(task))
    for part in ("save", "a.ckpt", DEPENDENCY, "5 attempts", "transient", "reset by peer"):
        assert part in text


@pytest.mark.parametrize("ranks", [2, 8])
def test_requests_in_an_outage_are_bounded(ranks: int) -> None:
    """What reaches an ill dependency after the trip is probes, whatever the number of ranks."""
    world = World(seed=ranks)
    dependency = Dependency(world, heals_at_s=400.0)
    for name in range(ranks):
        world.spawn(guarded(circuit(), dependency), name=name)

    world.run(limit_s=1000)

    during = [at for at in dependency.calls if 10.0 < at < 400.0]
    assert len(during) <= 2 * ranks
    assert len(dependency.probes) <= 12


def test_a_timeout_of_the_work_itself_is_no_abandoned_call() -> None:
    """A CallTimeoutError is reported as abandoned once, with its attempt."""
    task, _ = attempt(CallTimeoutError("stalled"))

    assert [event.attempt for event in task.emitted(CallAbandoned)] == [1]
    assert task.result.attempts == 2


def test_work_that_raises_stop_iteration_is_a_failure_like_others() -> None:
    """StopIteration out of the work does not end the guard's own generator."""
    task, _ = attempt(*[StopIteration("odd") for _ in range(9)])

    assert exhausted(task).failure == "unknown"


def raising(*errors: BaseException) -> tuple[list[int], Callable[[], None]]:
    """A recovery that raises ``errors`` one after the other and then succeeds, and its tries."""
    tries: list[int] = []
    left = list(errors)

    def recover() -> None:
        tries.append(1)
        if left:
            raise left.pop(0)

    return tries, recover


REFRESH_ERROR = type("RefreshError", (Exception,), {})("no refresh token")


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (REFRESH_ERROR, "permanent"),
        (OSError(errno.ENOSPC, "No space left on device"), "capacity"),
        (RefusedError("ExpiredToken"), "auth"),
        (RuntimeError("no credentials helper"), "auth"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_a_rebuild_that_fails_for_good_ends_the_call(error: Exception, failure: str) -> None:
    """One try; the refusal is the cause, both errors are named, the more severe class counts."""
    tries, rebuild = raising(*[error] * 9)
    refused = RefusedError("ExpiredToken")

    task, dependency = attempt(refused, rebuild=rebuild)

    assert (len(tries), len(dependency.calls)) == (1, 1)
    ended = exhausted(task)
    assert ended.__cause__ is refused
    assert (ended.failure, ended.attempts) == (failure, 1)
    assert "rebuild of the client failed" in str(ended)
    assert type(error).__name__ in str(ended)
    assert type(error).__name__ in ended.last_error
    assert "RefusedError" in ended.last_error
    assert task.emitted(RetryScheduled) == []


def test_a_rebuild_without_a_route_is_tried_again() -> None:
    """What passes is waited for, and said; then the call is repeated with the fresh client."""
    tries, rebuild = raising(ConnectionResetError("1"), ConnectionResetError("2"))

    task, dependency = attempt(RefusedError("ExpiredToken"), rebuild=rebuild)

    assert (len(tries), len(dependency.calls)) == (3, 2)
    assert task.result.attempts == 2
    told = [(event.operation, event.attempt) for event in task.emitted(AttemptFailed)]
    rebuilds = "rebuild of the client for save"
    assert told == [("save", 1), (rebuilds, 1), (rebuilds, 2)]
    assert [event.attempt for event in task.emitted(RetryScheduled)] == [2, 3]


def test_a_rebuild_that_never_finds_a_route_is_bounded() -> None:
    """All tries of one rebuild, the refused attempt included, are max_attempts."""
    tries, rebuild = raising(*[ConnectionResetError("no route")] * 99)

    task, dependency = attempt(RefusedError("ExpiredToken"), rebuild=rebuild)

    assert (len(tries), len(dependency.calls)) == (POLICY.max_attempts - 1, 1)
    assert exhausted(task).failure == "auth"
    assert "max_attempts=5" in str(exhausted(task))
    assert "no route" in str(exhausted(task))


def test_a_rebuild_past_the_deadline_is_not_tried_again() -> None:
    """The deadline of the operation bounds its rebuilds as well."""
    policy = RetryPolicy(deadline_s=0.5, base_delay_s=30.0, max_delay_s=30.0)
    tries, rebuild = raising(*[ConnectionResetError("no route")] * 99)

    task, _ = attempt(RefusedError("ExpiredToken"), rebuild=rebuild, policy=policy)

    assert len(tries) < POLICY.max_attempts - 1
    assert "deadline_s=0.5" in str(exhausted(task))


def test_a_rebuild_is_abandoned_like_an_attempt() -> None:
    """Both recoveries have stall_timeout_s, and not the timeout of work that marks no progress."""
    world = World()
    stale = type("FileExpired", (OSError,), {})

    task, _ = attempt(
        RefusedError("ExpiredToken"), stale("changed"), world=world, timeout_s=FOREVER_S
    )

    calls = [effect for effect in task.performed if isinstance(effect, fx.Call)]
    stall_s = POLICY.stall_timeout_s
    assert [call.timeout_s for call in calls] == [FOREVER_S, stall_s, FOREVER_S, stall_s, FOREVER_S]


def test_a_rebuild_runs_where_the_attempts_run() -> None:
    """A call that has no thread of its own has none for its recoveries either."""
    task, _ = attempt(RefusedError("ExpiredToken"), has_thread=False)

    calls = [effect for effect in task.performed if isinstance(effect, fx.Call)]
    assert [call.timeout_s for call in calls] == [None, None, None]


def test_caches_that_cannot_be_dropped_end_the_call() -> None:
    """The stale answer is the cause, and the error of the drop is named."""
    stale = type("FileExpired", (OSError,), {})("changed")
    tries, drop = raising(*[TypeError("a bug")] * 9)

    task, dependency = attempt(stale, drop_caches=drop)

    assert (len(tries), len(dependency.calls)) == (1, 1)
    assert exhausted(task).__cause__ is stale
    assert "drop of the caches failed" in str(exhausted(task))
    assert "TypeError: a bug" in str(exhausted(task))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interruption_of_a_rebuild_passes(error: BaseException) -> None:
    """Ctrl-C while the client is rebuilt comes out as it is."""
    tries, rebuild = raising(error)

    task, dependency = attempt(RefusedError("ExpiredToken"), rebuild=rebuild)

    assert task.error is error
    assert (len(tries), len(dependency.calls)) == (1, 1)


@pytest.mark.parametrize("judgement", ["permanent", "transient"])
def test_the_classifier_of_the_caller_decides(judgement: str) -> None:
    """A user's classifier turns an unknown failure into what it says."""
    world = World()
    classified = Patience(
        probe=Dependency(world).probe, classify=with_user_classifier(lambda _exc: judgement)
    )

    task, _ = attempt(*[ValueError("?") for _ in range(9)], world=world, waiting=classified)

    assert exhausted(task).failure == judgement
