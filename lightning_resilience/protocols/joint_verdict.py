# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The verdict of a joint operation: written once, from the workers' outcomes, for all ranks.

Each worker publishes its outcome before anything else can block or fail. The last one merges all of
them into the write-once verdict and rings; should it die in between, or should a worker fall
silent, any rank that waits does it instead. Later reports change nothing. A success is told only
once all ranks have come (``protocols.joint_muster``).
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from lightning_resilience.core import joint as core, lease, muster as presence, roll_call
from lightning_resilience.core.events import RanksLost, WorkAwaited
from lightning_resilience.core.records import FinalRecord, OutcomeRecord, decode, encode
from lightning_resilience.core.waiting import is_time_to_speak
from lightning_resilience.errors import (
    JointError,
    JointUnavailableError,
    ResilienceError,
    StoreUnavailableError,
)
from lightning_resilience.protocols.beating import OvertakenError, with_beat
from lightning_resilience.protocols.effects import (
    Add,
    Beat,
    Emit,
    Get,
    MultiGet,
    Nonce,
    Now,
    Set,
    Sleep,
    WaitFor,
)
from lightning_resilience.protocols.joint_fence import (
    arrive_again,
    cast,
    decided,
    refuse_to_guess,
    verdict_end,
)
from lightning_resilience.protocols.joint_muster import muster
from lightning_resilience.protocols.joint_terms import JointResult


if TYPE_CHECKING:
    from lightning_resilience.core.lease import Silence
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.joint_terms import Arrival, Joint, Member, Part


__all__ = ["await_final", "refuse", "someone_left", "withdraw", "work"]

# A rank that has shown nothing yet is timed from the observer's own arrival.
_NOTHING_YET: Final = ("", "")


def work(member: Member, joint: Joint, part: Part, *, arrival: Arrival) -> Protocol[JointResult]:
    """Do this rank's part, publish how it ended, and learn the verdict.

    Args:
        member: Who this rank is.
        joint: The operation.
        part: This rank's work.
        arrival: How this rank came.

    Returns:
        The verdict, with the work's own value or error.
    """
    beat = Beat(member.keys.joint("beat", member.rank), member.beat_s)
    end = verdict_end(member, joint)
    try:
        value = yield from with_beat(part.run(arrival.started_at_s), beat, ends=end)
        report = OutcomeRecord(rank=member.rank, detail=part.detail(value))
    except GeneratorExit:
        raise
    except OvertakenError:
        # Another rank has failed for good, or this one was taken for lost: the wait is in vain.
        final = yield from await_final(member, joint, arrival)
        return JointResult(final=final)
    except BaseException as error:  # noqa: BLE001 - published first, then judged by the verdict
        return (yield from _failed(member, joint, part, error=error, arrival=arrival))
    try:
        final = yield from _publish(member, joint, report, arrival=arrival, interrupted=False)
    except GeneratorExit:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and arrival.report is None:
            # Interrupted while it reports, or, as the only one that works, while it waits for a
            # rank that has not come: nobody knows of its report.
            with suppress(ResilienceError):
                yield from withdraw(member, joint, part, error=error, arrival=arrival)
        raise
    return JointResult(final=final, value=value)


def withdraw(
    member: Member, joint: Joint, part: Part | None, *, error: BaseException, arrival: Arrival
) -> Protocol[None]:
    """Tell the others that this rank has failed outside its work.

    A mismatch of operations is the verdict at once: somebody waits for what will not happen. All
    else concerns the others only where this rank has work.

    Args:
        member: Who this rank is.
        joint: The operation.
        part: The work that it would have had, or None.
        error: What it raises.
        arrival: How it came.
    """
    if isinstance(error, JointUnavailableError):
        return
    if isinstance(error, JointError):
        report = OutcomeRecord(rank=member.rank, failure=error.outcome, error=str(error))
        yield from _write_final(member, joint, (report,), arrival=arrival)
    elif part is not None:
        yield from _publish(member, joint, part.outcome(error), arrival=arrival, interrupted=True)


def refuse(
    member: Member, joint: Joint, arrival: Arrival, *, refusal: FinalRecord
) -> Protocol[FinalRecord]:
    """Make the gate's refusal the verdict, or learn what somebody else has made it.

    Args:
        member: Who this rank is.
        joint: The operation.
        arrival: How this rank came.
        refusal: What all ranks are to read.
    """
    return (yield from _make_final(member, joint, arrival, mine=refusal))


