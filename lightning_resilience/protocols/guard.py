# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One guarded call: pass the gate, attempt, classify, report, and decide what follows.

::

    ┌─▶ gate: fresh view? closed? else wait for the bell        (protocols.probe)
    │   attempt: Call(work, timeout_s=stall_timeout_s)
    │   report the result to the breaker, once                   (protocols.circuit)
    │   succeeded ──▶ return
    └── again after a jittered delay ◀── core.retry.decide ──▶ give up, with the evidence

Bounded by ``deadline_s``: every turn costs an attempt or waits, and ``decide`` ends it.

An interruption (``KeyboardInterrupt``, ``SystemExit``, a signal's exception) is never an outcome to
be retried: it passes through at once. The failure that ends the policy is the cause of what is
raised.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.core.breaker import BreakerState, passes
from lightning_resilience.core.events import (
    AttemptFailed,
    CallAbandoned,
    CallStalled,
    RetriesExhausted,
    RetryScheduled,
)
from lightning_resilience.core.outcome import OK, FailureClass, Outcome
from lightning_resilience.core.retry import RetryAction, RetryState, deadline_at_s, decide
from lightning_resilience.errors import CallTimeoutError, CircuitOpenError, RetriesExhaustedError
from lightning_resilience.protocols.circuit import refresh, report
from lightning_resilience.protocols.effects import Call, Draw, Emit, Now, Sleep, Voice
from lightning_resilience.protocols.probe import await_passage


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.breaker import BreakerView
    from lightning_resilience.core.retry import RetryDecision, RetryPolicy
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.probe import Patience


__all__ = ["Guarded", "GuardedCall", "guard"]


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
        timeout_s: Time without a mark of progress after which an attempt is abandoned, in seconds;
            None takes the policy's ``stall_timeout_s``. For work that cannot mark its progress.
        rebuild: Makes a fresh client, after credentials were refused.
        drop_caches: Drops what is cached of the dependency.
        collective: Whether every rank makes this call at the same time, and none returns before all
            have made it. Such a call passes the admission slots: ranks that wait in line for each
            other while all of them are needed would wait for nothing.
    """

    work: Callable[[CancelToken], Any]
    operation: str
    target: str
    policy: RetryPolicy
    patience: Patience
    timeout_s: float | None = None
    rebuild: Callable[[], None] = _nothing
    drop_caches: Callable[[], None] = _nothing
    collective: bool = False


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
        CircuitOpenError: The circuit is open and the policy is not to wait, or the deadline has
            passed; the last failure, if there was one, is the cause.
    """
    if started_at_s is None:
        started_at_s = yield Now()
    state = RetryState(started_at_s=started_at_s)
    ends_at_s = deadline_at_s(call.policy, state)
    ended = _Ended(outcome=OK)
    while True:
        try:
            view = yield from await_passage(
                circuit, call.patience, operation=call.operation, deadline_at_s=ends_at_s
            )
        except CircuitOpenError as error:
            error.attempts = state.attempts
            error.last_error = ended.outcome.error
            raise error from ended.error
        ended = yield from _attempt(circuit, call)
        healthy = yield from _ended_under_closed(circuit, view, ended)
        yield from _tell(circuit, call, ended, attempt=state.attempts + 1)
        yield from report(circuit, ended.outcome, epoch=view.record.epoch)
        now_s: float = yield Now()
        if ended.error is None:
            elapsed_s = now_s - state.started_at_s
            return Guarded(value=ended.value, attempts=state.attempts + 1, elapsed_s=elapsed_s)
        draw: float = yield Draw()
        decision = decide(
            call.policy, state, ended.outcome, healthy=healthy, now_s=now_s, draw=draw
        )
        state = decision.state
        if decision.action is RetryAction.GIVE_UP:
            raise (yield from _give_up(circuit, call, ended, decision=decision)) from ended.error
        yield from _prepare(circuit, call, ended, decision=decision)


def _timeout_s(call: GuardedCall) -> float:
    return call.policy.stall_timeout_s if call.timeout_s is None else call.timeout_s


def _attempt(circuit: Circuit, call: GuardedCall) -> Protocol[_Ended]:
    try:
        value = yield Call(
            call.work,
            timeout_s=_timeout_s(call),
            voice=Voice(call.patience.voice_s, partial(_stalled, circuit, call)),
        )
    except GeneratorExit:
        raise
    except BaseException as error:
        outcome = call.patience.classify(error)
        if outcome.failure is FailureClass.CANCELLED:
            raise
        return _Ended(outcome=outcome, error=error)
    return _Ended(outcome=OK, value=value)


def _ended_under_closed(circuit: Circuit, admitted: BreakerView, ended: _Ended) -> Protocol[bool]:
    if admitted.record.state != BreakerState.CLOSED.value:
        return False
    if not ended.outcome.counts:
        return True
    # Others may have tripped the circuit while this attempt ran, and then it is the outage that has
    # failed it. The read is not lost: the vote that may follow is a change of what it returns.
    view = yield from refresh(circuit)
    return view.record.state == BreakerState.CLOSED.value


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
        timeout_s = _timeout_s(call)
        yield Emit(
            CallAbandoned(**common, target=call.target, attempt=attempt, timeout_s=timeout_s)
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
        recover: Callable[[], None] = getattr(call, _RECOVERY[decision.action])
        yield Call(lambda _token: recover())
    view = circuit.view
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
