# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Is this still the store in which the operation began? The fence around a verdict.

A shared store that was lost and comes back empty looks as if nobody had ever decided. A rank that
was held up would then take those who have long gone on for lost, and return another verdict than
they have. So a verdict is made only where this is known: *in this store* nobody can be that has
left the operation with a verdict from another.

* **Arrival** is a change of the number that this rank wrote for the operation before. It succeeds
  only in the store from which the rank has taken the verdict of that operation, and all ranks have
  taken it from one store. Where the number is gone, the store is another one, and a rank that has
  shown nothing in it may have gone on.
* **The roll call.** In another store whoever makes a verdict waits until every rank has said, in
  *this* store, that it is in *this* operation. One who has gone on never says so.
* **The ballot.** Either is known of a store, and a verdict must not get into another. So it
  replaces exactly the bytes of a ballot that was seen beside the rank's own number, in one look,
  which one store has answered. The bytes of a ballot are in no other store: what is created from
  nothing may be created once more when an answer is lost with the store, but that is a draft only;
  the ballot takes the place of a draft that its writer has ceased to create.

So all verdicts of an operation that are returned are from one store, where there is one at most.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lightning_resilience.core import backoff, roll_call, store_loss
from lightning_resilience.core.records import FinalRecord, decode, encode
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.beating import End
from lightning_resilience.protocols.effects import Draw, Get, MultiGet, Nonce, Now, Set, Sleep
from lightning_resilience.protocols.joint_deferred import announce
from lightning_resilience.protocols.joint_terms import Arrival
from lightning_resilience.protocols.shared_cell import write


if TYPE_CHECKING:
    from lightning_resilience.errors import JointUnavailableError
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.joint_terms import Joint, Member


__all__ = [
    "arrive",
    "arrive_again",
    "cast",
    "decided",
    "enlist",
    "lay_out",
    "refuse_to_guess",
    "verdict_end",
]

# A store that is lost once more each time that a rank has come to terms with the one before, and
# others that lay out ballots at the same time.
_MOST_LOOKS: Final = 40

_BASE_S: Final = 0.005
_CAP_S: Final = 0.5


def enlist(member: Member) -> Protocol[Member]:
    """Write this rank's number before the first operation.

    Args:
        member: Who this rank is.

    Returns:
        The same member, enlisted.

    Raises:
        StoreUnavailableError: The shared store does not answer.
    """
    yield Set(member.keys.joint("arrived", member.rank), b"0")
    return replace(member, last_seq=0)


def arrive(member: Member, joint: Joint) -> Protocol[Arrival]:
    """Say that this rank is in the operation.

    Args:
        member: Who this rank is.
        joint: The operation.
    """
    started_at_s: float = yield Now()
    arrival = Arrival(started_at_s=started_at_s)
    key, mine = member.keys.joint("arrived", member.rank), str(joint.seq).encode()
    if member.last_seq is not None:
        written = yield from write(key, str(member.last_seq).encode(), mine)
        if written.won:
            return arrival
    arrival.is_in_new_store = True
    yield Set(key, mine)
    yield from announce(member, joint)
    return arrival


def arrive_again(member: Member, joint: Joint, arrival: Arrival) -> Protocol[None]:
    """Say so once more, because the store has lost it.

    Args:
        member: Who this rank is.
        joint: The operation.
        arrival: How it came.
    """
    arrival.is_in_new_store, arrival.has_called_roll = True, False
    yield Set(member.keys.joint("arrived", member.rank), str(joint.seq).encode())
    yield from announce(member, joint)


def lay_out(member: Member, joint: Joint, expected: bytes = b"") -> Protocol[bool]:
    """Put a ballot where the verdict will be, unless somebody else does.

    Args:
        member: Who this rank is.
        joint: The operation.
        expected: What is there: nothing, or a draft whose writer may have died.

    Returns:
        Whether it is this rank's.
    """
    key = member.keys.joint("final", joint.seq)
    draft = yield from _ballot(joint, is_draft=True)
    written = yield from write(key, expected, draft)
    if written.won:
        # Order: the draft was created for the last time, so this lies in one store only.
        ballot = yield from _ballot(joint, is_draft=False)
        written = yield from write(key, draft, ballot)
    return written.won


def _ballot(joint: Joint, *, is_draft: bool) -> Protocol[bytes]:
    writer: str = yield Nonce()
    return encode(FinalRecord(op=joint.op, is_open=True, is_draft=is_draft, writer=writer))


