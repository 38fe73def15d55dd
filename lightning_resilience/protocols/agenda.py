# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The agenda: any rank asks, rank 0 decides, and all act on the same item at the same boundary.

::

    any rank      ask ──▶ asked/<n> ──▶ listen        rank 0's helper thread
                                          │
    rank 0        at its next boundary:   └──▶ put ──▶ agenda/<n>, then a 1 in the broadcast
    all ranks     a 1 in the broadcast  ──▶ take ◀── agenda/<n>

The broadcast is Lightning's own, of rank 0's stop flag at the beginning of every step. It tells
*that* there is something, in the same step on all ranks, and the store tells *what*: so a step
without an item costs no operation of the store and no collective. Every rank counts the items that
it has taken, and lock-step gives all the same ``<n>``.

``asked/<n>`` is one cell for all ranks, and holds the most urgent item that was asked for. Whoever
asked for another one finds that ``agenda/<n>`` is not of its kind, and asks again for ``<n+1>``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from lightning_resilience.core.agenda import (
    AgendaKind,
    AgendaRecord,
    outranks,
    vanished_error,
)
from lightning_resilience.core.records import decode, encode
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.effects import Delete, Get, Set, WaitFor
from lightning_resilience.protocols.member_patience import patience_of
from lightning_resilience.protocols.persistent import Persistence, with_persistence
from lightning_resilience.protocols.shared_cell import write


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.joint_terms import Member


__all__ = ["ask", "listen", "put", "take"]

_CHUNK_S: Final = 600.0
_PARTS: Final = ("asked", "agenda")
_KEPT: Final = 2


def ask(member: Member, number: int, record: AgendaRecord) -> Protocol[None]:
    """Ask that all ranks act on something next. Idempotent.

    Args:
        member: Who this rank is.
        number: Number of the item that all ranks will act on next.
        record: What to ask for.

    Raises:
        StoreUnavailableError: The store did not answer; whether it was asked for is unknown.
    """
    key = member.keys.joint("asked", number)
    found = b""
    # Bounded: each round loses to somebody who is more urgent, or to a store that came back empty.
    for _ in range(len(AgendaKind) * member.world_size + 1):
        written = yield from write(key, found, encode(record))
        found = written.raw
        if written.won:
            return
        if not written.gone and not outranks(record, decode(AgendaRecord, found, key=key)):
            return


def listen(member: Member, number: int) -> Protocol[AgendaRecord]:
    """Wait until any rank asks for something. On rank 0, in a thread of its own.

    Not bounded: it waits for as long as nobody asks, also while the store is away, and ends with
    the fit.

    Args:
        member: Who this rank is.
        number: Number of the item that all ranks will act on next.

    Returns:
        The most urgent that was asked for until now.
    """
    persistence = Persistence(
        op="agenda", patience_s=math.inf, error=lambda _lost_for_s, error: error
    )
    return (yield from with_persistence(_listen(member, number), persistence))


def _listen(member: Member, number: int) -> Protocol[AgendaRecord]:
    key = member.keys.joint("asked", number)
    while True:
        if not (yield WaitFor(key, _CHUNK_S)):
            continue
        raw: bytes | None = yield Get(key)
        if raw is not None:
            return decode(AgendaRecord, raw, key=key)


def put(member: Member, number: int, record: AgendaRecord) -> Protocol[None]:
    """Say what all ranks act on. On rank 0, before it tells them to look. Idempotent.

    Args:
        member: Who this rank is.
        number: Number of the item.
        record: The item.

    Raises:
        StoreUnavailableError: The store did not answer; nobody must be told to look.
    """
    key = member.keys.joint("agenda", number)
    desired = encode(record)
    yield Set(key, desired)
    # A store may not answer a write, and nobody must look for what did not arrive.
    if (yield Get(key)) != desired:
        message = f"The shared store does not hold what was just written to {key!r}."
        raise StoreUnavailableError(message)
    # All ranks have met since they read it: in the collective that told them of the last item.
    if number > _KEPT:
        for part in _PARTS:
            yield Delete(member.keys.joint(part, number - _KEPT))


def take(member: Member, number: int) -> Protocol[AgendaRecord]:
    """Learn what all ranks act on. On every rank that was told to look.

    Args:
        member: Who this rank is.
        number: Number of the item.

    Returns:
        The same record on every rank.

    Raises:
        JointUnavailableError: This rank could not reach the shared store for too long, or the item
            is not there.
    """
    persistence = patience_of(member, "agenda", seq=number)
    return (yield from with_persistence(_take(member, number), persistence))


def _take(member: Member, number: int) -> Protocol[AgendaRecord]:
    key = member.keys.joint("agenda", number)
    raw: bytes | None = yield Get(key)
    if raw is None:
        raise vanished_error(number, rank=member.rank)
    return decode(AgendaRecord, raw, key=key)
