# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""I6 and I9: every save ends once, none was lost, and a run can start from the newest at any time.

All of it is seen from outside, after every effect on the storage: a process may be killed after any
of them. What a process says counts only where it says that a save has ended.

==================  ================================================================================
check               what it raises for
==================  ================================================================================
I6 OneEnd           a save that ends twice, or not at all, or is said to be published and is not
                    there, whole and with its manifest; one that has waited on the node and is
                    dropped, and nothing newer is there
I6 Standing         a published checkpoint that is changed or gone, though nobody has saved under
                    its name again, nor asked for its removal; what the run has started from also
                    where its removal was asked for
I6 NeverNone        no whole checkpoint, once one was published
I6 KeptAside        a damaged checkpoint of which a byte is neither in its place nor set aside
I9 HonestMarks      a manifest beside what it does not describe
I9 WholeLinks       a link to what is gone, though nobody has damaged that
I9 WholeStart       a start from what is torn or damaged, or not to be loaded
I9 FoundStart       no start, although there is a whole checkpoint
I9 NewestStart      a start from an older one than the newest that was published
==================  ================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from lightning_resilience.core.manifest import DIRECTORY
from lightning_resilience.drill.save_looks import marked
from lightning_resilience.errors import CheckpointError, DrillFailedError


if TYPE_CHECKING:
    from lightning_resilience.core.resolution import Inspection
    from lightning_resilience.drill.save_looks import Looks
    from lightning_resilience.drill.save_storage import SaveStorage


__all__ = ["SAVE_CHECKS", "SaveChecks"]

SAVE_CHECKS: Final = {
    "I6": ("OneEnd", "Standing", "NeverNone", "KeptAside"),
    "I9": ("HonestMarks", "WholeLinks", "WholeStart", "FoundStart", "NewestStart"),
}
"""Names of the checks by promise."""


