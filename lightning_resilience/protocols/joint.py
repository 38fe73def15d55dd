# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A joint operation: every rank enters it, some have work, and all leave with one verdict.

::

    arrive ──▶ gate ──▶ PROCEED ──▶ ranks with work: do it, with a beat    ──▶ report ─┐
      │         │                   the others: wait for the verdict's bell            ├─▶ verdict
      │         ├──▶ WAIT: all wait for the dependency together, then the next round   │
      │         └──▶ FAIL ─────────────────────────────────────────────────────────────┘

The ranks that wait do so on the shared store. They are not in a collective, so no process-group
timeout runs, and an outage may last longer than it.

* The gate is a write-once key, and the verdict replaces the open ballot that was laid out with the
  first gate (``protocols.joint_fence``): whoever is first decides, everybody reads the same.
* A worker that ends with an exception publishes that first, then raises; also where it was
  interrupted, also at the gate, and as it comes.
* A success is told once every rank has come; one that has not by then is lost
  (``protocols.joint_muster``).
* A rank that shows no change of its ``arrived`` and ``beat`` keys for ``joint_timeout_s`` of the
  observer's own time is lost. Whoever sees that writes it into the verdict, which names the rank.
* A rank that cannot read the verdict makes none up (``protocols.persistent``); where the store is
  gone for everybody, it may leave without one (``protocols.joint_deferred``).
* Keys of operations that every rank has left behind are removed (``protocols.joint_clean_up``).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from lightning_resilience.core import joint as core
from lightning_resilience.core.events import VerdictReached
from lightning_resilience.core.store_loss import DeferredError
from lightning_resilience.errors import ResilienceError, StoreUnavailableError
from lightning_resilience.protocols.effects import Emit, Now
from lightning_resilience.protocols.joint_clean_up import clean_up
from lightning_resilience.protocols.joint_deferred import Done, defer, settle, watched
from lightning_resilience.protocols.joint_fence import arrive
from lightning_resilience.protocols.joint_gate import pass_gate
from lightning_resilience.protocols.joint_terms import Arrival, Joint, JointResult, Member, Part
from lightning_resilience.protocols.joint_verdict import await_final, refuse, withdraw, work
from lightning_resilience.protocols.member_patience import patience_of
from lightning_resilience.protocols.persistent import with_persistence


if TYPE_CHECKING:
    from lightning_resilience.core.records import FinalRecord
    from lightning_resilience.protocols.effects import Protocol


__all__ = ["Joint", "JointResult", "Member", "Part", "perform"]

T = TypeVar("T")


def perform(member: Member, joint: Joint, part: Part | None) -> Protocol[JointResult]:
    """Take part in a joint operation.

    Args:
        member: Who this rank is.
        joint: The operation.
        part: This rank's work; None where it has none.

    Returns:
        The verdict, whether it is a success or a failure; the caller raises. Where the operation
        is deferred, what stands in its place.

    Raises:
        JointError: The ranks are not in lock-step.
        JointUnavailableError: This rank could not reach the shared store for too long.
        JointError: Also where an operation before, which this rank had deferred, had failed.
    """
    persistence = patience_of(
        member, joint.op, seq=joint.seq, may_be_deferred=joint.may_be_deferred
    )
    done = Done()
    try:
        operation = _perform(member, joint, watched(part, done))
        result = yield from with_persistence(operation, persistence)
    except DeferredError as error:
        member.last_seq = None
        return (yield from defer(member, joint, part, done=done, why=error))
    except BaseException:
        # Left without the verdict: what it has written here says nothing of the next operation.
        member.last_seq = None
        raise
    member.last_seq = joint.seq
    # The verdict is known: what cannot be tidied up now is tidied up with the next batch.
    with suppress(StoreUnavailableError):
        yield from clean_up(member, joint.seq)
    yield from settle(member, joint, result.final)
    return result


def _perform(member: Member, joint: Joint, part: Part | None) -> Protocol[JointResult]:
    coming = arrive(member, joint)
    arrival = yield from _or_withdrawn(coming, member, joint, part=part, arrival=None)
    failed = yield from _enter(member, joint, part, arrival=arrival)
    if failed is not None:
        result = JointResult(final=failed)
    elif part is None:
        final = yield from await_final(member, joint, arrival)
        result = JointResult(final=final)
    else:
        result = yield from work(member, joint, part, arrival=arrival)
    _check_place(member, joint, result.final)
    now_s: float = yield Now()
    yield Emit(
        VerdictReached(
            op=joint.op,
            seq=joint.seq,
            outcome=result.final.failure or "ok",
            first_rank=result.final.first_rank if result.final.failure else None,
            detail=result.final.error or result.final.detail,
            elapsed_s=now_s - arrival.started_at_s,
        )
    )
    return result


def _check_place(member: Member, joint: Joint, final: FinalRecord) -> None:
    """Raise where this rank has met another at another place, and a gate that said so was lost."""
    error = core.conflict_error(
        final, op=joint.op, digest=joint.digest, seq=joint.seq, rank=member.rank
    )
    if error is not None and not final.failure:
        raise error


def _enter(
    member: Member, joint: Joint, part: Part | None, *, arrival: Arrival
) -> Protocol[FinalRecord | None]:
    passing = pass_gate(member, joint, arrival, works=part is not None)
    failed = yield from _or_withdrawn(passing, member, joint, part=part, arrival=arrival)
    if failed is None:
        return None
    # Ranks without work may not be looking at the gate, but for the verdict; and a gate in a store
    # that was lost is no verdict yet.
    return (yield from refuse(member, joint, arrival, refusal=failed))


def _or_withdrawn(
    inner: Protocol[T], member: Member, joint: Joint, *, part: Part | None, arrival: Arrival | None
) -> Protocol[T]:
    try:
        return (yield from inner)
    except GeneratorExit:
        raise
    except BaseException as error:
        # Order: told first, then raised, so that nobody waits for this rank until its silence says
        # the same. Where the store is away nobody can be told, and the error stays what it is.
        with suppress(ResilienceError):
            if arrival is None:
                now_s: float = yield Now()
                arrival = Arrival(started_at_s=now_s)
            yield from withdraw(member, joint, part, error=error, arrival=arrival)
        raise
