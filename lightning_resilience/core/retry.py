# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What to do after an attempt: again, when, or give up, and why.

One operation is a sequence of attempts, the first of which has number 1. After each attempt the
failure class (``core.outcome``) and the policy decide:

=============  ==================================================================================
failure        decision
=============  ==================================================================================
transient      again after full jitter from ``base_delay_s``
throttle       again after full jitter from ``throttle_base_delay_s``, on top of ``Retry-After``
unknown        as transient, but only ``unknown_max_attempts`` attempts may end so
auth           rebuild the client once, at once; a second time is permanent
stale          drop the caches, at once; counts as an attempt, so it is bounded as well
capacity       give up: a full disk does not empty itself
permanent      give up: exactly one attempt
cancelled      never gets here: an interruption is not caught
=============  ==================================================================================

A rebuild of the client may fail itself. Where that passes (transient, throttle: no route to the
issuer of tokens), the rebuild is tried again like an attempt; anything else ends the operation,
because a refresh that is refused will be refused again.

``max_attempts`` bounds the attempts of *one operation at a healthy dependency*. An attempt that
fails for the dependency's sake while the circuit is not closed does not count: the outage is the
breaker's business, and an outage that is longer than five attempts must not fail a job that is
willing to wait. Stale caches and refused credentials are no outage; they always count.
``deadline_s`` bounds everything, waiting included. So the loop that asks this module always ends.

Where nobody but the caller is told how the operation ended, :func:`failure_to_raise` decides what
that caller sees.

The instants in :class:`RetryState` belong to the calling process's monotonic clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_resilience.core import backoff
from lightning_resilience.core.outcome import COUNTS_FOR_BREAKER, FailureClass, Outcome
from lightning_resilience.core.validation import check_at_least, check_seconds, check_whole, option


if TYPE_CHECKING:
    from lightning_resilience.errors import RetriesExhaustedError


