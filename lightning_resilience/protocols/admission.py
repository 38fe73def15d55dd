# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Get a slot of a dependency: look, claim, stand in line.

::

    look: record and slots in one read ──▶ a slot is to be had: claim it ──▶ Permit
      ▲                                        │ somebody else was faster: there is a crowd
      │                                        ▼
      └── wait: by the distance to one's turn the first time, then a share of the pace, growing

Bounded by the deadline: every turn waits, and a turn in which a claim was lost is followed by a
ticket and a wait. Waiting writes nothing but the ticket, so whoever gives up leaves nothing behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_resilience.core import admission as core, breaker, line as line_up, slots as cells
from lightning_resilience.core.events import SlotAwaited, SlotForgiven
from lightning_resilience.core.records import SlotRecord, decode, encode
from lightning_resilience.core.waiting import is_time_to_speak
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.circuit import accept
from lightning_resilience.protocols.effects import (
    Add,
    Draw,
    Emit,
    MultiGet,
    Nonce,
    Now,
    Sleep,
)
from lightning_resilience.protocols.permit import Permit
from lightning_resilience.protocols.shared_cell import write


if TYPE_CHECKING:
    from lightning_resilience.core.breaker import BreakerView
    from lightning_resilience.core.line import Queue
    from lightning_resilience.protocols.circuit import Circuit
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["enter", "look"]


@dataclass(slots=True, kw_only=True)
class _Line:
    """What one waiter remembers between its looks."""

    operation: str
    voice_s: float
    started_at_s: float
    deadline_at_s: float
    ticket: int | None = None
    has_ticket: bool = False
    has_waited: bool = False
    away_s: float = 0.0
    looked_at_s: float = 0.0
    queue: Queue | None = None
    spoken_at_s: float | None = None


def enter(
    circuit: Circuit,
    *,
    operation: str,
    voice_s: float,
    deadline_at_s: float,
    collective: bool = True,
    woken: bool = False,
) -> Protocol[tuple[BreakerView, Permit | None] | None]:
    """Wait for a slot.

    Args:
        circuit: What this process remembers of the breaker; it has a view.
        operation: What waits, for the events.
        voice_s: Longest time between two events that say what is awaited, in seconds.
        deadline_at_s: When to give up, on this process's clock.
        collective: Whether the call needs a slot also while the circuit is closed.
        woken: Whether the bell has just rung for all who waited. Then this one comes when it is its
            turn, and does not look before.

    Returns:
        The view by which the slot was claimed, and the permit, or None in its place where the
        circuit has closed meanwhile and the call needs none. None where the circuit does
        not let calls through any more, or the deadline has passed: the caller looks at the breaker
        again.
    """
    started_at_s: float = yield Now()
    line = _Line(
        operation=operation,
        voice_s=voice_s,
        started_at_s=started_at_s,
        deadline_at_s=deadline_at_s,
    )
    seen = None if circuit.view is None else circuit.view.record
    if woken or core.lines_up_first(seen, may_wait=started_at_s < deadline_at_s):
        # Everybody comes now: first the ticket, so that not all of them try the one free slot.
        yield from _draw_ticket(circuit, line, woken=woken)
    if woken:
        yield from _come_in_turn(circuit, line)
    while True:
        view, slots = yield from _look_in_line(circuit, line)
        if not breaker.passes(view.record):
            return None
        if not core.needs_slot(view.record, collective=collective):
            return view, None
        permit, queue = yield from _try(circuit, view, slots, line=line)
        if permit is not None:
            # Not the circuit's view: another thread may have seen a later epoch since.
            return view, permit
        now_s: float = yield Now()
        if now_s >= deadline_at_s:
            return None
        yield from _wait(circuit, line, queue)


def _try(
    circuit: Circuit, view: BreakerView, slots: tuple[cells.Slot, ...], *, line: _Line
) -> Protocol[tuple[Permit | None, Queue]]:
    chosen = yield from _choose(circuit, view, slots)
    now_s: float = yield Now()
    line.queue = queue = line_up.look_on(
        line.queue,
        slots,
        ticket=line.ticket,
        limit=view.record.limit,
        is_free=chosen is not None,
        now_s=now_s,
    )
    if chosen is None:
        return None, queue
    # One that is silent is taken by whoever sees it: those who come before have not.
    is_its_turn = line_up.may_try(
        queue,
        has_waited=line.has_waited,
        is_last_chance=now_s >= line.deadline_at_s,
        looked_at_s=line.looked_at_s,
        now_s=now_s,
    )
    if chosen.is_free and not is_its_turn:
        return None, queue
    return (yield from _claim(circuit, view, chosen, line=line)), queue


def look(circuit: Circuit) -> Protocol[tuple[BreakerView, tuple[cells.Slot, ...]]]:
    """Read the breaker's record and all slots in one round trip.

    Args:
        circuit: What this process remembers of the breaker.
    """
    keys = circuit.slot_keys
    sent_at_s: float = yield Now()
    values: list[bytes | None] = yield MultiGet((circuit.key, *keys))
    view = yield from accept(circuit, values[0], sent_at_s=sent_at_s)
    slots = tuple(
        cells.Slot(
            index=index,
            raw=raw or b"",
            record=decode(SlotRecord, raw, key=keys[index]) if raw else None,
        )
        for index, raw in enumerate(values[1:])
    )
    circuit.pace_s = cells.pace_s(slots)
    circuit.turn = cells.turn_of(slots)
    return view, slots


