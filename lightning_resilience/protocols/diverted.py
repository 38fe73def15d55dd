# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A guarded call with another way: what is done on this node where the dependency is ill.

::

    guard, and do not wait for an open circuit ──▶ succeeded, or failed for good ──▶ that
                 │ given up for an outage
                 ▼
    the other way ──▶ succeeded ──▶ that
                 │ there is no room for it, or it fails
                 ▼
    guard, and wait

So the caller waits for an ill dependency only where it has to. Whoever comes first after the open
wait probes all the same, because a call that does not wait sends the probe that is due.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_resilience.core.events import DiversionFailed
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.core.spool import diverts
from lightning_resilience.errors import ResilienceError
from lightning_resilience.protocols.effects import Call, Emit, Now
from lightning_resilience.protocols.guard import Guarded, guard


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.guard import GuardedCall


__all__ = ["OtherWay", "guard_or_divert"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherWay:
    """What is done instead.

    Args:
        work: Does it, given what the call was given up for; what it raises means that there is no
            other way now.
        timeout_s: Longest time without progress, in seconds.
        at_once: Why it is the first to be tried; empty where it is not.
    """

    work: Callable[[str, CancelToken], Any]
    timeout_s: float
    at_once: str = ""


def guard_or_divert(
    circuit: Circuit, call: GuardedCall, other: OtherWay, *, started_at_s: float | None = None
) -> Protocol[Guarded]:
    """Make a guarded call, or go the other way where the dependency is ill.

    Args:
        circuit: What this process remembers of the breaker.
        call: What to call, and how to wait where there is no other way.
        other: The other way.
        started_at_s: When the operation began, on this process's clock; None for now.

    Returns:
        The result of the call, or of the other way.

    Raises:
        RetriesExhaustedError: As ``guard`` does, where neither goes.
        CircuitOpenError: The same.
        BudgetExhaustedError: The same.
        StoreUnavailableError: The shared store does not answer.
    """
    began_at_s: float = (yield Now()) if started_at_s is None else started_at_s
    why, attempts = other.at_once, 0
    if not why:
        hasty = replace(call, patience=replace(call.patience, when_open="raise"))
        try:
            return (yield from guard(circuit, hasty, began_at_s))
        except ResilienceError as error:
            if not diverts(error):
                raise
            why, attempts = str(error), int(getattr(error, "attempts", 0))
    try:
        value = yield Call(lambda token: other.work(why, token), timeout_s=other.timeout_s)
    except GeneratorExit:
        raise
    except BaseException as error:
        if call.patience.classify(error).failure is FailureClass.CANCELLED:
            raise
        yield Emit(
            DiversionFailed(
                dependency=circuit.dependency,
                operation=call.operation,
                target=call.target,
                error=redacted(f"{type(error).__name__}: {error}"),
            )
        )
        return (yield from guard(circuit, call, began_at_s))
    now_s: float = yield Now()
    return Guarded(value=value, attempts=attempts, elapsed_s=now_s - began_at_s)
