# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Wait for an ill dependency: together, pushed, and with one probe for the whole job.

Whoever finds the circuit open draws a ticket and sleeps on the bell of this trip. When the open
wait is over by its own sight, a waiter claims the probe (``protocols.probing``); the one that wins
makes one real call and rings. Everybody else goes on sleeping.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from lightning_resilience.core import backoff, breaker, waiting
from lightning_resilience.core.events import DependencyAwaited
from lightning_resilience.errors import CircuitOpenError, StoreUnavailableError
from lightning_resilience.protocols.circuit import current, refresh
from lightning_resilience.protocols.effects import (
    Add,
    Draw,
    Emit,
    Now,
    Set,
    Sleep,
    WaitFor,
)
from lightning_resilience.protocols.probing import Patience, try_probe


if TYPE_CHECKING:
    from lightning_resilience.core.breaker import BreakerView
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["Patience", "await_passage", "try_probe"]

_PAUSE_BASE_S: Final = 0.05
_PAUSE_CAP_S: Final = 5.0


@dataclass(slots=True, kw_only=True)
class _Line:
    """What one waiter remembers between its looks."""

    operation: str
    deadline_at_s: float
    looks: bool
    started_at_s: float = 0.0
    spoken_at_s: float | None = None
    woken_in_vain: int = 0
    chunks: int = 0


def await_passage(
    circuit: Circuit,
    patience: Patience,
    *,
    operation: str,
    deadline_at_s: float,
    looks: bool = True,
) -> Protocol[BreakerView]:
    """Return once the circuit lets calls through.

    Costs no store operation while the view is fresh and closed.

    Args:
        circuit: What this process remembers of the breaker.
        patience: How to wait.
        operation: What waits, for the events.
        deadline_at_s: When to give up, on this process's clock.
        looks: Whether to read the record once the bell has rung. A caller that is going to read it
            anyway, with the slots, does not: all who wait are woken at once.

    Returns:
        The view that lets the caller pass; its epoch belongs to the caller's result. Where it does
        not pass, the bell has rung, and the caller looks for itself.

    Raises:
        CircuitOpenError: The circuit is open and ``when_open`` is ``raise``, or the deadline has
            passed.
    """
    view = yield from current(circuit)
    if breaker.passes(view.record):
        return view
    if patience.when_open == "raise":
        return (yield from _pass_or_refuse(circuit, patience, view))
    line = _Line(operation=operation, deadline_at_s=deadline_at_s, looks=looks)
    view = yield from _wait(circuit, patience, view, line=line)
    draw: float = yield Draw()
    yield Sleep(draw * patience.spread_s)
    return view


def _pass_or_refuse(
    circuit: Circuit, patience: Patience, view: BreakerView
) -> Protocol[BreakerView]:
    now_s: float = yield Now()
    if waiting.is_probe_due(view, circuit.config, now_s=now_s):
        # Where nobody waits, nobody else would ever notice that the dependency is well again.
        yield from _try_or_pass_over(circuit, patience, view, now_s=now_s)
        view = yield from refresh(circuit)
        now_s = yield Now()
    if breaker.passes(view.record):
        return view
    raise _refused(circuit, view, now_s=now_s, why="and the policy is not to wait")


def _wait(
    circuit: Circuit, patience: Patience, view: BreakerView, *, line: _Line
) -> Protocol[BreakerView]:
    now_s: float = yield Now()
    line.started_at_s = now_s
    generation = -1
    ticket: int | None = None
    while not breaker.passes(view.record):
        if now_s >= line.deadline_at_s:
            waited_s = now_s - line.started_at_s
            raise _refused(circuit, view, now_s=now_s, why=f"after {waited_s:.1f} s of waiting")
        if view.record.generation != generation:
            generation = view.record.generation
            ticket = yield from _draw_ticket(circuit, generation)
        if waiting.is_probe_due(view, circuit.config, now_s=now_s):
            # From the bytes that were read last: where they are no more, the store says so.
            has_probed = yield from _try_or_pass_over(circuit, patience, view, now_s=now_s)
            view = yield from current(circuit)
            if not has_probed:
                yield from _ring_for_others(circuit, view, generation=generation)
        else:
            wait_s = waiting.next_wait_s(
                view,
                circuit.config,
                near=patience.leads or waiting.is_near(ticket, chunks=line.chunks),
                longest_s=min(patience.chunk_s, line.deadline_at_s - now_s),
                now_s=now_s,
            )
            rang = yield from _sleep_on_bell(circuit, patience, view, line=line, wait_s=wait_s)
            if rang and not line.looks:
                return view
            line.chunks += wait_s >= patience.chunk_s
            view = yield from _look_again(circuit, view, line=line, rang=rang)
        now_s = yield Now()
    return view


