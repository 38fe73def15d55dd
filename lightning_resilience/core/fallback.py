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

from lightning_resilience.core.candidates import Candidate, best_first, overtaking
from lightning_resilience.core.pipeline import Do, Step
from lightning_resilience.core.resolution import (
    Found,
    Inspection,
    Search,
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
        note: Why it is one of another name than was looked for; empty where it is not.
        is_overridden: Whether there are checkpoints that cannot be loaded, and the run was told to
            start from the beginning all the same.
        unused: What is left unused then, in one sentence.
    """

    seen: Inspection | None = None
    note: str = ""
    is_overridden: bool = False
    unused: str = ""


def choosing(
    what: Search, places: int, *, allow_fresh_start: bool, before: Iterable[Inspection] = ()
) -> Steps[Choice]:
    """Search for a checkpoint to start from: the best first, and the next where it is damaged.

    Damaged ones are set aside only once it is known what all ranks start from. A checkpoint of
    another name than those that are looked for comes before them where its manifest says that it is
    newer, after them where it says nothing of the kind, and last of all where it has none: then it
    may be anybody's, or what a job has left that was killed in its first save. One that nobody can
    tell to be complete is taken only where there is none that is known to be: a directory in a
    user's format, without a manifest, may be a part of what a killed process was sending.

    Args:
        what: What is looked for.
        places: At how many places.
        allow_fresh_start: Whether to start from the beginning where all of them are damaged.
        before: What earlier searches of this start have set aside.

    Raises:
        CheckpointError: Something is there, and none of it can be loaded. All of it stays.
    """
    found: list[Found] = []
    for number in range(places):
        listed: Found = yield Do(Step.LIST, number)
        found.append(listed)
    looking = _Looking(found)
    chosen = yield from looking.best(by_number=what is Search.HPC)
    if chosen is not None:
        yield from _passing_over(looking.rejected)
        return Choice(seen=chosen, note=looking.note)
    unusable = [*looking.rejected, *map(_moved, before)]
    refused = refusal(what.value, found, unusable)
    if not refused:
        return Choice()
    if not allow_fresh_start:
        raise CheckpointError(refused)
    yield from _passing_over(looking.rejected)
    return Choice(is_overridden=True, unused=override(what.value, found, unusable))


class _Looking:
    """One look through all that was found.

    Args:
        found: What was seen at each place.
    """

    def __init__(self, found: Iterable[Found]) -> None:
        self._found = list(found)
        self._others = [other for place in self._found for other in place.substitutes]
        self._looked_at: set[Candidate] = set()
        self._doubted: list[Inspection] = []
        self.rejected: list[Inspection] = []
        """What is passed over, in the order in which it was looked at."""
        self.note = ""
        """Why one of another name is taken."""

    def best(self, *, by_number: bool) -> Steps[Inspection | None]:
        """Return what to start from."""
        candidates = (candidate for place in self._found for candidate in place.candidates)
        for candidate in best_first(candidates, by_number=by_number):
            newer = yield from self._committed(overtaking(candidate, self._others))
            if newer is not None:
                self.note = f"{newer.path} is newer than {candidate.url}"
                return self._passing(newer)
            seen = yield from self._judged(candidate)
            if not seen.rejected and not seen.doubt:
                return self._passing(seen)
            (self.rejected if seen.rejected else self._doubted).append(seen)
        marked = [other for other in self._others if other.is_marked]
        chosen = yield from self._committed(best_first(marked))
        if chosen is None and self._doubted:
            # The others are no better, and not what is passed over for it.
            chosen, self._doubted = self._doubted[0], []
        elif chosen is None:
            chosen = yield from self._unmarked()
        return None if chosen is None else self._passing(chosen)

    def _passing(self, chosen: Inspection) -> Inspection:
        self.rejected += map(_refused, self._doubted)
        return chosen

    def _committed(self, others: Iterable[Candidate]) -> Steps[Inspection | None]:
        """Return the first that is what its manifest says."""
        for other in others:
            if other in self._looked_at:
                continue
            seen = yield from self._judged(other)
            if seen.is_committed:
                return seen
            if seen.rejected:
                self.rejected.append(seen)
        return None

    def _unmarked(self) -> Steps[Inspection | None]:
        """Return the newest without a manifest that is whole, and that a training can go on from.

        A job that is killed between its first checkpoint and the manifest has left nothing else.
        """
        for other in best_first(other for other in self._others if not other.is_marked):
            seen = yield from self._judged(other)
            if seen.rejected:
                self.rejected.append(seen)
            elif seen.is_resumable and not seen.doubt:
                self.note = f"{seen.path} has no manifest, is whole, and is all there is"
                return seen
        return None

    def _judged(self, candidate: Candidate) -> Steps[Inspection]:
        self._looked_at.add(candidate)
        seen: Inspection = yield Do(Step.JUDGE, candidate.url)
        return replace(seen, training=candidate.training)


def _passing_over(rejected: Iterable[Inspection]) -> Steps[None]:
    for damaged in rejected:
        yield Do(Step.LEAVE, damaged)


def _refused(doubted: Inspection) -> Inspection:
    why = f"it has no manifest, {doubted.doubt}, and an older one is known to be complete"
    return replace(doubted, rejected=why)


def _moved(damaged: Inspection) -> Inspection:
    return replace(damaged, rejected=f"{damaged.rejected} (set aside by this start)")


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
    if seen.rejected or seen.is_committed:
        # Of what nobody has opened, all that is known is what its manifest says.
        return seen
    differs: str | None = yield Do(Step.COMPARE)
    if differs is None:
        return seen
    return replace(seen, rejected=differs, doubt="", is_committed=not differs)
