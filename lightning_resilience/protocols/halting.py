# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""All ranks leave a validation after the same batch; ``core.halting`` has the idea.

::

    rank 0       a stop is wanted  ──▶ open_halt: halt/<v> is "open"
    every rank   look, once a second; finds "open"  ──▶ stand: place/<v>/<rank> says its limit
    rank 0       hold: all places are there  ──▶ agenda/<n>, then halt/<v>: "stop" after a batch
    every rank   hold, at its limit  ◀── the answer; or raises its limit and goes on

A limit is raised by a new place first, and then a new nonce in ``halt/<v>`` while that is open.
Rank 0 reads the places after ``halt/<v>`` and answers by a compare-and-set on what it has read: so
it has seen the new place, or its answer is lost, or it came first and the rank finds it.

``<v>`` counts the validations of a fit, alike on all ranks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from lightning_resilience.core.halting import (
    ANSWER_S,
    OFF,
    OPEN,
    STOP,
    HaltRecord,
    PlaceRecord,
    agreed_batch,
    limit_of,
    pause_s,
)
from lightning_resilience.core.records import decode, encode
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.agenda import put
from lightning_resilience.protocols.effects import Get, MultiGet, Nonce, Now, Set, Sleep
from lightning_resilience.protocols.member_patience import patience_of
from lightning_resilience.protocols.persistent import with_persistence
from lightning_resilience.protocols.shared_cell import create, update, write


if TYPE_CHECKING:
    from lightning_resilience.core.agenda import AgendaRecord
    from lightning_resilience.core.halting import Halt
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.joint_terms import Member


__all__ = ["close_halt", "hold", "look", "meet", "open_halt", "stand"]


def _cell(member: Member, validation: int) -> str:
    return member.keys.joint("halt", validation)


def _decoded(member: Member, validation: int, raw: bytes | None) -> HaltRecord | None:
    return decode(HaltRecord, raw, key=_cell(member, validation)) if raw else None


def look(member: Member, validation: int) -> Protocol[HaltRecord | None]:
    """Return what is said of a validation, None for nothing. Any rank; one store operation.

    Args:
        member: Who this rank is.
        validation: Number of the validation in this fit.
    """
    raw: bytes | None = yield Get(_cell(member, validation))
    return _decoded(member, validation, raw)


def open_halt(member: Member, validation: int) -> Protocol[HaltRecord | None]:
    """Tell all ranks to say how far they go. On rank 0; idempotent.

    Args:
        member: Who this rank is.
        validation: Number of the validation in this fit.

    Returns:
        What is said now.
    """
    nonce: str = yield Nonce()
    opened = encode(HaltRecord(state=OPEN, writer=nonce))
    written = yield from create(_cell(member, validation), opened)
    return _decoded(member, validation, written.raw)


def stand(member: Member, validation: int, place: PlaceRecord) -> Protocol[None]:
    """Say how far this rank goes. It must keep to that whether or not this comes back well.

    Args:
        member: Who this rank is.
        validation: Number of the validation in this fit.
        place: Its limit, no less than any that it has said before.

    Raises:
        StoreUnavailableError: The store did not answer; whether the place is there is unknown.
    """
    key = member.keys.joint("place", validation, member.rank)
    desired = encode(place)
    yield Set(key, desired)
    # A store may not answer a write, and what follows must not come before it.
    if (yield Get(key)) != desired:
        message = f"The shared store does not hold what was just written to {key!r}."
        raise StoreUnavailableError(message)


def hold(
    member: Member,
    validation: int,
    place: PlaceRecord,
    *,
    item: tuple[int, AgendaRecord] | None = None,
) -> Protocol[HaltRecord]:
    """Stand at the limit until there is an answer, or the limit is raised.

    Args:
        member: Who this rank is.
        validation: Number of the validation in this fit.
        place: The limit from then on, where there is no answer soon.
        item: On rank 0, what all ranks act on when they leave: number on the agenda, and record.

    Returns:
        The answer; or the open record, and then ``place`` holds.
    """
    while True:
        raw, record = yield from _settled(member, validation, item)
        if record.state != OPEN:
            return record
        yield from stand(member, validation, place)
        written = yield from update(_cell(member, validation), raw, partial(_changed, state=OPEN))
        if written.won:
            return record


