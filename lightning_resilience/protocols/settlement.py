# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""After an attempt: tell the breaker, give the slot back, and pay for the next one.

None of this may cost the call its result: what the shared store does not hear now it learns by
itself (a vote lapses, a slot is forgiven), so where a call may be decided without the store, or has
succeeded, the store's failure is an event and not an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lightning_resilience.core.breaker import BreakerState, HostVoted
from lightning_resilience.core.budget import is_charged
from lightning_resilience.core.events import StoreLost
from lightning_resilience.core.slots import all_have_failed
from lightning_resilience.errors import (
    BudgetExhaustedError,
    CorruptRecordError,
    StoreUnavailableError,
)
from lightning_resilience.protocols.admission import look
from lightning_resilience.protocols.budget import charge
from lightning_resilience.protocols.circuit import apply, refresh, report
from lightning_resilience.protocols.detour import follow, guide, isolate, lose, rejoin
from lightning_resilience.protocols.effects import Emit
from lightning_resilience.protocols.permit import leave
from lightning_resilience.protocols.site import tell_trip


if TYPE_CHECKING:
    from lightning_resilience.core.breaker import BreakerView
    from lightning_resilience.core.outcome import Outcome
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.entry import Entry, Terms


__all__ = ["give_back", "pay", "settle"]

_SHARE_USED_UP: Final = "its share of the retry budget is used up, and the latest call failed"


def settle(circuit: Circuit, terms: Terms, entry: Entry, *, outcome: Outcome) -> Protocol[bool]:
    """Report how an attempt ended, and give its slot back.

    Args:
        circuit: The job's breaker.
        terms: How the call came.
        entry: What let it through.
        outcome: How the attempt ended.

    Returns:
        Whether the circuit was closed all the while, so that the attempt counts.

    Raises:
        CorruptRecordError: A failure could not be reported, because what is there is no record.
        StoreUnavailableError: The store's failures are the caller's own business.
    """
    healthy = entry.view.record.state == BreakerState.CLOSED.value
    try:
        healthy = yield from follow(
            circuit,
            entry.circuit,
            _report(entry, outcome),
            op=terms.operation,
            patience_s=terms.store_patience_s,
        )
    except StoreUnavailableError as error:
        yield from _missed(circuit, terms, error)
    except CorruptRecordError as error:
        yield from give_back(circuit, terms, entry, outcome=outcome)
        if not outcome.ok:
            raise
        yield Emit(StoreLost(op=terms.operation, error=str(error)))
        return healthy
    yield from give_back(circuit, terms, entry, outcome=outcome)
    if outcome.ok and entry.circuit.is_own:
        try:
            yield from rejoin(circuit)
        except StoreUnavailableError as error:
            yield from _missed(circuit, terms, error)
    elif outcome.counts:
        yield from isolate(circuit)
    return healthy


def _report(entry: Entry, outcome: Outcome) -> Protocol[bool]:
    circuit, admitted = entry.circuit, entry.view.record
    healthy = admitted.state == BreakerState.CLOSED.value
    others_failed = False
    if healthy and outcome.counts:
        # Others may have tripped the circuit while this attempt ran, and then it is the outage that
        # has failed it. The read is not lost: the vote that may follow is a change of what it
        # returns.
        view, others_failed = yield from _look_around(circuit, entry)
        healthy = view.record.state == BreakerState.CLOSED.value
    yield from report(
        circuit,
        outcome,
        epoch=admitted.epoch,
        store_id=admitted.store_id,
        others_failed=others_failed,
    )
    yield from tell_trip(circuit)
    return healthy


def _look_around(circuit: Circuit, entry: Entry) -> Protocol[tuple[BreakerView, bool]]:
    if entry.permit is None:
        return (yield from refresh(circuit)), False
    view, slots = yield from look(circuit)
    return view, all_have_failed(
        slots,
        own=entry.permit.index,
        generation=entry.permit.generation,
        at_least=circuit.config.trip_failures,
    )


def give_back(circuit: Circuit, terms: Terms, entry: Entry, *, outcome: Outcome) -> Protocol[None]:
    """Give the slot of an attempt back, if it had one.

    Args:
        circuit: The job's breaker.
        terms: How the call came.
        entry: What let it through.
        outcome: How the attempt ended.
    """
    if entry.permit is None:
        return
    # Without patience of its own: leaving tries more than once, and the lease does the rest.
    patience_s = None if terms.store_patience_s is None else 0.0
    leaving = leave(entry.permit, outcome)
    try:
        yield from follow(
            circuit, entry.circuit, leaving, op=terms.operation, patience_s=patience_s
        )
    except StoreUnavailableError as error:
        if terms.store_patience_s is None:
            raise
        # One answer that was lost is no store that is lost: the next operation finds that out.
        yield Emit(StoreLost(op=terms.operation, error=str(error)))


def _missed(circuit: Circuit, terms: Terms, error: StoreUnavailableError) -> Protocol[None]:
    if terms.store_patience_s is None:
        raise error
    if terms.may_go_alone:
        yield from lose(circuit, error)
    else:
        yield Emit(StoreLost(op=terms.operation, error=str(error)))


def pay(circuit: Circuit, terms: Terms, *, deadline_at_s: float) -> Protocol[bool]:
    """Charge a retry to the budget, waiting for it where that is allowed.

    Args:
        circuit: The job's breaker.
        terms: How the call came.
        deadline_at_s: When to give up, on this process's clock.

    Returns:
        False where the deadline would pass before the budget has room.

    Raises:
        BudgetExhaustedError: It is denied, and the policy is not to wait.
        StoreUnavailableError: The shared store does not answer, and the call may not go alone.
    """
    guiding = guide(circuit, may_go_alone=terms.may_go_alone)
    try:
        return (yield from _pay(circuit, guiding, terms, deadline_at_s=deadline_at_s))
    except StoreUnavailableError as error:
        if not terms.may_go_alone:
            raise
        yield from lose(circuit, error)
    return (yield from _pay(circuit, guide(circuit), terms, deadline_at_s=deadline_at_s))


def _pay(
    circuit: Circuit, followed: Circuit, terms: Terms, *, deadline_at_s: float
) -> Protocol[bool]:
    view = followed.view
    if view is None or not is_charged(view.record):
        return True
    waits = terms.patience.when_open == "wait"
    charging = charge(
        followed,
        operation=terms.operation,
        may_wait=waits and not followed.is_own,
        voice_s=terms.patience.voice_s,
        deadline_at_s=deadline_at_s,
        spreads=terms.collective,
    )
    try:
        return (
            yield from follow(
                circuit, followed, charging, op=terms.operation, patience_s=terms.store_patience_s
            )
        )
    except BudgetExhaustedError:
        if not waits:
            raise
    # A share of the budget may be less than it takes to trip. Alone, one that is used up and a call
    # that has failed are reason enough to stay away until a probe, or the job, knows better.
    vote = HostVoted(host=followed.host, hosts=1, reason=_SHARE_USED_UP)
    yield from follow(circuit, followed, apply(followed, vote), op=terms.operation, patience_s=None)
    return True
