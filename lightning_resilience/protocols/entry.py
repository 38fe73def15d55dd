# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Everything that stands between a call and its dependency: the breaker, and a slot where needed.

::

    which breaker: the job's, or this process's own        (protocols.detour)
      └─▶ its gate: closed or recovering, else wait         (protocols.probe)
            └─▶ a slot, for collective calls and while it recovers   (protocols.admission)

Bounded by the deadline: each turn ends with an entry, an error, or a wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_resilience.core import admission as core
from lightning_resilience.core.breaker import passes
from lightning_resilience.errors import CircuitOpenError, StoreUnavailableError
from lightning_resilience.protocols.admission import enter
from lightning_resilience.protocols.circuit import current
from lightning_resilience.protocols.detour import choose, follow, is_lost, lose, old_view, until_s
from lightning_resilience.protocols.effects import Draw, Now, Sleep
from lightning_resilience.protocols.probe import await_passage
from lightning_resilience.protocols.site import heed


if TYPE_CHECKING:
    from lightning_resilience.core.breaker import BreakerView
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.permit import Permit
    from lightning_resilience.protocols.probe import Patience


__all__ = ["Entry", "Terms", "admit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a call comes to its dependency.

    Args:
        operation: Its name, for events and errors.
        patience: How to wait.
        collective: Whether every rank makes this call at the same time.
        may_go_alone: Whether it may be decided without the shared store, once that is lost.
        store_patience_s: How long the shared store may be away, in seconds; None leaves its
            failures to the caller.
    """

    operation: str
    patience: Patience
    collective: bool
    may_go_alone: bool
    store_patience_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A call that may be made now.

    Args:
        circuit: The breaker that let it through: the job's, or the process's own.
        view: The view on which it did.
        permit: The slot that it holds, or None.
    """

    circuit: Circuit
    view: BreakerView
    permit: Permit | None


def admit(circuit: Circuit, terms: Terms, *, deadline_at_s: float) -> Protocol[Entry]:
    """Wait until the call may be made.

    Args:
        circuit: The job's breaker.
        terms: How the call comes.
        deadline_at_s: When to give up, on this process's clock.

    Raises:
        CircuitOpenError: The circuit is open, or no slot came free, and the call is not to wait
            (any longer).
        StoreUnavailableError: The shared store does not answer, and the call may not go alone.
    """
    while True:
        followed = yield from choose(circuit, may_go_alone=terms.may_go_alone)
        until = until_s(circuit, followed, deadline_at_s=deadline_at_s)
        try:
            return (yield from _by(circuit, followed, terms, deadline_at_s=until))
        except StoreUnavailableError as error:
            if not terms.may_go_alone:
                raise
            yield from lose(circuit, error)
        except CircuitOpenError:
            now_s: float = yield Now()
            refused = terms.patience.when_open == "raise" and now_s < until
            if refused or now_s >= deadline_at_s:
                raise


def _by(
    circuit: Circuit, followed: Circuit, terms: Terms, *, deadline_at_s: float
) -> Protocol[Entry]:
    view, patience_s = None, terms.store_patience_s
    if terms.may_go_alone:
        if not terms.collective:
            # Whoever takes a slot reads the record with the slots.
            view = yield from old_view(circuit, followed)
        if is_lost(circuit):
            # It is asked whether it is back, and nobody waits for that.
            patience_s = 0.0
    if followed is circuit and circuit.upstream is not None:
        heeding = heed(circuit)
        yield from follow(circuit, followed, heeding, op=terms.operation, patience_s=patience_s)
    through = _through(followed, terms, view, deadline_at_s=deadline_at_s)
    return (
        yield from follow(circuit, followed, through, op=terms.operation, patience_s=patience_s)
    )


def _through(
    circuit: Circuit, terms: Terms, trusted: BreakerView | None, *, deadline_at_s: float
) -> Protocol[Entry]:
    came_in_vain = False
    while True:
        view = trusted or (
            yield from _pass(circuit, terms, looks=came_in_vain, deadline_at_s=deadline_at_s)
        )
        trusted = None
        record = None if view is None else view.record
        if view is not None and core.passes_freely(view.record, collective=terms.collective):
            return Entry(circuit=circuit, view=view, permit=None)
        now_s: float = yield Now()
        waits = core.waits_for_slot(
            record, collective=terms.collective, when_open=terms.patience.when_open
        )
        woken = record is not None and not passes(record)
        entered = yield from enter(
            circuit,
            operation=terms.operation,
            voice_s=terms.patience.voice_s,
            deadline_at_s=deadline_at_s if waits else now_s,
            collective=terms.collective,
            woken=woken,
        )
        if entered is not None:
            view, permit = entered
            return Entry(circuit=circuit, view=view, permit=permit)
        came_in_vain = woken
        now_s = yield Now()
        view = circuit.view or view
        if view and passes(view.record) and (not waits or now_s >= deadline_at_s):
            raise _no_slot(circuit, view)


def _pass(
    circuit: Circuit, terms: Terms, *, looks: bool, deadline_at_s: float
) -> Protocol[BreakerView | None]:
    if terms.collective and (circuit.view is None or passes(circuit.view.record)):
        # Whoever takes a slot reads the record with the slots.
        return circuit.view
    view = yield from current(circuit)
    if passes(view.record):
        return view
    # Those who need a slot come back by their distance, and the others over the spread.
    patience = replace(terms.patience, spread_s=0.0)
    view = yield from await_passage(
        circuit, patience, operation=terms.operation, deadline_at_s=deadline_at_s, looks=looks
    )
    if core.spreads(view.record, collective=terms.collective, when_open=patience.when_open):
        draw: float = yield Draw()
        yield Sleep(draw * terms.patience.spread_s)
    return view


def _no_slot(circuit: Circuit, view: BreakerView) -> CircuitOpenError:
    record = view.record
    message = (
        f"All {record.limit} slots of {circuit.dependency} are taken (the circuit is "
        f"{record.state}, epoch {record.epoch}), and this call is not to wait (any longer). "
        "If the dependency takes more calls at once, raise max_concurrent."
    )
    return CircuitOpenError(
        message, dependency=circuit.dependency, epoch=record.epoch, reason=record.reason
    )
