# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Rank 0's spool: what a save does while storage is ill, and the thread that makes up for it.

The thread lives while something waits. It publishes one checkpoint after the other, the earliest
first, under the same guard as a save: behind the breaker, where it waits and probes, and with a
permit. It is not a rank's work in a joint operation, so nobody waits for it, but at the end.

A publication that repeating would not help is not tried again in this run. Its file stays, the end
of the run names it, and the next start tries again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from lightning_resilience.adapters.lightning.alone import adopt_device
from lightning_resilience.adapters.lightning.commit import origin_of
from lightning_resilience.adapters.lightning.unspooling import Publishing
from lightning_resilience.adapters.lightning.work import carry_out
from lightning_resilience.adapters.names import name_of
from lightning_resilience.adapters.spool import Kept, SpoolDirectory
from lightning_resilience.adapters.standalone import STORE_PATIENCE_S
from lightning_resilience.core.events import (
    CheckpointSpooled,
    CheckpointsUnpublished,
    CheckpointSuperseded,
)
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.spool import Entry, Item, Spool, diverts, refusal, spooled_detail
from lightning_resilience.errors import CheckpointError
from lightning_resilience.runtime.calls import PIECE_S, Token
from lightning_resilience.runtime.driver import Driver


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from lightning_resilience.adapters.lightning.alone import Alone
    from lightning_resilience.adapters.lightning.checkpoint_io import StagedSave
    from lightning_resilience.adapters.staging import Staged
    from lightning_resilience.core.spool import SpoolConfig
    from lightning_resilience.ports import CancelToken
    from lightning_resilience.protocols.guard import Guarded


__all__ = ["Link", "Spooled", "Spooling"]

_log = logging.getLogger(__name__)

# An interruption is thrown in within a second, and a piece of an upload takes as long.
_END_S: Final = 5.0


class _RunEndsError(BaseException):
    """Ends every wait of the thread. Never leaves this file."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link to a checkpoint.

    Args:
        target: The checkpoint.
        make: Makes it.
    """

    target: str
    make: Callable[[CancelToken], None]