def _look_again(
    circuit: Circuit, view: BreakerView, *, line: _Line, rang: bool
) -> Protocol[BreakerView]:
    now_s: float = yield Now()
    if not rang and waiting.is_probe_due(view, circuit.config, now_s=now_s):
        return view
    line.woken_in_vain += rang
    yield from _pause(line.woken_in_vain)
    generation = view.record.generation
    view = yield from refresh(circuit)
    if not rang:
        yield from _ring_for_others(circuit, view, generation=generation)
    return view


def _ring_for_others(circuit: Circuit, view: BreakerView, *, generation: int) -> Protocol[None]:
    if breaker.passes(view.record) and view.record.generation == generation:
        # Whoever had to ring has not: it died, or its write was lost. Nobody else need find out.
        yield Set(circuit.keys.bell(circuit.dependency, generation), b"1")


def _sleep_on_bell(
    circuit: Circuit, patience: Patience, view: BreakerView, *, line: _Line, wait_s: float
) -> Protocol[bool]:
    """Sleep until the bell of this trip rings, at most ``wait_s`` seconds; whether it has rung.

    A waiter that speaks does not look: what it says it knows, and a read is load on the store.
    """
    bell = circuit.keys.bell(circuit.dependency, view.record.generation)
    remaining_s = max(wait_s, _PAUSE_BASE_S)
    while remaining_s > 0:
        now_s: float = yield Now()
        piece_s = min(patience.voice_s, remaining_s)
        if waiting.is_time_to_speak(
            line.spoken_at_s, wait_s=piece_s, voice_s=patience.voice_s, now_s=now_s
        ):
            line.spoken_at_s = now_s
            yield Emit(_awaited(circuit, view, line, now_s=now_s))
        if (yield WaitFor(bell, piece_s)):
            return True
        remaining_s -= piece_s
    return False


def _try_or_pass_over(
    circuit: Circuit, patience: Patience, view: BreakerView, *, now_s: float
) -> Protocol[bool]:
    # The record may have been read again since, and the view that is overdue is the caller's.
    if circuit.probe_share.share < 1 and not patience.leads:
        draw: float = yield Draw()
        is_sent = circuit.probe_share.sends(draw=draw)
        circuit.probe_share = circuit.probe_share.after(sent=is_sent)
        if not is_sent:
            sighting = replace(view.sighting, first_seen_at_s=now_s)
            circuit.view = replace(view, sighting=sighting)
            return False
    return (yield from try_probe(circuit, patience, view))


def _draw_ticket(circuit: Circuit, generation: int) -> Protocol[int | None]:
    if circuit.place is not None and circuit.place[0] == generation:
        # One process has one place in line: whoever waits again does not go to the end.
        return circuit.place[1]
    if waiting.stands_far_back(circuit.ticket, turn=circuit.turn, slots=len(circuit.slot_keys)):
        return None
    try:
        ticket: int = yield Add(circuit.keys.waiting(circuit.dependency, generation), 1)
    except StoreUnavailableError:
        return None
    circuit.place = (generation, ticket)
    return ticket


def _pause(woken_in_vain: int) -> Protocol[None]:
    # The bell has rung, so this is the way out. It is a way back in only where the store was lost
    # and rebuilt at the same generation, and then a bell that stays rung must not make a busy loop.
    if woken_in_vain > 1:
        draw: float = yield Draw()
        yield Sleep(
            backoff.delay_s(woken_in_vain, base_s=_PAUSE_BASE_S, cap_s=_PAUSE_CAP_S, draw=draw)
        )


def _awaited(
    circuit: Circuit, view: BreakerView, line: _Line, *, now_s: float
) -> DependencyAwaited:
    return DependencyAwaited(
        dependency=circuit.dependency,
        operation=line.operation,
        state=view.record.state,
        elapsed_s=now_s - line.started_at_s,
        next_probe_in_s=waiting.next_probe_in_s(view, circuit.config, now_s=now_s),
    )


def _refused(circuit: Circuit, view: BreakerView, *, now_s: float, why: str) -> CircuitOpenError:
    record = view.record
    retry_after_s = waiting.next_probe_in_s(view, circuit.config, now_s=now_s)
    message = (
        f"The circuit of {circuit.dependency} is {record.state} (epoch {record.epoch}: "
        f"{record.reason}), {why}. "
        "The job stays away from an ill dependency; look at its health first."
    )
    return CircuitOpenError(
        message,
        dependency=circuit.dependency,
        retry_after_s=retry_after_s,
        epoch=record.epoch,
        reason=record.reason,
    )
