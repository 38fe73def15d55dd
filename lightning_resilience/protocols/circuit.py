# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""One process's dealings with one breaker's shared record: read it, change it, report to it.

What the process remembers between calls is a ``Circuit`` (``protocols.circuit_memory``). The
functions here are protocols: they read and write the record through effects, and everything that
they decide is decided in ``core``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from lightning_resilience.core import breaker, lease, site, window
from lightning_resilience.core.breaker import (
    AttemptFailed,
    AttemptSucceeded,
    BreakerState,
    BreakerView,
    HostVoted,
    VoteDropped,
    VotesCleared,
)
from lightning_resilience.core.events import RecordVanished
from lightning_resilience.core.records import (
    BreakerRecord,
    SlotRecord,
    StoreIdRecord,
    decode,
    encode,
)
from lightning_resilience.protocols.circuit_memory import Circuit, Limits, learn
from lightning_resilience.protocols.effects import Delete, Emit, Get, MultiGet, Nonce, Now, Set
from lightning_resilience.protocols.shared_cell import create, update, write


if TYPE_CHECKING:
    from lightning_resilience.core.breaker import BreakerInput, BreakerStep
    from lightning_resilience.core.outcome import Outcome
    from lightning_resilience.protocols.effects import Protocol
    from lightning_resilience.protocols.shared_cell import Written


__all__ = [
    "Circuit",
    "Limits",
    "accept",
    "apply",
    "apply_to",
    "begin",
    "current",
    "drop_old_votes",
    "learn",
    "refresh",
    "report",
    "withdraw",
]

_NEVER_S = float("-inf")


def refresh(circuit: Circuit) -> Protocol[BreakerView]:
    """Read the record; create it where nobody has, rebuild it where the store has lost it.

    Returns:
        The view after it.
    """
    sent_at_s: float = yield Now()
    raw: bytes | None = yield Get(circuit.key)
    return (yield from accept(circuit, raw, sent_at_s=sent_at_s))


def accept(circuit: Circuit, raw: bytes | None, *, sent_at_s: float) -> Protocol[BreakerView]:
    """Take note of what a read of the record has shown, and put right what is not as it must be.

    Args:
        circuit: What this process remembers.
        raw: The record's bytes, or None where there is none.
        sent_at_s: When the read was sent, on this process's clock.

    Returns:
        The view after it.
    """
    if raw is None:
        raw = yield from _create(circuit)
    if circuit.view is not None and _knows_less(circuit, circuit.view, raw):
        # Also right after a creation: somebody who knew less may have been faster.
        raw = yield from _overrule(circuit, circuit.view.record, raw)
    seen_at_s: float = yield Now()
    view = learn(circuit, raw, read_at_s=sent_at_s, seen_at_s=seen_at_s)
    if circuit.is_sites:
        # Whoever looks may hold a job's probe, and has no time for more than its vote.
        return view
    return (yield from drop_old_votes(circuit, view, now_s=seen_at_s))


def _store_id(circuit: Circuit) -> Protocol[str]:
    nonce: str = yield Nonce()
    written = yield from create(
        circuit.keys.store_id, encode(StoreIdRecord(store_id=nonce, writer=nonce))
    )
    return decode(StoreIdRecord, written.raw, key=circuit.keys.store_id).store_id


def _create(circuit: Circuit) -> Protocol[bytes]:
    store_id = yield from _store_id(circuit)
    writer: str = yield Nonce()
    if circuit.view is None:
        record = breaker.initial(circuit.config, store_id=store_id, writer=writer)
    else:
        seen = circuit.view.record
        if circuit.is_sites:
            seen = site.outlived(seen, circuit.config)
        yield Emit(RecordVanished(key=circuit.key, epoch=seen.epoch))
        # The slots are gone with it.
        circuit.has_slots = False
        record = breaker.rebuilt(seen, store_id=store_id, writer=writer)
    written = yield from create(circuit.key, encode(record))
    if not written.won:
        return written.raw
    return (yield from _rename(circuit, record, written.raw))


def _rename(circuit: Circuit, record: BreakerRecord, raw: bytes) -> Protocol[bytes]:
    """See to it that the record names the store that it is in.

    The store may have been lost between its identity and the record. Epochs of two stores under one
    identity could not be told apart, and whoever had seen a later one would never look again.
    """
    store_id = yield from _store_id(circuit)
    if store_id == record.store_id:
        return raw

    def change(found: bytes, writer: str) -> bytes | None:
        there = decode(BreakerRecord, found, key=circuit.key)
        if there.store_id != record.store_id:
            return None
        return encode(msgspec.structs.replace(there, store_id=store_id, writer=writer))

    return (yield from update(circuit.key, raw, change)).raw or raw


