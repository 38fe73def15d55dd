# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What follows a failed attempt, by class of failure, health, limits and time."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from lightning_resilience.core import retry
from lightning_resilience.core.outcome import FailureClass, Outcome
from lightning_resilience.core.retry import RetryAction, RetryDecision, RetryPolicy, RetryState
from lightning_resilience.errors import RetriesExhaustedError


POLICY = RetryPolicy()
START_S = 5000.0
OUTAGE = (FailureClass.TRANSIENT, FailureClass.THROTTLE, FailureClass.UNKNOWN)
NOT_HEALTH = (FailureClass.AUTH, FailureClass.STALE)
ONE_ATTEMPT = (
    FailureClass.PERMANENT,
    FailureClass.CAPACITY,
    FailureClass.CANCELLED,
    FailureClass.LOST,
)


def decide(
    failure: FailureClass | None = FailureClass.TRANSIENT,
    *,
    policy: RetryPolicy = POLICY,
    healthy: bool = True,
    elapsed_s: float = 0.0,
    draw: float = 0.5,
    retry_after_s: float | None = None,
    **before: Any,
) -> RetryDecision:
    """Decide after one failed attempt of an operation with this past."""
    state = dataclasses.replace(RetryState(started_at_s=START_S), **before)
    return retry.decide(
        policy,
        state,
        Outcome(failure=failure, retry_after_s=retry_after_s),
        healthy=healthy,
        now_s=START_S + elapsed_s,
        draw=draw,
    )


# The table of the module's docstring: action, and delay for a draw of one half, after attempt 1.
TABLE = {
    FailureClass.TRANSIENT: (RetryAction.RETRY, 0.5),
    FailureClass.THROTTLE: (RetryAction.RETRY, 2.0),
    FailureClass.UNKNOWN: (RetryAction.RETRY, 0.5),
    FailureClass.AUTH: (RetryAction.REBUILD_CLIENT, 0.0),
    FailureClass.STALE: (RetryAction.DROP_CACHES, 0.0),
    FailureClass.CAPACITY: (RetryAction.GIVE_UP, 0.0),
    FailureClass.PERMANENT: (RetryAction.GIVE_UP, 0.0),
    FailureClass.CANCELLED: (RetryAction.GIVE_UP, 0.0),
    FailureClass.LOST: (RetryAction.GIVE_UP, 0.0),
}


def test_every_class_has_its_row() -> None:
    """The table says something about every class of failure."""
    assert set(TABLE) == set(FailureClass)
    assert set(OUTAGE + NOT_HEALTH + ONE_ATTEMPT) == set(FailureClass)


@pytest.mark.parametrize("healthy", [True, False], ids=["closed", "not closed"])
@pytest.mark.parametrize("failure", FailureClass)
def test_the_first_failure_is_answered_by_its_class(
    failure: FailureClass,
    healthy: bool,  # noqa: FBT001 - data
) -> None:
    """After the first attempt the class alone decides what follows, in an outage or not."""
    action, delay_s = TABLE[failure]

    decision = decide(failure, healthy=healthy)

    assert (decision.action, decision.delay_s) == (action, delay_s)
    assert decision.reason
    assert decision.state.attempts == 1


def test_a_failure_without_a_class_is_unknown() -> None:
    """An outcome that nobody classified has the small limit of the unknown ones."""
    assert decide(None).state.unknown == 1
    assert decide(None, attempts=1, counted=1, unknown=1).action is RetryAction.GIVE_UP


@pytest.mark.parametrize("healthy", [True, False], ids=["closed", "not closed"])
@pytest.mark.parametrize("failure", ONE_ATTEMPT)
def test_what_repeating_cannot_mend_takes_one_attempt(
    failure: FailureClass,
    healthy: bool,  # noqa: FBT001 - data
) -> None:
    """A permanent failure, a full disk and a cancellation end the operation, however early."""
    policy = RetryPolicy(max_attempts=100, unknown_max_attempts=100)

    decision = decide(failure, policy=policy, healthy=healthy, retry_after_s=60.0)

    assert decision.action is RetryAction.GIVE_UP
    assert decision.state.attempts == 1


