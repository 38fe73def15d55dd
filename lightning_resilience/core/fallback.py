# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""In which order candidates are looked at when a run starts, and what is set aside when.

``choosing`` is run by every rank with the same answers: rank 0's. ``judging`` is what rank 0 does
about one candidate. Both are steps, as in ``core.pipeline``; ``core.resolution`` has what follows
from what they find.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lightning_resilience.core.pipeline import Do, Step
from lightning_resilience.core.resolution import (
    Found,
    Inspection,
    Search,
    best_first,
    override,
    refusal,
)
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_resilience.core.pipeline import Steps


__all__ = ["Choice", "choosing", "judging"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a search has come to; the same on every rank.

    Args:
        seen: The checkpoint to start from; None where there is none.
        is_overridden: Whether there are checkpoints that cannot be loaded, and the run was told to
            start from the beginning all the same.
        unused: What is left unused then, in one sentence.
    """

    seen: Inspection | None = None
    is_overridden: bool = False
    unused: str = ""


def choosing(what: Search, places: int, *, allow_fresh_start: bool) -> Steps[Choice]:
    """Search for a checkpoint to start from: the best first, and the next where it is damaged.

    Damaged ones are set aside only once it is known what all ranks start from. Checkpoints of other
    names than those that are looked for come after them, and only with a manifest: without one they
    may be anybody's. One that nobody can tell to be complete is taken only where there is none that
    is known to be: a directory in a user's format, without a manifest, may be a part of what a
    killed process was sending.

    Args:
        what: What is looked for.
        places: At how many places.
        allow_fresh_start: Whether to start from the beginning where all of them are damaged.

    Raises:
        CheckpointError: Something is there, and none of it can be loaded. All of it stays.
    """
    found: list[Found] = []
    for number in range(places):
        listed: Found = yield Do(Step.LIST, number)
        found.append(listed)
    chosen, rejected = yield from _best(found, by_number=what is Search.HPC)
    if chosen is not None:
        yield from _passing_over(rejected)
        return Choice(seen=chosen)
    refused = refusal(what.value, found, rejected)
    if not refused:
        return Choice()
    if not allow_fresh_start:
        raise CheckpointError(refused)
    yield from _passing_over(rejected)
    return Choice(is_overridden=True, unused=override(what.value, found, rejected))


def _best(
    found: list[Found], *, by_number: bool
) -> Steps[tuple[Inspection | None, list[Inspection]]]:
    """Return what to start from, and what is passed over for it."""
    rejected: list[Inspection] = []
    doubted: list[Inspection] = []
    candidates = (candidate for place in found for candidate in place.candidates)
    for candidate in best_first(candidates, by_number=by_number):
        seen: Inspection = yield Do(Step.JUDGE, candidate.url)
        if not seen.rejected and not seen.doubt:
            return seen, [*rejected, *map(_refused, doubted)]
        (rejected if seen.rejected else doubted).append(seen)
    chosen = yield from _substitute(found)
    if chosen is None and doubted:
        chosen, doubted = doubted[0], []
    return chosen, [*rejected, *map(_refused, doubted)] if chosen else rejected


def _substitute(found: Iterable[Found]) -> Steps[Inspection | None]:
    for candidate in best_first(other for place in found for other in place.substitutes):
        seen: Inspection = yield Do(Step.JUDGE, candidate.url)
        if seen.is_committed:
            return seen
    return None


def _passing_over(rejected: Iterable[Inspection]) -> Steps[None]:
    for damaged in rejected:
        yield Do(Step.LEAVE, damaged)


def _refused(doubted: Inspection) -> Inspection:
    why = f"it has no manifest, {doubted.doubt}, and an older one is known to be complete"
    return replace(doubted, rejected=why)


def judging() -> Steps[Inspection]:
    """Look at a candidate; at one that is damaged twice, and only that has a mark.

    What is being written, or was written between the two looks, is not known to be damaged.
    """
    seen = yield from _looked_at()
    if not seen.rejected:
        return seen
    mark: str = yield Do(Step.IDENTIFY)
    again = yield from _looked_at()
    is_same = again == seen and (yield Do(Step.IDENTIFY)) == mark
    return replace(again, mark=mark) if is_same else again


def _looked_at() -> Steps[Inspection]:
    seen: Inspection = yield Do(Step.INSPECT)
    if seen.rejected:
        return seen
    differs: str | None = yield Do(Step.COMPARE)
    if differs is None:
        return seen
    return replace(seen, rejected=differs, doubt="", is_committed=not differs)
