# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""All interleavings of a few waiters on one or two slots, with lost answers and stopped holders.

Waiters look, claim, beat and leave in any order; any compare-and-set may be answered, executed
without an answer, or not executed; time passes in ticks, two of which are a lease. A holder that is
stopped, or dead, is one that does nothing in the rest of a sequence. Two sequences that lead to the
same state, but for the names of nonces, have the same continuations, so each state is continued
once.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import pytest

from lightning_resilience.core import admission, slots
from lightning_resilience.core.admission import Slot
from lightning_resilience.core.lease import Silence
from lightning_resilience.core.outcome import OK
from lightning_resilience.core.records import SlotRecord, decode, encode
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols import effects as fx
from lightning_resilience.protocols.admission import Permit, _give_back


if TYPE_CHECKING:
    from collections.abc import Iterator


LEASE_TICKS = 2
NONCES = itertools.count()
ANSWERS = ("answered", "lost", "away")

Cells: TypeAlias = "tuple[bytes, ...]"


@dataclass(frozen=True)
class Waiter:
    """One process: what it has seen, and what it holds or believes to hold.

    Args:
        seen: For each slot, what it saw at its last look, and for how many ticks; empty before.
        claim: Slot, expectation and desired bytes of a claim without an answer.
        slot: Number of the slot that it holds.
        held: The record that it holds, or None.
        unanswered: A beat without an answer.
        free: What it leaves behind, once it is leaving.
    """

    seen: tuple[tuple[bytes, int], ...] = ()
    claim: tuple[int, bytes, bytes] | None = None
    slot: int = 0
    held: SlotRecord | None = None
    unanswered: SlotRecord | None = None
    free: bytes = b""

    def permit(self) -> Permit:
        """The permit as production code keeps it."""
        assert self.held is not None
        permit = Permit(str(self.slot), self.held, index=self.slot, every_s=1.0, entered_at_s=0.0)
        permit._unanswered = self.unanswered
        return permit


@dataclass(frozen=True)
class State:
    """The cells, for how many ticks each was left alone, and the waiters.

    Args:
        forgiven: Holders that were taken for dead.
    """

    cells: Cells
    ages: tuple[int, ...]
    waiters: tuple[Waiter, ...]
    forgiven: frozenset[str] = frozenset()

    def holder(self, slot: int) -> str:
        """Who has the slot by the store; empty where nobody has."""
        return holder_of(self.cells[slot])

    def identity(self) -> str:
        """The state with its nonces named in the order in which they occur."""
        names: dict[str, str] = {}
        text = repr((self.cells, self.ages, self.waiters, sorted(self.forgiven)))
        return re.sub(r"n\d+", lambda found: names.setdefault(found[0], f"m{len(names)}"), text)


def nonce() -> str:
    """A text that no other write uses."""
    return f"n{next(NONCES)}"


def holder_of(raw: bytes) -> str:
    """Holder in a cell's bytes."""
    return decode(SlotRecord, raw, key="slot").holder if raw else ""


def slots_of(cells: tuple[bytes, ...]) -> list[Slot]:
    """The slots as a look reads them."""
    return [
        Slot(index=at, raw=raw, record=decode(SlotRecord, raw, key="slot") if raw else None)
        for at, raw in enumerate(cells)
    ]


def with_waiter(state: State, who: int, waiter: Waiter) -> State:
    """The state with one waiter replaced."""
    waiters = list(state.waiters)
    waiters[who] = waiter
    return replace(state, waiters=tuple(waiters))


def put(state: State, slot: int, expected: bytes, desired: bytes) -> tuple[State, bytes]:
    """A compare-and-set, and what it returns."""
    found = state.cells[slot]
    if found != expected:
        return state, found
    cells, ages = list(state.cells), list(state.ages)
    cells[slot], ages[slot] = desired, 0
    return replace(state, cells=tuple(cells), ages=tuple(ages)), desired


# --- moves -----------------------------------------------------------------------------------


def tick(state: State) -> State:
    """Let time pass for everybody."""
    waiters = tuple(
        replace(waiter, seen=tuple((raw, min(age + 1, LEASE_TICKS)) for raw, age in waiter.seen))
        for waiter in state.waiters
    )
    ages = tuple(min(age + 1, LEASE_TICKS) for age in state.ages)
    return replace(state, waiters=waiters, ages=ages)


def look(state: State, who: int) -> State:
    """Read all cells, and note since when they are as they are."""
    before = state.waiters[who].seen or ((b"-", 0),) * len(state.cells)
    seen = tuple(
        (raw, age if raw == was else 0) for raw, (was, age) in zip(state.cells, before, strict=True)
    )
    return with_waiter(state, who, replace(state.waiters[who], seen=seen))


