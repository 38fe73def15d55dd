# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker: one shared record, its states, and the one function that changes it.

One breaker stands before each (storage endpoint, operation class) of a job. Its whole state is one
record in the shared store (``core.records.BreakerRecord``), so that all ranks read the same;
``step`` is a pure function from a record and an input to the next record, and the protocols write
that by compare-and-set from the exact bytes that were read.

::

                votes of ≥ quorum distinct hosts
     CLOSED ───────────────────────────────────────▶ OPEN
       ▲                                              │  an observer has seen it unchanged
       │ limit reaches max_concurrent                 ▼  for open_s and claims the probe
   RECOVERING ◀──── the probe succeeds ──────── HALF_OPEN ◀─┐ unchanged for probe_lease_s:
       │                                              │     │ another takes over, in a new epoch
       │                                              └─────┘
       └── reopen_failures, or a failed ramp ──▶ OPEN ◀── the probe fails (open_s doubles)

   FORCED_OPEN: entered and left by an operator only; it is left to OPEN, so that a probe decides

* **Votes are of hosts, and level-triggered** (``core.window``): a host with a broken link trips
  itself, not the job, and the requests that it takes to trip do not grow with the number of ranks.
  Who is already listed, or reads OPEN, writes nothing.
* **A permit is a lease.** The probe's holder can die: an observer that has seen HALF_OPEN unchanged
  for ``probe_lease_s`` on its own clock takes over (``core.lease``). A lost permit never blocks
  recovery.
* **Epochs fence.** Every transition, take-overs too, begins a new epoch. An input that names
  another epoch or holder than the record's changes nothing; it is late, not wrong.
* **A denied claim changes nothing**, so it cannot keep a dead holder's lease alive.
* **The open wait** is deterministic, ``min(max_open_for_s, open_for_s · 2^k)``: one job, one probe.
* **Ramp**: in RECOVERING each success doubles the limit from ``ramp_start``; a failure halves it. A
  ramp has failed when there is nothing left to halve.

Only failures that say something about health get here (``core.outcome``). A probe that is answered
with a permanent failure was *answered*: the caller's own attempt tells what is wrong.

Sources: M. Nygard, "Release It!", 2nd ed. 2018, ch. 5 (states); Polly and resilience4j leave a
half-open circuit stuck where its permit's holder never reports, which the lease is for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, get_args

import msgspec

from lightning_resilience.core.breaker_config import MOST_VOTES, BreakerConfig
from lightning_resilience.core.breaker_inputs import (
    AttemptFailed,
    AttemptSucceeded,
    BreakerInput,
    ForcedOpen,
    ForceReleased,
    HeldUpstream,
    HostVoted,
    ProbeClaimed,
    ProbeFailed,
    ProbeReleased,
    ProbeSucceeded,
    VoteDropped,
    VotesCleared,
)
from lightning_resilience.core.breaker_record import (
    HISTORY_LENGTH,
    LEGAL,
    PASSING,
    BreakerState,
    BreakerStep,
    BreakerView,
    initial,
    is_fresh,
    outranks,
    passes,
    quorum,
    rebuilt,
)
from lightning_resilience.core.events import BreakerChanged, Event, ResultDropped, VoteCast
from lightning_resilience.core.records import BreakerRecord, Transition
from lightning_resilience.errors import InvalidTransitionError


__all__ = [
    "HISTORY_LENGTH",
    "LEGAL",
    "PASSING",
    "TABLE",
    "AttemptFailed",
    "AttemptSucceeded",
    "BreakerConfig",
    "BreakerInput",
    "BreakerState",
    "BreakerStep",
    "BreakerView",
    "ForceReleased",
    "ForcedOpen",
    "HeldUpstream",
    "HostVoted",
    "ProbeClaimed",
    "ProbeFailed",
    "ProbeReleased",
    "ProbeSucceeded",
    "VoteDropped",
    "VotesCleared",
    "initial",
    "is_fresh",
    "outranks",
    "passes",
    "quorum",
    "rebuilt",
    "step",
]


_CLOSED, _OPEN, _HALF_OPEN, _RECOVERING, _FORCED = BreakerState


@dataclass(frozen=True, slots=True)
class _Context:
    config: BreakerConfig
    dependency: str
    writer: str


def _same(record: BreakerRecord, reason: str, *events: Event) -> BreakerStep:
    return BreakerStep(record=record, changed=False, reason=reason, events=events)


def _move(
    ctx: _Context, record: BreakerRecord, state: BreakerState, *, reason: str, **fields: object
) -> BreakerStep:
    previous = BreakerState(record.state)
    if (previous, state) not in LEGAL:
        message = f"No transition from {previous.value} to {state.value} exists ({reason})."
        raise InvalidTransitionError(message)
    bell_was_rung = previous in PASSING and state not in PASSING
    after = msgspec.structs.replace(
        record,
        epoch=record.epoch + 1,
        generation=record.generation + bell_was_rung,
        state=state.value,
        votes=(),
        holder="",
        upstream=0 if state in PASSING else record.upstream,
        history=(
            *record.history,
            Transition(epoch=record.epoch + 1, state=state.value, reason=reason),
        )[-HISTORY_LENGTH:],
        reason=reason,
        writer=ctx.writer,
    )
    after = msgspec.structs.replace(after, **fields)
    event = BreakerChanged(
        dependency=ctx.dependency,
        epoch=after.epoch,
        previous=previous.value,
        state=state.value,
        reason=reason,
        open_s=after.open_s,
        limit=after.limit,
    )
    return BreakerStep(record=after, changed=True, reason=reason, events=(event,))