def _knows_less(circuit: Circuit, view: BreakerView, raw: bytes) -> bool:
    if circuit.is_sites and not site.is_for_good(view.record):
        return False
    return breaker.outranks(view.record, decode(BreakerRecord, raw, key=circuit.key))


def _overrule(circuit: Circuit, seen: BreakerRecord, found: bytes) -> Protocol[bytes]:
    def change(raw: bytes, writer: str) -> bytes | None:
        there = decode(BreakerRecord, raw, key=circuit.key)
        if not breaker.outranks(seen, there):
            return None
        return encode(breaker.rebuilt(seen, store_id=there.store_id, writer=writer))

    # Whoever is faster may know more than was found, and still less than this process.
    written = yield from update(circuit.key, found, change)
    return written.raw or found


def drop_old_votes(circuit: Circuit, view: BreakerView, *, now_s: float) -> Protocol[BreakerView]:
    """Drop a vote that this process has seen for longer than ``window_s``, where there is one.

    Args:
        circuit: What this process remembers.
        view: What it has just read.
        now_s: Now, on this process's clock.

    Returns:
        The view after it.
    """
    for host, sighting in circuit.votes.items():
        if lease.is_expired(sighting, lease_s=circuit.config.window_s, now_s=now_s):
            return (yield from apply(circuit, VoteDropped(host=host)))
    return view


def current(circuit: Circuit) -> Protocol[BreakerView]:
    """Return a view that is fresh, with a read only where the present one is not."""
    now_s: float = yield Now()
    if circuit.view is not None and circuit.is_fresh(now_s=now_s):
        return circuit.view
    return (yield from refresh(circuit))


def apply(circuit: Circuit, event: BreakerInput) -> Protocol[BreakerView]:
    """Report a fact to the shared record, deciding anew whenever somebody else was faster.

    Args:
        circuit: What this process remembers; it must have a view.
        event: The fact.

    Returns:
        The view after it, whether or not the fact changed anything.
    """
    view = circuit.view or (yield from refresh(circuit))
    last: list[tuple[BreakerRecord, BreakerStep]] = []

    def change(raw: bytes, writer: str) -> bytes | None:
        if _knows_less(circuit, view, raw):
            return None
        record = decode(BreakerRecord, raw, key=circuit.key)
        stepped = breaker.step(
            circuit.config, record, event, dependency=circuit.dependency, writer=writer
        )
        last[:] = [(record, stepped)]
        return encode(stepped.record) if stepped.changed else None

    sent_at_s: float = yield Now()
    written = yield from update(circuit.key, view.raw, change)
    if written.gone or _knows_less(circuit, view, written.raw):
        # The fact belongs to an epoch of a store that is no more; what is true now is read anew.
        return (yield from refresh(circuit))
    return (yield from _settle(circuit, *last[0], written=written, sent_at_s=sent_at_s))


def apply_to(circuit: Circuit, view: BreakerView, event: BreakerInput) -> Protocol[bool]:
    """Report a fact to exactly the record of ``view``: claims and results of probes.

    Nothing is tried again: whoever was faster has begun another epoch.

    Args:
        circuit: What this process remembers.
        view: The record that the fact is about.
        event: The fact.

    Returns:
        True if this process's record is there now.
    """
    writer: str = yield Nonce()
    stepped = breaker.step(
        circuit.config, view.record, event, dependency=circuit.dependency, writer=writer
    )
    sent_at_s: float = yield Now()
    if not stepped.changed:
        return False
    written = yield from write(circuit.key, view.raw, encode(stepped.record))
    if written.gone or _knows_less(circuit, view, written.raw):
        yield from refresh(circuit)
        return False
    yield from _settle(circuit, view.record, stepped, written=written, sent_at_s=sent_at_s)
    return written.won


def _settle(
    circuit: Circuit,
    before: BreakerRecord,
    stepped: BreakerStep,
    *,
    written: Written,
    sent_at_s: float,
) -> Protocol[BreakerView]:
    seen_at_s: float = yield Now()
    view = learn(circuit, written.raw, read_at_s=sent_at_s, seen_at_s=seen_at_s)
    if written.won or not stepped.changed:
        for event in stepped.events:
            yield Emit(event)
    if written.won:
        yield from _ring(circuit, before, view.record)
    return view