@pytest.mark.parametrize("failure", OUTAGE + NOT_HEALTH)
@pytest.mark.parametrize(("counted", "more"), [(0, True), (3, True), (4, False), (7, False)])
def test_max_attempts_bounds_attempts_at_a_healthy_dependency(
    failure: FailureClass,
    counted: int,
    more: bool,  # noqa: FBT001 - data
) -> None:
    """The fifth attempt is the last, whatever it fails with, a refused credential included."""
    decision = decide(failure, attempts=counted, counted=counted)

    assert (decision.action is not RetryAction.GIVE_UP) is more
    assert decision.state.counted == counted + 1
    if not more:
        assert "max_attempts=5" in decision.reason


@pytest.mark.parametrize("failure", FailureClass)
def test_an_attempt_in_an_outage_does_not_count(failure: FailureClass) -> None:
    """What fails for the dependency's sake while its circuit is not closed uses up no attempt."""
    decision = decide(failure, healthy=False, attempts=50, counted=3)

    assert decision.state.counted == (3 if failure in OUTAGE else 4)
    assert decision.state.attempts == 51


@pytest.mark.parametrize("failure", [FailureClass.TRANSIENT, FailureClass.THROTTLE])
def test_an_outage_outlasts_every_number_of_attempts(failure: FailureClass) -> None:
    """A thousand failures while the circuit is not closed do not end an operation."""
    decision = decide(failure, healthy=False, attempts=1000, counted=4)

    assert decision.action is RetryAction.RETRY


def test_stale_caches_do_not_spin_in_an_outage() -> None:
    """A cache that stays stale says nothing about health: it is bounded in an outage as well."""
    state = RetryState(started_at_s=START_S)

    for expected in [*[RetryAction.DROP_CACHES] * 4, RetryAction.GIVE_UP]:
        decision = retry.decide(
            POLICY,
            state,
            Outcome(failure=FailureClass.STALE),
            healthy=False,
            now_s=START_S,
            draw=0.5,
        )
        state = decision.state
        assert decision.action is expected


@pytest.mark.parametrize("healthy", [True, False], ids=["closed", "not closed"])
def test_unknown_failures_have_a_limit_of_their_own(
    healthy: bool,  # noqa: FBT001 - data
) -> None:
    """The second unknown failure ends the operation, also where it does not count as attempt."""
    first = decide(FailureClass.UNKNOWN, healthy=healthy)
    second = decide(FailureClass.UNKNOWN, healthy=healthy, attempts=1, unknown=1)

    assert first.action is RetryAction.RETRY
    assert second.action is RetryAction.GIVE_UP
    assert "unknown_max_attempts=2" in second.reason


def test_known_failures_do_not_use_the_limit_of_unknown_ones() -> None:
    """After an unknown failure, transient ones go on to the full number of attempts."""
    decision = decide(FailureClass.TRANSIENT, attempts=3, counted=3, unknown=2)

    assert decision.action is RetryAction.RETRY
    assert decision.state.unknown == 2


@pytest.mark.parametrize("healthy", [True, False], ids=["closed", "not closed"])
def test_the_client_is_rebuilt_once(healthy: bool) -> None:  # noqa: FBT001 - data
    """Refused credentials rebuild the client at once; refused again, they are permanent."""
    first = decide(FailureClass.AUTH, healthy=healthy)
    second = decide(FailureClass.AUTH, healthy=healthy, attempts=1, rebuilt=True)

    assert (first.action, first.delay_s) == (RetryAction.REBUILD_CLIENT, 0.0)
    assert first.state.rebuilt
    assert second.action is RetryAction.GIVE_UP
    assert "credentials" in second.reason


@pytest.mark.parametrize("failure", sorted(set(FailureClass) - {FailureClass.AUTH}))
def test_only_refused_credentials_rebuild_the_client(failure: FailureClass) -> None:
    """No other failure marks the client as rebuilt, nor forgets that it was."""
    assert not decide(failure).state.rebuilt
    assert decide(failure, rebuilt=True).state.rebuilt


