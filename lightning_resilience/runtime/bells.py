# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Wait for a key without blocking the thread that waits, nor the connection that works.

A store's ``wait`` holds its client's connection for its whole length, and on the main thread it
would hold back Python's signal handlers as well. So it runs on a helper thread, with a connection
of its own, and the caller waits in short pieces for what the helper finds.

* A caller whose time is up leaves the helper's wait running: mostly it comes back for the same key,
  and a wait that is cut short and begun again is load on the store (and a warning in torch's log).
* A caller that comes for another key cuts the old wait off by closing its connection.
* Connections are a cost (a TCPStore server does a reverse DNS look-up for each one that it
  accepts), so a helper whose wait has ended serves the next one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from lightning_resilience.runtime.calls import PIECE_S


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.ports import Clock, SharedStore


__all__ = ["Bells"]

_LONGEST_WAIT_S: Final = 600.0


class _Helper:
    """One helper thread and its connection; serves one wait at a time."""

    def __init__(self, store: SharedStore) -> None:
        self._watcher = store.watcher()
        self._asked = threading.Semaphore(0)
        self._answered = threading.Event()
        self._dismissed = False
        self._error: BaseException | None = None
        self.key = ""
        self._thread = threading.Thread(
            target=self._serve, name="lightning-resilience-bells", daemon=True
        )

    def ask(self, key: str) -> None:
        self.key = key
        self._error = None
        self._answered.clear()
        self._asked.release()
        if self._thread.ident is None:
            self._thread.start()

    def has_answered(self, *, within_s: float) -> bool:
        return self._answered.wait(within_s)

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def dismiss(self) -> None:
        self._dismissed = True
        self._watcher.close()
        self._asked.release()

    def _serve(self) -> None:
        while self._asked.acquire() and not self._dismissed:
            self._wait()
            self._answered.set()

    def _wait(self) -> None:
        try:
            # Bounded by dismissal: a wait that ends without the key is begun again.
            while not (self._dismissed or self._watcher.wait_for(self.key, _LONGEST_WAIT_S)):
                pass
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            self._error = error


class Bells:
    """Waits for keys, one at a time, on behalf of one thread.

    Args:
        store: The store; its ``watcher()`` gives the helper its own connection.
        clock: For the length of waits.
    """

    def __init__(self, store: SharedStore, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._waiting: _Helper | None = None
        self._idle: _Helper | None = None

    def wait_for(self, key: str, timeout_s: float, *, check: Callable[[], None]) -> bool:
        """Wait until ``key`` exists, at most ``timeout_s`` seconds.

        Args:
            key: The key.
            timeout_s: Longest wait, in seconds.
            check: Called at least every ``PIECE_S`` seconds; what it raises ends the wait.

        Returns:
            True if the key exists.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        ends_at_s = self._clock.now_s() + timeout_s
        helper = self._helper_for(key)
        while (remaining_s := ends_at_s - self._clock.now_s()) > 0:
            if helper.has_answered(within_s=min(PIECE_S, remaining_s)):
                break
            check()
        else:
            return False
        self._waiting, self._idle = None, helper
        helper.raise_error()
        return True

    def _helper_for(self, key: str) -> _Helper:
        if self._waiting is not None:
            if self._waiting.key == key:
                return self._waiting
            if self._waiting.has_answered(within_s=0):
                self._idle = self._waiting
            else:
                self._waiting.dismiss()
        helper = self._idle or _Helper(self._store)
        self._waiting = self._idle = None
        try:
            helper.ask(key)
        except BaseException:
            # Interrupted while its thread was starting: nobody else would ever end it.
            helper.dismiss()
            raise
        self._waiting = helper
        return helper

    def close(self) -> None:
        """Let the helper thread end. Idempotent."""
        for helper in (self._waiting, self._idle):
            if helper is not None:
                helper.dismiss()
        self._waiting = self._idle = None

    def __del__(self) -> None:
        # A thread that ends takes its bells with it, and nobody else knows of their helper.
        self.close()
