# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What this rank knows of its checkpoints, for ``core.retention`` to decide on removals.

Any thread may tell: a save in the background ends in a thread of its own. Names are compared
without asking storage; only when a removal is about to be carried out, in a thread that may hang,
links among directories are followed as well.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_resilience.adapters.names import name_of, real_path_of
from lightning_resilience.adapters.storage import is_local
from lightning_resilience.core.retention import Retention, Stage


if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    from lightning_resilience.core.retention import Decision, Removal
    from lightning_resilience.ports import CancelToken


__all__ = ["Ending", "Retaining"]


class Ending:
    """How a save ends that does not fail."""

    stage = Stage.VERIFIED


class Retaining:
    """This rank's saves, and what its run has started from.

    Attributes:
        directories: Tells the directories of the checkpoint callbacks, once those are set up.
    """

    def __init__(self) -> None:
        self.directories: Callable[[], Iterable[str]] = tuple
        self._known = Retention()
        self._unseen = ""
        self._real: dict[str, str] = {}
        self._lock = threading.Lock()

    # What happens ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def saving(self, url: str) -> Iterator[Ending]:
        """Note a save, and how it ends."""
        self._change(Retention.asked_to_save, self._name(url))
        with self.writing(url) as ending:
            yield ending

    @contextlib.contextmanager
    def writing(self, url: str) -> Iterator[Ending]:
        """Note how a save ends that was handed over before."""
        ending = Ending()
        try:
            yield ending
        except BaseException:
            self._change(Retention.ended, self._name(url), Stage.FAILED)
            raise
        self._change(Retention.ended, self._name(url), ending.stage)

    def published(self, url: str, number: int) -> None:
        """Note that a checkpoint that had waited on this node is in storage, verified."""
        self._change(Retention.published, self._name(url), number)

    def number_of(self, url: str) -> int:
        """Return the how manieth save the latest of that path is; 0 where there was none."""
        return self._known.number_of(self._name(url))

    def number_being_saved(self, url: str) -> int:
        """Return the how manieth save that of that path is which is being written now."""
        return self._known.number_being_saved(self._name(url))

    def is_replaced(self, url: str) -> bool:
        """Tell whether a later save is safe, in storage or on this node."""
        return self._known.is_replaced(self._name(url))

    @contextlib.contextmanager
    def handing_over(self, url: str) -> Iterator[None]:
        """Note a save that is handed over: done with only once it was written."""
        self._change(Retention.asked_to_save, self._name(url))
        try:
            yield
        except BaseException:
            self._change(Retention.withdrawn, self._name(url))
            raise

    def overwritten(self, url: str) -> None:
        """Note that what is there under that name is about to be replaced."""
        self._change(Retention.overwritten, self._name(url))

    def linking(self, link: str, target: str) -> None:
        """Note that ``link`` may point to ``target`` from now on, whatever is answered."""
        self._change(Retention.linking, self._name(link), self._name(target))

    def linked(self, link: str, target: str) -> None:
        """Note that ``link`` points to ``target`` now."""
        self._change(Retention.linked, self._name(link), self._name(target))

    def removed(self, url: str) -> None:
        """Note that a checkpoint is gone."""
        self._change(Retention.removed, self._name(url))

    def start_from(self, path: str | os.PathLike[str]) -> None:
        """Note what the run starts from."""
        name = self._name(path)
        self._change(Retention.starting_from, name)
        if name in self._known.started_from:
            self._unseen = name

    # What follows ---------------------------------------------------------------------------------

    @property
    def has_to_look(self) -> bool:
        """Whether the run starts from a file that may be a link, and nobody has looked yet."""
        return bool(self._unseen) and is_local(self._unseen)

    def look(self, token: CancelToken, urls: Iterable[str] = ()) -> None:
        """Follow links: at what the run starts from, and among directories. May hang.

        Args:
            token: Of the call.
            urls: Checkpoints that are about to be removed.
        """
        unseen = self._unseen
        if unseen:
            path = real_path_of(unseen)
            token.raise_if_cancelled()
            self._change(Retention.starting_from, path)
            self._unseen = ""
        known = self._known
        names = [*map(name_of, urls), *known.started_from, *(save.path for save in known.saves)]
        folders = {*(name.rpartition("/")[0] for name in names), *map(name_of, self.directories())}
        for folder in folders - self._real.keys():
            self._real[folder] = real_path_of(folder)
        self._change(Retention.renamed, self._known_as)

    def is_verified(self, url: str) -> bool:
        """Tell whether the latest save of that path is in storage, verified."""
        return self._known.is_verified(self._name(url))

    def removal(self, url: str, *, replaced_by: str = "") -> Removal:
        """Return what is asked for by a removal now; see ``Retention.removal``."""
        by = self._name(replaced_by) if replaced_by else ""
        return self._known.removal(self._name(url), replaced_by=by)

    def decide(self, removal: Removal) -> Decision:
        """Tell what becomes of a removal now; asks nobody."""
        path, by = self._known_as(removal.path), self._known_as(removal.replaced_by)
        known_as = replace(removal, path=path, replaced_by=by)
        directories = (name_of(directory) for directory in self.directories())
        return self._known.decide(known_as, [self._real.get(each, each) for each in directories])

    def _name(self, path: str | os.PathLike[str]) -> str:
        return self._known_as(name_of(path))

    def _known_as(self, name: str) -> str:
        # The last part is not followed: to remove a link is not to remove what it points to.
        folder, _, last = name.rpartition("/")
        real = self._real.get(folder, folder)
        return name if real == folder else f"{real.rstrip('/')}/{last}"

    def _change(self, change: Callable[..., Retention], *what: Any) -> None:
        with self._lock:
            self._known = change(self._known, *what)