def _failed(
    member: Member, joint: Joint, part: Part, *, error: BaseException, arrival: Arrival
) -> Protocol[JointResult]:
    interrupted = not isinstance(error, Exception)
    try:
        final = yield from _publish(
            member,
            joint,
            part.outcome(error),
            arrival=arrival,
            interrupted=interrupted,
        )
    except JointUnavailableError:
        if interrupted:
            raise error from None
        raise
    return JointResult(final=final, error=error)


def _publish(
    member: Member, joint: Joint, report: OutcomeRecord, *, arrival: Arrival, interrupted: bool
) -> Protocol[FinalRecord]:
    if joint.workers == (member.rank,):
        return (yield from _write_final(member, joint, (report,), arrival=arrival))
    yield Set(member.keys.joint("out", joint.seq, member.rank), encode(report))
    arrival.report = report
    try:
        reported: int = yield Add(member.keys.joint("count", joint.seq), 1)
    except StoreUnavailableError:
        # Only a hint: whoever waits reads the reports themselves at the end of a chunk.
        reported = 0
    if reported >= len(joint.workers):
        outcomes, missing = yield from _reports(member, joint, arrival)
        if not missing:
            return (yield from _write_final(member, joint, outcomes, arrival=arrival))
    if interrupted:
        # Whoever was interrupted does not wait for the others, and its report is the most severe
        # there is.
        return (yield from _write_final(member, joint, (report,), arrival=arrival))
    if not report.failure:
        return (yield from await_final(member, joint, arrival))
    # This failure fails all. A beat for those who fail at the same time, maybe more severely; then
    # the others are told, who may be waiting for an outage that does not matter any more.
    yield WaitFor(member.keys.joint("done", joint.seq), member.beat_s)
    outcomes, _missing = yield from _reports(member, joint, arrival)
    return (yield from _write_final(member, joint, outcomes, arrival=arrival))


def _reports(
    member: Member, joint: Joint, arrival: Arrival
) -> Protocol[tuple[tuple[OutcomeRecord, ...], tuple[int, ...]]]:
    """Read what the workers have reported; put this rank's own report back where it was lost.

    A store that comes back empty has lost it, and nobody else knows it: without it this rank would
    be waited for, and a success could be made of the reports of all others.
    """
    keys = tuple(member.keys.joint("out", joint.seq, rank) for rank in joint.workers)
    values: list[bytes | None] = yield MultiGet(keys)
    reports = {
        rank: decode(OutcomeRecord, raw, key=key)
        for rank, key, raw in zip(joint.workers, keys, values, strict=True)
        if raw is not None
    }
    mine = arrival.report
    if mine is not None and member.rank not in reports:
        yield Set(member.keys.joint("out", joint.seq, member.rank), encode(mine))
        reports[member.rank] = mine
    missing = tuple(rank for rank in joint.workers if rank not in reports)
    return tuple(reports.values()), missing


def _terms(joint: Joint, *, writer: str) -> FinalRecord:
    return FinalRecord(
        op=joint.op,
        subject=joint.subject,
        digest=joint.digest,
        workers=joint.workers,
        writer=writer,
    )


def _write_final(
    member: Member,
    joint: Joint,
    outcomes: tuple[OutcomeRecord, ...],
    *,
    arrival: Arrival,
    lost: tuple[int, ...] = (),
    absent: tuple[int, ...] = (),
) -> Protocol[FinalRecord]:
    writer: str = yield Nonce()
    decide = partial(
        core.decide_final, _terms(joint, writer=writer), outcomes, silent_s=member.timeout_s
    )
    mine = decide(lost_ranks=lost, absent_ranks=absent)
    if not mine.failure:
        # Order: before the verdict, so that whoever comes later finds that it was taken for lost.
        absent = yield from muster(member, joint, arrival)
        mine = decide(lost_ranks=absent, absent_ranks=absent)
    return (yield from _make_final(member, joint, arrival, mine=mine))


def _make_final(
    member: Member, joint: Joint, arrival: Arrival, *, mine: FinalRecord
) -> Protocol[FinalRecord]:
    final = yield from cast(member, joint, arrival, mine=mine)
    # Order: after the verdict, so that whoever is woken reads it.
    yield Set(member.keys.joint("done", joint.seq), b"1")
    return final


def await_final(member: Member, joint: Joint, arrival: Arrival) -> Protocol[FinalRecord]:
    """Wait for the verdict; write it where nobody else is left to.

    A rank that is interrupted meanwhile says so: the worker, whose work goes on, then knows that
    nobody is there any more for the collective that follows.

    Args:
        member: Who this rank is.
        joint: The operation.
        arrival: How this rank came.

    Returns:
        The verdict.
    """
    try:
        return (yield from _watch(member, joint, arrival))
    except GeneratorExit:
        raise
    except BaseException as error:
        if not isinstance(error, Exception):
            with suppress(ResilienceError):
                yield Set(member.keys.joint("left", member.rank), str(joint.seq).encode())
        raise


