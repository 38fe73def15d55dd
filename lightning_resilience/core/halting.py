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

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from lightning_resilience.core.agenda import ASK_AGAIN_S
from lightning_resilience.core.records import VERSION


if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = [
    "ANSWER_S",
    "OFF",
    "OPEN",
    "STOP",
    "Halt",
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
_QUIET_S: Final = 10.0
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


@dataclass(slots=True, kw_only=True)
class Halt:
    """What one rank knows and has said of leaving one validation. Not for two threads at once.

    Args:
        validation: Number of the validation in this fit, alike on all ranks.
        world_size: Number of ranks.
        looks_at_s: When it looks next whether all are to stop, on its own clock.
        wants_stop: Whether this rank wants all to stop.
        limit: After how many batches it stands without an answer, None where it was not asked.
        raises: How often it has raised that.
        answer: What all ranks do, None before that is known.
    """

    validation: int
    world_size: int
    looks_at_s: float
    wants_stop: bool = False
    limit: int | None = None
    raises: int = 0
    answer: HaltRecord | None = None

    def is_due(self, batch: int, *, now_s: float, wants_stop: bool) -> bool:
        """Tell whether there is anything to ask or to say of the store after a batch.

        Args:
            batch: How many batches of the validation this rank has made.
            now_s: What its clock says.
            wants_stop: Whether it wants all ranks to stop.
        """
        if self.answer is not None:
            return False
        if self.limit is not None:
            return batch >= self.limit
        if wants_stop and not self.wants_stop:
            self.wants_stop, self.looks_at_s = True, now_s
        return now_s >= self.looks_at_s

    def is_reached(self, batch: int) -> bool:
        """Tell whether all ranks leave after this batch."""
        answer = self.answer
        return answer is not None and answer.state == STOP and batch >= answer.batch

    def look_again(self, *, now_s: float, has_answered: bool) -> None:
        """Set when this rank looks next.

        Args:
            now_s: What its clock says.
            has_answered: Whether the store has. One that has not is spared, the longer the less
                this rank has to say.
        """
        pause = pause_s(self.world_size) if self.wants_stop else look_s(self.world_size)
        if not has_answered:
            pause = ASK_AGAIN_S if self.wants_stop else _QUIET_S
        self.looks_at_s = now_s + pause
