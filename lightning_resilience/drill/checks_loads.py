# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What is promised of a resume, seen from outside: what is read, by whom, and what comes of it.

==================  ================================================================================
check               what it raises for
==================  ================================================================================
I3 ReplacedReaders  a rank that waits on although the reader has shown no mark for its patience, or
                    reads no more
I3 EndedLoads       ranks that never come to an end, or a job that never resumes
I5 OneReader        a second reader on a node, beside one that was not silent for that long
I5 AdmittedLoads    a read without a slot, or more at once than there are slots
I6 KeptGood         a good checkpoint that is set aside, changed or gone, though nobody has saved
                    under its name, nor asked for its removal; what the job has started from also
                    where it has asked for that
I7 OneFetch         more reads of the checkpoint than nodes, where nothing has gone wrong; and more
                    than its troubles explain where something has; one of what a rank of the same
                    node has found damaged; one to choose a good one in object storage that no load
                    has found damaged
I8 OneCheckpoint    ranks that choose, return or load different things
I9 CheckedBytes     a rank that has loaded other bytes than were saved, or than rank 0 has chosen
I9 FoundLoad        a load that fails, or a start that is refused, without a reason; one that begins
                    anew beside checkpoints; what is in use and removed from a cache
I9 NewestLoad       a start from an older one than the newest that was published before the search
==================  ================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

from lightning_resilience.drill.load_plan import Place
from lightning_resilience.drill.load_rank import Older, Rank
from lightning_resilience.drill.load_reading import PATIENCE_S
from lightning_resilience.drill.save_looks import number_of_digest
from lightning_resilience.errors import DrillFailedError


if TYPE_CHECKING:
    from lightning_resilience.core.resolution import Inspection
    from lightning_resilience.core.spooled import SpoolEntry
    from lightning_resilience.drill.load_job import Job, Load
    from lightning_resilience.drill.load_node import Node, NodeFile
    from lightning_resilience.drill.load_process import Actor, Owner
    from lightning_resilience.drill.load_world import LoadWorld


__all__ = ["LOAD_CHECKS", "LoadChecks"]

IN_USE_S: Final = 600.0
"""For how long after its last use a file of a cache stays, in seconds."""

LOAD_CHECKS: Final = {
    "I3": ("ReplacedReaders", "EndedLoads"),
    "I5": ("OneReader", "AdmittedLoads"),
    "I6": ("KeptGood",),
    "I7": ("OneFetch",),
    "I8": ("OneCheckpoint",),
    "I9": ("CheckedBytes", "FoundLoad", "NewestLoad"),
}
"""Names of the checks by promise."""


