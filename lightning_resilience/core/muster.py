# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Who has not come to a joint operation, and what is said of them.

A success is told to nobody before every rank has come: a call that was made on some ranks only
would otherwise succeed there, and from then on the numbers of the ranks would no longer match. A
rank that has written a later number has been here, and is no concern of this operation's any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final


if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


__all__ = ["absent_ranks", "has_come", "lost_error", "named", "next_look_s"]

_MOST_NAMED: Final = 8
_FIRST_LOOK_S: Final = 0.01
# A rank that comes late finds the verdict this share of its delay later.
_LOOK_SHARE: Final = 0.125


def has_come(arrived: str, *, seq: int) -> bool:
    """Tell whether a rank is in an operation, or was.

    Args:
        arrived: The number that it wrote when it arrived last, as text; empty where there is none.
        seq: Number of the operation.
    """
    return arrived != "" and int(arrived) >= seq


def absent_ranks(arrived: Mapping[int, bytes | None], *, seq: int) -> tuple[int, ...]:
    """Return the ranks that have not come to an operation, in ascending order.

    Args:
        arrived: What each rank has written when it arrived last.
        seq: Number of the operation.
    """
    late = (rank for rank, raw in arrived.items() if not has_come((raw or b"").decode(), seq=seq))
    return tuple(sorted(late))


def next_look_s(watched_s: float, *, beat_s: float) -> float:
    """Return how long to wait for absent ranks until the next look, in seconds.

    Args:
        watched_s: For how long they have been awaited, in seconds.
        beat_s: The longest time between two looks, in seconds: with each goes a sign of life.
    """
    return min(beat_s, max(_FIRST_LOOK_S, _LOOK_SHARE * watched_s))


def lost_error(rank: int, *, is_absent: bool, silent_s: float) -> str:
    """Say what is wrong with a rank that is lost.

    Args:
        rank: The rank.
        is_absent: Whether it has never come to the operation.
        silent_s: For how long it was awaited, in seconds.
    """
    if is_absent:
        return (
            f"rank {rank} has not come to it within {silent_s:.1f} s. If it goes on training, then "
            "the call was made on some ranks only, or once too often on some: a call under "
            "`if trainer.is_global_zero` is the usual reason"
        )
    return f"rank {rank} gave no sign of life for {silent_s:.1f} s"


def named(ranks: Sequence[int]) -> str:
    """Return a list of ranks for a sentence, the first of them where they are many."""
    first = ", ".join(str(rank) for rank in ranks[:_MOST_NAMED])
    return f"{first} and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else first