class Spooling:
    """What waits on this node. Any thread.

    Args:
        alone: This rank's guarded calls.
        config: How much may wait.
    """

    def __init__(self, alone: Alone, *, config: SpoolConfig) -> None:
        self._alone = alone
        self._config = config
        self._spool = Spool()
        self._kept: dict[str, Kept] = {}
        self._storages: dict[str, Any] = {}
        self._links: dict[str, Link] = {}
        self._left: list[Kept] = []
        self._seen: dict[str, set[str]] = {}
        self._directory: SpoolDirectory | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    # What comes -----------------------------------------------------------------------------------

    def instead_of(self, work: StagedSave) -> Callable[[str, CancelToken], Spooled]:
        """Return what is done instead of a save while storage is ill."""
        return partial(self._keep, work)

    def _keep(self, work: StagedSave, why: str, token: CancelToken) -> Spooled:
        spool = self._claimed()
        now_s = self._alone.driver.clock.now_s()
        refused = refusal(
            self._spool, self._config, work.url, free_bytes=spool.free_bytes, now_s=now_s
        )
        if refused:
            raise CheckpointError(refused)
        number = self._alone.retaining.number_of(work.url)
        nonce = self._alone.driver.dice.nonce()
        kept = spool.keep(
            nonce,
            lambda file: work.spool(file, token),
            partial(_entry_of, work, number),
        )
        if token.cancelled:
            spool.drop(nonce)
            token.raise_if_cancelled()
        self._add(kept, work.storage, since_s=now_s)
        entry = kept.entry
        self._alone.driver.sink.emit(
            CheckpointSpooled(
                path=redacted(work.url),
                file=kept.file,
                size_bytes=entry.size_bytes,
                waiting=len(self._spool.items),
                reason=redacted(why),
            )
        )
        told = spooled_detail(entry.digest)
        return Spooled(file=kept.file, size_bytes=entry.size_bytes, digest=told)

    def _claimed(self) -> SpoolDirectory:
        with self._changed:
            if self._directory is None:
                self._directory = SpoolDirectory(self._alone.storage.spool_directory)
            spool = self._directory
        if not spool.claim():
            message = (
                "the spool of this run on this node belongs to another process that is alive; give "
                "each job a run_id of its own"
            )
            raise CheckpointError(message)
        return spool

    def _add(self, kept: Kept, storage: Any, *, since_s: float) -> None:
        entry = kept.entry
        item = Item(
            name=kept.name,
            path=name_of(entry.path),
            number=entry.number,
            size_bytes=entry.size_bytes,
            since_s=since_s,
        )
        with self._changed:
            self._kept[kept.name], self._storages[kept.name] = kept, storage
            self._spool = self._spool.added(item)
        self._supersede(item.path, before=entry.number, why="a newer one of that path came")
        with self._changed:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(
                    target=self._publish_all, name="lightning-resilience-spool", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    # What goes ------------------------------------------------------------------------------------

    def holds(self, url: str) -> bool:
        """Tell whether a checkpoint of that path waits; asks nobody."""
        return self._spool.holds(name_of(url))

    def seen(self, directory: str, names: Iterable[str]) -> None:
        """Note what is in a directory of checkpoints, before the first save of this run."""
        self._seen[name_of(directory)] = {name.rstrip("/").rpartition("/")[2] for name in names}

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

    def saved(self, url: str) -> None:
        """Note that a newer one of that path is in storage."""
        number = self._alone.retaining.number_of(url)
        self._supersede(name_of(url), before=number, why="a newer one of that path is in storage")

    def asked_to_remove(self, url: str) -> None:
        """Take off what waits under that path and is to be removed, once a later one is safe."""
        if self._alone.retaining.is_replaced(url):
            number = self._alone.retaining.number_of(url)
            self._supersede(name_of(url), before=number + 1, why="it was to be removed")

    def link_or_later(self, link: Link, token: CancelToken) -> None:
        """Make a link to a checkpoint: now, or where that waits, once it is published."""
        if not self._noted(link):
            link.make(token)

    def link_later(self, link: Link, why: str, token: CancelToken) -> None:
        """Have a link to a checkpoint that waits made once it is published.

        Raises:
            CheckpointError: It does not wait: it is in storage, which is ill.
        """
        token.raise_if_cancelled()
        if not self._noted(link):
            message = f"the link waits for its storage ({why})"
            raise CheckpointError(message)

    def _noted(self, link: Link) -> bool:
        name = name_of(link.target)
        with self._changed:
            if self._spool.holds(name):
                self._links[name] = link
            return self._spool.holds(name)

    def _supersede(self, path: str, *, before: int, why: str) -> None:
        with self._changed:
            gone = self._spool.superseded(path, before=before)
            for item in gone:
                self._spool = self._spool.without(item)
            self._changed.notify_all()
        for item in gone:
            self._drop(item)
            self._alone.driver.sink.emit(CheckpointSuperseded(path=redacted(path), reason=why))

    def _drop(self, item: Item) -> None:
        self._storages.pop(item.name, None)
        if self._kept.pop(item.name, None) is not None and self._directory is not None:
            self._directory.drop(item.name)

    # The thread -----------------------------------------------------------------------------------

    def _publish_all(self) -> None:
        driver = self._own_driver()
        try:
            for item in self._waiting():
                self._publish(item, driver)
        except _RunEndsError:
            pass
        except Exception:  # noqa: BLE001 - a thread has nobody to raise to
            _log.exception("what waits on this node is not published any more in this run")
        finally:
            driver.close()

    def _waiting(self) -> Iterator[Item]:
        while True:
            with self._changed:
                item = None if self._is_closed else self._spool.first()
                if item is None:
                    # Order: under the lock, so that whoever adds one finds that there is no thread.
                    self._thread = None
                    self._changed.notify_all()
                    return
            yield item

    def _publish(self, item: Item, driver: Driver) -> None:
        alone, kept = self._alone, self._kept.get(item.name)
        if kept is None:
            return
        work = Publishing(
            self._storages[item.name],
            kept,
            nonce=alone.driver.dice.nonce,
            sending=partial(self._sending, item),
            is_wanted=lambda: not self._is_closed,
        )
        call = replace(
            alone.call("publish", work, kind="write"),
            may_go_alone=True,
            store_patience_s=STORE_PATIENCE_S,
        )
        circuit = alone.breakers.circuit(work.url, "write")
        try:
            done: Guarded = driver.run(carry_out(circuit, call, work))
        except Exception as error:  # noqa: BLE001 - told, and the file stays
            self._not_published(item, error)
            return
        if done.value is None:
            return
        alone.retaining.published(kept.entry.path, kept.entry.number)
        alone.tell(kept.entry.path, done)
        self._make_link(item)
        with self._changed:
            self._spool = self._spool.without(item)
            self._changed.notify_all()
        self._drop(item)

    @contextlib.contextmanager
    def _sending(self, item: Item) -> Iterator[bool]:
        # While it waits behind the breaker it may be superseded; what is sent is sent.
        with self._changed:
            is_wanted = self._spool.has(item)
            self._spool = self._spool.sending(item, is_sent=True)
        try:
            yield is_wanted
        finally:
            with self._changed:
                self._spool = self._spool.sending(item, is_sent=False)

    def _not_published(self, item: Item, error: Exception) -> None:
        if diverts(error) and not self._is_closed:
            # It is as ill as it was, and one deadline is over: the next begins.
            return
        kept = self._kept.get(item.name)
        if kept is None:
            return
        _log.warning(
            "%s is not published, and lies at %s: %s",
            *(redacted(kept.entry.path), kept.file, redacted(str(error))),
        )
        with self._changed:
            self._left.append(kept)
            self._spool = self._spool.without(item)
            self._changed.notify_all()

    def _make_link(self, item: Item) -> None:
        link = self._links.pop(item.path, None)
        if link is None:
            return
        try:
            link.make(Token())
        except Exception as error:  # noqa: BLE001 - the checkpoint itself is there
            _log.warning("a link to %s was not made: %r", redacted(item.path), error)

    def _own_driver(self) -> Driver:
        alone = self._alone.driver
        return Driver(
            store=alone.store,
            clock=alone.clock,
            dice=alone.dice,
            sink=alone.sink,
            interrupt=self._check,
            adopt=adopt_device,
        )

    def _check(self) -> None:
        if self._is_closed:
            raise _RunEndsError

    # The end --------------------------------------------------------------------------------------

    def flush(self, timeout_s: float, token: CancelToken | None = None) -> None:
        """Wait until nothing waits, at most for a while."""
        clock = self._alone.driver.clock
        ends_at_s = clock.now_s() + timeout_s
        with self._changed:
            while self._spool.items and self._thread is not None:
                remaining_s = ends_at_s - clock.now_s()
                if remaining_s <= 0:
                    break
                self._changed.wait(min(remaining_s, PIECE_S))
                if token is not None:
                    token.progress()
                    token.raise_if_cancelled()

    def close(self) -> None:
        """End the thread, say what is left, and let another process have the spool. Idempotent."""
        with self._changed:
            self._is_closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join(_END_S)
        left = [*self._left, *(self._kept[item.name] for item in self._spool.items)]
        self._left, self._spool = [], Spool()
        if left:
            self._tell(left)
        if self._directory is not None:
            self._directory.release()

    def _tell(self, left: Iterable[Kept]) -> None:
        each = [(redacted(kept.entry.path), kept.file) for kept in left]
        paths, files = tuple(zip(*each, strict=True))
        self._alone.driver.sink.emit(CheckpointsUnpublished(paths=paths, files=files))


def _entry_of(work: StagedSave, number: int, staged: Staged) -> Entry:
    origin = origin_of(work.checkpoint, work.storage)
    return Entry(
        path=work.url,
        size_bytes=staged.size_bytes,
        digest=staged.digest,
        number=number,
        step=origin.step,
        epoch=origin.epoch,
        run=origin.run,
        versions=dict(origin.versions),
    )
