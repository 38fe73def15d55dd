# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Rank 0's spool: what a save, a question and a link do while storage is ill.

What waits is on the shelf (``shelf``), and a thread publishes it (``publisher``). Other ranks have
no spool: of a save that was spooled they are told so, and go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from lightning_resilience.adapters.lightning.publisher import Publisher
from lightning_resilience.adapters.lightning.shelf import Shelf, Shelved
from lightning_resilience.adapters.names import name_of
from lightning_resilience.core.events import (
    CheckpointSpooled,
    CheckpointsUnpublished,
    CheckpointSuperseded,
)
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.spool import pause_s, refusal, spooled_detail
from lightning_resilience.core.spooled import entry_of
from lightning_resilience.errors import CheckpointError
from lightning_resilience.runtime.calls import Token


if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from lightning_resilience.adapters.lightning.alone import Alone
    from lightning_resilience.adapters.lightning.shelf import Link
    from lightning_resilience.adapters.lightning.work import Work
    from lightning_resilience.adapters.staging import Staged
    from lightning_resilience.adapters.storage import Storage
    from lightning_resilience.adapters.trees import Tree
    from lightning_resilience.core.manifest import Origin
    from lightning_resilience.core.spool import SpoolConfig
    from lightning_resilience.core.spooled import SpoolEntry
    from lightning_resilience.ports import CancelToken