def someone_left(member: Member) -> Protocol[bool]:
    """Tell whether a rank was interrupted while it waited for another.

    Args:
        member: Who this rank is.
    """
    keys = tuple(member.keys.joint("left", rank) for rank in range(member.world_size))
    values: list[bytes | None] = yield MultiGet(keys)
    return any(raw is not None for raw in values)


def _watch(member: Member, joint: Joint, arrival: Arrival) -> Protocol[FinalRecord]:
    # Bounded: a worker that is silent for timeout_s is lost, and one that is not is at work under
    # its own deadline.
    key = member.keys.joint("final", joint.seq)
    longest_s = min(joint.patience.chunk_s, joint.patience.voice_s)
    silences = {
        rank: lease.Silence(version=_NOTHING_YET, looked_at_s=arrival.started_at_s)
        for rank in joint.workers
    }
    spoken_at_s: float | None = None
    while True:
        silent_s = joint.silence_s(member, arrival)
        chunk_s = min(longest_s, silent_s / 2)
        rang: bool = yield WaitFor(member.keys.joint("done", joint.seq), chunk_s)
        raw: bytes | None = yield Get(key)
        final = decided(member, joint, raw)
        if final is not None:
            return final
        if rang:
            # Its verdict was lost with the store, and a bell that stays rung is no busy loop.
            yield Sleep(member.beat_s)
        now_s: float = yield Now()
        if is_time_to_speak(
            spoken_at_s, wait_s=chunk_s, voice_s=joint.patience.voice_s, now_s=now_s
        ):
            spoken_at_s, elapsed_s = now_s, now_s - arrival.started_at_s
            yield Emit(
                WorkAwaited(op=joint.op, seq=joint.seq, elapsed_s=elapsed_s, workers=joint.workers)
            )
        outcomes, missing = yield from _reports(member, joint, arrival)
        lost = yield from _lost(
            member, joint, arrival, missing=missing, silences=silences, longest_gap_s=chunk_s
        )
        if set(lost) == set(missing):
            if lost:
                yield Emit(
                    RanksLost(op=joint.op, seq=joint.seq, ranks=lost, silent_s=member.timeout_s)
                )
            absent = _absent(lost, silences, seq=joint.seq)
            return (
                yield from _write_final(
                    member, joint, outcomes, arrival=arrival, lost=lost, absent=absent
                )
            )


def _absent(lost: tuple[int, ...], silences: dict[int, Silence], *, seq: int) -> tuple[int, ...]:
    numbers = {rank: str(silences[rank].version[0]).encode() for rank in lost}
    return presence.absent_ranks(numbers, seq=seq)


def _lost(
    member: Member,
    joint: Joint,
    arrival: Arrival,
    *,
    missing: tuple[int, ...],
    silences: dict[int, Silence],
    longest_gap_s: float,
) -> Protocol[tuple[int, ...]]:
    parts = [member.keys.joint(part, rank) for rank in missing for part in ("arrived", "beat")]
    sent_at_s: float = yield Now()
    mine, *values = yield MultiGet((member.keys.joint("arrived", member.rank), *parts))
    seen_at_s: float = yield Now()
    if mine is None:
        # So that whoever has work sees that this rank has gone nowhere.
        yield from arrive_again(member, joint, arrival)
    if roll_call.has_gone_on(values[::2], seq=joint.seq):
        # Between the look at the verdict and this one, or with a verdict that was lost.
        yield from refuse_to_guess(member, joint, missing)
        return ()
    lost = []
    for position, rank in enumerate(missing):
        pair = values[2 * position : 2 * position + 2]
        silences[rank] = lease.listen(
            silences[rank],
            tuple((raw or b"").decode() for raw in pair),
            sent_at_s=sent_at_s,
            seen_at_s=seen_at_s,
            longest_gap_s=longest_gap_s,
        )
        # One that has come to this store has said that it lives, and is lost like any other.
        limit_s = joint.silence_s(member, arrival) if pair[0] is None else member.timeout_s
        if silences[rank].watched_s >= limit_s:
            if not roll_call.may_be_lost(pair[0], is_in_new_store=arrival.is_in_new_store):
                yield from refuse_to_guess(member, joint, (rank,))
                return ()
            lost.append(rank)
    return tuple(lost)