def chosen(waiter: Waiter, draw: float) -> Slot | None:
    """The slot that a waiter claims by its last look."""
    slots = slots_of(tuple(raw for raw, _ in waiter.seen))
    silences = {
        slot.index: Silence(version=(slot.raw.decode(),), watched_s=float(age), looked_at_s=0.0)
        for slot, (_, age) in zip(slots, waiter.seen, strict=True)
    }
    return admission.choose(
        slots,
        limit=len(waiter.seen),
        silences=silences,
        lease_s=float(LEASE_TICKS),
        draw=draw,
    )


def claim(state: State, who: int, slot: Slot, answer: str) -> State:
    """Claim a slot for the first time."""
    record = slots.taken(slot, ticket=None, holder=nonce())
    return send_claim(state, who, (slot.index, slot.raw, encode(record)), answer)


def send_claim(state: State, who: int, pending: tuple[int, bytes, bytes], answer: str) -> State:
    """Send a claim, the first time or again."""
    slot, expected, desired = pending
    returned = b""
    if answer != "away":
        before = state.holder(slot)
        taken_over = before and state.cells[slot] == expected != desired
        state, returned = put(state, slot, expected, desired)
        if taken_over:
            state = replace(state, forgiven=state.forgiven | {before})
    if answer != "answered":
        return with_waiter(state, who, replace(state.waiters[who], claim=pending))
    if returned != desired:
        # Somebody was faster: it looks again.
        return with_waiter(state, who, replace(state.waiters[who], claim=None))
    held = decode(SlotRecord, desired, key="slot")
    return with_waiter(state, who, Waiter(slot=slot, held=held))


def beat(state: State, who: int, answer: str) -> State:
    """Show that the holder lives."""
    waiter = state.waiters[who]
    permit = waiter.permit()
    request = permit.request(nonce())
    assert isinstance(request, fx.CompareAndSet)
    returned = b""
    if answer != "away":
        state, returned = put(state, waiter.slot, request.expected, request.desired)
    if answer == "answered":
        permit.answered(returned)
    if permit.is_lost:
        return with_waiter(state, who, Waiter())
    changed = replace(waiter, held=permit.record, unanswered=permit._unanswered)
    return with_waiter(state, who, changed)


def leave(state: State, who: int, answer: str) -> State:
    """Give the slot back, the first time or again."""
    waiter = state.waiters[who]
    permit = waiter.permit()
    free = waiter.free or encode(
        slots.released(permit.record, OK, generation=0, lasted_s=1.0, writer=nonce())
    )
    giving = _give_back(permit, free)
    try:
        effect = next(giving)
        while True:
            assert isinstance(effect, fx.CompareAndSet)
            returned = b""
            if answer != "away":
                state, returned = put(state, waiter.slot, effect.expected, effect.desired)
            if answer != "answered":
                giving.throw(StoreUnavailableError("no answer"))
            effect = giving.send(returned)
    except StopIteration:
        return with_waiter(state, who, Waiter())
    except StoreUnavailableError:
        return with_waiter(state, who, replace(waiter, free=free))


def moves(state: State) -> Iterator[tuple[str, int, State]]:
    """Every move that can follow: its name, who makes it, and where it leads."""
    yield "tick", -1, tick(state)
    for who, waiter in enumerate(state.waiters):
        if waiter.claim is not None:
            for answer in ANSWERS[:2]:
                yield f"claim {answer}", who, send_claim(state, who, waiter.claim, answer)
        elif waiter.held is None:
            yield "look", who, look(state, who)
            slots = {chosen(waiter, draw) for draw in (0.0, 0.75)} if waiter.seen else set()
            for slot, answer in itertools.product(slots - {None}, ANSWERS):
                assert slot is not None
                yield f"claim {answer}", who, claim(state, who, slot, answer)
        else:
            for answer in ANSWERS:
                if not waiter.free:
                    yield f"beat {answer}", who, beat(state, who, answer)
                yield f"leave {answer}", who, leave(state, who, answer)


# --- rules -----------------------------------------------------------------------------------


def believers(state: State, slot: int) -> list[str]:
    """Who may take a slot for its own: those who hold it, and those whose claim went through."""
    names = [
        waiter.held.holder
        for waiter in state.waiters
        if waiter.held is not None and waiter.slot == slot and not waiter.free
    ]
    claims = [waiter.claim for waiter in state.waiters if waiter.claim is not None]
    return names + [
        holder_of(desired)
        for at, _, desired in claims
        if at == slot and holder_of(desired) == state.holder(slot)
    ]


