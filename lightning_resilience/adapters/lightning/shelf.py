# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""What waits on rank 0's node, for the thread that trains and for the one that publishes.

Every change is made under one lock, in which nothing is asked of storage. What is to be done next
is decided in ``core.spool``; files lie in ``adapters.spool``.
"""

from __future__ import annotations

import contextlib
import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_resilience.adapters.names import name_of
from lightning_resilience.adapters.spool import SpoolDirectory
from lightning_resilience.adapters.storage import is_local
from lightning_resilience.core.spool import Item, Spool
from lightning_resilience.errors import CheckpointError


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_resilience.adapters.spool import Kept
    from lightning_resilience.adapters.storage import Storage
    from lightning_resilience.ports import CancelToken


__all__ = ["Link", "Shelf", "Shelved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shelved:
    """A checkpoint that waits.

    Args:
        kept: Its file and record.
        storage: Clients of the storage where it belongs.
    """

    kept: Kept
    storage: Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link to a checkpoint.

    Args:
        target: The checkpoint.
        make: Makes it.
    """

    target: str
    make: Callable[[CancelToken], None]


class Shelf:
    """What waits. Any thread.

    Args:
        parent: Makes the node's directory of this run.
        pause_s: Tells how long a name is to be left alone, in seconds, given when it was written.
    """

    def __init__(
        self, parent: Callable[[], str], *, pause_s: Callable[[float | None], float]
    ) -> None:
        self.changed = threading.Condition()
        self.spool = Spool()
        self._parent = parent
        self._directory: SpoolDirectory | None = None
        self._shelved: dict[str, Shelved] = {}
        self._links: dict[str, Link] = {}
        self._saving: set[str] = set()
        self._pause_s = pause_s
        self._written_at_s: dict[str, float] = {}

    def claim(self) -> SpoolDirectory:
        """Return the directory, which is this process's own.

        Raises:
            CheckpointError: It is another's, which is alive.
        """
        with self.changed:
            if self._directory is None:
                self._directory = SpoolDirectory(self._parent())
            directory = self._directory
        if not directory.claim():
            message = (
                "the spool of this run on this node belongs to another process that is alive; give "
                "each job a run_id of its own"
            )
            raise CheckpointError(message)
        return directory

    def release(self) -> None:
        """Let another process have the directory."""
        if self._directory is not None:
            self._directory.release()

    def put(self, shelved: Shelved, *, since_s: float) -> Item:
        """Let a checkpoint wait."""
        kept = shelved.kept
        item = Item(
            name=kept.name,
            path=name_of(kept.entry.path),
            number=kept.entry.number,
            size_bytes=kept.entry.size_bytes,
            since_s=since_s,
        )
        with self.changed:
            self._shelved[item.name] = shelved
            self.spool = self.spool.added(item)
            self.changed.notify_all()
        return item

    def of(self, item: Item) -> Shelved | None:
        """Return what an item stands for; None where it was taken off."""
        return self._shelved.get(item.name)

    def supersede(self, path: str, *, before: int) -> tuple[Item, ...]:
        """Take off what a later save of that path, or its removal, leaves no use for."""
        with self.changed:
            gone = self.spool.superseded(path, before=before)
        for item in gone:
            self.take_off(item, is_dropped=True)
        return gone

    def take_off(self, item: Item, *, is_dropped: bool) -> None:
        """Let an item wait no more, and drop its file if nobody needs it."""
        with self.changed:
            self.spool = self.spool.without(item)
            found = self._shelved.pop(item.name, None)
            self.changed.notify_all()
        if is_dropped and found is not None and self._directory is not None:
            self._directory.drop(item.name)

    def clear(self) -> list[Kept]:
        """Let nothing wait any more; return what did. The files stay."""
        with self.changed:
            left = [self._shelved.pop(item.name).kept for item in self.spool.items]
            self.spool = Spool()
            self.changed.notify_all()
        return left

    # One path, two threads ------------------------------------------------------------------------

    @contextlib.contextmanager
    def saving(self, path: str) -> Iterator[None]:
        """Send nothing older of a path while it is saved: that would come after the newer."""
        with self.changed:
            self._saving.add(path)
        try:
            yield
        finally:
            with self.changed:
                self._saving.discard(path)
                self.changed.notify_all()

    def next(self) -> Item | None:
        """Return what may be sent now; the caller holds the lock."""
        paced = {item.path for item in self.spool.items if self.pause_s(item.path) > 0}
        return self.spool.first(but=self._saving | paced)

    def pause_s(self, path: str) -> float:
        """Return how long a path is to be left alone, in seconds."""
        # A rename is no request, and its filesystem has no such limit.
        if is_local(path):
            return 0.0
        # What is being sent now is written when that ends, and a save would follow it at once.
        is_sent = any(item.is_sent and item.path == path for item in self.spool.items)
        return self._pause_s(math.inf if is_sent else self._written_at_s.get(path))

    def written(self, path: str, *, now_s: float) -> None:
        """Note that a path has just been written."""
        self._written_at_s[path] = now_s

    def forget(self, path: str) -> None:
        """Let a path be written again at once."""
        self._written_at_s.pop(path, None)

    @contextlib.contextmanager
    def sending(self, item: Item) -> Iterator[bool]:
        """Hold an item while it is sent; whether it may be."""
        # While it waits behind the breaker it may be superseded; what is sent is sent.
        with self.changed:
            may_be = self.spool.has(item) and item.path not in self._saving
            if may_be:
                self.spool = self.spool.sending(item, is_sent=True)
        try:
            yield may_be
        finally:
            with self.changed:
                self.spool = self.spool.sending(item, is_sent=False)

    # Links ----------------------------------------------------------------------------------------

    def note(self, link: Link) -> bool:
        """Have a link made once its target is there; whether its target waits."""
        name = name_of(link.target)
        with self.changed:
            if self.spool.holds(name):
                self._links[name] = link
            return self.spool.holds(name)

    def link_to(self, item: Item) -> Link | None:
        """Return the link that waits for an item, once."""
        with self.changed:
            return self._links.pop(item.path, None)
