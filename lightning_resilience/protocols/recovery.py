# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Between two attempts: rebuild the client or drop the caches, bounded, and tell why it cannot be.

A recovery is foreign code, like an attempt, and may hang or fail. Its timeout is that of silence,
not a probe's: to ask an issuer of tokens may take longer than a small object, and the error of an
abandoned call names the option that bounds it. A failure that passes is waited for, within the
policy of the operation (``core.retry.decide_recovery``); anything else is handed back at once.

It is no call of the dependency: it passes no gate, holds no slot, and says nothing about health.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.events import (
    AttemptFailed,
    CallAbandoned,
    CallStalled,
    RetryScheduled,
)
from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.core.retry import RetryAction, decide_recovery
from lightning_resilience.errors import CallTimeoutError
from lightning_resilience.protocols.effects import Call, Draw, Emit, Now, Sleep, Voice


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.core.outcome import Outcome
    from lightning_resilience.core.retry import RetryPolicy, RetryState
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.probe import Patience


__all__ = ["LABELS", "Recovery", "Unrecovered", "recover"]

LABELS: Final = {
    RetryAction.REBUILD_CLIENT: "rebuild of the client",
    RetryAction.DROP_CACHES: "drop of the caches",
}
"""What each recovery is called in events and errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What is done between two attempts, and for whom.

    Args:
        action: Which recovery it is.
        work: Does it.
        dependency: Name of the dependency.
        operation: The operation that waits for it.
        target: What that is about.
        policy: The operation's retry policy.
        patience: How to speak, and how to classify.
        has_thread: Whether it runs in a thread of its own, so that it can be abandoned.
    """

    action: RetryAction
    work: Callable[[], None]
    dependency: str
    operation: str
    target: str
    policy: RetryPolicy
    patience: Patience
    has_thread: bool = True

    @property
    def name(self) -> str:
        """What it is called in events."""
        return f"{LABELS[self.action]} for {self.operation}"

    def stalled(self, stalled_s: float) -> CallStalled:
        """Make the event of a recovery that shows no sign of life."""
        return CallStalled(
            dependency=self.dependency,
            operation=self.name,
            target=self.target,
            stalled_s=stalled_s,
            timeout_s=self.policy.stall_timeout_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrecovered:
    """Why there is no further attempt.

    Args:
        outcome: How the last try of the recovery ended.
        reason: Why it was the last, in words for logs and errors.
    """

    outcome: Outcome
    reason: str


def recover(recovery: Recovery, state: RetryState) -> Protocol[Unrecovered | None]:
    """Carry out a recovery.

    Bounded by the policy: ``decide_recovery`` counts each try like an attempt.

    Args:
        recovery: What is done.
        state: The operation so far; its tries are counted in a copy.

    Returns:
        None once it has succeeded, else why it has not.
    """
    tries = 0
    while True:
        outcome = yield from _try(recovery, number=tries + 1)
        if outcome is None:
            return None
        tries += 1
        now_s: float = yield Now()
        draw: float = yield Draw()
        decision = decide_recovery(recovery.policy, state, outcome, now_s=now_s, draw=draw)
        state = decision.state
        if decision.action is RetryAction.GIVE_UP:
            reason = f"{LABELS[recovery.action]} failed, {decision.reason}"
            return Unrecovered(outcome=outcome, reason=reason)
        yield from _pause(recovery, outcome, number=tries + 1, delay_s=decision.delay_s)


def _try(recovery: Recovery, *, number: int) -> Protocol[Outcome | None]:
    timeout_s = recovery.policy.stall_timeout_s if recovery.has_thread else None
    voice = Voice(recovery.patience.voice_s, recovery.stalled)
    try:
        yield Call(lambda _token: recovery.work(), timeout_s=timeout_s, voice=voice)
    except GeneratorExit:
        raise
    except BaseException as error:
        outcome = recovery.patience.classify(error)
        if outcome.failure is FailureClass.CANCELLED:
            raise
        yield from _tell(recovery, outcome, number=number)
        if isinstance(error, CallTimeoutError):
            yield from _tell_abandoned(recovery, number=number)
        return outcome
    return None


def _tell(recovery: Recovery, outcome: Outcome, *, number: int) -> Protocol[None]:
    yield Emit(
        AttemptFailed(
            dependency=recovery.dependency,
            operation=recovery.name,
            target=recovery.target,
            attempt=number,
            failure=(outcome.failure or FailureClass.UNKNOWN).value,
            error=outcome.error,
        )
    )


def _tell_abandoned(recovery: Recovery, *, number: int) -> Protocol[None]:
    yield Emit(
        CallAbandoned(
            dependency=recovery.dependency,
            operation=recovery.name,
            target=recovery.target,
            attempt=number,
            timeout_s=recovery.policy.stall_timeout_s,
            moved="",
        )
    )


def _pause(recovery: Recovery, outcome: Outcome, *, number: int, delay_s: float) -> Protocol[None]:
    remaining_s = delay_s
    while remaining_s > 0:
        yield Emit(
            RetryScheduled(
                dependency=recovery.dependency,
                operation=recovery.name,
                target=recovery.target,
                attempt=number,
                failure=(outcome.failure or FailureClass.UNKNOWN).value,
                delay_s=remaining_s,
                error=outcome.error,
            )
        )
        # In pieces, because an issuer may ask to be left alone for longer than a silence may be.
        piece_s = min(remaining_s, recovery.patience.voice_s)
        yield Sleep(piece_s)
        remaining_s -= piece_s
