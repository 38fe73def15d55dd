# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints may be removed now: never the last good one, never what is not ours to remove.

Whoever asks for a removal believes that the newer checkpoint is there. That may be wrong: it may
still be on its way, have failed, or never have been verified. So what is known of this run's own
saves decides, and storage is not asked. What an earlier start of the run has saved is older than
all of them, and counts for nothing.

============  ======================================================================================
decision      when
============  ======================================================================================
``resumed``   the run has started from it: never
``outside``   it is in no directory of the checkpoint callbacks, and not saved by this run: never
``again``     it was saved again since it was asked for: not any more
``wait``      a save that was asked for before is not done with, or none that is at least as new as
              that, and newer than what is to be removed, was verified; or a link points to it. A
              checkpoint that waits on the node is done with, and not verified
``remove``    else, and for what this run has saved outside those directories (a tuner's temporary
              files); and for what one save is said to replace, once that is verified
============  ======================================================================================

A removal that waits is decided again after every save. A link is no checkpoint of its own: without
its target it is nothing, so the target stays until the link points elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final


if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable


__all__ = ["Decision", "Removal", "Retention", "Save", "Stage"]

_MAX_SAVES: Final = 1000
"""More than anybody removes one by one; what is forgotten is older than the rest."""


class Decision(str, Enum):
    """What becomes of a removal now."""

    REMOVE = "remove"
    WAIT = "wait"
    AGAIN = "again"
    RESUMED = "resumed"
    OUTSIDE = "outside"

    @property
    def is_never(self) -> bool:
        """Whether it will not be carried out later either."""
        return self in {Decision.AGAIN, Decision.RESUMED, Decision.OUTSIDE}


class Stage(str, Enum):
    """How far a save has come."""

    PENDING = "pending"
    SPOOLED = "spooled"
    VERIFIED = "verified"
    FAILED = "failed"


