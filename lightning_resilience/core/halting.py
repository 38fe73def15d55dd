# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""At which batch of a validation all ranks leave it, though none waits for another there.

Ranks validate each at its own pace, so the batch must be one that none of them has passed. Once a
rank has heard that all are to stop, it says how far it goes without an answer, its *limit*, and
keeps to that. When all have said so, the farthest limit is the batch.

A rank that stands at its limit without an answer may not stand there for long: another one that
has not heard of anything yet may be in a collective and wait for it. It raises its limit, each time
by twice as much, in such a way that either the answer comes first or it takes the raise into
account.

Ranks whose validations are not equally long have no such batch: they stop at the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from lightning_resilience.core.records import VERSION


if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = [
    "ANSWER_S",
    "OFF",
    "OPEN",
    "QUIET_S",
    "STOP",
    "HaltRecord",
    "PlaceRecord",
    "agreed_batch",
    "limit_of",
    "look_s",
    "pause_s",
]

OPEN: Final = "open"
"""All ranks are to say how far they go."""
STOP: Final = "stop"
"""All ranks leave at a batch."""
OFF: Final = "off"
"""All ranks go on validating, and stop at the next step of the training."""

ANSWER_S: Final = 0.3
"""How long a rank stands at its limit before it raises it, in seconds: less than a wait takes to be
interrupted by the signal that it is all about."""
QUIET_S: Final = 10.0
"""How long a rank that validates does not look again at a store that did not answer, in seconds."""

_LOOK_S: Final = 1.0
_PAUSE_S: Final = 0.05
_RANKS_PER_LOOK_S: Final = 1000.0
_MOST_DOUBLINGS: Final = 30

_Batch = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class HaltRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Whether and where all ranks leave one validation; it changes while it is open, then never.

    Args:
        v: Version of the format.
        state: ``open``, ``stop`` or ``off``.
        batch: After how many batches of this validation all ranks leave it.
        writer: Nonce of this write.
    """

    v: int = VERSION
    state: Annotated[str, msgspec.Meta(pattern=r"\A(open|stop|off)\Z")]
    batch: _Batch = 0
    writer: str


class PlaceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How far a rank goes in one validation before it has an answer.

    Args:
        v: Version of the format.
        limit: After how many batches it stands.
        length: How long its validation is, in words that are the same where the length is; empty
            where nobody knows.
    """

    v: int = VERSION
    limit: _Batch
    length: str = ""


def limit_of(batch: int, *, raises: int) -> int:
    """Return how far a rank goes that has made ``batch`` batches and raised its limit so often."""
    return batch + (1 << min(raises, _MOST_DOUBLINGS))


def agreed_batch(places: Sequence[PlaceRecord]) -> int | None:
    """Return after which batch all ranks leave; None where there is no batch that all have.

    Args:
        places: What each rank has said.
    """
    lengths = {place.length for place in places}
    if len(lengths) > 1 or "" in lengths:
        return None
    return max(place.limit for place in places)


def look_s(world_size: int) -> float:
    """Return how often a rank that validates looks whether all are to stop, in seconds.

    The store gets some thousand looks a second at most, however many ranks there are.
    """
    return max(_LOOK_S, world_size / _RANKS_PER_LOOK_S)


def pause_s(world_size: int) -> float:
    """Return how long a rank that expects an answer pauses between two looks, in seconds."""
    return _PAUSE_S * look_s(world_size)
