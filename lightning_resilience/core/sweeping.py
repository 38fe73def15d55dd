# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What of ours nobody will finish: staged files and uploads of processes that were killed.

Whether a process still works on something cannot be asked. But whatever is written is touched as it
grows, so what was not touched for a day is nobody's: an attempt without any progress is abandoned
after ``stall_timeout_s``, and what it has begun is removed then.

Age is told by one clock, that of the storage: its time is that of a file that was made there just
now. A host whose clock is wrong removes nothing too early.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final


if TYPE_CHECKING:
    from collections.abc import Iterable


__all__ = ["Leftover", "is_orphaned", "orphans"]

_ORPHANED_AFTER_S: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """Something unfinished of ours.

    Args:
        name: What to remove.
        touched_s: When it was last touched, by the storage's clock, in seconds.
    """

    name: str
    touched_s: float


def is_orphaned(age_s: float, *, after_s: float = _ORPHANED_AFTER_S) -> bool:
    """Tell whether nobody works any more on something of that age.

    Args:
        age_s: For how long it was not touched, by the storage's clock, in seconds; below 0 where
            somebody has touched it since.
        after_s: How long whoever works on it leaves it alone at most, in seconds.
    """
    return age_s > after_s


def orphans(leftovers: Iterable[Leftover], *, now_s: float) -> list[Leftover]:
    """Return what nobody works on any more, the oldest first.

    Args:
        leftovers: What is unfinished.
        now_s: The storage's time, in seconds.
    """
    old = [item for item in leftovers if is_orphaned(now_s - item.touched_s)]
    return sorted(old, key=lambda item: (item.touched_s, item.name))
