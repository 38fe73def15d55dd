# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The gate of a joint operation: one verdict for all ranks before any of them works.

The first rank to arrive at a round decides from the breaker and the policy, by creating a
write-once key; the others read the same. WAIT ends a round: the ranks that have work wait for the
dependency together, each ready to be the one that probes, and whoever sees it recover (or its own
deadline pass) writes the next round. A first arriver that dies leaves its verdict valid.

Ranks without work do not wait here but for the verdict: their storage is not the one that counts,
and the verdict's bell wakes them however the waiting ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.core import joint as core
from lightning_resilience.core.breaker import passes
from lightning_resilience.core.events import GateDecided
from lightning_resilience.core.joint import GateVerdict
from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.core.records import FinalRecord, GateRecord, decode, encode
from lightning_resilience.core.waiting import is_probe_due
from lightning_resilience.errors import CircuitOpenError
from lightning_resilience.protocols.beating import OvertakenError, with_beat
from lightning_resilience.protocols.circuit import current, refresh
from lightning_resilience.protocols.effects import Beat, Emit, Get, Nonce, Now
from lightning_resilience.protocols.joint_fence import decided, lay_out, verdict_end
from lightning_resilience.protocols.probe import await_passage
from lightning_resilience.protocols.shared_cell import create
from lightning_resilience.protocols.site import heed


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.joint_terms import Arrival, Joint, Member


__all__ = ["pass_gate"]

_MOST_ROUNDS: Final = 1000


def pass_gate(
    member: Member, joint: Joint, arrival: Arrival, *, works: bool
) -> Protocol[FinalRecord | None]:
    """Wait until this rank may go on.

    Args:
        member: Who this rank is.
        joint: The operation.
        works: Whether this rank has work. One that has none leaves the waiting and the probing to
            those that do: their storage is the one that counts, and their verdict wakes it.
        arrival: How this rank came.

    Returns:
        None to proceed, or the verdict with which all ranks leave at once.

    Raises:
        JointError: Another rank is at another operation.
    """
    gate = yield from _decide(member, joint, 0, expired="")
    for round_number in range(1, _MOST_ROUNDS):
        if gate.verdict == GateVerdict.PROCEED.value:
            return None
        if gate.verdict == GateVerdict.FAIL.value:
            return _refusal(joint, gate)
        if not works:
            return None
        try:
            expired = yield from _wait_together(
                member, joint, round_number, started_at_s=arrival.started_at_s
            )
        except OvertakenError:
            # Another rank has failed for good, or this one was taken for lost.
            return (yield from _final(member, joint))
        gate = yield from _decide(member, joint, round_number, expired=expired)
    return _refusal(
        joint, msgspec.structs.replace(gate, reason=f"{_MOST_ROUNDS} rounds of waiting")
    )


def _final(member: Member, joint: Joint) -> Protocol[FinalRecord | None]:
    key = member.keys.joint("final", joint.seq)
    raw: bytes | None = yield Get(key)
    return decided(member, joint, raw)


def _decide(
    member: Member, joint: Joint, round_number: int, *, expired: str
) -> Protocol[GateRecord]:
    decision, epoch = yield from _own_decision(member, joint, expired)
    writer: str = yield Nonce()
    mine = GateRecord(
        op=joint.op,
        digest=joint.digest,
        subject=joint.subject,
        verdict=decision.verdict.value,
        epoch=epoch,
        rank=member.rank,
        reason=decision.reason,
        writer=writer,
    )
    key = member.keys.joint("gate", joint.seq, round_number)
    written = yield from create(key, encode(mine))
    gate = mine if written.won else decode(GateRecord, written.raw, key=key)
    if written.won and not round_number:
        yield from lay_out(member, joint)
    conflict = core.conflict_error(
        gate, op=joint.op, digest=joint.digest, seq=joint.seq, rank=member.rank
    )
    if conflict is not None:
        raise conflict
    if written.won:
        yield Emit(
            GateDecided(
                op=joint.op,
                seq=joint.seq,
                round_number=round_number,
                verdict=gate.verdict,
                reason=gate.reason,
            )
        )
    return gate


def _own_decision(
    member: Member, joint: Joint, expired: str
) -> Protocol[tuple[core.GateDecision, int]]:
    if joint.circuit is None:
        return core.decide_gate(None, on_outage=_policy(member, joint)), 0
    yield from heed(joint.circuit)
    view = yield from current(joint.circuit)
    if not passes(view.record):
        # Order: a verdict that stops anybody rests on a read that was made after arrival.
        view = yield from refresh(joint.circuit)
    now_s: float = yield Now()
    decision = core.decide_gate(
        view.record,
        on_outage=_policy(member, joint),
        expired=expired,
        probe_owed=joint.circuit.inherited or is_probe_due(view, joint.circuit.config, now_s=now_s),
    )
    return decision, view.record.epoch


def _wait_together(
    member: Member, joint: Joint, round_number: int, *, started_at_s: float
) -> Protocol[str]:
    # Who comes late may find that the others have not only waited, but also decided.
    decided: bytes | None = yield Get(member.keys.joint("gate", joint.seq, round_number))
    if joint.circuit is None or decided is not None:
        return ""
    view = yield from current(joint.circuit)
    wait_s = core.gate_wait_s(
        view.record,
        joint.circuit.config,
        on_outage=_policy(member, joint),
        deadline_s=joint.deadline_s,
    )
    beat = Beat(member.keys.joint("beat", member.rank), member.beat_s)
    waiting = await_passage(
        joint.circuit,
        # Those who drew the first places in line may be waiting for this rank now.
        replace(joint.patience, when_open="wait", leads=member.rank == joint.workers[0]),
        operation=joint.op,
        deadline_at_s=started_at_s + wait_s,
    )
    try:
        yield from with_beat(waiting, beat, ends=verdict_end(member, joint))
    except CircuitOpenError as error:
        return str(error)
    return ""


def _policy(member: Member, joint: Joint) -> str:
    return joint.on_outage or member.on_outage


def _refusal(joint: Joint, gate: GateRecord) -> FinalRecord:
    return FinalRecord(
        op=gate.op,
        subject=gate.subject,
        failure=FailureClass.TRANSIENT.value,
        first_rank=gate.rank,
        error=gate.reason,
        workers=joint.workers,
        writer=gate.writer,
    )