@pytest.mark.parametrize(
    ("failure", "attempts", "upper_s"),
    [
        (FailureClass.TRANSIENT, 0, 1.0),
        (FailureClass.TRANSIENT, 3, 8.0),
        (FailureClass.TRANSIENT, 5, 30.0),
        (FailureClass.UNKNOWN, 1, 2.0),
        (FailureClass.THROTTLE, 0, 4.0),
        (FailureClass.THROTTLE, 2, 16.0),
        (FailureClass.THROTTLE, 3, 30.0),
        (FailureClass.THROTTLE, 10**9, 30.0),
    ],
)
def test_delays_are_full_jitter(failure: FailureClass, attempts: int, upper_s: float) -> None:
    """The delay is a share of the bound that doubles from the class's own base up to the cap."""
    delays = [
        decide(failure, attempts=attempts, draw=draw, healthy=False).delay_s
        for draw in (0.0, 0.25, 0.75)
    ]

    assert delays == [0.0, upper_s / 4, upper_s * 3 / 4]


@pytest.mark.parametrize("failure", [FailureClass.THROTTLE, FailureClass.TRANSIENT])
@pytest.mark.parametrize(
    ("asked_s", "floor_s"), [(0.0, 0.0), (7.5, 7.5), (120.0, 120.0), (121.0, 120.0), (1e9, 120.0)]
)
def test_retry_after_is_a_bounded_floor(
    failure: FailureClass, asked_s: float, floor_s: float
) -> None:
    """No delay is below Retry-After, up to the longest that is honoured; jitter comes on top."""
    base_s = POLICY.throttle_base_delay_s if failure is FailureClass.THROTTLE else 1.0

    delays = [decide(failure, retry_after_s=asked_s, draw=draw).delay_s for draw in (0.0, 0.5)]

    assert delays == [floor_s, floor_s + base_s / 2]


def test_retry_after_can_be_switched_off() -> None:
    """With a longest of 0 s the answer's wish is ignored."""
    policy = RetryPolicy(retry_after_max_s=0)

    assert decide(FailureClass.THROTTLE, policy=policy, retry_after_s=60.0).delay_s == 2.0


@pytest.mark.parametrize("failure", [FailureClass.AUTH, FailureClass.STALE])
def test_what_is_repeated_at_once_is_repeated_at_once(failure: FailureClass) -> None:
    """A fresh client and a dropped cache need no wait, whatever the answer asked for."""
    assert decide(failure, retry_after_s=60.0, draw=0.99).delay_s == 0.0


@pytest.mark.parametrize("failure", OUTAGE)
@pytest.mark.parametrize("healthy", [True, False], ids=["closed", "not closed"])
@pytest.mark.parametrize(
    ("left_s", "more"), [(1000.0, True), (2.001, True), (2.0, False), (0.0, False), (-5.0, False)]
)
def test_no_wait_crosses_the_deadline(
    failure: FailureClass,
    healthy: bool,  # noqa: FBT001 - data
    left_s: float,
    more: bool,  # noqa: FBT001 - data
) -> None:
    """An attempt that could start only at the deadline or later is not waited for."""
    policy = RetryPolicy(base_delay_s=4.0)

    decision = decide(failure, policy=policy, healthy=healthy, elapsed_s=1800.0 - left_s)

    assert (decision.action is RetryAction.RETRY) is more
    if not more:
        assert "deadline_s=1800" in decision.reason


@pytest.mark.parametrize("failure", NOT_HEALTH)
def test_the_deadline_bounds_what_is_repeated_at_once(failure: FailureClass) -> None:
    """After the deadline no client is rebuilt and no cache is dropped."""
    assert decide(failure, elapsed_s=1799.9).action is not RetryAction.GIVE_UP

    late = decide(failure, elapsed_s=1800.0)

    assert late.action is RetryAction.GIVE_UP
    assert "deadline_s=1800" in late.reason


def test_the_deadline_counts_from_the_start_of_the_operation() -> None:
    """The operation ends deadline_s after it began, on its own process's clock."""
    state = RetryState(started_at_s=-20.0, attempts=3)

    assert retry.deadline_at_s(RetryPolicy(deadline_s=60), state) == 40.0


def test_the_state_that_was_given_is_untouched() -> None:
    """A decision returns a new state; the start of the operation stays."""
    before = RetryState(started_at_s=START_S, attempts=1, counted=1)

    after = retry.decide(
        POLICY,
        before,
        Outcome(failure=FailureClass.TRANSIENT),
        healthy=True,
        now_s=START_S,
        draw=0.5,
    ).state

    assert before == RetryState(started_at_s=START_S, attempts=1, counted=1)
    assert after == RetryState(started_at_s=START_S, attempts=2, counted=2)