__all__ = ["Spooled", "Spooling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spooled:
    """What a save has come to that was spooled.

    Args:
        file: Where it lies.
        size_bytes: Its length.
        digest: What the other ranks are told of it.
    """

    file: str
    size_bytes: int
    digest: str


class Spoolable(Protocol):
    """A save whose checkpoint can be kept on this node as a whole.

    Attributes:
        storage: Clients of storage.
        url: Where it goes.
        origin: Where it comes from.
        at_once: Why it is kept here though storage may be well; empty where that is no reason.
    """

    storage: Storage
    url: str
    origin: Origin
    at_once: str

    def size_bytes(self) -> tuple[int, int]:
        """Return about how long it will be, and how much of that is on this node already."""
        ...

    def spool(self, path: str, token: CancelToken) -> Staged | Tree:
        """Have ``path`` be the checkpoint; storage is asked nothing."""
        ...


class Spooling:
    """What waits on this node. Any thread.

    Args:
        alone: This rank's guarded calls.
        config: How much may wait.
    """

    def __init__(self, alone: Alone, *, config: SpoolConfig) -> None:
        self._alone = alone
        self._config = config
        clock = alone.driver.clock
        self._shelf = Shelf(
            lambda: alone.storage.spool_directory,
            pause_s=lambda written_at_s: pause_s(written_at_s, config, now_s=clock.now_s()),
        )
        self._publisher = Publisher(alone, self._shelf)
        self._seen: dict[str, set[str]] = {}
        self._unwanted: dict[str, int] = {}

    # A save ---------------------------------------------------------------------------------------

    def saving(self, url: str) -> AbstractContextManager[None]:
        """Hold back what waits under that path while it is saved."""
        return self._shelf.saving(name_of(url))

    def divert(self, work: Work) -> None:
        """Have a save spooled where it meets an outage, or comes too soon after another."""
        if work.not_spooled:
            work.waits_because = work.not_spooled
            return
        work.instead = partial(self._keep, cast("Spoolable", work))
        work.at_once = self._too_soon(work.url)

    def _keep(self, work: Spoolable, why: str, token: CancelToken) -> Spooled:
        alone, directory = self._alone, self._shelf.claim()
        now_s = alone.driver.clock.now_s()
        spool, path = self._shelf.spool, name_of(work.url)
        size_bytes, staged_bytes = work.size_bytes()
        refused = refusal(
            *(spool, self._config, path),
            free_bytes=directory.free_bytes + staged_bytes,
            now_s=now_s,
            size_bytes=size_bytes,
        )
        if refused:
            raise CheckpointError(refused)
        name, number = alone.driver.dice.nonce(), alone.retaining.number_being_saved(work.url)
        kept = directory.keep(
            name, lambda file: work.spool(file, token), partial(_entry_of, work, number)
        )
        if token.cancelled:
            # Nobody waits for it any more, and its save may be waiting for storage now.
            directory.drop(name)
            token.raise_if_cancelled()
        self._shelf.put(Shelved(kept=kept, storage=work.storage), since_s=now_s)
        self._supersede(path, before=number, why="a newer one of that path waits")
        entry = kept.entry
        alone.driver.sink.emit(
            CheckpointSpooled(
                path=redacted(work.url),
                file=kept.file,
                size_bytes=entry.size_bytes,
                waiting=len(self._shelf.spool.items),
                is_paced=why == work.at_once,
                reason=redacted(why),
            )
        )
        self._publisher.start()
        told = spooled_detail(entry.digest)
        return Spooled(file=kept.file, size_bytes=entry.size_bytes, digest=told)

    def _too_soon(self, url: str) -> str:
        if not self._shelf.pause_s(name_of(url)):
            return ""
        return (
            f"that name was written less than {self._config.same_path_interval_s:g} s ago "
            "(same_path_interval_s)"
        )

    def saved(self, url: str) -> None:
        """Note that a newer one of that path is in storage."""
        self._shelf.written(name_of(url), now_s=self._alone.driver.clock.now_s())
        number = self._alone.retaining.number_of(url)
        self._supersede(name_of(url), before=number, why="a newer one of that path is in storage")

    def asked_to_remove(self, url: str) -> None:
        """Take off what waits under that path and is to be removed, once a later one is safe."""
        with self._shelf.changed:
            self._unwanted[url] = self._alone.retaining.number_of(url)
        self.reconsider()

    def reconsider(self) -> None:
        """Take off what was to be removed, where that had to wait for a later save.

        In the background that is written after its removal of the older one was asked for.
        """
        retaining = self._alone.retaining
        with self._shelf.changed:
            asked = dict(self._unwanted)
        for url, number in asked.items():
            is_saved_again = retaining.number_of(url) != number
            if not is_saved_again and not retaining.is_replaced(url):
                continue
            with self._shelf.changed:
                self._unwanted.pop(url, None)
            if not is_saved_again:
                self._supersede(name_of(url), before=number + 1, why="it was to be removed")

    def _supersede(self, path: str, *, before: int, why: str) -> None:
        for item in self._shelf.supersede(path, before=before):
            event = CheckpointSuperseded(path=redacted(item.path), reason=why)
            self._alone.driver.sink.emit(event)

    # Questions and links --------------------------------------------------------------------------

    def holds(self, url: str) -> bool:
        """Tell whether a checkpoint of that path waits; asks nobody."""
        return self._shelf.spool.holds(name_of(url))

    def seen(self, directory: str, names: Iterable[str]) -> set[str]:
        """Note, and return, what is in a directory, before the first save of this run."""
        seen = {name.rstrip("/").rpartition("/")[2] for name in names}
        self._seen[name_of(directory)] = seen
        return seen

    def is_known(self, url: str, why: str, token: CancelToken) -> bool:
        """Tell whether a checkpoint exists, while storage cannot be asked.

        Only this run writes to its directories: so what was there when it began, and what it has
        saved since, is all that can be there.

        Raises:
            CheckpointError: The directory could not be listed then, so it cannot be told.
        """
        token.raise_if_cancelled()
        folder, _, last = name_of(url).rpartition("/")
        if self.holds(url) or self._alone.retaining.number_of(url):
            return True
        if folder not in self._seen:
            message = f"it is not known what was in {redacted(folder)} before ({why})"
            raise CheckpointError(message)
        return last in self._seen[folder]

    def nothing_is_in_the_way(self, url: str, why: str, token: CancelToken) -> None:
        """Return where no directory can have the name of a file, while storage cannot be asked.

        Raises:
            CheckpointError: It may have been there when the run began.
        """
        token.raise_if_cancelled()
        folder, _, last = name_of(url).rpartition("/")
        is_file = bool(self._alone.retaining.number_of(url))
        if not is_file and last in self._seen.get(folder, {last}):
            message = f"what may have the name of {redacted(url)} has to make room first ({why})"
            raise CheckpointError(message)

    def link_or_later(self, link: Link, token: CancelToken) -> None:
        """Make a link to a checkpoint: now, or where that waits, once it is published."""
        if not self._shelf.note(link):
            link.make(token)

    def link_later(self, link: Link, why: str, token: CancelToken) -> None:
        """Have a link to a checkpoint that waits made once it is published.

        Raises:
            CheckpointError: It does not wait: it is in storage, which is ill.
        """
        token.raise_if_cancelled()
        if not self._shelf.note(link):
            message = f"the link waits for its storage ({why})"
            raise CheckpointError(message)

    # The end --------------------------------------------------------------------------------------

    def flush(self, timeout_s: float, token: CancelToken | None = None) -> None:
        """Wait until nothing waits, at most for a while, in seconds."""
        self._publisher.flush(timeout_s, token or Token())

    def await_published(self, url: str, token: CancelToken | None = None) -> None:
        """Wait until no checkpoint of that path waits here, so that it can be loaded.

        At most as long as a call on ill storage may take: the load that comes after it waits too.
        """
        self._publisher.await_path(
            name_of(url), self._alone.breakers.policy.retry.deadline_s, token or Token()
        )

    def close(self) -> None:
        """Publish no more, say what is left, and let another process have it. Idempotent."""
        left = self._publisher.close()
        if left:
            paths = tuple(redacted(kept.entry.path) for kept in left)
            files = tuple(kept.file for kept in left)
            self._alone.driver.sink.emit(CheckpointsUnpublished(paths=paths, files=files))
        self._shelf.release()


def _entry_of(work: Spoolable, number: int, staged: Staged | Tree) -> SpoolEntry:
    return entry_of(*(work.url, staged.contents, work.origin), digest=staged.digest, number=number)