_SAFE: Final = frozenset({Stage.SPOOLED, Stage.VERIFIED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One save of this run.

    Args:
        path: The checkpoint.
        number: The how manieth save it is, ≥ 1.
        stage: How far it has come.
    """

    path: str
    number: int
    stage: Stage = Stage.PENDING


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A removal that was asked for.

    Args:
        path: The checkpoint.
        asked_at: Number of saves that had been asked for by then.
        replaced_by: The one save that is waited for, wherever it is; empty for any other.
    """

    path: str
    asked_at: int = 0
    replaced_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What is known of this run's checkpoints. Each change makes a new one.

    Paths are compared as they are: whoever asks makes one spelling of them first.

    Args:
        started_from: Every name of the checkpoint that the run has started from.
        links: Links and what they point to, as far as this run has made them.
        saves: This run's saves, the earliest first.
        count: How many saves were asked for.
    """

    started_from: frozenset[str] = frozenset()
    links: tuple[tuple[str, str], ...] = ()
    saves: tuple[Save, ...] = ()
    count: int = 0

    # What happens ---------------------------------------------------------------------------------

    def asked_to_save(self, path: str) -> Retention:
        """Return what is known once a save was asked for: what was there is no good one any more.

        Args:
            path: The checkpoint.
        """
        known = self.overwritten(path)
        save = Save(path=path, number=self.count + 1)
        return replace(known, saves=(*known.saves, save)[-_MAX_SAVES:], count=save.number)

    def overwritten(self, path: str) -> Retention:
        """Return what is known once something under that name is about to be replaced."""
        return replace(
            self,
            saves=tuple(s for s in self.saves if s.path != path or s.stage is Stage.PENDING),
            links=tuple(link for link in self.links if link[0] != path),
        )

    def ended(self, path: str, stage: Stage) -> Retention:
        """Return what is known once a save is done with.

        Args:
            path: The checkpoint. One that was asked for under another name is the earliest of those
                that are pending: saves are carried out in their order.
            stage: How it has ended.
        """
        pending = [save for save in self.saves if save.stage is Stage.PENDING]
        done = next((save for save in pending if save.path == path), None)
        done = done or next(iter(pending), None)
        if done is None:
            return self.asked_to_save(path).ended(path, stage)
        return self._with(replace(done, stage=stage))

    def published(self, path: str, number: int) -> Retention:
        """Return what is known once a save that had waited on the node is in storage, verified.

        Args:
            path: The checkpoint.
            number: The how manieth save it is.
        """
        waited = [s for s in self.saves if (s.path, s.number) == (path, number)]
        # One that was saved again meanwhile is not in storage as the latest says.
        latest = max((s.number for s in self.saves if s.path == path), default=0)
        if not waited or latest != number:
            return self
        return self._with(replace(waited[0], stage=Stage.VERIFIED))

    def withdrawn(self, path: str) -> Retention:
        """Return what is known once a save was not handed over after all, if it is pending yet."""
        found = (s for s in self.saves if s.path == path and s.stage is Stage.PENDING)
        done = next(found, None)
        return self if done is None else self._with(replace(done, stage=Stage.FAILED))

    def linking(self, link: str, target: str) -> Retention:
        """Return what is known once ``link`` may point to ``target``, or still to what it did."""
        return replace(self, links=(*self.links, (link, target)))

    def linked(self, link: str, target: str) -> Retention:
        """Return what is known once ``link`` points to ``target``, or is a copy of it."""
        known = self.overwritten(link)
        return replace(known, links=(*known.links, (link, target)))

    def removed(self, path: str) -> Retention:
        """Return what is known once a checkpoint, or a link, is gone."""
        return self.overwritten(path)

    def starting_from(self, path: str) -> Retention:
        """Return what is known once the run starts from ``path``: one of its names.

        A tuner goes back to what this run has saved itself, and then has no more need of it.
        """
        if any(save.path == path for save in self.saves):
            return self
        return replace(self, started_from=self.started_from | {path})

    def renamed(self, name: Callable[[str], str]) -> Retention:
        """Return the same under other names.

        Args:
            name: Returns the other name of a checkpoint.
        """
        return replace(
            self,
            # Both: what the run has started from is not removed under any name.
            started_from=self.started_from | {name(path) for path in self.started_from},
            links=tuple((name(link), name(target)) for link, target in self.links),
            saves=tuple(replace(save, path=name(save.path)) for save in self.saves),
        )

    # What follows ---------------------------------------------------------------------------------

    def number_of(self, path: str) -> int:
        """Return the how manieth save the latest of that path is; 0 where there was none."""
        return max((save.number for save in self.saves if save.path == path), default=0)

    def number_being_saved(self, path: str) -> int:
        """Return the how manieth save that of ``path`` is which is being written now.

        In the background it may not be the latest that was asked for. It is the one that ``ended``
        will take for it.
        """
        pending = [save for save in self.saves if save.stage is Stage.PENDING]
        named = (save for save in pending if save.path == path)
        return next((save.number for save in (*named, *pending)), self.count + 1)

    def is_replaced(self, path: str) -> bool:
        """Tell whether a later save is safe, in storage or on the node.

        Then one that only waits on the node, and whose removal was asked for, need not be published
        any more. What is in storage stays until a later one is there as well (``decide``).
        """
        number = self.number_of(path)
        return any(
            save.stage in _SAFE and save.number > number and save.path != path
            for save in self.saves
        )

    def is_verified(self, path: str) -> bool:
        """Tell whether the latest save of that path is in storage, verified."""
        latest = max((s for s in self.saves if s.path == path), key=_number, default=None)
        return latest is not None and latest.stage is Stage.VERIFIED

    def removal(self, path: str, *, replaced_by: str = "") -> Removal:
        """Return what is asked for by a removal now.

        Args:
            path: The checkpoint.
            replaced_by: See ``Removal``.
        """
        return Removal(path=path, asked_at=self.count, replaced_by=replaced_by)

    def decide(self, removal: Removal, directories: Collection[str]) -> Decision:
        """Tell what becomes of a removal now.

        Args:
            removal: What was asked for.
            directories: Those of the checkpoint callbacks; where there are none, nothing is outside
                of them.
        """
        own = [save for save in self.saves if save.path == removal.path]
        if removal.path in self.started_from:
            return Decision.RESUMED
        if any(save.number > removal.asked_at for save in own):
            return Decision.AGAIN
        if removal.replaced_by:
            return self._once_replaced(removal)
        return self._among_others(removal, own, directories)

    def _among_others(
        self, removal: Removal, own: list[Save], directories: Collection[str]
    ) -> Decision:
        home = _home(removal.path, directories)
        if home is None and directories and not own:
            return Decision.OUTSIDE
        here = (
            own if home is None else [s for s in self.saves if _home(s.path, directories) == home]
        )
        before = [save for save in here if save.number <= removal.asked_at]
        if any(save.stage is Stage.PENDING for save in before):
            return Decision.WAIT
        if home is None or self._is_spare(removal, here, before):
            return Decision.REMOVE
        return Decision.WAIT

    def _once_replaced(self, removal: Removal) -> Decision:
        is_linked = any(target == removal.path for _, target in self.links)
        is_safe = self.is_verified(removal.replaced_by) and not is_linked
        return Decision.REMOVE if is_safe else Decision.WAIT

    def _is_spare(self, removal: Removal, here: list[Save], before: list[Save]) -> bool:
        if any(target == removal.path for _, target in self.links):
            return False
        # It was asked for because of the last of them, so one that was there before does not do.
        since = max((save.number for save in before), default=0)
        return any(
            save.stage is Stage.VERIFIED and save.number >= since and save.path != removal.path
            for save in here
        )

    def _with(self, changed: Save) -> Retention:
        saves = (changed if save.number == changed.number else save for save in self.saves)
        return replace(self, saves=tuple(saves))


def _number(save: Save) -> int:
    return save.number


def _home(path: str, directories: Iterable[str]) -> str | None:
    around = [each for each in directories if path.startswith(f"{each}/")]
    return max(around, key=len, default=None)