__all__ = [
    "RetryAction",
    "RetryDecision",
    "RetryPolicy",
    "RetryState",
    "deadline_at_s",
    "decide",
    "decide_recovery",
    "failure_to_raise",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Which attempts, how many, how far apart.

    Args:
        base_delay_s: Upper bound of the first delay, in seconds, > 0.
        max_delay_s: Largest upper bound of a delay, in seconds, at least ``base_delay_s``.
        max_attempts: Attempts of one operation, the first included, ≥ 1.
        deadline_s: Bound of one operation with all its attempts and waits, in seconds, > 0.
        stall_timeout_s: An attempt that makes no progress for this long is abandoned, in seconds,
            > 0.
        throttle_base_delay_s: As ``base_delay_s``, after a throttling answer, in seconds, > 0.
        retry_after_max_s: Longest ``Retry-After`` that is honoured, in seconds, ≥ 0.
        unknown_max_attempts: Attempts of one operation that may end with an unknown failure, ≥ 1.

    Raises:
        ConfigError: An option is out of range or contradicts another.

    Example:
        >>> from lightning_resilience import RetryPolicy
        >>> RetryPolicy(max_attempts=8).max_delay_s
        30.0
    """

    base_delay_s: float = option(1.0, why="blips end in seconds")
    max_delay_s: float = option(30.0, why="the cap wants to be between N/C and 2N/C")
    max_attempts: int = option(5, why="more than `trip_failures`")
    deadline_s: float = option(1800.0, why="half an hour idle is a person's problem")
    stall_timeout_s: float = option(60.0, why="no part finished: independent of the size")
    throttle_base_delay_s: float = option(4.0, why="slower than after a blip")
    retry_after_max_s: float = option(120.0, why="`Retry-After` is a floor, bounded")
    unknown_max_attempts: int = option(2, why="may be a bug")

    def __post_init__(self) -> None:
        for name in ("base_delay_s", "max_delay_s", "deadline_s", "stall_timeout_s"):
            check_seconds(name, getattr(self, name))
        check_seconds("throttle_base_delay_s", self.throttle_base_delay_s)
        check_seconds("retry_after_max_s", self.retry_after_max_s, zero=True)
        check_whole("max_attempts", self.max_attempts, minimum=1)
        check_whole("unknown_max_attempts", self.unknown_max_attempts, minimum=1)
        for name in ("base_delay_s", "throttle_base_delay_s"):
            check_at_least(
                ("max_delay_s", self.max_delay_s),
                (name, getattr(self, name)),
                why="the cap of the delays cannot be below the first one",
            )
        check_at_least(
            ("max_attempts", self.max_attempts),
            ("unknown_max_attempts", self.unknown_max_attempts),
            why="unknown failures are a part of all attempts",
        )


class RetryAction(enum.Enum):
    """What the caller does next."""

    RETRY = "retry"
    REBUILD_CLIENT = "rebuild the client, then retry"
    DROP_CACHES = "drop the caches, then retry"
    GIVE_UP = "give up"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryState:
    """What has happened to one operation so far.

    Args:
        started_at_s: When the operation began, on this process's clock.
        attempts: Attempts that have ended.
        counted: Those of them that count towards ``max_attempts``.
        unknown: Those that ended with an unknown failure.
        rebuilt: Whether the client has been rebuilt for this operation.
    """

    started_at_s: float
    attempts: int = 0
    counted: int = 0
    unknown: int = 0
    rebuilt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryDecision:
    """What to do, and why.

    Args:
        state: The operation's state after this attempt.
        action: What to do.
        delay_s: How long to wait before it, in seconds.
        reason: Why, in words for logs and errors.
    """

    state: RetryState
    action: RetryAction
    delay_s: float = 0.0
    reason: str = ""


def deadline_at_s(policy: RetryPolicy, state: RetryState) -> float:
    """Return the instant at which the operation ends whatever happens."""
    return state.started_at_s + policy.deadline_s


def _delay_s(policy: RetryPolicy, state: RetryState, outcome: Outcome, *, draw: float) -> float:
    throttled = outcome.failure is FailureClass.THROTTLE
    base_s = policy.throttle_base_delay_s if throttled else policy.base_delay_s
    jitter_s = backoff.delay_s(state.attempts, base_s=base_s, cap_s=policy.max_delay_s, draw=draw)
    # On top of, not the larger of both: all ranks are told the same Retry-After, and taking the
    # larger would bring most of them back in the same instant.
    floor_s = min(outcome.retry_after_s or 0.0, policy.retry_after_max_s)
    return floor_s + jitter_s


def _limit_reached(policy: RetryPolicy, state: RetryState, failure: FailureClass) -> str:
    if state.counted >= policy.max_attempts:
        return f"max_attempts={policy.max_attempts} reached"
    if failure is FailureClass.UNKNOWN and state.unknown >= policy.unknown_max_attempts:
        return f"unknown_max_attempts={policy.unknown_max_attempts} reached"
    return ""


_ONE_ATTEMPT = {
    FailureClass.PERMANENT: "a permanent failure is not retried",
    FailureClass.CAPACITY: "there is no space or quota left, and waiting does not make any",
    FailureClass.CANCELLED: "it was cancelled",
    FailureClass.LOST: "a rank was lost",
}

# The dependency was asked and has answered: callers know these failures by their own types.
_ANSWERS = (FailureClass.PERMANENT.value, FailureClass.CAPACITY.value, FailureClass.AUTH.value)

_AT_ONCE = {
    FailureClass.AUTH: RetryAction.REBUILD_CLIENT,
    FailureClass.STALE: RetryAction.DROP_CACHES,
}


def decide(
    policy: RetryPolicy,
    state: RetryState,
    outcome: Outcome,
    *,
    healthy: bool,
    now_s: float,
    draw: float,
) -> RetryDecision:
    """Decide what follows a failed attempt.

    Args:
        policy: The policy.
        state: The operation before this attempt ended.
        outcome: How the attempt ended; not ``ok``.
        healthy: Whether the circuit was closed when the attempt ended. Otherwise a failure that the
            breaker counts does not count towards ``max_attempts``.
        now_s: Now, on this process's clock.
        draw: A uniform number in [0, 1).

    Returns:
        The decision, with the operation's new state.
    """
    failure = outcome.failure or FailureClass.UNKNOWN
    after = replace(
        state,
        attempts=state.attempts + 1,
        counted=state.counted + (healthy or failure not in COUNTS_FOR_BREAKER),
        unknown=state.unknown + (failure is FailureClass.UNKNOWN),
    )
    if failure in _ONE_ATTEMPT:
        return _give_up(after, _ONE_ATTEMPT[failure])
    if failure is FailureClass.AUTH and after.rebuilt:
        return _give_up(after, "credentials are refused, also by a fresh client")
    reason = _limit_reached(policy, after, failure)
    if reason:
        return _give_up(after, reason)
    delay_s = 0.0 if failure in _AT_ONCE else _delay_s(policy, after, outcome, draw=draw)
    if now_s + delay_s >= deadline_at_s(policy, after):
        return _give_up(
            after, f"deadline_s={policy.deadline_s:g} would pass before the next attempt"
        )
    return RetryDecision(
        state=replace(after, rebuilt=after.rebuilt or failure is FailureClass.AUTH),
        action=_AT_ONCE.get(failure, RetryAction.RETRY),
        delay_s=delay_s,
        reason=failure.value,
    )


_PASSING = frozenset({FailureClass.TRANSIENT, FailureClass.THROTTLE})


def decide_recovery(
    policy: RetryPolicy, state: RetryState, outcome: Outcome, *, now_s: float, draw: float
) -> RetryDecision:
    """Decide what follows a recovery (a rebuilt client, dropped caches) that failed itself.

    Args:
        policy: The policy.
        state: The operation before this recovery ended; failed recoveries are counted in it as
            attempts, so that all tries of one recovery are bounded by ``max_attempts``.
        outcome: How the recovery ended; not ``ok``.
        now_s: Now, on this process's clock.
        draw: A uniform number in [0, 1).

    Returns:
        ``RETRY``, the recovery that is, or ``GIVE_UP``, with the new state.
    """
    failure = outcome.failure or FailureClass.UNKNOWN
    if failure not in _PASSING:
        after = replace(state, attempts=state.attempts + 1, counted=state.counted + 1)
        return _give_up(after, f"{failure}: it would fail again")
    # What a recovery asks need not be the dependency: its circuit excuses nothing.
    return decide(policy, state, outcome, healthy=True, now_s=now_s, draw=draw)


def _give_up(after: RetryState, reason: str) -> RetryDecision:
    return RetryDecision(state=after, action=RetryAction.GIVE_UP, reason=reason)


def failure_to_raise(error: RetriesExhaustedError) -> BaseException:
    """Return what a caller sees that made the call alone, outside a joint operation.

    A missing file, a denial or a full disk is an answer, and code around storage catches it by its
    type: ``FileNotFoundError``, ``PermissionError``. Only a series of attempts that was given up
    has no exception of its own.

    Args:
        error: How the guard gave up.

    Returns:
        The last failure itself where it is an answer, else ``error``.
    """
    if error.failure in _ANSWERS and error.__cause__ is not None:
        return error.__cause__
    return error