def _ring(circuit: Circuit, before: BreakerRecord, after: BreakerRecord) -> Protocol[None]:
    if after.epoch == before.epoch:
        return
    circuit.wrote = after.epoch
    if circuit.is_sites:
        # Nobody waits in a site's store, and whoever writes there holds a job's probe meanwhile.
        return
    if breaker.passes(after) and before.state == BreakerState.HALF_OPEN.value:
        yield from _make_slots(circuit)
        # Order: after the record, so that whoever is woken reads it. If this process dies in
        # between, the waiters read the record at the end of their chunk.
        yield Set(circuit.keys.bell(circuit.dependency, after.generation), b"1")
    if after.generation > before.generation:
        # Nobody waits for the trip before the last any more: its bell has rung.
        yield Delete(circuit.keys.bell(circuit.dependency, after.generation - 2))
        yield Delete(circuit.keys.waiting(circuit.dependency, after.generation - 2))


def _make_slots(circuit: Circuit) -> Protocol[None]:
    # Before everybody comes: keys that are missing cannot be read in one round trip.
    if circuit.has_slots:
        return
    found: list[bytes | None] = yield MultiGet(circuit.slot_keys)
    for key, raw in zip(circuit.slot_keys, found, strict=True):
        if raw is None:
            writer: str = yield Nonce()
            yield from create(key, encode(SlotRecord(writer=writer)))
    circuit.has_slots = True


def begin(circuit: Circuit, *, new_incarnation: bool) -> Protocol[BreakerView]:
    """Read the record before the first call, so that no rank is admitted on no view at all.

    Args:
        circuit: What this process remembers: nothing yet.
        new_incarnation: Whether to clear the votes of the incarnation before.
    """
    view = yield from refresh(circuit)
    if new_incarnation and view.record.votes:
        return (yield from apply(circuit, VotesCleared()))
    return view


def report(
    circuit: Circuit,
    outcome: Outcome,
    *,
    epoch: int,
    store_id: str = "",
    others_failed: bool = False,
) -> Protocol[None]:
    """Report how an attempt ended, once.

    A success under a closed circuit costs no store operation. Failures that say nothing about
    health are not reported at all.

    Args:
        circuit: What this process remembers; it has a view.
        outcome: How the attempt ended.
        epoch: Epoch of the record that admitted it.
        store_id: The store that the epoch belongs to; empty for the present one.
        others_failed: Whether the latest calls of all others failed as well: then one failure is
            enough for a vote.
    """
    now_s: float = yield Now()
    view = circuit.view
    if view is None:
        return
    recovering = view.record.state == BreakerState.RECOVERING.value
    if outcome.ok:
        yield from withdraw(circuit)
        if recovering:
            yield from apply(circuit, AttemptSucceeded(epoch=epoch, store_id=store_id))
    elif outcome.counts:
        if recovering:
            failed = AttemptFailed(epoch=epoch, reason=outcome.error, store_id=store_id)
            yield from apply(circuit, failed)
        else:
            yield from _note_failure(circuit, outcome, others_failed=others_failed, now_s=now_s)
        if circuit.view is not None:
            # After a failure the next call reads again, however young the view is.
            circuit.view = replace(circuit.view, read_at_s=_NEVER_S)


def withdraw(circuit: Circuit) -> Protocol[None]:
    """Withdraw this host's vote, because a call of it has succeeded.

    Args:
        circuit: What this process remembers.
    """
    circuit.window = window.record_success(circuit.window)
    if circuit.view is not None and circuit.host in circuit.view.record.votes:
        yield from apply(circuit, VoteDropped(host=circuit.host))


def _note_failure(
    circuit: Circuit, outcome: Outcome, *, others_failed: bool, now_s: float
) -> Protocol[None]:
    config = circuit.config
    circuit.window = window.record_failure(circuit.window, now_s=now_s, window_s=config.window_s)
    wants_vote = window.wants_vote(
        circuit.window,
        now_s=now_s,
        window_s=config.window_s,
        trip_failures=config.trip_failures,
    )
    if not (wants_vote or others_failed):
        return
    failures, seen = f"{circuit.window.failures} failures in a row on {circuit.host}", None
    if not wants_vote and circuit.view is not None:
        failures = f"a failure on {circuit.host}, and the latest call in every slot failed"
        seen = (circuit.view.record.store_id, circuit.view.record.epoch)
    reason = f"{failures}, {outcome.error}"
    vote = HostVoted(host=circuit.host, hosts=circuit.hosts, reason=reason, seen=seen)
    yield from apply(circuit, vote)
