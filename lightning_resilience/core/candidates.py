# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which of several checkpoints is the newest, whatever the order in which storage has got them.

A checkpoint that has waited on a node through an outage reaches storage late, and is no newer for
that. So those of one *training* are ordered by the step that their manifests say. A training begins
where a run starts from the beginning, or from a checkpoint that somebody has named; a run that goes
on from the last checkpoint belongs to the training of that one, whatever the run is called.

What two trainings have left in one directory cannot be compared by steps: the older one may have
gone further. Of two trainings that one counts for more in which storage has got something last.

A checkpoint without a manifest, or whose manifest names no training, may be the latest of one all
the same: a job may be killed just before it writes the manifest. It stands behind all that
storage has got no earlier than it.

The last checkpoint is written after the one by step, so a job that is killed between the two leaves
a last one that is older. ``overtaking`` finds what is newer than it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


__all__ = ["Candidate", "best_first", "overtaking"]

_NUMBER: Final = re.compile(r"(\d+)\.[^.]*$")


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One file, or directory, that a run might start from.

    Args:
        url: Where it is, with its protocol.
        modified_s: When it was written, in seconds of the storage's clock; None where it does not
            say.
        is_marked: Whether it has a manifest.
        step: The step that this says.
        training: The training that this says; empty also where nothing could go on from it.
    """

    url: str
    modified_s: float | None = None
    is_marked: bool = False
    step: int | None = None
    training: str = ""

    @property
    def number(self) -> int:
        """The last number in its name (``last-v2.ckpt``); -1 without one."""
        found = _NUMBER.search(self.url)
        return -1 if found is None else int(found.group(1))


def best_first(candidates: Iterable[Candidate], *, by_number: bool = False) -> list[Candidate]:
    """Return candidates in the order in which they are inspected.

    Args:
        candidates: Of all places.
        by_number: Whether the number in the name counts for more than how new they are.
    """
    items = set(candidates)
    latest_s: dict[str, float] = {}
    for item in items:
        latest_s[_group(item)] = max(latest_s.get(_group(item), float("-inf")), _at_s(item))

    def rank(item: Candidate) -> tuple[float, float, float, float, str]:
        number, at_s = float(item.number), _at_s(item)
        if by_number:
            return number, at_s, 0.0, 0.0, item.url
        step = -1.0 if item.step is None or not item.training else float(item.step)
        # The name last, so that the order is one of its own where storage tells no difference.
        return latest_s[_group(item)], step, at_s, number, item.url

    ranked = sorted(items, key=rank, reverse=True)
    if by_number:
        return ranked
    ordered = [item for item in ranked if item.training]
    for item in ranked:
        if not item.training:
            ordered.insert(_place_of(item, ordered), item)
    return ordered


def _place_of(item: Candidate, ordered: Sequence[Candidate]) -> int:
    # Of two that name no training, the one that was ranked first is the later one.
    later = (at for at, other in enumerate(ordered) if _at_s(other) >= _at_s(item))
    return max(later, default=-1) + 1


def overtaking(last: Candidate, others: Iterable[Candidate]) -> list[Candidate]:
    """Return which checkpoints of other names are newer than a last one, the newest first.

    They are of the same training and of a later step. A last one without a manifest says neither:
    the manifest is taken away before it is written over. What was not written before it is newer,
    or is of the same save point.

    Args:
        last: The last one.
        others: Checkpoints of other names.
    """

    def is_newer(other: Candidate) -> bool:
        if not other.training or other.step is None:
            return False
        if last.training:
            return other.training == last.training and other.step > (last.step or 0)
        return last.modified_s is not None and _at_s(other) >= last.modified_s

    return best_first(filter(is_newer, others))


def _group(item: Candidate) -> str:
    return f"training {item.training}" if item.training else item.url


def _at_s(item: Candidate) -> float:
    return float("-inf") if item.modified_s is None else item.modified_s