def _reopen(ctx: _Context, record: BreakerRecord, reason: str) -> BreakerStep:
    open_s = min(ctx.config.max_open_for_s, record.open_s * 2)
    return _move(ctx, record, _OPEN, reason=reason, open_s=open_s, limit=0, failures=0, upstream=0)


def _with_votes(
    ctx: _Context, record: BreakerRecord, votes: tuple[str, ...], *, reason: str
) -> BreakerStep:
    after = msgspec.structs.replace(record, votes=votes, reason=reason, writer=ctx.writer)
    return BreakerStep(record=after, changed=True, reason=reason)


def _vote(ctx: _Context, record: BreakerRecord, event: HostVoted) -> BreakerStep:
    if event.seen not in {None, (record.store_id, record.epoch)}:
        return _same(record, "it rests on what others did in another epoch")
    stands = event.host in record.votes
    votes = record.votes if stands else (*record.votes, event.host)[-MOST_VOTES:]
    counted = event.counted(votes, stands=stands)
    needed = quorum(event.hosts, fraction=ctx.config.quorum_fraction)
    if counted >= needed:
        reason = f"{counted} of {event.hosts} hosts voted; latest: {event.reason}"
        return _move(ctx, record, _OPEN, reason=reason, open_s=ctx.config.open_for_s, limit=0)
    if stands:
        return _same(record, "this host's vote stands already")
    cast = VoteCast(dependency=ctx.dependency, host=event.host, votes=len(votes), quorum=needed)
    stepped = _with_votes(ctx, record, votes, reason=f"{len(votes)} of {needed} votes")
    return replace(stepped, events=(cast,))


def _drop_vote(ctx: _Context, record: BreakerRecord, event: VoteDropped) -> BreakerStep:
    if event.host not in record.votes:
        return _same(record, "there is no such vote")
    votes = tuple(host for host in record.votes if host != event.host)
    return _with_votes(ctx, record, votes, reason=f"the vote of {event.host} no longer stands")


def _clear_votes(ctx: _Context, record: BreakerRecord, _event: VotesCleared) -> BreakerStep:
    if not record.votes:
        return _same(record, "there are no votes")
    return _with_votes(ctx, record, (), reason="a new incarnation has begun")


def _claim_open(ctx: _Context, record: BreakerRecord, event: ProbeClaimed) -> BreakerStep:
    if event.unchanged_s < record.open_s:
        return _same(
            record,
            f"the probe is due after {record.open_s:g} s, {event.unchanged_s:.3g} s have passed",
        )
    return _move(ctx, record, _HALF_OPEN, reason="a probe was claimed", holder=event.holder)


def _take_over(ctx: _Context, record: BreakerRecord, event: ProbeClaimed) -> BreakerStep:
    lease_s = ctx.config.probe_lease_s
    if event.unchanged_s < lease_s:
        return _same(
            record, f"the prober's lease lasts {lease_s:g} s, {event.unchanged_s:.3g} s have passed"
        )
    return _move(
        ctx,
        record,
        _HALF_OPEN,
        reason="the prober was silent; another took over",
        holder=event.holder,
    )


def _is_stale(record: BreakerRecord, event: ProbeSucceeded | ProbeFailed | ProbeReleased) -> bool:
    return (record.epoch, record.holder) != (event.epoch, event.holder)


def _drop(ctx: _Context, record: BreakerRecord, epoch: int) -> BreakerStep:
    dropped = ResultDropped(dependency=ctx.dependency, epoch=epoch, current_epoch=record.epoch)
    return _same(record, f"a result of epoch {epoch} does not change epoch {record.epoch}", dropped)


def _probe_succeeded(ctx: _Context, record: BreakerRecord, event: ProbeSucceeded) -> BreakerStep:
    if _is_stale(record, event):
        return _drop(ctx, record, event.epoch)
    return _ramp(ctx, record, ctx.config.ramp_start, reason="the probe was answered")


def _ramp(ctx: _Context, record: BreakerRecord, limit: int, *, reason: str) -> BreakerStep:
    most = ctx.config.max_concurrent
    if limit >= most:
        return _move(
            ctx,
            record,
            _CLOSED,
            reason=reason,
            limit=most,
            failures=0,
            open_s=ctx.config.open_for_s,
        )
    return _move(ctx, record, _RECOVERING, reason=f"{reason}; limit {limit}", limit=limit)