def decided(member: Member, joint: Joint, raw: bytes | None) -> FinalRecord | None:
    """Return the verdict that was read, or None where there is none yet.

    Args:
        member: Who this rank is.
        joint: The operation.
        raw: What was read in the verdict's place.

    Raises:
        JointUnavailableError: There will be none.
    """
    if raw is None:
        return None
    record = decode(FinalRecord, raw, key=member.keys.joint("final", joint.seq))
    if roll_call.is_spoiled(record):
        raise _unknowable(member, joint, absent=record.lost_ranks)
    return None if record.is_open else record


def verdict_end(member: Member, joint: Joint) -> End:
    """Return what ends every wait of the operation: its verdict.

    Args:
        member: Who this rank is.
        joint: The operation.
    """
    key = member.keys.joint("final", joint.seq)

    def has_come(raw: bytes) -> bool:
        record = decode(FinalRecord, raw, key=key)
        return not record.is_open or roll_call.is_spoiled(record)

    return End(key=key, has_come=has_come)


def cast(
    member: Member, joint: Joint, arrival: Arrival, *, mine: FinalRecord
) -> Protocol[FinalRecord]:
    """Make a verdict, or learn what somebody else has made it.

    Args:
        member: Who this rank is.
        joint: The operation.
        arrival: How this rank came.
        mine: The verdict.

    Raises:
        JointUnavailableError: The store has lost what there was, and ranks that may have a verdict
            do not say that they have none.
    """
    keys = tuple(
        member.keys.joint(part, number)
        for part, number in (("final", joint.seq), ("arrived", member.rank))
    )
    for attempt in range(1, _MOST_LOOKS):
        raw, arrived = yield MultiGet(keys)
        found = decided(member, joint, raw)
        if found is not None:
            return found
        if arrived is None:
            yield from arrive_again(member, joint, arrival)
        if arrival.is_in_new_store and not arrival.has_called_roll:
            # Then look again: the roll was called in some store, and what was seen may be another.
            yield from _call_the_roll(member, joint, arrival)
        elif raw is None or decode(FinalRecord, raw, key=keys[0]).is_draft:
            if not (yield from lay_out(member, joint, raw or b"")):
                yield from _pause(attempt)
        elif (yield from write(keys[0], raw, encode(mine))).won:
            return mine
    raise _unknowable(member, joint, absent=(member.rank,))


def _unknowable(member: Member, joint: Joint, *, absent: tuple[int, ...]) -> JointUnavailableError:
    make = store_loss.others_error if joint.may_be_deferred else roll_call.replaced_error
    return make(joint.op, seq=joint.seq, rank=member.rank, absent=absent)


def _pause(attempt: int) -> Protocol[None]:
    draw: float = yield Draw()
    yield Sleep(backoff.delay_s(attempt, base_s=_BASE_S, cap_s=_CAP_S, draw=draw))


def _call_the_roll(member: Member, joint: Joint, arrival: Arrival) -> Protocol[None]:
    keys = tuple(member.keys.joint("arrived", rank) for rank in range(member.world_size))
    began_at_s: float = yield Now()
    now_s = began_at_s
    while True:
        numbers: list[bytes | None] = yield MultiGet(keys)
        absent = roll_call.absent_ranks(numbers, seq=joint.seq)
        if not absent:
            arrival.has_called_roll = True
            return
        patience_s = joint.silence_s(member, arrival)
        if now_s - began_at_s >= patience_s or roll_call.has_gone_on(numbers, seq=joint.seq):
            yield from refuse_to_guess(member, joint, absent)
            return
        nonce: str = yield Nonce()
        # Or this one would be taken for lost meanwhile. One that is not heard is made good by the
        # next.
        with suppress(StoreUnavailableError):
            yield Set(member.keys.joint("beat", member.rank), nonce.encode())
        yield Sleep(min(member.beat_s, patience_s / 2))
        now_s = yield Now()


def refuse_to_guess(member: Member, joint: Joint, absent: tuple[int, ...]) -> Protocol[None]:
    """Raise where there is no verdict; return where there is one, and it is read next.

    The ballot is spoiled first, so that the others in this store do not find out one by one.

    Args:
        member: Who this rank is.
        joint: The operation.
        absent: Ranks that may have gone on with a verdict that is lost.

    Raises:
        JointUnavailableError: There is no verdict in the store.
    """
    key = member.keys.joint("final", joint.seq)
    raw: bytes | None = yield Get(key)
    if decided(member, joint, raw) is not None:
        return
    writer: str = yield Nonce()
    spoiled = roll_call.spoiled(joint.op, absent=absent, writer=writer)
    written = yield from write(key, raw or b"", encode(spoiled))
    yield Set(member.keys.joint("done", joint.seq), b"1")
    if decided(member, joint, written.raw or None) is None:
        raise _unknowable(member, joint, absent=absent)