class LoadChecks:
    """Who looks after a world of loads.

    Args:
        world: The world.

    Attributes:
        standing: Good checkpoints that nobody may touch, with their training steps.
    """

    def __init__(self, world: LoadWorld) -> None:
        self.standing: dict[str, int] = {}
        self._world = world
        self._before: dict[str, int] = {}
        self._writing: dict[str, set[object]] = {}
        self._contested: set[str] = set()
        self._refused: dict[tuple[int, str], float] = {}
        self._opened = 0
        self._choices: dict[int, object] = {}
        self._was_disturbed = False
        self._came_late = False

    # Saves, removals, damage ----------------------------------------------------------------------

    def begins_to_save(self, path: str, owner: object, number: int | None = None) -> None:
        """Note that what has that name may be replaced.

        Args:
            path: The name.
            owner: Who does it.
            number: What it is replaced with, where that is to be compared first; None where not.
        """
        if number is None or self.standing.get(path, 0) <= number:
            self.standing.pop(path, None)
        if number is not None:
            # What is published late, or by two nodes at once, is not in its order in storage.
            newest = max(self.standing.values(), default=0)
            self._came_late |= newest > number or any(self._writing.values())
        writing = self._writing.setdefault(path, set())
        writing.add(owner)
        if len(writing) > 1:
            self._contested.add(path)

    def published(self, path: str, number: int, owner: object) -> None:
        """Note that a checkpoint is there, whole and with its manifest.

        Where two processes write under one name, what is there in the end is anybody's.
        """
        writing = self._writing.get(path, set())
        writing.discard(owner)
        if not writing:
            if path not in self._contested:
                self.standing[path] = number
            self._contested.discard(path)

    def removes(self, path: str, owner: Owner) -> None:
        """Note that a checkpoint is about to be removed."""
        if isinstance(owner, Older):
            self.standing.pop(path, None)

    def drops(self, entry: SpoolEntry) -> None:
        """Note that what was left on a node is not there any more."""
        path, number = entry.path, entry.step or 0
        waiting = [
            other.step or 0
            for node in self._world.nodes
            for other in node.spool.values()
            if other.path == path
        ]
        newest = max([self._world.looks.number_of(path) or 0, *waiting])
        if newest < number and not self._was_disturbed:
            what = f"step {number} for {path} is dropped from a node, and nothing newer is there"
            self._fail("I6 KeptGood", what)

    def damages(self, path: str) -> None:
        """Note that a checkpoint is about to be damaged, by nobody's request."""
        self.standing.pop(path, None)

    def happened(self, what: str) -> None:
        """Look at the storage."""
        for path, number in self.standing.items():
            found = self._world.looks.number_of(path)
            if found != number:
                there = "no whole checkpoint" if found is None else f"step {found}"
                self._fail("I6 KeptGood", f"{what}: step {number} was good as {path}: {there}")

    # One start ------------------------------------------------------------------------------------

    def starts(self, job: Job) -> None:
        """Note that a start begins."""
        older = self._world.older
        self._was_disturbed = older is not None and not older.has_ended
        for writing in self._writing.values():
            # Of the start before nobody lives.
            writing.intersection_update({older})
        job.is_disturbed = self._was_disturbed
        self._opened = 0
        self._choices = {}
        self._before = {}

    def searches(self) -> None:
        """Note that rank 0 begins to search."""
        self._before = dict(self.standing)

    def looks_inside(self, path: str) -> None:
        """Look at a candidate that rank 0 opens before any load of it has found damage."""
        if self._world.plan.place is Place.OBJECTS and path in self.standing:
            self._fail("I7 OneFetch", f"rank 0 opens {path} to choose it, and has its manifest")

    def chose(self, rank: Rank, number: int) -> None:
        """Look at what a rank starts from.

        Args:
            rank: The rank.
            number: How often it has chosen before.
        """
        choice = rank.choice
        if choice != self._choices.setdefault(number, choice):
            self._fail("I8 OneCheckpoint", f"{rank.name} starts from {choice}")
        stayed = [n for path, n in self._before.items() if self.standing.get(path) == n]
        newest = max(stayed, default=0)
        if choice is None or choice.seen is None:
            there = [each.url for each in self._world.looks.listed().candidates]
            if newest or (there and not self._was_disturbed):
                self._fail("I9 FoundLoad", f"{rank.name} begins anew beside {', '.join(there)}")
            return
        found = _chosen_number(choice.seen)
        if found < newest and not self._came_late and not self._was_disturbed:
            what = f"{rank.name} starts from step {found}, and step {newest} was published"
            self._fail("I9 NewestLoad", what)

    def returns(self, rank: Rank, load: Load) -> None:
        """Look at what a rank has loaded."""
        loaded, choice = rank.loaded, rank.choice
        if loaded is None and load.error is None:
            self._fail("I8 OneCheckpoint", f"{rank.name} has loaded nothing, and succeeds")
        if loaded is None or choice is None or choice.seen is None:
            return
        if loaded.is_damaged or loaded.number != _chosen_number(choice.seen):
            what = "damaged bytes" if loaded.is_damaged else f"step {loaded.number}"
            self._fail("I9 CheckedBytes", f"{rank.name} has loaded {what} of {choice.seen}")

    def ends(self, job: Job) -> None:
        """Look at how a start has ended."""
        living = [rank for rank in job.ranks if rank.is_alive]
        if len(living) == len(job.ranks):
            errors = [repr(rank.main.error) for rank in living]
            if len(set(errors)) > 1:
                self._fail("I8 OneCheckpoint", f"the ranks end differently: {errors}")
        if not self._was_disturbed:
            self._look_for_reason(job)

    def _look_for_reason(self, job: Job) -> None:
        for report in (report for load in job.loads for report in load.reports):
            is_there = all(rank.choice.seen.path in self.standing for rank in self._chosen(job))
            if report.error.startswith("FileNotFoundError") and is_there:
                self._fail("I9 FoundLoad", f"rank {report.rank} does not find what is there")
        for error in job.errors:
            if self.standing and not job.troubles:
                self._fail("I9 FoundLoad", f"{error!r} beside {self.standing}")

    def is_refused_rightly(self, job: Job) -> bool:
        """Tell whether a start was refused because there is nothing good."""
        return bool(job.errors) and not self.standing and not job.troubles

    def never_resumes(self) -> NoReturn:
        """Note that no start is left."""
        self._fail("I3 EndedLoads", f"none of {self._world.plan.starts} starts has resumed")

    def never_ends(self, names: str) -> NoReturn:
        """Note that nothing happens any more, or too much."""
        self._fail("I3 EndedLoads", f"{names} do not come to an end")

    # Readers --------------------------------------------------------------------------------------

    def marks(self, attempt: Actor) -> None:
        """Note that a reader has shown that it goes on."""
        attempt.marked_s = self._world.now_s

    def refused(self, file: NodeFile) -> None:
        """Note that a rank of a node knows that the checkpoint is damaged."""
        self._refused.setdefault((file.node.number, file.told), self._world.now_s)

    def opens(self, attempt: Actor, file: NodeFile) -> None:
        """Look at a reader that opens the checkpoint."""
        world, job = self._world, self._world.job
        self._opened += 1
        nodes = world.plan.nodes * len(job.loads)
        if self._opened > nodes + 3 * job.troubles and not self._was_disturbed:
            what = f"read {self._opened} of {nodes} nodes, and {job.troubles} troubles"
            self._fail("I7 OneFetch", f"{attempt.name}: {what}")
        refused_s = self._refused.get((file.node.number, file.told))
        if refused_s is not None and refused_s <= attempt.looked_s:
            what = "reads what a rank of its node has found damaged"
            self._fail("I7 OneFetch", f"{attempt.name} {what}")
        if attempt.is_abandoned:
            # Its slot is free, and its successor may have it: what hangs is on top of the bound.
            return
        reading = [each for each in world.reading if each.owner.is_alive and not each.is_abandoned]
        if attempt not in world.admitted:
            self._fail("I5 AdmittedLoads", f"{attempt.name} reads without a slot")
        if len(reading) >= world.plan.slots and attempt not in reading:
            what = f"{len(reading) + 1} read at once, and there are {world.plan.slots} slots"
            self._fail("I5 AdmittedLoads", f"{attempt.name}: {what}")
        self._look_at_other(attempt, file)
        world.reading[attempt] = file.key

    def _look_at_other(self, attempt: Actor, file: NodeFile) -> None:
        world = self._world
        held = file.node.locks.get(file.lock("reading"))
        other = None if held is None else held.who
        if other is attempt or other not in world.reading or other.is_abandoned:
            return
        silent_s = world.now_s - other.marked_s
        if silent_s < PATIENCE_S and other.marked_s <= attempt.looked_s:
            what = f"reads beside {other.name}, which was silent for {silent_s:.2f} s only"
            self._fail("I5 OneReader", f"{attempt.name} {what}")

    def waits(self, attempt: Actor, file: NodeFile, mark: int | None) -> None:
        """Look at a rank that has just looked for a reader's mark."""
        held = file.node.locks.get(file.lock("reading"))
        if held is not None and held.who is not attempt and held.who.op is None:
            what = f"waits for {held.who.name}, which has ended and reads no more"
            self._fail("I3 ReplacedReaders", f"{attempt.name} {what}")
        seen, since_s = attempt.watched
        silent_s = attempt.looked_s - since_s
        if mark is not None and mark == seen and silent_s >= PATIENCE_S:
            what = f"waits for a reader that has been silent for {silent_s:.2f} s"
            self._fail("I3 ReplacedReaders", f"{attempt.name} {what}")
        attempt.sees = mark

    def watches(self, attempt: Actor) -> None:
        """Note from when on a rank has seen the mark that it sees."""
        if attempt.sees != attempt.watched[0]:
            attempt.watched = (attempt.sees, self._world.now_s)

    def made_room(self, node: Node, before: dict[str, float]) -> None:
        """Look at what was removed from a node's cache.

        Args:
            node: The node.
            before: When each of its files was used before.
        """
        for name, used_s in before.items():
            unused_s = self._world.now_s - used_s
            if name not in node.files and unused_s < IN_USE_S:
                what = f"{name} is removed from node {node.number}, used {unused_s:.2f} s ago"
                self._fail("I9 FoundLoad", what)

    # ----------------------------------------------------------------------------------------------

    def _chosen(self, job: Job) -> list[Any]:
        return [rank for rank in job.ranks if rank.choice is not None and rank.choice.seen]

    def _fail(self, check: str, what: str) -> NoReturn:
        message = f"{check} does not hold: {what}."
        raise DrillFailedError(message, step=len(self._world.story), check=check)


def _chosen_number(seen: Inspection) -> int:
    """Return the training steps of what rank 0 has chosen, by the digest that stands for it."""
    if seen.saved:
        return number_of_digest(seen.saved)
    return int(seen.digest.rpartition(" ")[2] or 0)