def _probe_failed(ctx: _Context, record: BreakerRecord, event: ProbeFailed) -> BreakerStep:
    if _is_stale(record, event):
        return _drop(ctx, record, event.epoch)
    return _reopen(ctx, record, f"the probe failed: {event.reason}")


def _probe_released(ctx: _Context, record: BreakerRecord, event: ProbeReleased) -> BreakerStep:
    if _is_stale(record, event):
        return _drop(ctx, record, event.epoch)
    return _move(ctx, record, _OPEN, reason="the probe was cancelled")


def _hold(ctx: _Context, record: BreakerRecord, event: HeldUpstream) -> BreakerStep:
    if event.claim is None and record.holder:
        return _same(record, "whoever holds the probe looks at the site")
    if event.claim is not None and event.claim != (record.epoch, record.holder):
        return _drop(ctx, record, event.claim[0])
    held = {"open_s": event.open_s, "limit": 0, "failures": 0, "upstream": event.upstream}
    return _move(ctx, record, _OPEN, reason=event.reason, **held)


def _is_of_another(record: BreakerRecord, event: AttemptSucceeded | AttemptFailed) -> bool:
    return event.epoch != record.epoch or event.store_id not in {"", record.store_id}


def _attempt_succeeded(
    ctx: _Context, record: BreakerRecord, event: AttemptSucceeded
) -> BreakerStep:
    if _is_of_another(record, event):
        return _drop(ctx, record, event.epoch)
    return _ramp(ctx, record, record.limit * 2, reason="a call succeeded")


def _attempt_failed(ctx: _Context, record: BreakerRecord, event: AttemptFailed) -> BreakerStep:
    if _is_of_another(record, event):
        return _drop(ctx, record, event.epoch)
    failures = record.failures + 1
    if failures >= ctx.config.reopen_failures:
        return _reopen(ctx, record, f"{failures} failures while recovering; latest: {event.reason}")
    limit = record.limit // 2
    if limit < ctx.config.ramp_start:
        return _reopen(ctx, record, f"the ramp failed at limit {record.limit}: {event.reason}")
    return _move(
        ctx,
        record,
        _RECOVERING,
        reason=f"a call failed; limit {limit}",
        limit=limit,
        failures=failures,
    )


def _force(ctx: _Context, record: BreakerRecord, event: ForcedOpen) -> BreakerStep:
    return _move(
        ctx, record, _FORCED, reason=f"by an operator: {event.reason}", limit=0, failures=0
    )


def _release(ctx: _Context, record: BreakerRecord, event: ForceReleased) -> BreakerStep:
    open_s = ctx.config.open_for_s
    return _move(
        ctx, record, _OPEN, reason=f"released by an operator: {event.reason}", open_s=open_s
    )


def _late(ctx: _Context, record: BreakerRecord, event: BreakerInput) -> BreakerStep:
    # Not an error: the sender acted on what it had read, and somebody else was faster.
    epoch = getattr(event, "epoch", record.epoch)
    if epoch != record.epoch:
        return _drop(ctx, record, epoch)
    return _same(record, f"nothing to do in state {record.state}")


_Handler = Callable[..., BreakerStep]

_EVERYWHERE: Final[dict[type, _Handler]] = {
    **dict.fromkeys(get_args(BreakerInput), _late),
    ForcedOpen: _force,
}

TABLE: Final[dict[BreakerState, dict[type, _Handler]]] = {
    _CLOSED: {
        **_EVERYWHERE,
        HostVoted: _vote,
        VoteDropped: _drop_vote,
        VotesCleared: _clear_votes,
        HeldUpstream: _hold,
    },
    _OPEN: {**_EVERYWHERE, ProbeClaimed: _claim_open},
    _HALF_OPEN: {
        **_EVERYWHERE,
        ProbeClaimed: _take_over,
        ProbeSucceeded: _probe_succeeded,
        ProbeFailed: _probe_failed,
        ProbeReleased: _probe_released,
        HeldUpstream: _hold,
    },
    _RECOVERING: {
        **_EVERYWHERE,
        AttemptSucceeded: _attempt_succeeded,
        AttemptFailed: _attempt_failed,
        HeldUpstream: _hold,
    },
    _FORCED: {**_EVERYWHERE, ForcedOpen: _late, ForceReleased: _release},
}
"""What each input does in each state; ``_late`` means that it changes nothing there."""


def step(
    config: BreakerConfig,
    record: BreakerRecord,
    event: BreakerInput,
    *,
    dependency: str,
    writer: str,
) -> BreakerStep:
    """Apply one input to a breaker's record.

    Args:
        config: The breaker's configuration.
        record: The record as it was read.
        event: What happened.
        dependency: Name of the dependency, for the events.
        writer: A fresh nonce for the record that is written.

    Returns:
        The record to write and what to report, or the same record and why nothing changes.

    Raises:
        InvalidTransitionError: The table asks for a transition that does not exist; a bug of ours.
            The record is untouched.
    """
    handler = TABLE[BreakerState(record.state)][type(event)]
    return handler(_Context(config, dependency, writer), record, event)
