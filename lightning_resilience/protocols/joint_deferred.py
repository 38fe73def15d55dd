# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Leave a joint operation without a verdict, because the store is gone, and settle that later.

``core.store_loss`` says when, and why the ranks stay together. Here is what follows:

* a rank without work returns what stands in the place of a verdict;
* the rank with work tells its own outcome where it has one, and otherwise goes the other way, which
  needs no store: its checkpoint is staged in the spool. Where that does not go either, it raises;
* in the next store, rank 0 tells as it arrives how the operations before have ended for it. Whoever
  has deferred one reads that with its next verdict, or the verdict itself where it is still there.
  One that had failed, and was returned as a failure by others, is raised then: their books differ.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightning_resilience.core import joint as core
from lightning_resilience.core.events import DeferralsSettled, OperationDeferred
from lightning_resilience.core.records import FinalRecord, decode, encode
from lightning_resilience.core.store_loss import (
    DeferredError,
    SettledRecord,
    deferred_final,
    undone_error,
)
from lightning_resilience.errors import StoreUnavailableError
from lightning_resilience.protocols.effects import Emit, MultiGet, Set
from lightning_resilience.protocols.joint_terms import JointResult


if TYPE_CHECKING:
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.joint_terms import Joint, Member, Part


__all__ = ["Done", "announce", "defer", "settle", "watched"]

_TELLER = 0


@dataclass(slots=True)
class Done:
    """What has come of a part, though nobody may have been told.

    Attributes:
        value: What it returned.
        error: What it raised.
        has_ended: Whether it has ended.
    """

    value: Any = None
    error: BaseException | None = None
    has_ended: bool = False


def watched(part: Part | None, done: Done) -> Part | None:
    """Return a part that notes how it ends.

    Args:
        part: The part, or None.
        done: Where that is noted.
    """
    if part is None:
        return None

    def run(started_at_s: float) -> Protocol[Any]:
        try:
            done.value = yield from part.run(started_at_s)
        except (GeneratorExit, DeferredError):
            raise
        except BaseException as error:
            done.error, done.has_ended = error, True
            raise
        done.has_ended = True
        return done.value

    return replace(part, run=run)


def defer(
    member: Member, joint: Joint, part: Part | None, *, done: Done, why: DeferredError
) -> Protocol[JointResult]:
    """Leave an operation whose verdict nobody can know.

    Args:
        member: Who this rank is.
        joint: The operation.
        part: This rank's work; None where it has none.
        done: What has come of that.
        why: Why there is no verdict.

    Returns:
        What stands in the place of the verdict, with what this rank's work has returned.

    Raises:
        JointUnavailableError: This rank's work is neither done nor staged.
    """
    member.unsettled = member.unsettled.with_deferred(joint.seq)
    yield Emit(OperationDeferred(op=joint.op, seq=joint.seq, reason=str(why)))
    final = deferred_final(joint.op, subject=joint.subject, workers=joint.workers, why=str(why))
    if part is None:
        return JointResult(final=final)
    if not done.has_ended and part.instead is not None:
        try:
            done.value = yield from part.instead(str(why))
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody else can be told
            done.error = error
    if done.error is not None:
        cause = f"{type(done.error).__name__}: {done.error}"
        raise undone_error(
            joint.op, seq=joint.seq, rank=member.rank, subject=joint.subject, cause=cause
        ) from done.error
    return JointResult(final=final, value=done.value)


def announce(member: Member, joint: Joint) -> Protocol[None]:
    """Tell in a store that has lost what it held how the operations before have ended.

    Args:
        member: Who this rank is; only one rank tells.
        joint: The operation to which it has come.
    """
    if member.rank == _TELLER and member.defer_after_s is not None:
        told = member.unsettled.record(joint.seq)
        yield Set(member.keys.joint("settled", _TELLER), encode(told))


def settle(member: Member, joint: Joint, final: FinalRecord) -> Protocol[None]:
    """Learn, after a verdict, how the operations have ended that this rank had deferred.

    What cannot be learnt now is asked for after the next one.

    Args:
        member: Who this rank is.
        joint: The operation that has ended.
        final: How.

    Raises:
        JointError: One had failed for the others.
    """
    before = member.unsettled
    if not before.deferred:
        member.unsettled = before.with_verdict(joint.seq, final)
        return
    with suppress(StoreUnavailableError):
        told = yield from _ask(member, joint)
        member.unsettled, failed = before.heard(told)
        settled = len(before.deferred) - len(member.unsettled.deferred)
        if settled:
            yield Emit(DeferralsSettled(op=joint.op, seq=joint.seq, number=settled))
        for seq, one in failed.items():
            error = core.error_of(one, seq=seq)
            if error is not None:
                error.in_step = False
                raise error
    member.unsettled = member.unsettled.with_verdict(joint.seq, final)


def _ask(member: Member, joint: Joint) -> Protocol[SettledRecord | None]:
    if member.rank == _TELLER:
        return member.unsettled.record(joint.seq)
    deferred = member.unsettled.deferred
    key = member.keys.joint("settled", _TELLER)
    keys = tuple(member.keys.joint("final", seq) for seq in deferred)
    raw, *finals = yield MultiGet((key, *keys))
    told = SettledRecord(before=0) if raw is None else decode(SettledRecord, raw, key=key)
    # Where the store has lost nothing, the verdicts themselves are there.
    there = {
        str(seq): record
        for seq, record in zip(deferred, map(_verdict, finals, keys), strict=True)
        if record is not None
    }
    before = max((told.before, *(int(seq) + 1 for seq in there)))
    failures = {seq: record for seq, record in there.items() if record.failure}
    return SettledRecord(before=before, failures={**told.failures, **failures})


def _verdict(raw: bytes | None, key: str) -> FinalRecord | None:
    record = None if raw is None else decode(FinalRecord, raw, key=key)
    return None if record is None or record.is_open else record
