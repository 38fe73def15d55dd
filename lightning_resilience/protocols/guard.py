# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One guarded call: pass the gate, attempt, classify, report, and decide what follows.

::

    ┌─▶ enter: the breaker lets it through, and a slot is free   (protocols.entry)
    │   attempt: Call(work, timeout_s=stall_timeout_s)
    │   settle: report the result, once; give the slot back      (protocols.settlement)
    │   succeeded ──▶ return
    │   core.retry.decide ──▶ give up, with the evidence
    │   pay: a retry is charged to the job's budget              (protocols.settlement)
    └── again after a jittered delay

Bounded by ``deadline_s``: every turn costs an attempt or waits, and ``decide`` ends it.

An interruption (``KeyboardInterrupt``, ``SystemExit``, a signal's exception) is never an outcome to
be retried: it passes through at once. The failure that ends the policy is the cause of what is
raised; where the client could not be rebuilt (``protocols.recovery``), both errors are named.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lightning_resilience.core.breaker import passes
from lightning_resilience.core.events import (
    AttemptFailed,
    CallAbandoned,
    CallStalled,
    RetriesExhausted,
    RetryScheduled,
)
from lightning_resilience.core.outcome import OK, FailureClass, Outcome, most_severe
from lightning_resilience.core.retry import RetryAction, RetryState, deadline_at_s, decide
from lightning_resilience.errors import (
    BudgetExhaustedError,
    CallTimeoutError,
    CircuitOpenError,
    ResilienceError,
    RetriesExhaustedError,
    StoreError,
)
from lightning_resilience.protocols.detour import guide
from lightning_resilience.protocols.effects import Call, Draw, Emit, Now, Sleep, Voice
from lightning_resilience.protocols.entry import Entry, Terms, admit
from lightning_resilience.protocols.recovery import Recovery, recover
from lightning_resilience.protocols.settlement import give_back, pay, settle


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.breaker_record import BreakerView
    from lightning_resilience.core.retry import RetryDecision, RetryPolicy
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.probe import Patience


__all__ = ["Guarded", "GuardedCall", "guard"]

T = TypeVar("T")


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedCall:
    """What is called, and how.

    Args:
        work: One attempt. Gets a cancel token, and checks it before anything that publishes.
        operation: Its name, for events and errors.
        target: What it is about, for example a path.
        policy: The retry policy.
        patience: How to wait, and how to classify.
        collective: Whether every rank makes this call at the same time: then it passes admission
            also while the circuit is closed.
        may_go_alone: Whether it may be decided without the shared store, once that is lost. Never
            in a joint operation.
        store_patience_s: How long the shared store may be away, in seconds, before that or before
            the store's error is raised; None leaves the store's failures to the caller.
        let_through: The view on which the first attempt was made before anybody was asked; ``work``
            raises its failure. None: the gate comes first.
        has_thread: Whether an attempt runs in a thread of its own, so that it can be abandoned.
        timeout_s: Time without a mark of progress after which an attempt is abandoned, in seconds;
            None takes the policy's ``stall_timeout_s``. For work that cannot mark its progress.
        rebuild: Makes a fresh client, after credentials were refused. Has ``stall_timeout_s``.
        drop_caches: Drops what is cached of the dependency. Has ``stall_timeout_s``.
    """

    work: Callable[[CancelToken], Any]
    operation: str
    target: str
    policy: RetryPolicy
    patience: Patience
    collective: bool = False
    may_go_alone: bool = False
    store_patience_s: float | None = None
    let_through: BreakerView | None = None
    has_thread: bool = True
    timeout_s: float | None = None
    rebuild: Callable[[], None] = _nothing
    drop_caches: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarded:
    """A guarded call that succeeded.

    Args:
        value: What the work returned.
        attempts: Attempts made.
        elapsed_s: Time from the first gate to the end, in seconds.
    """

    value: Any
    attempts: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    outcome: Outcome
    value: Any = None
    error: BaseException | None = None

    @property
    def failure(self) -> str:
        return (self.outcome.failure or FailureClass.UNKNOWN).value


_RECOVERY: Final = {
    RetryAction.REBUILD_CLIENT: "rebuild",
    RetryAction.DROP_CACHES: "drop_caches",
}


def guard(
    circuit: Circuit, call: GuardedCall, started_at_s: float | None = None
) -> Protocol[Guarded]:
    """Make a call under the breaker and the retry policy.

    Args:
        circuit: The dependency's breaker.
        call: What is called, and how.
        started_at_s: When the operation began, on this process's clock; None for now.

    Returns:
        The work's result.

    Raises:
        RetriesExhaustedError: The policy ended; the last failure is the cause.
        CircuitOpenError: The circuit is open or no slot came free, and the policy is not to wait,
            or the deadline has passed; the last failure, if there was one, is the cause.
        BudgetExhaustedError: The job's retry budget denies another attempt, and the policy is not
            to wait; the last failure is the cause.
        StoreUnavailableError: The shared store does not answer, and the call may not be decided
            without it.
    """
    if started_at_s is None:
        started_at_s = yield Now()
    circuit.note_calls(1, now_s=started_at_s)
    state = RetryState(started_at_s=started_at_s)
    ends_at_s = deadline_at_s(call.policy, state)
    ended = _Ended(outcome=OK)
    while True:
        entering = _enter(circuit, call, ended, attempts=state.attempts, deadline_at_s=ends_at_s)
        entry = yield from _caused(ended, entering)
        ended = yield from _attempt(circuit, call, entry)
        yield from _tell(circuit, call, ended, attempt=state.attempts + 1)
        settling = settle(circuit, _terms(call), entry, outcome=ended.outcome)
        healthy = yield from _caused(ended, settling)
        now_s: float = yield Now()
        if ended.error is None:
            elapsed_s = now_s - state.started_at_s
            return Guarded(value=ended.value, attempts=state.attempts + 1, elapsed_s=elapsed_s)
        draw: float = yield Draw()
        decision = decide(
            call.policy, state, ended.outcome, healthy=healthy, now_s=now_s, draw=draw
        )
        state = decision.state
        if decision.action is not RetryAction.GIVE_UP:
            charging = _charge(circuit, call, ended, decision=decision)
            decision = yield from _caused(ended, charging)
        if decision.action is RetryAction.GIVE_UP:
            raise (yield from _give_up(circuit, call, ended, decision=decision)) from ended.error
        yield from _prepare(circuit, call, ended, decision=decision)


def _enter(
    circuit: Circuit, call: GuardedCall, ended: _Ended, *, attempts: int, deadline_at_s: float
) -> Protocol[Entry]:
    if call.let_through is not None and ended.error is None:
        # Its result belongs to the epoch that let it through, whatever has happened since.
        return Entry(circuit=circuit, view=call.let_through, permit=None)
    try:
        return (yield from admit(circuit, _terms(call), deadline_at_s=deadline_at_s))
    except CircuitOpenError as error:
        error.attempts = attempts
        error.last_error = ended.outcome.error
        raise error from ended.error


def _caused(ended: _Ended, inner: Protocol[T]) -> Protocol[T]:
    """Run ``inner``; where the store fails it, the failure before is the cause."""
    try:
        return (yield from inner)
    except StoreError as error:
        if ended.error is None:
            raise
        raise error from ended.error


def _terms(call: GuardedCall) -> Terms:
    return Terms(
        operation=call.operation,
        patience=call.patience,
        collective=call.collective,
        may_go_alone=call.may_go_alone,
        store_patience_s=call.store_patience_s,
    )


def _timeout_s(call: GuardedCall) -> float:
    return call.policy.stall_timeout_s if call.timeout_s is None else call.timeout_s


def _attempt(circuit: Circuit, call: GuardedCall, entry: Entry) -> Protocol[_Ended]:
    try:
        value = yield Call(
            call.work,
            timeout_s=_timeout_s(call) if call.has_thread else None,
            voice=Voice(call.patience.voice_s, partial(_stalled, circuit, call)),
            renewal=entry.permit,
        )
    except GeneratorExit:
        raise
    except BaseException as error:
        outcome = call.patience.classify(error)
        if outcome.failure is FailureClass.CANCELLED:
            # The slot goes back at once instead of at the end of its lease.
            with suppress(ResilienceError):
                yield from give_back(circuit, _terms(call), entry, outcome=outcome)
            raise
        return _Ended(outcome=outcome, error=error)
    return _Ended(outcome=OK, value=value)


def _charge(
    circuit: Circuit, call: GuardedCall, ended: _Ended, *, decision: RetryDecision
) -> Protocol[RetryDecision]:
    try:
        granted = yield from pay(
            circuit, _terms(call), deadline_at_s=deadline_at_s(call.policy, decision.state)
        )
    except BudgetExhaustedError as error:
        error.attempts = decision.state.attempts
        error.last_error = ended.outcome.error
        raise error from ended.error
    if granted:
        return decision
    return replace(
        decision,
        action=RetryAction.GIVE_UP,
        reason=f"deadline_s={call.policy.deadline_s:g} would pass before the job's retry budget "
        "has room",
    )


def _tell(circuit: Circuit, call: GuardedCall, ended: _Ended, *, attempt: int) -> Protocol[None]:
    if ended.error is None:
        return
    common = {"dependency": circuit.dependency, "operation": call.operation}
    yield Emit(
        AttemptFailed(
            **common,
            target=call.target,
            attempt=attempt,
            failure=ended.failure,
            error=ended.outcome.error,
        )
    )
    if isinstance(ended.error, CallTimeoutError):
        timeout_s, moved = _timeout_s(call), ended.error.moved
        yield Emit(
            CallAbandoned(
                **common, target=call.target, attempt=attempt, timeout_s=timeout_s, moved=moved
            )
        )


def _give_up(
    circuit: Circuit, call: GuardedCall, ended: _Ended, *, decision: RetryDecision
) -> Protocol[RetriesExhaustedError]:
    attempts = decision.state.attempts
    yield Emit(
        RetriesExhausted(
            dependency=circuit.dependency,
            operation=call.operation,
            target=call.target,
            attempts=attempts,
            failure=ended.failure,
            reason=decision.reason,
            error=ended.outcome.error,
        )
    )
    message = (
        f"{call.operation} of {call.target} on {circuit.dependency} was given up after {attempts} "
        f"attempt{'s' if attempts > 1 else ''} ({ended.failure}; {decision.reason}): "
        f"{ended.outcome.error}"
    )
    return RetriesExhaustedError(
        message,
        attempts=attempts,
        reason=decision.reason,
        failure=ended.failure,
        last_error=ended.outcome.error,
    )


def _prepare(
    circuit: Circuit, call: GuardedCall, ended: _Ended, *, decision: RetryDecision
) -> Protocol[None]:
    if decision.action in _RECOVERY:
        yield from _recover(circuit, call, ended, decision=decision)
    view = guide(circuit, may_go_alone=call.may_go_alone).view
    if view is not None and not passes(view.record):
        # The circuit has just opened: the gate decides when to come back, not the backoff.
        return
    remaining_s = decision.delay_s
    while remaining_s > 0:
        yield Emit(_scheduled(circuit, call, ended, decision=decision, delay_s=remaining_s))
        # In pieces, because the storage may ask to be left alone for longer than a silence may be.
        piece_s = min(remaining_s, call.patience.voice_s)
        yield Sleep(piece_s)
        remaining_s -= piece_s


def _recover(
    circuit: Circuit, call: GuardedCall, ended: _Ended, *, decision: RetryDecision
) -> Protocol[None]:
    recovery = Recovery(
        action=decision.action,
        work=getattr(call, _RECOVERY[decision.action]),
        dependency=circuit.dependency,
        operation=call.operation,
        target=call.target,
        policy=call.policy,
        patience=call.patience,
        has_thread=call.has_thread,
    )
    failed = yield from recover(recovery, decision.state)
    if failed is None:
        return
    both = replace(
        ended.outcome,
        failure=most_severe([ended.outcome.failure, failed.outcome.failure]),
        error=f"{ended.outcome.error}; then: {failed.outcome.error}",
    )
    last = replace(decision, reason=failed.reason)
    error = yield from _give_up(circuit, call, replace(ended, outcome=both), decision=last)
    raise error from ended.error


def _scheduled(
    circuit: Circuit,
    call: GuardedCall,
    ended: _Ended,
    *,
    decision: RetryDecision,
    delay_s: float,
) -> RetryScheduled:
    return RetryScheduled(
        dependency=circuit.dependency,
        operation=call.operation,
        target=call.target,
        attempt=decision.state.attempts + 1,
        failure=ended.failure,
        delay_s=delay_s,
        error=ended.outcome.error,
    )


def _stalled(circuit: Circuit, call: GuardedCall, stalled_s: float) -> CallStalled:
    return CallStalled(
        dependency=circuit.dependency,
        operation=call.operation,
        target=call.target,
        stalled_s=stalled_s,
        timeout_s=_timeout_s(call),
    )