def check(before: State, name: str, who: int, after: State) -> None:
    """What must hold of every move."""
    for slot in range(len(after.cells)):
        rightful = [holder for holder in believers(after, slot) if holder not in after.forgiven]
        assert len(rightful) <= 1, "two holders, and neither was taken for dead"
        assert not rightful or after.holder(slot) == rightful[0]
    if after.forgiven != before.forgiven:
        (slot,) = (at for at, raw in enumerate(before.cells) if after.cells[at] != raw)
        assert before.ages[slot] >= LEASE_TICKS, "taken for dead before a lease of silence"
    waiter = before.waiters[who]
    if waiter.held is None or who < 0:
        return
    if waiter.held.holder in before.forgiven:
        assert after.cells == before.cells, "one that was forgiven has changed a cell"
    if name == "leave answered":
        assert after.holder(waiter.slot) != waiter.held.holder, "a permit was lost"


def check_open(state: State) -> None:
    """Whatever has happened, a newcomer gets a free slot at once, and any after a lease."""
    newcomer = replace(state, waiters=(*state.waiters, Waiter()))
    who = len(state.waiters)
    newcomer = look(newcomer, who)
    free = {at for at in range(len(state.cells)) if not state.holder(at)}
    slot = chosen(newcomer.waiters[who], 0.0)
    assert (slot is not None and slot.index in free) if free else slot is None
    if slot is None:
        newcomer = look(tick(tick(newcomer)), who)
        slot = chosen(newcomer.waiters[who], 0.0)
    assert slot is not None
    entered = claim(newcomer, who, slot, "answered")
    assert entered.waiters[who].held is not None


def unused(cells: int, waiters: int) -> State:
    """Nobody has come yet."""
    return State(cells=(b"",) * cells, ages=(0,) * cells, waiters=(Waiter(),) * waiters)


def all_held(cells: int, waiters: int) -> State:
    """The first waiters hold the slots; the others have come."""
    state = unused(cells, waiters)
    for who in range(cells):
        state = look(state, who)
        slot = chosen(state.waiters[who], 0.0)
        assert slot is not None
        state = claim(state, who, slot, "answered")
    return state


def every_move(start: State, length: int) -> Iterator[tuple[State, str, int, State]]:
    """Every move of every sequence up to the length."""
    seen = {start.identity()}
    frontier = [start]
    for _ in range(length):
        following = []
        for state in frontier:
            for name, who, after in moves(state):
                yield state, name, who, after
                key = after.identity()
                if key not in seen:
                    seen.add(key)
                    following.append(after)
        frontier = following


@pytest.mark.parametrize(
    ("start", "length", "forgiving"),
    [
        (unused(1, 2), 9, True),
        (unused(1, 3), 7, True),
        (unused(2, 2), 7, False),
        (all_held(2, 3), 5, True),
    ],
    ids=["one slot for two", "one slot for three", "two slots for two", "two held, three waiters"],
)
def test_no_interleaving_breaks_a_slot(
    start: State,
    length: int,
    forgiving: bool,  # noqa: FBT001 - data
) -> None:
    """Never two rightful holders of a slot, none lost, none changed by one that was forgiven."""
    names = set()
    forgiven = 0

    for before, name, who, after in every_move(start, length):
        names.add(name)
        forgiven += after.forgiven != before.forgiven
        check(before, name, who, after)
        check_open(after)

    assert len(names) == 2 + 3 * 3
    assert (forgiven > 10) is forgiving


def test_a_stopped_holder_comes_back_to_find_its_slot_gone() -> None:
    """The one sequence that all of this is about, move by move."""
    state = State(cells=(b"",), ages=(0,), waiters=(Waiter(), Waiter()))
    state = look(state, 0)
    slot = chosen(state.waiters[0], 0.0)
    assert slot is not None
    state = look(claim(state, 0, slot, "answered"), 1)
    assert chosen(state.waiters[1], 0.0) is None
    state = look(tick(tick(state)), 1)
    slot = chosen(state.waiters[1], 0.0)
    assert slot is not None
    state = claim(state, 1, slot, "answered")

    beaten, left = beat(state, 0, "answered"), leave(state, 0, "answered")

    assert beaten.cells == left.cells == state.cells
    assert beaten.waiters[0].held is left.waiters[0].held is None
    assert state.holder(0) == state.waiters[1].permit().record.holder