def _look_in_line(
    circuit: Circuit, line: _Line
) -> Protocol[tuple[BreakerView, tuple[cells.Slot, ...]]]:
    sent_at_s: float = yield Now()
    line.looked_at_s = sent_at_s
    view, slots = yield from look(circuit)
    seen_at_s: float = yield Now()
    circuit.silences = core.heard(
        circuit.silences,
        slots,
        sent_at_s=sent_at_s,
        seen_at_s=seen_at_s,
        away_s=line.away_s,
        lease_s=circuit.admission.slot_lease_s,
    )
    return view, slots


def _choose(
    circuit: Circuit, view: BreakerView, slots: tuple[cells.Slot, ...]
) -> Protocol[cells.Slot | None]:
    draw: float = yield Draw()
    return core.choose(
        slots,
        limit=view.record.limit,
        silences=circuit.silences,
        lease_s=circuit.admission.slot_lease_s,
        draw=draw,
    )


def _claim(
    circuit: Circuit, view: BreakerView, slot: cells.Slot, *, line: _Line
) -> Protocol[Permit | None]:
    now_s: float = yield Now()
    holder: str = yield Nonce()
    record = cells.taken(slot, ticket=line.ticket, holder=holder)
    key = circuit.slot_keys[slot.index]
    written = yield from write(key, slot.raw, encode(record))
    if not written.won:
        return None
    # It has been let in: whoever of this process comes next draws a ticket of its own.
    circuit.ticket = None
    if not slot.is_free:
        yield Emit(SlotForgiven(dependency=circuit.dependency, slot=slot.index))
    return Permit(
        key,
        record,
        index=slot.index,
        every_s=circuit.admission.beat_every_s,
        entered_at_s=now_s,
        generation=view.record.generation,
        is_own=circuit.is_own,
    )


def _draw_ticket(circuit: Circuit, line: _Line, *, woken: bool = False) -> Protocol[None]:
    line.has_ticket = True
    store_id = "" if circuit.view is None else circuit.view.record.store_id
    if circuit.ticket is not None and circuit.ticket[0] == store_id:
        # It was not let in with it. Whoever comes again does not go to the end of the line.
        line.ticket = circuit.ticket[1]
        return
    if woken and circuit.place is not None:
        # It was let in and has failed: it comes before all who still hold a ticket.
        return
    try:
        line.ticket = yield Add(circuit.keys.turn(circuit.dependency), 1)
    except StoreUnavailableError:
        # A hint only: without one this waiter looks again soon.
        line.ticket = None
    circuit.ticket = None if line.ticket is None else (store_id, line.ticket)


def _come_in_turn(circuit: Circuit, line: _Line) -> Protocol[None]:
    draw: float = yield Draw()
    now_s: float = yield Now()
    line.queue = line_up.at_the_bell(
        circuit.config.max_concurrent,
        ticket=line.ticket,
        place=None if circuit.place is None else circuit.place[1],
        turn=circuit.turn,
        limit=circuit.config.ramp_start,
        pace_s=circuit.pace_s,
        now_s=now_s,
    )
    yield from _sleep(circuit, line, wait_s=line_up.first_look_s(line.queue, draw=draw))


def _wait(circuit: Circuit, line: _Line, queue: Queue) -> Protocol[None]:
    if not line.has_ticket:
        yield from _draw_ticket(circuit, line)
        queue = line.queue = line_up.with_ticket(queue, line.ticket, turn=circuit.turn)
    draw: float = yield Draw()
    now_s: float = yield Now()
    lease_s = circuit.admission.slot_lease_s
    wait_s = line_up.next_look_s(queue, now_s=now_s, lease_s=lease_s, draw=draw)
    yield from _sleep(circuit, line, wait_s=wait_s)


def _sleep(circuit: Circuit, line: _Line, *, wait_s: float) -> Protocol[None]:
    """Sleep, and say now and then what is awaited; who speaks does not look."""
    now_s: float = yield Now()
    remaining_s = line.away_s = max(0.0, min(wait_s, line.deadline_at_s - now_s))
    line.has_waited = True
    while True:
        piece_s = min(remaining_s, line.voice_s)
        if is_time_to_speak(line.spoken_at_s, wait_s=piece_s, voice_s=line.voice_s, now_s=now_s):
            line.spoken_at_s = now_s
            yield Emit(_awaited(circuit, line, now_s=now_s))
        yield Sleep(piece_s)
        remaining_s -= piece_s
        if remaining_s <= 0:
            return
        now_s = yield Now()


def _awaited(circuit: Circuit, line: _Line, *, now_s: float) -> SlotAwaited:
    return SlotAwaited(
        dependency=circuit.dependency,
        operation=line.operation,
        limit=0 if circuit.view is None else circuit.view.record.limit,
        elapsed_s=now_s - line.started_at_s,
    )
