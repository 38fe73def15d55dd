# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""The thread that publishes what waits on this node.

It lives while something waits. It publishes one checkpoint after the other, the earliest first,
under the same guard as a save: behind the breaker, where it waits and probes, and with a permit. It
is no rank's work in a joint operation, so nobody waits for it, but at the end.

A publication that repeating would not help is not tried again in this run. Its file stays, the end
of the run names it and fails for it, and the next start tries again. A later save of the same path
goes to storage itself, and so meets what the publication has met.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from lightning_resilience.adapters.lightning.alone import adopt_device
from lightning_resilience.adapters.lightning.unspooling import Publishing
from lightning_resilience.adapters.lightning.work import carry_out
from lightning_resilience.adapters.standalone import STORE_PATIENCE_S
from lightning_resilience.core.evidence import redacted
from lightning_resilience.core.spool import diverts
from lightning_resilience.runtime.calls import PIECE_S, Token
from lightning_resilience.runtime.driver import Driver


if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning_resilience.adapters.lightning.alone import Alone
    from lightning_resilience.adapters.lightning.shelf import Shelf, Shelved
    from lightning_resilience.adapters.spool import Kept
    from lightning_resilience.core.spool import Item
    from lightning_resilience.ports import CancelToken


__all__ = ["Publisher"]

_log = logging.getLogger(__name__)

# An interruption is thrown in within a second, and a piece of an upload takes as long.
_END_S: Final = 5.0


class _RunEndsError(BaseException):
    """Ends every wait of the thread. Never leaves this file."""


class Publisher:
    """Publishes what waits. Any thread.

    Args:
        alone: This rank's guarded calls.
        shelf: What waits.
    """

    def __init__(self, alone: Alone, shelf: Shelf) -> None:
        self._alone = alone
        self._shelf = shelf
        self._refused: list[tuple[Kept, Exception]] = []
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def start(self) -> None:
        """Begin, unless it is at it. Idempotent."""
        with self._shelf.changed:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(
                    target=self._publish_all, name="lightning-resilience-spool", daemon=True
                )
                self._thread.start()

    def _publish_all(self) -> None:
        driver = self._own_driver()
        try:
            for item, shelved in self._waiting():
                self._publish(item, shelved, driver)
        except _RunEndsError:
            pass
        except Exception:  # noqa: BLE001 - a thread has nobody to raise to
            _log.exception("what waits on this node is not published any more in this run")
        finally:
            driver.close()
            with self._shelf.changed:
                # Since it found nothing to do, another one may have begun.
                if self._thread is threading.current_thread():
                    self._thread = None
                self._shelf.changed.notify_all()

    def _waiting(self) -> Iterator[tuple[Item, Shelved]]:
        shelf = self._shelf
        while True:
            with shelf.changed:
                while shelf.spool.items and shelf.next() is None and not self._is_closed:
                    # All that wait are of paths that are being saved, or were written just now.
                    shelf.changed.wait(PIECE_S)
                item = None if self._is_closed else shelf.next()
                shelved = None if item is None else shelf.of(item)
                if item is None or shelved is None:
                    # Order: under the lock, so that whoever adds one finds that there is no thread.
                    self._thread = None
                    return
            yield item, shelved

    def _publish(self, item: Item, shelved: Shelved, driver: Driver) -> None:
        alone, kept = self._alone, shelved.kept
        work = Publishing(
            shelved.storage,
            kept,
            nonce=alone.driver.dice.nonce,
            sending=partial(self._shelf.sending, item),
            is_wanted=lambda: not self._is_closed,
        )
        call = replace(
            alone.call("publish", work, kind="write"),
            may_go_alone=True,
            store_patience_s=STORE_PATIENCE_S,
        )
        circuit = alone.breakers.circuit(work.url, "write")
        try:
            done = driver.run(carry_out(circuit, call, work))
        except Exception as error:  # noqa: BLE001 - told, and the file stays
            self._not_published(item, kept, error)
            return
        if done.value is None:
            return
        self._shelf.written(item.path, now_s=alone.driver.clock.now_s())
        alone.retaining.published(kept.entry.path, kept.entry.number)
        alone.tell(kept.entry.path, done, step=kept.entry.step)
        self._make_link(item)
        self._shelf.take_off(item, is_dropped=True)

    def _not_published(self, item: Item, kept: Kept, error: Exception) -> None:
        if self._is_closed or diverts(error):
            # It is as ill as it was, and one deadline is over: the next begins.
            return
        _log.warning(
            "%s is not published, and lies at %s: %s",
            *(redacted(kept.entry.path), kept.file, redacted(str(error))),
        )
        self._refused.append((kept, error))
        self._shelf.forget(item.path)
        self._shelf.take_off(item, is_dropped=False)

    def _make_link(self, item: Item) -> None:
        link = self._shelf.link_to(item)
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
            site=alone.site,
        )

    def _check(self) -> None:
        if self._is_closed:
            raise _RunEndsError

    # The end --------------------------------------------------------------------------------------

    def flush(self, timeout_s: float, token: CancelToken) -> None:
        """Wait until nothing waits, at most for a while.

        Args:
            timeout_s: How long, in seconds.
            token: Of the call.

        Raises:
            Exception: What the publication of a checkpoint has failed with that is in storage under
                no later save, and that repeating would not help.
        """
        self._wait_while(lambda: bool(self._shelf.spool.items), timeout_s, token)
        for kept, error in self._refused:
            if self._alone.retaining.number_of(kept.entry.path) == kept.entry.number:
                raise error

    def await_path(self, path: str, timeout_s: float, token: CancelToken) -> None:
        """Wait until nothing of that path waits, at most for a while, in seconds."""
        self._wait_while(lambda: self._shelf.spool.holds(path), timeout_s, token)

    def _wait_while(self, waits: Callable[[], bool], timeout_s: float, token: CancelToken) -> None:
        clock, shelf = self._alone.driver.clock, self._shelf
        ends_at_s = clock.now_s() + timeout_s
        with shelf.changed:
            while waits() and self._thread is not None:
                remaining_s = ends_at_s - clock.now_s()
                if remaining_s <= 0:
                    break
                # No mark of progress: whoever makes progress is not interrupted.
                shelf.changed.wait(min(remaining_s, PIECE_S))
                token.raise_if_cancelled()

    def close(self) -> list[Kept]:
        """End the thread; return what is left on this node. Idempotent."""
        with self._shelf.changed:
            self._is_closed = True
            thread = self._thread
            self._shelf.changed.notify_all()
        if thread is not None:
            thread.join(_END_S)
        refused, self._refused = self._refused, []
        return [*(kept for kept, _ in refused), *self._shelf.clear()]
