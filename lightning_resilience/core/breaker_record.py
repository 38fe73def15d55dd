# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A breaker's record outside the state machine: states, birth, rebirth, one process's view.

``core.breaker`` changes a record that exists. Here is what happens around that: the record of a
breaker that nobody has used, the record to create where the store came back empty, and what a
process that has read a record may conclude from it.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from lightning_resilience.core.breaker_config import MOST_VOTES
from lightning_resilience.core.records import BreakerRecord, Transition


if TYPE_CHECKING:
    from lightning_resilience.core.breaker_config import BreakerConfig
    from lightning_resilience.core.event import Event
    from lightning_resilience.core.lease import Sighting


__all__ = [
    "HISTORY_LENGTH",
    "LEGAL",
    "PASSING",
    "BreakerState",
    "BreakerStep",
    "BreakerView",
    "initial",
    "is_fresh",
    "outranks",
    "passes",
    "precedes",
    "quorum",
    "rebuilt",
]

HISTORY_LENGTH: Final = 32
"""How many transitions a record remembers."""

_ROUNDING: Final = 1e-12


class BreakerState(str, enum.Enum):
    """The five states."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    RECOVERING = "recovering"
    FORCED_OPEN = "forced_open"


_CLOSED, _OPEN, _HALF_OPEN, _RECOVERING, _FORCED = BreakerState

PASSING: Final = frozenset({_CLOSED, _RECOVERING})

LEGAL: Final = frozenset(
    {
        (_CLOSED, _OPEN),
        (_OPEN, _HALF_OPEN),
        (_HALF_OPEN, _HALF_OPEN),  # take-over
        (_HALF_OPEN, _OPEN),
        (_HALF_OPEN, _RECOVERING),
        (_HALF_OPEN, _CLOSED),  # ramp_start = max_concurrent: there is nothing to ramp
        (_RECOVERING, _RECOVERING),  # the limit moves
        (_RECOVERING, _CLOSED),
        (_RECOVERING, _OPEN),
        (_FORCED, _OPEN),
        *((state, _FORCED) for state in BreakerState if state is not _FORCED),
    }
)
"""Every legal transition (previous state, state). Each begins an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerView:
    """What one process knows of a breaker.

    Args:
        record: The record that was read.
        raw: Its exact bytes, the expectation of the next compare-and-set.
        read_at_s: When the read was *sent*, on this process's clock.
        sighting: Since when this process has seen this (store, epoch).
    """

    record: BreakerRecord
    raw: bytes
    read_at_s: float
    sighting: Sighting


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerStep:
    """What an input makes of a record.

    Args:
        record: The record to write, or the very record that was given where nothing changes.
        changed: Whether there is something to write.
        reason: Why, also where nothing changes.
        events: What to report once it is written; where nothing changes, at once.
    """

    record: BreakerRecord
    changed: bool
    reason: str
    events: tuple[Event, ...] = ()


def is_fresh(view: BreakerView | None, *, max_age_s: float, now_s: float) -> bool:
    """Tell whether a call may go ahead on this view without another read."""
    return view is not None and now_s - view.read_at_s < max_age_s


def passes(record: BreakerRecord) -> bool:
    """Tell whether the circuit lets calls through (CLOSED, and RECOVERING up to its limit)."""
    return BreakerState(record.state) in PASSING


def quorum(hosts: int, *, fraction: float) -> int:
    """Return how many hosts must vote.

    Args:
        hosts: Hosts that use the dependency, ≥ 1.
        fraction: Share of them, in (0, 1].

    Returns:
        ``min(hosts, max(2, min(ceil(fraction · hosts), 8)))``: never one host of several, and never
        so many that the trip takes long.
    """
    # 0.14 · 50 is 7.000000000000001 in floats, and its quorum is 7.
    share = math.ceil(fraction * hosts * (1 - _ROUNDING))
    return min(hosts, max(2, min(share, MOST_VOTES)))


def initial(config: BreakerConfig, *, store_id: str, writer: str) -> BreakerRecord:
    """Return the record of a breaker that nobody has used: closed, epoch 1."""
    first = Transition(epoch=1, state=_CLOSED.value, reason="created")
    return BreakerRecord(
        store_id=store_id,
        epoch=1,
        generation=0,
        state=_CLOSED.value,
        limit=config.max_concurrent,
        open_s=config.open_for_s,
        history=(first,),
        reason=first.reason,
        writer=writer,
    )


def rebuilt(seen: BreakerRecord, *, store_id: str, writer: str) -> BreakerRecord:
    """Return the record to create where the store came back empty.

    The state is the last one that was seen; a probe that was under way is over, because nobody can
    settle it any more.

    Args:
        seen: The shared record with the highest epoch that this process has read.
        store_id: The new server's identity.
        writer: Nonce of the write.

    Returns:
        A record one epoch later.
    """
    state = _OPEN if seen.state == _HALF_OPEN.value else BreakerState(seen.state)
    entry = Transition(
        epoch=seen.epoch + 1, state=state.value, reason="rebuilt after the store was lost"
    )
    return msgspec.structs.replace(
        seen,
        store_id=store_id,
        epoch=entry.epoch,
        state=state.value,
        votes=(),
        holder="",
        history=(*seen.history, entry)[-HISTORY_LENGTH:],
        reason=entry.reason,
        writer=writer,
    )


def outranks(seen: BreakerRecord, found: BreakerRecord) -> bool:
    """Tell whether ``found`` was rebuilt by somebody who knew less than this process has seen.

    A rebuilt record is one epoch above what its writer saw, so an equal epoch is less. Each process
    says so until it is heard, once for each store: what it has written then is what it has seen
    from there on.
    """
    return found.store_id != seen.store_id and seen.epoch >= found.epoch


def precedes(found: BreakerRecord, seen: BreakerRecord) -> bool:
    """Tell whether ``found`` was there before ``seen``: the same store, an earlier epoch."""
    return found.store_id == seen.store_id and found.epoch < seen.epoch
