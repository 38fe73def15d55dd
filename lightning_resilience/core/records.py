# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is stored in the shared store: records; ``core.keys`` has their names.

Records are small JSON objects, strictly typed, with a version first: ``{"v":1,…}``. Fields are
written in the order of the struct; an unknown version is a ``CorruptRecordError``, unknown fields
are ignored (so a newer minor version may add some), never pickle. Records hold no instants, only
epochs and durations, because no instant of one host is ever compared with another's. Every value
that is written by a compare-and-set carries ``writer``, a nonce of this very write.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from lightning_resilience.core.outcome import FailureClass
from lightning_resilience.errors import CorruptRecordError


__all__ = [
    "VERSION",
    "BreakerRecord",
    "BudgetRecord",
    "FinalRecord",
    "GateRecord",
    "OutcomeRecord",
    "SlotRecord",
    "StoreIdRecord",
    "Transition",
    "decode",
    "encode",
]

VERSION: Final = 1

# What a record may hold is checked when it is decoded, so that a name which this version does not
# know is a corrupt record where it is read, and not a ValueError in the middle of a decision.
_StateName: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"\A(closed|open|half_open|recovering|forced_open)\Z")
]
_LastName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A(ok|failed)?\Z")]
_VerdictName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A(proceed|wait|fail)\Z")]
_FailureName: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=rf"\A({'|'.join(failure.value for failure in FailureClass)})?\Z")
]
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
# Whoever reads a budget takes the first for the present bucket.
_Buckets: TypeAlias = Annotated[tuple[_Count, ...], msgspec.Meta(min_length=1)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
_Duration: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a breaker's history.

    Args:
        epoch: Epoch that the transition began.
        state: State that it led to.
        reason: Why.
    """

    epoch: _Count
    state: _StateName
    reason: str


class BreakerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Shared state of one circuit breaker; see ``core.breaker`` for its meaning.

    Args:
        v: Version of the format.
        store_id: Which store server the epoch belongs to.
        epoch: Grows with every transition; a result of one epoch never changes a later one.
        generation: Number of the current or latest trip; names its bell.
        state: Name of the state.
        votes: Hosts whose latest results failed, at most 8.
        limit: Calls that may be in flight.
        failures: Failures since the probe, while recovering; 0 otherwise.
        holder: Nonce of the claim that holds the probe's permit; empty where there is none.
        open_s: How long the circuit stays open before a probe, in seconds.
        upstream: Epoch of the site's record because of which the circuit is open; 0 where it is
            not, or has reasons of its own.
        history: The last 32 transitions.
        reason: Why the record is as it is.
        writer: Nonce of this write.
    """

    v: int = VERSION
    store_id: str = ""
    epoch: _Count
    generation: _Count
    state: _StateName
    votes: tuple[str, ...] = ()
    limit: _Count
    failures: _Count = 0
    holder: str = ""
    open_s: _Seconds
    upstream: _Count = 0
    history: tuple[Transition, ...] = ()
    reason: str = ""
    writer: str


class SlotRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One slot of a dependency's admission; see ``core.admission``.

    Args:
        v: Version of the format.
        turn: Highest ticket that this slot has let in; 0 where it has let in none.
        holder: Nonce of the claim that holds the slot; empty where it is free.
        took_s: How long the last call in this slot took that succeeded, in seconds; 0 where that is
            unknown.
        last: How the last call in this slot ended: ``ok``, ``failed``, or empty where none has.
        generation: Number of the trip after which that call was let in.
        writer: Nonce of this write. A holder's beat is a write that changes nothing else.
    """

    v: int = VERSION
    turn: _Count = 0
    holder: str = ""
    took_s: _Duration = 0.0
    last: _LastName = ""
    generation: _Count = 0
    writer: str


class BudgetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Retries of the whole job at one dependency; see ``core.budget``.

    Args:
        v: Version of the format.
        origin: Nonce of whoever created the record; a rebuilt one has another.
        bucket: Number of the present bucket.
        retries: Retries granted in the present bucket and those before it, the present one first.
        calls: Calls that were reported in the same buckets.
        writer: Nonce of this write.
    """

    v: int = VERSION
    origin: str
    bucket: _Count
    retries: _Buckets
    calls: _Buckets
    writer: str


class StoreIdRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which store server this is.

    Args:
        v: Version of the format.
        store_id: The server's name, given by the first who came.
        writer: Nonce of this write.
    """

    v: int = VERSION
    store_id: str
    writer: str


class GateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict of one round of a joint operation's gate; write-once.

    Args:
        v: Version of the format.
        op: Name of the operation; another one at the same number is an error.
        digest: Digest of the operation's arguments.
        verdict: Name of a ``core.joint.GateVerdict``.
        epoch: Epoch of the breaker's record that the verdict rests on.
        rank: Who wrote it.
        reason: Why.
        subject: What the operation is about, as the writer sees it.
        writer: Nonce of this write.
    """

    v: int = VERSION
    op: str
    digest: str
    subject: str = ""
    verdict: _VerdictName
    epoch: _Count
    rank: _Count
    reason: str
    writer: str


class OutcomeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank's part of a joint operation ended.

    Args:
        v: Version of the format.
        rank: The rank.
        failure: Failure class, or empty where it went well.
        error: One line: type and text of the failure.
        detail: What the part produced, for the others (for example size and digest).
        attempts: Attempts made.
    """

    v: int = VERSION
    rank: _Count
    failure: _FailureName = ""
    error: str = ""
    detail: str = ""
    attempts: _Count = 0


class FinalRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of a joint operation, the same for every rank; before it, an open ballot.

    Args:
        v: Version of the format.
        op: Name of the operation.
        failure: Most severe failure class, or empty where all went well.
        first_rank: Lowest rank with that class; -1 where all went well.
        error: That rank's error.
        detail: That rank's detail, or the lowest worker's where all went well.
        subject: What the operation is about, as the writer sees it: the same in all ranks' errors.
        digest: Where in training the writer is; whoever is elsewhere has not succeeded.
        workers: Ranks that had work.
        lost_ranks: Ranks that were silent for too long, or have not come.
        attempts: Attempts of the rank named.
        is_open: Whether this is the ballot, and there is no verdict yet.
        is_draft: Whether it is a ballot that no verdict may replace yet.
        writer: Nonce of this write.
    """

    v: int = VERSION
    op: str
    failure: _FailureName = ""
    first_rank: int = -1
    error: str = ""
    detail: str = ""
    subject: str = ""
    digest: str = ""
    workers: tuple[int, ...] = ()
    lost_ranks: tuple[int, ...] = ()
    attempts: _Count = 0
    is_open: bool = False
    is_draft: bool = False
    writer: str


Record = TypeVar("Record", bound=msgspec.Struct)


class _Versioned(msgspec.Struct):
    v: int


_encoder: Final = msgspec.json.Encoder()

# Most of what is read was read before: slots that nobody has touched since, and in a simulated job
# what a thousand others have read. Records are immutable, so they may be handed out again; at most
# a few megabytes are kept.
_MOST_KNOWN: Final = 1024
_LONGEST_KNOWN: Final = 4096

# RecursionError: fields that are skipped may be nested without end.
_UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(record: msgspec.Struct) -> bytes:
    """Return the bytes of a record: compact JSON, fields in the struct's order."""
    return _encoder.encode(record)


def decode(kind: type[Record], raw: bytes, *, key: str) -> Record:
    """Decode a record strictly.

    Args:
        kind: The record's type.
        raw: What the store holds.
        key: Where it was read, for the error.

    Returns:
        The record.

    Raises:
        CorruptRecordError: The bytes are not a record of this type and version.
    """
    if len(raw) <= _LONGEST_KNOWN:
        try:
            known: Record = _decode_known(kind, raw)
        except CorruptRecordError:
            # Once more below, for an error that names the key.
            pass
        else:
            return known
    return _decode(kind, raw, key=key)


@lru_cache(maxsize=_MOST_KNOWN)
def _decode_known(kind: type[Any], raw: bytes) -> Any:  # noqa: ANN401 - a record of that kind
    return _decode(kind, raw, key="")


def _decode(kind: type[Record], raw: bytes, *, key: str) -> Record:
    try:
        version = msgspec.json.decode(raw, type=_Versioned).v
    except _UNDECODABLE as error:
        message = (
            f"The record at {key!r} does not decode ({error}; {len(raw)} bytes). "
            "Something else writes to this store, or the record is damaged."
        )
        raise CorruptRecordError(message, key=key) from error
    if version != VERSION:
        message = (
            f"The record at {key!r} has version {version}, this package reads version {VERSION}. "
            "Run the same version of lightning-resilience on every rank."
        )
        raise CorruptRecordError(message, key=key, found_version=version)
    try:
        return msgspec.json.decode(raw, type=kind)
    except _UNDECODABLE as error:
        message = f"The record at {key!r} is no {kind.__name__}: {error}."
        raise CorruptRecordError(message, key=key, found_version=version) from error