def _changed(raw: bytes, nonce: str, *, state: str) -> bytes | None:
    # Once there is an answer, it stays.
    if decode(HaltRecord, raw, key="halt").state != OPEN:
        return None
    return encode(HaltRecord(state=state, writer=nonce))


def _settled(
    member: Member, validation: int, item: tuple[int, AgendaRecord] | None
) -> Protocol[tuple[bytes, HaltRecord]]:
    key = _cell(member, validation)
    until_s = (yield Now()) + ANSWER_S
    while True:
        raw: bytes | None = yield Get(key)
        if raw is None:
            # The store has come back without it: there is no answer that all ranks would see.
            return b"", HaltRecord(state=OFF, writer="")
        record = decode(HaltRecord, raw, key=key)
        if record.state == OPEN and item is not None:
            answered = yield from _answer(member, validation, item, opened=raw)
            record = answered or record
        if record.state != OPEN or (yield Now()) >= until_s:
            return raw, record
        yield Sleep(pause_s(member.world_size))


def _answer(
    member: Member, validation: int, item: tuple[int, AgendaRecord], *, opened: bytes
) -> Protocol[HaltRecord | None]:
    keys = tuple(member.keys.joint("place", validation, rank) for rank in range(member.world_size))
    found: list[bytes | None] = yield MultiGet(keys)
    places = [
        decode(PlaceRecord, one, key=key)
        for key, one in zip(keys, found, strict=True)
        if one is not None
    ]
    if len(places) < member.world_size:
        return None
    batch = agreed_batch(places)
    nonce: str = yield Nonce()
    answer = HaltRecord(state=OFF, writer=nonce)
    if batch is not None:
        answer = HaltRecord(state=STOP, batch=batch, writer=nonce)
        yield from put(member, item[0], item[1])
    written = yield from write(_cell(member, validation), opened, encode(answer))
    return answer if written.won else None


def meet(
    member: Member,
    halt: Halt,
    *,
    batch: int,
    length: str,
    item: tuple[int, AgendaRecord] | None = None,
) -> Protocol[None]:
    """Do what is due between two batches of a validation, on any rank.

    Args:
        member: Who this rank is.
        halt: What it knows of this validation; kept up to date.
        batch: How many batches it has made.
        length: How long its validation is, in words; empty where it does not know.
        item: On rank 0, what it wants all ranks to act on when they leave, if anything: number on
            the agenda, and record.

    Raises:
        JointUnavailableError: This rank has said that it stands here, and could not reach the
            shared store for too long to learn whether it may go on.
    """
    if halt.limit is None:
        yield from _first(member, halt, PlaceRecord(limit=limit_of(batch, raises=0), length=length))
        return
    halt.raises += 1
    place = PlaceRecord(limit=limit_of(batch, raises=halt.raises), length=length)
    persistence = patience_of(member, "agenda", seq=halt.validation)
    holding = hold(member, halt.validation, place, item=item)
    record = yield from with_persistence(holding, persistence)
    if record.state == OPEN:
        halt.limit = place.limit
    else:
        halt.answer = record


def _first(member: Member, halt: Halt, place: PlaceRecord) -> Protocol[None]:
    opens = member.rank == 0 and halt.wants_stop
    ask = open_halt if opens else look
    try:
        record = yield from ask(member, halt.validation)
        halt.look_again(now_s=(yield Now()), has_answered=True)
        if record is not None and record.state == OPEN:
            # First of all: what is said may arrive without an answer.
            halt.limit = place.limit
            yield from stand(member, halt.validation, place)
    except StoreUnavailableError:
        halt.look_again(now_s=(yield Now()), has_answered=False)


def close_halt(member: Member, validation: int) -> Protocol[None]:
    """Let ranks that still validate go on without a limit. On rank 0, at its end; idempotent.

    Args:
        member: Who this rank is.
        validation: Number of the validation in this fit.
    """
    raw: bytes | None = yield Get(_cell(member, validation))
    if raw is not None:
        yield from update(_cell(member, validation), raw, partial(_changed, state=OFF))