def given_up(failure: str, cause: BaseException | None) -> RetriesExhaustedError:
    """How a guard gives up."""
    error = RetriesExhaustedError("given up", failure=failure)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("failure", ["permanent", "capacity", "auth"])
def test_an_answer_is_raised_as_itself(failure: str) -> None:
    """A caller sees the missing file, the denial or the full disk, not that it was asked once."""
    cause = FileNotFoundError("no such key")

    assert retry.failure_to_raise(given_up(failure, cause)) is cause


@pytest.mark.parametrize("failure", ["transient", "throttle", "unknown", "stale"])
def test_a_series_that_was_given_up_is_raised_as_such(failure: str) -> None:
    """The last of several failures is its cause, and not what is raised."""
    error = given_up(failure, ConnectionResetError())

    assert retry.failure_to_raise(error) is error


def test_without_a_cause_there_is_nothing_else_to_raise() -> None:
    """An error that has come from another process may have lost its cause."""
    error = given_up("permanent", None)

    assert retry.failure_to_raise(error) is error


def recovery(failure: FailureClass | None, **before: Any) -> RetryDecision:
    """Decide after a rebuild that failed."""
    state = dataclasses.replace(RetryState(started_at_s=START_S, rebuilt=True), **before)
    return retry.decide_recovery(POLICY, state, Outcome(failure=failure), now_s=START_S, draw=0.5)


PASSING = {FailureClass.TRANSIENT: 1.0, FailureClass.THROTTLE: 4.0}


@pytest.mark.parametrize("failure", [*FailureClass, None])
def test_a_recovery_is_repeated_only_where_its_failure_passes(
    failure: FailureClass | None,
) -> None:
    """No route and too many requests pass; a refusal, a bug or what nobody knows does not."""
    decision = recovery(failure, attempts=1, counted=1)

    repeated = failure in PASSING
    assert decision.action is (RetryAction.RETRY if repeated else RetryAction.GIVE_UP)
    assert decision.delay_s == PASSING.get(failure or FailureClass.UNKNOWN, 0.0)
    assert (decision.state.attempts, decision.state.counted) == (2, 2)
    if not repeated:
        assert (failure or FailureClass.UNKNOWN).value in decision.reason


@pytest.mark.parametrize("failure", PASSING)
def test_recoveries_count_like_attempts_at_a_healthy_dependency(failure: FailureClass) -> None:
    """An open circuit of the storage excuses no issuer of tokens."""
    decision = recovery(failure, attempts=4, counted=4)

    assert decision.action is RetryAction.GIVE_UP
    assert "max_attempts=5" in decision.reason


policies = st.builds(
    RetryPolicy,
    max_attempts=st.integers(2, 8),
    unknown_max_attempts=st.integers(1, 2),
    deadline_s=st.floats(1.0, 3600.0),
    base_delay_s=st.floats(0.01, 4.0),
    max_delay_s=st.floats(4.0, 60.0),
)
attempts = st.tuples(
    st.sampled_from([*OUTAGE, *NOT_HEALTH]),
    st.booleans(),
    st.floats(0.0, 1.0, exclude_max=True),
    st.one_of(st.none(), st.floats(0.0, 1e6)),
)


@given(policies, st.lists(attempts, min_size=1, max_size=20), st.floats(5.0, 100.0))
def test_every_operation_ends(
    policy: RetryPolicy,
    outcomes: list[tuple[FailureClass, bool, float, float | None]],
    took_s: float,
) -> None:
    """Any failures, repeated for ever, end by max_attempts or deadline_s; no wait crosses that."""
    most = math.ceil(policy.deadline_s / took_s) + 1
    state = RetryState(started_at_s=START_S)
    now_s, healthy_attempts, ended = START_S, 0, False

    for failure, healthy, draw, retry_after_s in itertools.islice(itertools.cycle(outcomes), most):
        now_s += took_s
        healthy_attempts += healthy
        decision = retry.decide(
            policy,
            state,
            Outcome(failure=failure, retry_after_s=retry_after_s),
            healthy=healthy,
            now_s=now_s,
            draw=draw,
        )
        state = decision.state
        ended = decision.action is RetryAction.GIVE_UP
        if ended:
            break
        now_s += decision.delay_s
        assert now_s < retry.deadline_at_s(policy, state)

    assert ended
    assert healthy_attempts <= policy.max_attempts
    assert state.unknown <= policy.unknown_max_attempts
