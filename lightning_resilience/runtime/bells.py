# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""Wait for a key without blocking the thread that waits, nor the connection that works.

A store's ``wait`` holds its client's connection for its whole length, and on the main thread it
would hold back Python's signal handlers as well. So it runs on a helper thread, with a connection
of its own, and the caller waits in short pieces for what the helper finds.

Connections are a cost (a TCPStore server does a reverse DNS look-up for each one that it accepts),
so one helper serves all waits of a process, one after the other. A caller that leaves before its
wait has ended leaves the helper behind as well: that one ends with its wait, and the next wait gets
a new one.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from lightning_resilience.runtime.calls import PIECE_S


if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_resilience.ports import SharedStore


__all__ = ["Bells"]


class _Helper:
    """One helper thread and its connection; serves one wait at a time."""

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self._asked = threading.Semaphore(0)
        self._answered = threading.Event()
        self._request: tuple[str, float] | None = None
        self._found = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._serve, name="lightning-resilience-bells", daemon=True
        )
        self._thread.start()

    def ask(self, key: str, timeout_s: float) -> None:
        self._answered.clear()
        self._error = None
        self._request = (key, timeout_s)
        self._asked.release()

    def has_answered(self) -> bool:
        return self._answered.wait(PIECE_S)

    def answer(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._found

    def dismiss(self) -> None:
        self._request = None
        self._asked.release()

    def _serve(self) -> None:
        watcher: SharedStore | None = None
        try:
            while True:
                self._asked.acquire()
                request = self._request
                if request is None:
                    return
                try:
                    watcher = watcher or self._store.watcher()
                    self._found = watcher.wait_for(*request)
                except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
                    self._error = error
                finally:
                    self._answered.set()
        finally:
            if watcher is not None:
                watcher.close()


class Bells:
    """Waits for keys, one at a time, on behalf of one thread.

    Args:
        store: The store; its ``watcher()`` gives the helper its own connection.
    """

    def __init__(self, store: SharedStore) -> None:
        self._store = store
        self._helper: _Helper | None = None

    def wait_for(self, key: str, timeout_s: float, *, check: Callable[[], None]) -> bool:
        """Wait until ``key`` exists.

        Bounded by the store's ``wait_for``, which ends after ``timeout_s``.

        Args:
            key: The key.
            timeout_s: Longest wait, in seconds.
            check: Called at least every ``PIECE_S`` seconds; what it raises ends the wait.

        Returns:
            True if the key exists.

        Raises:
            StoreUnavailableError: The store did not answer.
        """
        helper = self._helper or _Helper(self._store)
        self._helper = None  # Order: only a helper that has answered may be used again.
        helper.ask(key, timeout_s)
        try:
            while not helper.has_answered():
                check()
        except BaseException:
            helper.dismiss()
            raise
        self._helper = helper
        return helper.answer()

    def close(self) -> None:
        """Let the helper thread end. Idempotent."""
        if self._helper is not None:
            self._helper.dismiss()
            self._helper = None
