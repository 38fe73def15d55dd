# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Is this still the store in which the operation began? The fence around a verdict.

A shared store that was lost and comes back empty looks as if nobody had ever decided. A rank that
was held up would then take those who have long gone on for lost, and return another verdict than
they have. So a verdict is never created from nothing:

* **The ballot.** Whoever decides the first gate puts an open ballot where the verdict will be; it
  names that gate's writer, so every rank knows its bytes without reading them. A verdict replaces
  exactly these bytes. Where they are gone, the store is another one.
* **The roll call.** In another store a verdict may still come about, if nobody has returned with
  one: whoever has work waits until every rank has said, in *this* store, that it is in *this*
  operation. One who has gone on never says so, and then nobody makes a verdict up.
* **Arrival** is a change of what this rank wrote when it arrived before. Where that is gone, the
  store is another one, and a rank that has shown nothing in it may have gone on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from lightning_resilience.core import roll_call
from lightning_resilience.core.records import FinalRecord, GateRecord, decode, encode
from lightning_resilience.protocols.beating import End
from lightning_resilience.protocols.effects import Get, MultiGet, Nonce, Now, Set, Sleep
from lightning_resilience.protocols.joint_terms import Arrival
from lightning_resilience.protocols.shared_cell import create, write


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.joint_terms import Joint, Member


__all__ = [
    "arrive",
    "arrive_again",
    "ballot",
    "cast",
    "decided",
    "enlist",
    "lay_out",
    "refuse_to_guess",
    "verdict_end",
]

# A store that is lost once more each time that a rank has come to terms with the one before.
_MOST_STORES: Final = 10


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
    return replace(member, is_enlisted=True)


def arrive(member: Member, joint: Joint) -> Protocol[Arrival]:
    """Say that this rank is in the operation.

    Args:
        member: Who this rank is.
        joint: The operation.
    """
    started_at_s: float = yield Now()
    arrival = Arrival(started_at_s=started_at_s)
    key, mine = member.keys.joint("arrived", member.rank), str(joint.seq).encode()
    has_written = joint.seq > 1 or member.is_enlisted
    expected = str(joint.seq - 1).encode() if has_written else b""
    written = yield from write(key, expected, mine)
    if not written.won:
        arrival.is_in_new_store = written.gone
        yield Set(key, mine)
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


def ballot(gate: bytes, *, key: str) -> bytes:
    """Return what lies where the verdict will be, as the first gate says.

    Args:
        gate: The first gate's bytes; empty where there is none.
        key: That gate's key, for errors.
    """
    if not gate:
        return b""
    record = decode(GateRecord, gate, key=key)
    return encode(FinalRecord(op=record.op, writer=record.writer, is_open=True))


def lay_out(member: Member, joint: Joint, gate: bytes) -> Protocol[None]:
    """Put the open ballot where the verdict will be.

    Args:
        member: Who this rank is.
        joint: The operation.
        gate: The first gate's bytes.
    """
    gate_key = member.keys.joint("gate", joint.seq, 0)
    yield from create(member.keys.joint("final", joint.seq), ballot(gate, key=gate_key))


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
        raise roll_call.replaced_error(
            joint.op, seq=joint.seq, rank=member.rank, absent=record.lost_ranks
        )
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
    key = member.keys.joint("final", joint.seq)
    for _ in range(_MOST_STORES):
        yield from _make_sure(member, joint, arrival)
        expected = ballot(arrival.gate, key=member.keys.joint("gate", joint.seq, 0))
        written = yield from write(key, expected, encode(mine))
        if written.won:
            return mine
        found = decided(member, joint, written.raw or None)
        if found is not None:
            return found
        yield from _restore(member, joint, arrival)
    raise roll_call.replaced_error(joint.op, seq=joint.seq, rank=member.rank, absent=(member.rank,))


def _make_sure(member: Member, joint: Joint, arrival: Arrival) -> Protocol[None]:
    """Look whether this is the store in which this rank arrived; if not, call the roll."""
    arrived: bytes | None = yield Get(member.keys.joint("arrived", member.rank))
    if arrived is None:
        yield from arrive_again(member, joint, arrival)
    if arrival.is_in_new_store and not arrival.has_called_roll:
        yield from _call_the_roll(member, joint, arrival)


def _restore(member: Member, joint: Joint, arrival: Arrival) -> Protocol[None]:
    gate_key = member.keys.joint("gate", joint.seq, 0)
    gate: bytes | None = yield Get(gate_key)
    if arrival.gate and gate != arrival.gate:
        yield from arrive_again(member, joint, arrival)
        yield from _call_the_roll(member, joint, arrival)
        # Whoever came to the new store first may have made a gate there, and it counts.
        gate = (yield from create(gate_key, arrival.gate)).raw
    arrival.gate = gate or b""
    if gate:
        # Where it is still the same, whoever decided it has died before it could do this.
        yield from lay_out(member, joint, gate)


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
        if now_s - began_at_s >= member.timeout_s or roll_call.has_gone_on(numbers, seq=joint.seq):
            yield from refuse_to_guess(member, joint, absent)
            return
        nonce: str = yield Nonce()
        # Or this one would be taken for lost meanwhile.
        yield Set(member.keys.joint("beat", member.rank), nonce.encode())
        yield Sleep(member.beat_s)
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
        raise roll_call.replaced_error(joint.op, seq=joint.seq, rank=member.rank, absent=absent)