class SaveChecks:
    """Who looks after I6 and I9 in a world of saves.

    Args:
        storage: The storage.
        looks: Who looks at it.

    Attributes:
        is_on: Whether to look; who repeats the beginning of a run has looked already.
    """

    def __init__(self, storage: SaveStorage, looks: Looks) -> None:
        self.is_on = True
        self._storage = storage
        self._looks = looks
        self._open: dict[int, str] = {}
        self._ended: dict[int, str] = {}
        self._waiting: dict[str, tuple[str, int]] = {}
        self._standing: dict[str, int] = {}
        self._damaged: set[str] = set()
        self._kept_aside: set[str] = set()
        self._unwanted: set[str] = set()
        self._started_from = ""
        self._was_published = False
        self._came_late = False

    # What is said ---------------------------------------------------------------------------------

    def asked(self, save: int, path: str) -> None:
        """Note that a save was asked for."""
        self._open[save] = path
        self._released(path)
        # What was damaged is to be replaced.
        self._kept_aside.discard(path)
        self._unwanted.discard(path)

    def ended(self, save: int, how: str, number: int) -> None:
        """Note how a save has ended.

        Args:
            save: The save.
            how: ``published``, ``failed``, or ``spooled``: it waits on the node.
            number: Training steps of what was saved.
        """
        path = self._open.pop(save, None)
        if path is None:
            self._fail("I6 OneEnd", f"save {save} has ended as {how}, and had ended before")
        self._ended[save] = how
        if how == "published":
            self._published(path, number, f"save {save}")

    def waits(self, name: str, path: str, number: int) -> None:
        """Note that a save waits on the node."""
        self._waiting[name] = (path, number)

    def sends(self, path: str, number: int) -> None:
        """Note that what has waited is about to be published: what is older may be replaced."""
        if self._standing.get(path, number) <= number:
            self._released(path)
            self._kept_aside.discard(path)
        if any(standing > number for standing in self._standing.values()):
            # It will be the latest that was written, and it is an older one.
            self._came_late = True

    def waited(self, name: str, how: str) -> None:
        """Note how what has waited on the node has ended.

        Args:
            name: Its file.
            how: ``published``, or ``superseded``: nobody has any use for it.
        """
        path, number = self._waiting.pop(name)
        if how == "published":
            self._published(path, number, f"{name}, which waited on the node,")
            return
        waiting = [other for at, other in self._waiting.values() if at == path]
        newest = max([self._looks.number_of(path) or 0, *waiting])
        if newest < number and path not in self._unwanted:
            what = f"{name} of step {number} is dropped, nobody has asked for its removal"
            self._fail("I6 OneEnd", f"{what}, and nothing newer is there or waits for {path}")

    def _published(self, path: str, number: int, which: str) -> None:
        there = self._looks.number_of(path)
        if there != number or self._looks.manifest(path) is None:
            what = f"{which} of step {number} to {path} is said to be published"
            self._fail("I6 OneEnd", f"{what}, and there is {self._told(path)}")
        self._standing[path] = number
        self._damaged.discard(path)
        self._was_published = True

    def removal_asked(self, path: str) -> None:
        """Note that a removal was asked for: from here on it may be carried out."""
        if path != self._started_from:
            self._released(path)
            self._kept_aside.discard(path)
            self._unwanted.add(path)

    def linked(self, path: str) -> None:
        """Note that a link is to take the place of what is there."""
        self._released(path)

    def started(self, path: str) -> None:
        """Note what a run has started from; empty for from the beginning."""
        self._started_from = path
        number = self._looks.number_of(path) if path else None
        if number is not None and path not in self._storage.links:
            self._standing.setdefault(path, number)

    def came_late(self) -> None:
        """Note that something was carried out that its caller has given up."""
        self._came_late = True

    def died(self) -> None:
        """Note that the process is gone, and its open saves with it."""
        self._open.clear()
        self._started_from = ""

    def finished(self) -> None:
        """Note that the run has come to its end."""
        if self._open:
            self._fail("I6 OneEnd", f"saves {sorted(self._open)} have not ended")

    def never_starts(self, starts: int) -> None:
        """Note that no start was left, and none has come to the end."""
        self._fail("I9 FoundStart", f"none of {starts} starts has come to its end")

    def damage(self, path: str) -> None:
        """Note that a checkpoint is about to be damaged, by nobody's request."""
        self._damaged.add(path)
        # What is being saved again, or waits to be published, replaces what is there.
        replaced = {*self._open.values(), *(other for other, _ in self._waiting.values())}
        if path not in self._unwanted | replaced:
            self._kept_aside.add(path)
        self._released(path)

    # What is seen ---------------------------------------------------------------------------------

    def happened(self, what: str) -> None:
        """Look at everything."""
        if not self.is_on:
            return
        for path, number in self._standing.items():
            if self._looks.number_of(path) != number:
                message = f"step {number} was published as {path}, and there is {self._told(path)}"
                self._fail("I6 Standing", f"{what}: {message}")
        self._look_at_damaged(what)
        self._look_at_marks(what)
        self._look_at_links(what)
        whole = [path for path in self._looks.checkpoints() if self._is_whole(path)]
        if self._was_published and not whole and not self._damaged:
            self._fail("I6 NeverNone", f"{what}, and there is no whole checkpoint any more")
        self._look_at_start(what, whole)

    def _look_at_damaged(self, what: str) -> None:
        for path in self._kept_aside:
            kept = any(
                blob.is_damaged
                for at, blob in self._storage.files.items()
                if at == path
                or at.startswith(f"{path}/")
                or (f"/{DIRECTORY}/set-aside/" in at and path.rpartition("/")[2] in at)
            )
            # What was sent before, and lands now, may put what was damaged right.
            if not kept and not self._came_late:
                self._fail("I6 KeptAside", f"{what}, and what was damaged of {path} is gone")

    def _look_at_marks(self, what: str) -> None:
        for path in marked(self._storage):
            if path in self._damaged:
                continue
            error = self._looks.manifest_error(path)
            if error:
                self._fail(
                    "I9 HonestMarks", f"{what}, and the manifest of {path} is wrong: {error}"
                )

    def _look_at_links(self, what: str) -> None:
        for path, target in self._storage.links.items():
            is_there = any(
                at == target or at.startswith(f"{target}/") for at in self._storage.files
            )
            if not is_there and target not in self._damaged:
                self._fail("I9 WholeLinks", f"{what}, and {path} is a link to {target}: it is gone")

    def _look_at_start(self, what: str, whole: list[str]) -> None:
        try:
            choice = self._looks.start()
        except (CheckpointError, OSError) as error:
            self._look_at_others(f"{what}, and a start is refused ({error})", whole)
            return
        if choice.seen is None:
            if whole:
                there = ", ".join(map(self._told, whole))
                self._fail("I9 FoundStart", f"{what}, and a run starts anew beside {there}")
            return
        # What nobody can tell to be complete is taken where no candidate is known to be.
        known = [path for path in whole if self._looks.manifest(path) is not None]
        if not choice.seen.doubt or self._candidates().intersection(known):
            self._look_at_chosen(what, choice.seen)

    def _look_at_others(self, what: str, whole: list[str]) -> None:
        # A person names another one, or there is none.
        candidates = self._candidates()
        for path in whole:
            if path in candidates or self._looks.judged(path).rejected:
                self._fail("I9 FoundStart", f"{what}, although {self._told(path)} is there")

    def _look_at_chosen(self, what: str, seen: Inspection) -> None:
        if seen.path in self._damaged - self._kept_aside:
            # What was damaged is being replaced or removed, and has no manifest any more.
            return
        number = self._looks.number_of(seen.path)
        if number is None or self._looks.manifest_error(seen.path):
            there = self._told(seen.path)
            self._fail("I9 WholeStart", f"{what}, and a run starts from {seen.path}: {there}")
        candidates = self._candidates()
        newest = max((n for path, n in self._standing.items() if path in candidates), default=0)
        if number < newest and not self._came_late:
            message = f"a run starts from step {number}, and step {newest} was published"
            self._fail("I9 NewestStart", f"{what}, and {message}")

    def _candidates(self) -> set[str]:
        return {candidate.url for candidate in self._looks.listed().candidates}

    def _is_whole(self, path: str) -> bool:
        return self._looks.number_of(path) is not None

    def _released(self, path: str) -> None:
        self._standing.pop(path, None)

    def _told(self, path: str) -> str:
        number = self._looks.number_of(path)
        marked = self._looks.manifest(path) is not None
        there = "no whole checkpoint" if number is None else f"step {number}"
        return f"{there} at {path}, {'with' if marked else 'without'} a manifest"

    def _fail(self, check: str, what: str) -> NoReturn:
        message = f"{check} does not hold: {what}."
        raise DrillFailedError(message, step=self._storage.effects, check=check)
